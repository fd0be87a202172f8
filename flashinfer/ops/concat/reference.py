"""The concatenation in torch."""


def run(problem, config, k, k_nope, k_rope):
    """k [tokens, heads, nope + rope] from k_nope [tokens, heads, nope] and k_rope [tokens, 1, rope]."""
    nope = k_nope.shape[2]
    k[..., :nope] = k_nope
    k[..., nope:] = k_rope

"""Random calls of sampling and top-k. What the filters keep is found by sorting in float64."""

import math

import torch

import flashinfer
from flashinfer import sampling
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.fuzz import VOCABULARIES, Call


def logits_of(draw):
    n = draw.pick(0, 1, 2, 5)
    columns = draw.fitting(VOCABULARIES, max(n, 1))
    x = draw.tensor(n, columns, dtype=torch.float32)
    if x.numel() and draw.chance(0.2):
        # A row that a mask leaves a single token of, or half of them.
        x[0, torch.randperm(columns, device=draw.device)[: draw.pick(columns - 1, columns // 2)]] = -math.inf
    return x


def probs_of(draw):
    return draw.laid(logits_of(draw).softmax(-1))


def kept_by(probs, k=None, p=None):
    """bool, of the rows: the k largest; then the fewest that sum to p of all. Of equal ones all or none."""
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if k is not None:
        keep &= torch.arange(probs.shape[1], device=probs.device)[None] < k
    if p is not None:
        keep &= ordered.cumsum(1) - ordered < p
    least = ordered.where(keep, torch.inf).amin(1, keepdim=True) if probs.shape[1] else ordered
    return probs.double() >= least


def clear_p(draw, probs):
    """A threshold that no sum of the largest probabilities of a row comes near, or 1."""
    sums = probs.double().sort(-1, descending=True).values.cumsum(1)
    for _ in range(20):
        p = draw.random.random() * 0.98 + 0.01
        if not sums.numel() or (sums - p).abs().min() > 1e-5:
            return p
    return 1.0


def k_of(draw, probs):
    return draw.pick(1, 2, 7, 40, 100, probs.shape[1], probs.shape[1] + 5)


def renorm(draw):
    probs = probs_of(draw)
    by_k = draw.chance()
    value = k_of(draw, probs) if by_k else clear_p(draw, probs)
    kept = kept_by(probs, k=value) if by_k else kept_by(probs, p=value if value < 1 else math.inf)

    def formula(t):
        shares = torch.where(kept, probs, 0.0).to(t)
        return shares / shares.sum(1, keepdim=True)

    name = "top_k" if by_k else "top_p"
    if by_k and draw.chance(0.3):
        value = torch.full((len(probs),), value, dtype=torch.int32, device=draw.device)
    function = sampling.top_k_renorm_probs if by_k else sampling.top_p_renorm_probs
    return Call(
        function,
        {"probs": probs, name: value},
        lambda out: assert_close(out, formula(torch.float32), formula(torch.float64)),
    )


def mask_logits(draw):
    x = logits_of(draw)
    k = k_of(draw, x)
    expected = torch.where(kept_by(x, k=k), x, -math.inf)
    return Call(sampling.top_k_mask_logits, dict(logits=x, top_k=k), lambda out: assert_bitwise(out, expected))


def softmax(draw):
    x = logits_of(draw)
    temperature = draw.pick(None, 0.1, 1.0, 7.5)
    scale = 1.0 if temperature is None else temperature
    if temperature is not None and draw.chance():
        temperature = torch.full((len(x),), temperature, dtype=torch.float32, device=draw.device)
        scale = temperature[:, None].double()

    def formula(t):
        return torch.softmax(x.to(t) / (scale if isinstance(scale, float) else scale.to(t)), -1)

    return Call(
        sampling.softmax,
        dict(logits=x, temperature=temperature),
        lambda out: assert_close(out, formula(torch.float32), formula(torch.float64)),
    )


def sample(draw):
    """A token that the filters leave and that has a probability."""
    probs = probs_of(draw)
    k, p, indices = k_of(draw, probs), clear_p(draw, probs), None
    kind = draw.pick("", "top_k", "top_p", "top_k_top_p", "min_p")
    arguments = dict(probs=probs, deterministic=draw.chance())
    allowed = probs > 0
    if "top_k" in kind:
        arguments["top_k"] = k
        allowed &= kept_by(probs, k=k)
    if "top_p" in kind:
        arguments["top_p"] = p
        if kind == "top_p":
            allowed &= kept_by(probs, p=p if p < 1 else math.inf)
    if kind == "min_p":
        arguments["min_p"] = draw.pick(0.0, 0.1, 0.9)
        top = probs.double().amax(1, keepdim=True) if probs.numel() else probs.double()
        allowed &= probs.double() >= arguments["min_p"] * top * (1 - 1e-6)
    if len(probs) and draw.chance(0.3):
        indices = draw.ints([draw.integer(0, len(probs) - 1) for _ in range(draw.pick(1, 4))], torch.int32)
        arguments["indices"] = indices
        allowed = allowed[indices.long()]

    def check(out):
        assert out.shape == (len(allowed),) and out.dtype in (torch.int32, torch.int64)
        assert bool(((out >= 0) & (out < probs.shape[1])).all()), "a token outside of the vocabulary"
        assert bool(allowed.gather(1, out.long()[:, None]).all()), "a token that the filters exclude"

    return Call(getattr(sampling, f"{kind}_sampling_from_probs".lstrip("_")), arguments, check)


def top_k(draw):
    dtype, n = draw.float(), draw.pick(1, 2, 5)
    x = draw.tensor(n, draw.fitting(VOCABULARIES, n), dtype=dtype)
    if draw.chance(0.2):
        x[0, : x.shape[1] // 2] = draw.pick(math.inf, -math.inf)
    k = min(draw.pick(1, 2, 7, 64, 100), x.shape[1])
    arguments = dict(input=x, k=k, sorted=draw.chance(), deterministic=draw.chance())

    def check(result):
        values, indices = result
        expected = x.double().sort(1, descending=True).values[:, :k]
        assert_bitwise(values.double().sort(1, descending=True).values + 0.0, expected + 0.0, "values")
        assert_bitwise(x.gather(1, indices.long()), values, "values at indices")
        assert all(len(set(row)) == k for row in indices.tolist()), "a column twice"
        if arguments["sorted"]:
            assert bool((values[:, 1:] <= values[:, :-1]).all()), "not sorted"

    return Call(flashinfer.top_k, arguments, check)


FAMILIES = (renorm, mask_logits, softmax, sample, top_k)

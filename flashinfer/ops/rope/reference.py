"""RoPE in torch: angles in float64, the rotation in float32, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.rope.frequencies import radians


def run(problem, config, q, k, q_out, k_out, positions, offsets, source):
    """Rotate q into q_out and k into k_out; all are [tokens, heads, head_dim].

    positions : [tokens]; or, where offsets [batch] is given, the indptr [batch + 1] of a ragged batch whose request i
    begins at position offsets[i].
    source : cosines and sines [positions, rotary_dim], or Frequencies.
    """
    if problem.ragged:
        token = torch.arange(len(q), dtype=torch.int32, device=q.device)
        request = torch.searchsorted(positions[1:], token, right=True)
        positions = token + (offsets - positions[:-1])[request]
    if problem.cached:
        cos, sin = source[positions].chunk(2, dim=-1)
    else:
        angle = positions[:, None] * radians(source, q.device)
        cos, sin = angle.cos().float(), angle.sin().float()
    for x, out in ((q, q_out), (k, k_out)):
        out[..., : problem.rotary_dim] = rotated(x[..., : problem.rotary_dim], cos, sin, problem.interleave)
        if not problem.inplace:
            out[..., problem.rotary_dim :] = x[..., problem.rotary_dim :]


def rotated(x, cos, sin, interleave: bool) -> torch.Tensor:
    """x [tokens, heads, 2 * pairs] rotated by cos and sin [tokens, pairs]; float32."""
    # The two of a pair lie along `axis`.
    axis, shape = (-1, (-1, 2)) if interleave else (-2, (2, -1))
    pairs = x.unflatten(-1, shape)
    cos, sin = cos[:, None].unsqueeze(axis), torch.stack((-sin, sin), axis)[:, None]
    return (pairs * cos + pairs.flip(axis) * sin).flatten(-2)


IMPLEMENTATION = Implementation(run)

"""Norms and RoPE of videos in torch: angles in float64, the rotation in float32, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.rope.frequencies import radians
from flashinfer.ops.rope.reference import rotated


def run(problem, config, rows, weights, outputs, space, axes, eps, length, scales):
    """Rows [tokens, n] of queries, keys and values to `outputs`, [tokens, heads, head_dim] each.

    weights : of the norms of queries and keys, or None. space : Space; videos follow one another. axes : Axes.
    length : what rotated pairs are multiplied by.
    scales : of queries and keys, and of values, where the problem has another format.
    """
    at = torch.arange(len(rows), device=rows.device)
    width, height = at % space.width, at // space.width % space.height
    frame = at // (space.width * space.height) % space.frames
    pairs = space.frame_pairs, space.height_pairs, problem.head_dim // 2 - space.frame_pairs - space.height_pairs
    each = torch.tensor(pairs, dtype=torch.int64, device=rows.device)
    place = torch.stack((frame, height, width), 1).repeat_interleave(each, 1)
    angle = place * radians(axes, rows.device)
    cos, sin = (length * angle.cos()).float(), (length * angle.sin()).float()
    parts = rows.float().split([out.shape[1] * problem.head_dim for out in outputs], 1)
    for x, weight, out, scale in zip(parts, (*weights, None), outputs, (scales[0], *scales)):
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight.float()
        x = x.view(out.shape)
        x = x if out is outputs[2] else rotated(x, cos, sin, problem.interleave)
        out.copy_(narrow.to_fp8(x * scale, torch.float8_e4m3fn) if problem.out else x)


IMPLEMENTATION = Implementation(run)

"""Grouped GEMM in torch: a loop over the groups, each a float32 product of exactly dequantized operands."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts
from flashinfer.ops.gemm import operands


def run(problem, config, a, b, a_scale, b_scale, alpha, out, groups, weights):
    """`Problem` in `flashinfer/ops/gemm/grouped/__init__.py` describes the arguments."""
    for group, (entry, rows) in enumerate(_groups(problem, a, b, groups)):
        weight = group if weights is None else int(weights[group])
        if not 0 <= weight < len(b) or not len(rows):
            continue
        left = _left(problem, a[entry] if problem.kind == "counts" else a, a_scale, entry, rows, group, groups)
        product = left @ _right(problem, b, b_scale, weight).T
        if alpha is not None:
            product = product * alpha[group if problem.alpha == "groups" else 0]
        (out[entry] if problem.kind == "counts" else out)[rows] = product.to(out.dtype)


def _groups(problem, a, b, groups):
    """(batch entry, rows) of each group."""
    found = groups.tolist()
    if problem.kind == "counts":
        return [(g, torch.arange(min(max(n, 0), a.shape[1]), device=a.device)) for g, n in enumerate(found)]
    if problem.kind == "indices":
        return [(0, (groups == g).nonzero()[:, 0]) for g in range(len(b))]
    ends = groups.cumsum(0).tolist() if problem.kind == "lengths" else found[1:]
    starts = [0, *ends[:-1]] if problem.kind == "lengths" else found[:-1]
    bounds = [(max(s, 0), max(s, min(e, len(a)), 0)) for s, e in zip(starts, ends, strict=True)]
    return [(0, torch.arange(*bound, device=a.device)) for bound in bounds]


def _left(problem, a, a_scale, entry, rows, group, groups):
    """The rows of a of one group, dequantized, float32 [rows, K]."""
    wide = operands.values(a, problem.a)[rows]
    if problem.scale == "fp32":
        scale = a_scale[entry] if problem.kind == "counts" else a_scale
        return wide * operands.spread(scale, len(a), wide.shape[1], problem.rows, problem.width)[rows]
    if a_scale is None:
        return wide
    start = int(groups[group])
    shift = (start + 127 * group) // 128 * 128 - start if problem.padded else 0
    blocks = wide.shape[1] // problem.width
    a_scale = a_scale[entry] if problem.kind == "counts" else a_scale
    at = layouts.offsets(a_scale.numel() // layouts.padded(1, blocks, "128x4")[1], blocks, "128x4", rows.device)
    found = operands.factors(a_scale.view(-1)[at[rows + shift]], problem.scale)
    return (wide.unflatten(-1, (-1, problem.width)) * found[..., None]).flatten(-2)


def _right(problem, b, b_scale, weight):
    """One weight, dequantized, float32 [N, K]."""
    codes = b[weight].T if problem.columns_first else b[weight]
    if problem.scale == "fp32":
        wide = operands.values(codes, problem.b)
        return wide * operands.spread(b_scale[weight], *wide.shape, problem.columns, problem.width)
    flat = None if b_scale is None else b_scale[weight]
    return operands.widen(codes, problem.b, flat, problem.scale, "128x4", problem.width)


IMPLEMENTATION = Implementation(run)

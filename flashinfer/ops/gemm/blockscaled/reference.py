"""Products of block-scaled operands in torch: operands dequantised exactly, one float32 product, one rounding."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.gemm import operands


def run(problem, config, a, b, a_scale, b_scale, alpha, out):
    """As `flashinfer/ops/gemm/blockscaled/__init__.py` states it."""
    left = _wide(problem, a, problem.a, a_scale, problem.a_layout, problem.rows)
    right = _wide(problem, b, problem.b, b_scale, problem.b_layout, problem.columns)
    product = left @ right.mT
    if alpha is not None:
        product = product * (alpha[:, None] if problem.alpha == "rows" else alpha)
    if problem.shuffled:
        product = _unshuffled(product)
    out.copy_(product)


def _wide(problem, codes, encoding, scale, layout, high):
    """An operand [batch, rows, .] as float32 [batch, rows, K]."""
    if problem.scale == "fp32":
        wide = operands.values(codes, encoding)
        return wide * operands.spread(scale, *wide.shape[1:], high, problem.width)
    flat = [None] * len(codes) if scale is None else scale
    pairs = zip(codes, flat, strict=True)
    return torch.stack([operands.widen(c, encoding, f, problem.scale, layout, problem.width) for c, f in pairs])


def _unshuffled(product):
    """Columns in the order of the weight's rows before they were shuffled in blocks of 32."""
    return product.unflatten(-1, (-1, 4, 8)).mT.flatten(-3)


IMPLEMENTATION = Implementation(run)

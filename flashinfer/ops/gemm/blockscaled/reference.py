"""Products of block-scaled operands in torch: operands dequantised exactly, one float32 product, one rounding."""

import torch
from torch.nn.functional import pad

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.gemm import operands
from flashinfer.ops.gemm.blockscaled import Problem, Quantize


def run(problem, config, *args):
    _RUN[type(problem)](problem, *args)


def gemm(problem, a, b, a_scale, b_scale, alpha, out):
    """As `flashinfer/ops/gemm/blockscaled/__init__.py` states it."""
    left = _wide(problem, a, problem.a, a_scale, problem.a_layout, problem.rows)
    right = _wide(problem, b, problem.b, b_scale, problem.b_layout, problem.columns)
    product = left @ right.mT
    if alpha is not None:
        product = product * alpha
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


def quantize(problem, x, codes, scale):
    """x [n, K] to e4m3 codes [n, K], and float32 scales [ceil(n / rows), ceil(K / 128)]."""
    high, wide = (-(-size // block) * block for size, block in zip(x.shape, (problem.rows, 128), strict=True))
    y = pad(x.float(), (0, wide - x.shape[1], 0, high - x.shape[0]))
    blocks = y.view(high // problem.rows, problem.rows, wide // 128, 128).transpose(1, 2).flatten(2)
    found, scales = narrow.quantize_fp8(blocks, problem.rows * 128, codes.dtype)
    found = found.unflatten(-1, (problem.rows, 128)).view(torch.uint8).transpose(1, 2).reshape(high, wide)
    codes.copy_(found[: x.shape[0], : x.shape[1]].view(codes.dtype))
    scale.copy_(scales[..., 0])


_RUN = {Problem: gemm, Quantize: quantize}

IMPLEMENTATION = Implementation(run)

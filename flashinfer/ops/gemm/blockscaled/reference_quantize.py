"""Quantisation by blocks of 128 in torch."""

import torch
from torch.nn.functional import pad

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow


def run(problem, config, x, codes, scale):
    """x [n, K] to e4m3 codes [n, K], and float32 scales [ceil(n / rows), ceil(K / 128)]."""
    high, wide = (-(-size // block) * block for size, block in zip(x.shape, (problem.rows, 128), strict=True))
    y = pad(x.float(), (0, wide - x.shape[1], 0, high - x.shape[0]))
    blocks = y.view(high // problem.rows, problem.rows, wide // 128, 128).transpose(1, 2).flatten(2)
    found, scales = narrow.quantize_fp8(blocks, problem.rows * 128, codes.dtype)
    found = found.unflatten(-1, (problem.rows, 128)).view(torch.uint8).transpose(1, 2).reshape(high, wide)
    codes.copy_(found[: x.shape[0], : x.shape[1]].view(codes.dtype))
    scale.copy_(scales[..., 0])


IMPLEMENTATION = Implementation(run)

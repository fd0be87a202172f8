"""Narrow formats and block scales in torch: what the references of several rooms share.

The same statements, on the device, are `flashinfer/ops/_device/formats.py` and `flashinfer/ops/_device/scales.py`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

# Half way between neighbouring magnitudes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to float8, to nearest even; what is too large becomes the largest value."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] to bytes [..., n / 2] of two e2m1, the first in the low half; a NaN becomes 6."""
    magnitude = x.abs()
    code = sum((magnitude > t) | ((magnitude == t) & (i % 2 == 1)) for i, t in enumerate(_BETWEEN)).to(torch.uint8)
    code = torch.where(x.isnan(), 7, code | (x.signbit().to(torch.uint8) << 3))
    return code[..., 0::2] | (code[..., 1::2] << 4)


def quantize_fp8(y: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as codes, and float32 scales [..., n / width]."""
    blocks = y.unflatten(-1, (-1, width))
    scale = (blocks.abs().amax(-1) / torch.finfo(dtype).max).clamp(min=2.0**-126)
    return to_fp8(blocks * (1 / scale)[..., None], dtype).flatten(-2), scale


def quantize_nvfp4(y: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as e2m1 bytes [..., n / 2], and float8_e4m3fn block scales [..., n / 16]."""
    blocks = y.unflatten(-1, (-1, 16))
    factor = to_fp8(global_scale * (blocks.abs().amax(-1) * (1 / 6)), torch.float8_e4m3fn)
    wide = factor.float()
    inverse = torch.where(wide == 0, 0, 1 / (wide * (1 / global_scale)))
    return to_e2m1((blocks * inverse[..., None]).flatten(-2)), factor


def quantize_mxfp4(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as e2m1 bytes [..., n / 2], and bytes of ue8m0 block scales [..., n / 32]."""
    blocks = y.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)
    # 6 is 0.75 * 2 ** 3.
    code = (exponent - 3 + (mantissa > 0.75).int() + 127).clamp(0, 254)
    code = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, torch.where(amax.isnan(), 255, code)))
    inverse = torch.where(code == 255, torch.nan, torch.ldexp(torch.ones_like(amax), 127 - code))
    return to_e2m1((blocks * inverse[..., None]).flatten(-2)), code.to(torch.uint8)


def tiled_128x4(factors: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, blocks] in tiles of 128 rows and 4 blocks, [32][4][4] inside; padding is 0. One dimension."""
    rows, blocks = factors.shape
    padded = pad(factors, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).flatten()

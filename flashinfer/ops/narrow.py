"""Narrow formats and block scales in torch: what the references of several rooms share.

The same statements, on the device, are `flashinfer/ops/_device/formats.py` and `flashinfer/ops/_device/scales.py`.
"""

from __future__ import annotations

import torch

from flashinfer.ops.formats import ELEMENTS, Format

# Half way between neighbouring magnitudes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.float32, device="cpu")


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to float8, to nearest even; what is too large becomes the largest value, and a NaN one without sign."""
    largest = torch.finfo(dtype).max
    codes = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes).to(torch.uint8).view(dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] to bytes [..., n / 2] of two e2m1, the first in the low half; a NaN becomes 6."""
    magnitude = x.abs()
    code = sum((magnitude > t) | ((magnitude == t) & (i % 2 == 1)) for i, t in enumerate(_BETWEEN)).to(torch.uint8)
    code = torch.where(x.isnan(), 7, code | (x.signbit().to(torch.uint8) << 3))
    return code[..., 0::2] | (code[..., 1::2] << 4)


def quantize_fp8(y: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as codes, and float32 scales [..., n / width]."""
    blocks = y.unflatten(-1, (-1, width))
    amax = blocks.abs().amax(-1)
    # A tensor, since by a number torch multiplies with its inverse on a GPU, which rounds twice.
    scale = (amax / torch.full_like(amax, torch.finfo(dtype).max)).clamp(min=2.0**-126)
    return to_fp8(blocks * (1 / scale)[..., None], dtype).flatten(-2), scale


def quantize_ints(y: torch.Tensor, width: int, element: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as bytes of "i8" or "i4", and float32 scales [..., n / width]; codes of a NaN's block are 0."""
    largest = ELEMENTS[element].largest
    blocks = y.unflatten(-1, (-1, width))
    amax = blocks.abs().amax(-1)
    scale = (amax / torch.full_like(amax, largest)).clamp(min=2.0**-126)
    codes = (blocks * (1 / scale)[..., None]).round().clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)
    codes = codes.flatten(-2).view(torch.uint8)
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4) if element == "i4" else codes, scale


def quantize_rows(y: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as bytes of codes and float32 factors of a format of caches; infinity is the largest float32."""
    largest = torch.finfo(torch.float32).max
    y, width = y.clamp(-largest, largest), format.width or y.shape[-1]
    if format.element == "fp8e4nv":
        codes, factors = quantize_fp8(y, width, torch.float8_e4m3fn)
        return codes.view(torch.uint8), factors
    return quantize_ints(y, width, format.element)


def widened(codes: torch.Tensor, element: str) -> torch.Tensor:
    """Bytes [..., n] of codes of "fp8e4nv", "i8", "e2m1" or "i4" to float32, [..., 2 n] where two lie in a byte."""
    if element == "e2m1":
        return from_e2m1(codes)
    if element == "i4":
        halves = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).view(torch.int8)
        return ((halves ^ 8) - 8).float()
    return codes.view(torch.int8 if element == "i8" else torch.float8_e4m3fn).float()


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] of two e2m1 to float32 [..., 2 n], the low half first."""
    return _E2M1.to(codes.device)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def quantize_nvfp4(
    y: torch.Tensor, global_scale: torch.Tensor, score: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as e2m1 bytes [..., n / 2], and float8_e4m3fn block scales [..., n / 16].

    With a `score`, "mae" or "mse", a block whose largest value is better mapped to 4 than to 6 is.
    """
    if not score:
        return _nvfp4(y, global_scale, 6)
    (codes, factor), (codes4, factor4) = (_nvfp4(y, global_scale, peak) for peak in (6, 4))
    worse, better = (_error(y, c, f, global_scale, score) for c, f in ((codes, factor), (codes4, factor4)))
    take = better < worse
    codes = torch.where(take[..., None], codes4.unflatten(-1, (-1, 8)), codes.unflatten(-1, (-1, 8))).flatten(-2)
    return codes, torch.where(take, factor4.view(torch.uint8), factor.view(torch.uint8)).view(factor.dtype)


def _nvfp4(y, global_scale, peak):
    blocks = y.unflatten(-1, (-1, 16))
    factor = to_fp8(global_scale * (blocks.abs().amax(-1) * (1 / peak)), torch.float8_e4m3fn)
    wide = factor.float()
    inverse = torch.where(wide == 0, 0, 1 / (wide * (1 / global_scale)))
    return to_e2m1((blocks * inverse[..., None]).flatten(-2)), factor


def _error(y, codes, factor, global_scale, score):
    """The sum of a block's errors; neighbours are added first, so that every float32 rounding is defined."""
    scale = (factor.float() * (1 / global_scale))[..., None]
    error = (y.unflatten(-1, (-1, 16)) - from_e2m1(codes).unflatten(-1, (-1, 16)) * scale).abs()
    error = error * error if score == "mse" else error
    for _ in range(4):
        error = error[..., 0::2] + error[..., 1::2]
    return error[..., 0]


def quantize_mxfp4(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as e2m1 bytes [..., n / 2], and bytes of ue8m0 block scales [..., n / 32]."""
    # 6 is 0.75 * 2 ** 3.
    blocks, code = _mx(y, 0.75, 3)
    return to_e2m1(blocks), code


def quantize_mxfp8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as float8_e4m3fn [..., n], and bytes of ue8m0 block scales [..., n / 32]."""
    # 448 is 0.875 * 2 ** 9.
    blocks, code = _mx(y, 0.875, 9)
    return to_fp8(blocks, torch.float8_e4m3fn), code


def _mx(y, peak_mantissa, peak_exponent):
    """y over its blocks' factors, and the factors: least powers of two with amax / factor within the peak."""
    blocks = y.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)
    code = (exponent - peak_exponent + (mantissa > peak_mantissa).int() + 127).clamp(0, 254)
    code = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, torch.where(amax.isnan(), 255, code)))
    code = code.to(torch.uint8)
    inverse = from_ue8m0(torch.where(code == 255, code, 254 - code))
    return (blocks * inverse[..., None]).flatten(-2), code


def from_ue8m0(code: torch.Tensor) -> torch.Tensor:
    """Bytes of ue8m0 as float32."""
    bits = torch.where(code == 0, 1 << 22, code.int() << 23)
    return torch.where(code == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)

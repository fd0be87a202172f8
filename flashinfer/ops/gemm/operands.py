"""Host code shared by the GEMMs with scaled operands: formats, and operands dequantized to float32 in torch."""

from __future__ import annotations

import torch

from flashinfer.ops import layouts, narrow
from flashinfer.ops.formats import ELEMENTS

# codes in one element of the operand's tensor: 2 for e2m1 in uint8, else 1
PER_BYTE = {name: known.per_byte for name, known in ELEMENTS.items()}
FP8 = ("fp8e4nv", "fp8e5")


def bucket(rows: int) -> int:
    """`rows` rounded up to 16, 32, 64 or 128; 256 for more. Configs depend on it, not on the number of rows."""
    for most in (16, 32, 64, 128):
        if rows <= most:
            return most
    return 256


def values(codes: torch.Tensor, encoding: str) -> torch.Tensor:
    """Codes [..., n] of a format as float32; exact."""
    return narrow.from_e2m1(codes) if encoding == "e2m1" else codes.float()


def factors(bytes: torch.Tensor, scale: str) -> torch.Tensor:
    """Bytes of "ue8m0" or "ue4m3" as float32; exact."""
    return narrow.from_ue8m0(bytes) if scale == "ue8m0" else bytes.view(torch.float8_e4m3fn).float()


def widen(codes: torch.Tensor, encoding: str, flat: torch.Tensor | None, scale: str, layout: str, width: int):
    """Codes [rows, n] times their factors `flat`, bytes in a layout, as float32 [rows, elements]."""
    wide = values(codes, encoding)
    if flat is None:
        return wide
    rows, columns = wide.shape
    found = factors(layouts.restore(flat, rows, columns // width, layout), scale)
    return (wide.unflatten(-1, (-1, width)) * found[..., None]).flatten(-2)


def spread(scale: torch.Tensor, rows: int, columns: int, high: int, wide: int) -> torch.Tensor:
    """Scales [.., row blocks, column blocks], each of a block of `high` rows and `wide` columns, repeated to
    [.., rows, columns]."""
    return scale.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(wide, -1)[..., :columns]

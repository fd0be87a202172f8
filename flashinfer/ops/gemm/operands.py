"""What the products with scaled operands have in common, on the host: formats, and operands widened to float32."""

from __future__ import annotations

import torch

from flashinfer.ops import layouts, narrow
from flashinfer.ops.formats import ELEMENTS

# elements in a byte or, for wider ones, in an element of the tensor
PER_BYTE = {name: known.per_byte for name, known in ELEMENTS.items()}
FP8 = ("fp8e4nv", "fp8e5")


def bucket(rows: int) -> int:
    """Rows rounded up to 16, 32, 64 or 128, and 256 for more: what a kernel's tile is chosen by."""
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
    """Codes [rows, n] times their factors, the bytes of a layout, as float32 [rows, elements]."""
    wide = values(codes, encoding)
    if flat is None:
        return wide
    rows, columns = wide.shape
    found = factors(layouts.restore(flat, rows, columns // width, layout), scale)
    return (wide.unflatten(-1, (-1, width)) * found[..., None]).flatten(-2)


def spread(scale: torch.Tensor, rows: int, columns: int, high: int, wide: int) -> torch.Tensor:
    """Scales [.., row blocks, column blocks], each for `high` rows and `wide` columns, as [.., rows, columns]."""
    return scale.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(wide, -1)[..., :columns]

"""Layouts of block scale factors, for the host; the device's `scale_offset` is tested against this.

Factors are [rows, blocks]. "linear" is row-major. "128x4" and "8x4" pad with zeros to whole tiles of that many rows
and blocks, a tile's bytes together and tiles row by row. Inside an 8x4 tile rows follow each other. Inside a 128x4
tile, row 32 g + r of the four groups g is at 16 r + 4 g: the order in which tensor cores read factors (cuBLAS
documentation, "1D Block Scaling Factors Layout").
"""

from __future__ import annotations

import torch

TILE_ROWS = {"linear": 1, "128x4": 128, "8x4": 8}


def padded(rows: int, blocks: int, layout: str) -> tuple[int, int]:
    """Rows and blocks of whole tiles."""
    columns = 1 if layout == "linear" else 4
    return -(-rows // TILE_ROWS[layout]) * TILE_ROWS[layout], -(-blocks // columns) * columns


def holds(factors: torch.Tensor, rows: int, blocks: int, layout: str, entries: int = 1) -> bool:
    """Whether a tensor has the bytes of the factors of `entries` matrices: row-major ones in rows, or flat."""
    high, wide = padded(rows, blocks, layout)
    longer = [size for size in factors.shape if size != 1]
    row = (longer or [1])[-1] * factors.element_size()
    in_rows = layout != "linear" or row in (wide, high * wide, entries * high * wide)
    return in_rows and factors.nbytes == entries * high * wide


def offsets(rows: int, blocks: int, layout: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [rows, blocks]: where in the flat, padded layout each factor is."""
    high, wide = padded(rows, blocks, layout)
    at = torch.arange(high * wide, device=device)
    if layout == "128x4":
        at = at.view(high // 128, wide // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    elif layout == "8x4":
        at = at.view(high // 8, wide // 4, 8, 4).permute(0, 2, 1, 3)
    return at.reshape(high, wide)[:rows, :blocks]


def arrange(factors: torch.Tensor, layout: str) -> torch.Tensor:
    """Factors [..., rows, blocks] in a layout, [..., padded rows x padded blocks]; padding is zero."""
    *batch, rows, blocks = factors.shape
    high, wide = padded(rows, blocks, layout)
    out = factors.new_zeros(*batch, high * wide)
    out[..., offsets(rows, blocks, layout, factors.device).flatten()] = factors.flatten(-2)
    return out


def restore(arranged: torch.Tensor, rows: int, blocks: int, layout: str) -> torch.Tensor:
    """The factors [rows, blocks] of a flat layout: what `arrange` was given."""
    return arranged[offsets(rows, blocks, layout, arranged.device)]

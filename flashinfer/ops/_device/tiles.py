"""Tiles and warps of kernels that read long rows, shared by several programs, as `prefix` does."""

from __future__ import annotations

from dataclasses import dataclass

# Elements that a program reads at once: 8 KiB of float32, of which a multiprocessor has four or more in flight. Rows
# are summed tile by tile, so this number decides their last bits. Not measured.
TILE = 2048


@dataclass(frozen=True)
class Config:
    """tile, num_warps : elements read at once, and warps of a program that reads rows.

    list_tile, list_warps : the same for the program that searches what is left of a row.
    """

    tile: int
    num_warps: int
    list_tile: int
    list_warps: int


def portable(problem, target) -> Config:
    # 8 elements a thread: with 16 the kernel that sums and draws takes up to 220 registers, and two programs fill a
    # multiprocessor.
    num_warps = max(TILE // 256, 1)
    # A list is seldom longer than a thousand; each halving of it costs a reduction over the warps. Not measured.
    return Config(TILE, num_warps, list_tile=1024, list_warps=4)

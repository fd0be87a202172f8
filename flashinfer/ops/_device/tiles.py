"""Tiles and warps of kernels that read long rows, shared by several programs, as `prefix` does."""

from __future__ import annotations

from dataclasses import dataclass

# Elements that a program reads at once: 8 KiB of float32, of which a multiprocessor has four or more in flight. Rows
# are summed tile by tile, so this number decides their last bits. 1024 makes top-k with top-p of 64 x 128256 6 % faster
# and plain draws 8 % slower, 4096 neither faster (H100).
TILE = 2048
# Neighbours whose largest value is kept: 256 bytes of float32, two lines to read again. A k rules as far as a quarter
# of the groups goes, 501 of 128256 columns. Reading the maxima in each step, a program brackets a row of
# 128256 columns in 6.6 us with 64 and in 9.6 with 32 (H200).
GROUP = 64


@dataclass(frozen=True)
class Config:
    """tile, num_warps : elements read at once, and warps of a program that reads rows.

    list_tile, list_warps : the same for the program that searches what is left of a row. ways : keys that a step of its
    search tries at once, a power of two. group : columns of a group, a power of two that divides the tile.

    group_tile, group_warps : groups that the program reads at once that brackets a row by them, and its warps.

    early : kernels of few programs may be launched before those in front of them end.
    """

    tile: int
    num_warps: int
    list_tile: int
    list_warps: int
    ways: int
    group: int
    group_tile: int
    group_warps: int
    early: bool


def portable(problem, target) -> Config:
    # 8 elements a thread: with 16 the kernel that sums and draws takes up to 220 registers, and two programs fill a
    # multiprocessor.
    num_warps = max(TILE // 256, 1)
    # A list is seldom longer than a hundred. A step waits for a sum over the warps, however many keys it tries: top-k
    # and top-p of 1 x 128256 take 48.9 us with 8 ways and tiles of 512, 56.6 with halving and tiles of 1024 (H100).
    # The 2004 groups of 128256 columns stay in registers, 8 a thread; more than 2048 are read again in each step. Their
    # bracket takes 6.2 us of 64 rows (H200).
    return Config(TILE, num_warps, 512, 4, ways=8, group=GROUP, group_tile=2048, group_warps=8,
                  early=target.pdl)  # fmt: skip

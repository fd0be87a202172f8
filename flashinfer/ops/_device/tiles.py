"""Tile sizes and warp counts of `prefix`, whose kernels share long rows among programs."""

from __future__ import annotations

from dataclasses import dataclass

# Elements that a program reads at once: 8 KiB of float32; a multiprocessor has four or more such tiles in flight. Rows
# are summed tile by tile, so a sum's last bits depend on this number. 1024 makes top-k with top-p of 64 x 128256 6 %
# faster and plain sampling 8 % slower; 4096 makes neither faster (H100).
TILE = 2048
# Neighbours whose largest value is stored: 256 bytes of float32, two cache lines to read again. Group maxima bound a k
# up to a quarter of the groups, which is 501 for 128256 columns. The bracket stage of such a row takes 6.6 us with
# groups of 64 and 9.6 us with 32 (H200).
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
    # 8 elements a thread. With 16 the gather kernel takes up to 220 registers, and a multiprocessor holds two programs.
    num_warps = max(TILE // 256, 1)
    # A list seldom has more than a hundred elements. A search step waits for one sum over the warps, whatever number of
    # keys it tests: top-k and top-p of 1 x 128256 take 48.9 us with 8 ways and tiles of 512, 56.6 with a binary search
    # and tiles of 1024 (H100). The 2004 group maxima of 128256 columns stay in registers, 8 a thread; maxima past 2048
    # are read again in each step. The bracket stage takes 6.2 us for 64 such rows (H200).
    return Config(TILE, num_warps, 512, 4, ways=8, group=GROUP, group_tile=2048, group_warps=8,
                  early=target.pdl)  # fmt: skip

"""Tiles and warps of the top-k kernels: those of all rooms that read long rows, but for what a large k asks for."""

from dataclasses import replace

from flashinfer.ops._device import tiles
from flashinfer.ops._device.tiles import Config

__all__ = ["Config", "portable"]

# Groups of 8, so that 2048 of 65536 are a quarter of them. With groups of 4 bracket takes 27 us, with 8 it takes 16
# (H200).
GROUP = 8


def portable(problem, target) -> Config:
    # Both searches stay in registers, 16 keys a thread: a list for k = 2048 has about 2400 elements, and 65536
    # columns have 8192 groups.
    sizes = tiles.portable(problem, target)
    return replace(sizes, group=GROUP, group_tile=8192, group_warps=16, list_tile=4096, list_warps=8)

"""Tiles and warps of the top-k kernels: those of all rooms that read long rows, but for what a large k asks for."""

from dataclasses import replace

from flashinfer.ops._device import tiles
from flashinfer.ops._device.tiles import Config

__all__ = ["Config", "portable"]

# Groups of 8, so that 2048 of 65536 are a quarter of them. Not measured.
GROUP = 8


def portable(problem, target) -> Config:
    # A list for k = 2048 has about 2400 elements: three reads of twice the warps. Not measured.
    return replace(tiles.portable(problem, target), group=GROUP, list_tile=1024, list_warps=8)

"""Tiles and warps of the top-k kernels: those of all rooms that read long rows."""

from flashinfer.ops._device.tiles import Config, portable

__all__ = ["Config", "portable"]

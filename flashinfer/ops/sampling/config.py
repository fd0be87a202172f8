"""Tiles and warps of the sampling kernels: those of all rooms that read long rows."""

from flashinfer.ops._device.tiles import Config, portable

__all__ = ["Config", "portable"]

"""Tensors over memory that is given by its address."""

from __future__ import annotations

import ctypes

import torch


def tensor_at(address: int, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A contiguous tensor of a shape at an address of host memory or of a GPU, without a copy.

    The caller owns the memory, which has to outlive the tensor.
    """
    count = torch.Size(shape).numel() * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        memory = torch.as_tensor(_OnGpu(address, count), device=device)
    else:
        memory = torch.frombuffer((ctypes.c_byte * count).from_address(address), dtype=torch.uint8)
    return memory.view(dtype).view(shape)


class _OnGpu:
    """GPU memory with the CUDA array interface (version 3)."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip

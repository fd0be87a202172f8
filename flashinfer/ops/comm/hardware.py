"""Queries of the CUDA driver and of NVML about GPUs and their links."""

from __future__ import annotations

import ctypes

import torch

from flashinfer._core import driver
from flashinfer._core.checks import require
from flashinfer._core.driver import asked

_MOST_LINKS = 18


def device_attribute(name: str, index: int) -> bool:
    """Whether the GPU `index` has the feature that a CUdevice_attribute names; False without a GPU."""
    if not torch.cuda.is_available():
        return False
    require(0 <= index < torch.cuda.device_count(), "device_idx", index, f"0 to {torch.cuda.device_count() - 1}")
    cuda = driver.bindings()
    torch.cuda.init()
    device = asked("cuDeviceGet", *cuda.cuDeviceGet(index))
    status, value = cuda.cuDeviceGetAttribute(getattr(cuda.CUdevice_attribute, name), device)
    # A driver that does not know the attribute lacks the feature.
    return not status and bool(value)


def allocation_prop(index: int):
    """CUmemAllocationProp of memory on a GPU that can be exported as a file descriptor."""
    if not torch.cuda.is_available():
        raise RuntimeError("get_allocation_prop: there is no GPU")
    require(0 <= index < torch.cuda.device_count(), "dev_id", index, f"0 to {torch.cuda.device_count() - 1}")
    cuda = driver.bindings()
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = index
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


def allocation_granularity(index: int) -> int:
    """The granularity in bytes of allocations with `allocation_prop`."""
    prop, cuda = allocation_prop(index), driver.bindings()
    flag = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(asked("cuMemGetAllocationGranularity", *cuda.cuMemGetAllocationGranularity(prop, flag)))


def nvlinks(uuid: str) -> list[bool]:
    """For each NVLink of a GPU, whether it is up; [] if it has none, or without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    handle, state = ctypes.c_void_p(), ctypes.c_uint()
    named = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if nvml.nvmlInit_v2():
        return []
    try:
        if nvml.nvmlDeviceGetHandleByUUID(named.encode(), ctypes.byref(handle)):
            return []
        links = []
        for link in range(_MOST_LINKS):
            # A status other than 0 means that there is no link with this number.
            if not nvml.nvmlDeviceGetNvLinkState(handle, ctypes.c_uint(link), ctypes.byref(state)):
                links.append(bool(state.value))
        return links
    finally:
        nvml.nvmlShutdown()

"""The CUDA driver API: load a cubin, find its kernel, encode tensor maps."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache, partial

import torch

from flashinfer._core.checks import dtype_name, require


@cache
def bindings():
    """The driver module of cuda-bindings, imported at first use, because machines without a GPU need not have it."""
    from cuda.bindings import driver

    return driver


def fail(status, doing: str) -> None:
    """Raise RuntimeError with the failed operation and the driver's text for `status`."""
    driver = bindings()
    name, text = (ask(status)[1] for ask in (driver.cuGetErrorName, driver.cuGetErrorString))
    raise RuntimeError(f"{doing}: {name.decode()} ({text.decode()})")


def asked(doing: str, status, *values):
    """The value of the driver call that is `doing`; RuntimeError if its status is not 0."""
    if status:
        fail(status, doing)
    return values[0] if values else None


def use_context(index: int) -> None:
    """Set the device's primary context in a thread that has none: torch does so only at its own first use."""
    driver = bindings()
    if not int(asked("current context", *driver.cuCtxGetCurrent())):
        device = asked("device", *driver.cuDeviceGet(index))
        context = asked("primary context", *driver.cuDevicePrimaryCtxRetain(device))
        asked("set context", *driver.cuCtxSetCurrent(context))


def load(name: str, cubin: bytes, kernel: dict):
    """The CUfunction of a cubin's kernel, loaded in the current context."""
    driver = bindings()
    doing = f"{name}: loading {kernel['symbol']}"
    # A first call may be inside a graph capture; loading is not part of the graph.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = asked(doing, *driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        module = asked(doing, *driver.cuModuleLoadData(cubin))
        function = asked(doing, *driver.cuModuleGetFunction(module, kernel["symbol"].encode()))
        # More than 48 KiB needs an opt-in (CUDA C++ Programming Guide, "Shared Memory" of each architecture).
        if kernel["shared"] > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            asked(doing, *driver.cuFuncSetAttribute(function, attribute, kernel["shared"]))
    finally:
        asked(doing, *driver.cuThreadExchangeStreamCaptureMode(mode))
    return function


_CONFIG, _GRID = struct.Struct("<7I4xQQI4x"), struct.Struct("<3I")
# Offsets in 8-byte words in a CUlaunchConfig: the stream, and the number of attributes.
_STREAM, _COUNT = 4, 6


class LaunchConfig:
    """A CUlaunchConfig in memory of ours (CUDA driver API, cuLaunchKernelEx): a launch writes what is new and no more.

    Attributes
    ----------
    handle : CUlaunchConfig
        What cuLaunchKernelEx takes.
    put_stream : callable (stream)
    """

    def __init__(self, threads: int, shared: int):
        # An attribute is its number, padded to 8 bytes, and 64 bytes of value: 6, programmatic stream serialization.
        self._attribute = (ctypes.c_uint32 * 18)(6, 0, 1)
        self._memory = memory = (ctypes.c_uint64 * 7)()
        _CONFIG.pack_into(memory, 0, 1, 1, 1, threads, 1, 1, shared, 0, ctypes.addressof(self._attribute), 0)
        self._words = memoryview(memory).cast("B").cast("Q")
        self.handle = bindings().CUlaunchConfig(ctypes.addressof(memory))
        self.put_stream = partial(self._words.__setitem__, _STREAM)

    def put_grid(self, x: int, y: int, z: int, early: bool) -> None:
        """early : the kernel may be launched before those in front of it end."""
        _GRID.pack_into(self._memory, 0, x, y, z)
        self._words[_COUNT] = early


def copy_to_device(to: int, source: int, count: int, stream: int) -> None:
    """Copy `count` bytes from pageable host memory, in the order of the stream."""
    status = bindings().cuMemcpyHtoDAsync(to, source, count, stream)[0]
    if status:
        fail(status, f"copy of {count} bytes to the device")


_MAP_TYPES = {
    "u8": "UINT8",
    "i8": "UINT8",
    "fp8e4nv": "UINT8",
    "fp8e5": "UINT8",
    "fp16": "FLOAT16",
    "bf16": "BFLOAT16",
    "fp32": "FLOAT32",
    "i32": "INT32",
}


def encode(argument: str, tensor: torch.Tensor, dtype: str, block: tuple[int, ...], wish: dict | None) -> bytes:
    """The 128 bytes of a tiled tensor map (CUDA driver API, cuTensorMapEncodeTiled), dimensions innermost first."""
    sizes, strides, item = tensor.shape, tensor.stride(), tensor.element_size()
    rank = tensor.dim()
    require(rank == len(block) and 2 <= rank <= 5, f"{argument} rank", rank, f"that of the block {block}, 2 to 5")
    require(tensor.numel() > 0, f"{argument} shape", tuple(sizes), "no dimension of 0")
    require(dtype_name(tensor.dtype) == dtype and dtype in _MAP_TYPES, f"{argument} dtype", tensor.dtype, dtype)
    require(strides[-1] == 1, f"{argument} last stride", strides[-1], "1")
    aligned = tensor.data_ptr() % 16 == 0 and all(stride * item % 16 == 0 for stride in strides[:-1])
    if not aligned:
        # Nothing steps along a dimension of one element, but the driver wants its stride whole, too.
        strides = (*(16 if size == 1 else stride for size, stride in zip(sizes, strides[:-1])), strides[-1])
        aligned = tensor.data_ptr() % 16 == 0 and all(stride * item % 16 == 0 for stride in strides[:-1])
    require(aligned, f"{argument} strides", strides, "a base and outer strides that are multiples of 16 bytes")
    plain = wish is not None and wish["elem_size"] == item and not (wish["fp4_padded"] or wish.get("is_im2col"))
    require(plain, f"{argument} map", wish, f"a tiled map of {item}-byte elements")
    driver = bindings()
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    encoded = asked(
        f"{argument}: tensor map",
        *driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[dtype]}"),
            rank,
            tensor.data_ptr(),
            [u64(size) for size in reversed(sizes)],
            [u64(stride * item) for stride in reversed(strides[:-1])],
            [u32(size) for size in reversed(wish["block_size"])],
            [u32(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(wish["swizzle"]),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def readdressing(argument: str, at: int) -> Callable[[int], None]:
    """A function that gives the tensor map in host memory at `at` another base address."""
    driver = bindings()
    tensor_map, replace = driver.CUtensorMap(at), driver.cuTensorMapReplaceAddress

    def readdress(address: int) -> None:
        status = replace(tensor_map, address)[0]
        if status:
            fail(status, f"{argument}: tensor map at {address:#x}")

    return readdress

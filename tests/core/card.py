"""A card that is not there: tensors of host memory that say they are on a GPU, and a driver that keeps each launch.

`insert` changes torch for the rest of the process: what imports this runs in a process of its own.
"""

import ctypes
import os
import struct
import sys
from types import ModuleType, SimpleNamespace

import torch

ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


def config_of(address):
    """(grid, block, shared bytes, stream, {attribute: value}) of a CUlaunchConfig, as cuda.h lays it out."""
    *sizes, shared, stream, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(address, 56))
    found = {}
    for i in range(count):
        # CUlaunchAttribute: a number, and at 8 a union of 64 bytes
        kind, value = struct.unpack("<I4xI", ctypes.string_at(attributes + 72 * i, 12))
        found[kind] = value
    return tuple(sizes[:3]), tuple(sizes[3:]), shared, stream, found


class Card:
    """launches : (kernel, grid, stream, bytes of each parameter) of each. attributes : of each, {number: value}."""

    def __init__(self):
        self.launches, self.attributes, self.stream, self.status = [], [], 7, 0
        # The number of the capture that is going on, and whether torch's allocator knows it.
        self.capture, self.known = None, False

    def snapshot(self):
        """torch's segments, of which one is all memory."""
        pool = (0, 1) if self.known else (0, 0)
        return [{"address": 0, "total_size": 1 << 63, "segment_pool_id": pool}]

    def launch(self, config, kernel, slots, extra):
        grid, _, _, stream, attributes = config_of(config)
        self.attributes.append(attributes)
        sizes = [size for _, size, _ in kernel["parameters"]]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(slots)
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
        self.launches.append((kernel["symbol"], grid, stream, values))
        return (self.status,)

    def made(self, call):
        """What `call` launches."""
        before = len(self.launches)
        call()
        return self.launches[before:]


class Elsewhere(torch.Tensor):
    """A tensor on the second GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = ONE

    def get_device(self):
        return 1


class OnHost(torch.Tensor):
    """A tensor that says it is on the host."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda = torch.device("cpu"), False

    def get_device(self):
        return -1


def on_host(tensor):
    return torch.Tensor._make_subclass(OnHost, tensor)


class _Nothing:
    """A context."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


class _Words:
    def __getattr__(self, name):
        return name

    def __call__(self, value):
        return value


def _map(kind, rank, address, *wish):
    encoded = ctypes.create_string_buffer(struct.pack("<Q", address) + bytes(120), 128)
    return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded), encoded=encoded)


def _readdress(tensor_map, address):
    ctypes.c_uint64.from_address(tensor_map).value = address
    return (0,)


def _copy(to, source, count, stream):
    ctypes.memmove(to, source, count)
    return (0,)


def insert() -> Card:
    """Put a Hopper card into this process."""
    card, words = Card(), _Words()
    driver = ModuleType("cuda.bindings.driver")
    for name in ("CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion",
                 "CUtensorMapFloatOOBfill"):  # fmt: skip
        setattr(driver, name, words)
    driver.cuuint32_t = driver.cuuint64_t = driver.CUtensorMap = driver.CUlaunchConfig = int
    driver.cuCtxGetCurrent = lambda: (0, 1)
    driver.cuGetErrorName = lambda status: (0, b"CUDA_ERROR_INVALID_VALUE")
    driver.cuGetErrorString = lambda status: (0, b"invalid argument")
    driver.cuLaunchKernelEx, driver.cuTensorMapEncodeTiled = card.launch, _map
    driver.cuTensorMapReplaceAddress, driver.cuMemcpyHtoDAsync = _readdress, _copy
    bindings, cuda = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.driver, cuda.bindings = driver, bindings
    sys.modules.update({"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.driver": driver})
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: card.stream
    torch.cuda.is_current_stream_capturing = lambda: card.capture is not None
    torch.cuda.memory_snapshot = card.snapshot
    driver.cuStreamGetCaptureInfo = lambda stream: (0, 1, card.capture, None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(
        cuda_stream=card.stream, synchronize=lambda: None
    )
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.device = _Nothing
    for name in ("empty", "empty_strided", "zeros", "ones", "full", "arange", "tensor", "randint"):
        setattr(torch, name, _anywhere(getattr(torch, name)))
    torch.Tensor.to = _stays(torch.Tensor.to)
    torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.get_device = ZERO, True, lambda self: 0

    from flashinfer._core import driver as ours
    from flashinfer._core import target

    ours.load = lambda name, cubin, kernel: kernel | {"symbol": f"{kernel['symbol']} {hash(cubin):x}"}
    target._by_index[0] = target.NAMED["90a"]
    os.environ.pop("FLASHINFER_DEBUG", None)
    return card


def _anywhere(factory):
    return lambda *args, device=None, **others: factory(*args, **others)


def _stays(to):
    def moved(tensor, *args, **others):
        args = [x for x in args if not isinstance(x, torch.device)]
        others = {name: x for name, x in others.items() if name not in ("device", "non_blocking")}
        return to(tensor, *args, **others) if args or others else tensor

    return moved

"""Problem + config -> compiled kernel -> launch. After the first call of a kind: one dict lookup, one pack, one launch.

A cubin is loaded and launched through the driver API; Triton is asked only where no cache holds the cubin.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from flashinfer._core import compiler, driver, env, kernel_cache
from flashinfer._core.checks import dtype_name, require
from flashinfer._core.target import target_of

# Triton's name of a scalar type -> struct code, PTX kind. A value that does not fit its code is an error.
_SCALARS = {
    "i1": ("?", "u8"),
    "i8": ("b", "u8"),
    "u8": ("B", "u8"),
    "i16": ("h", "u16"),
    "u16": ("H", "u16"),
    "i32": ("i", "u32"),
    "u32": ("I", "u32"),
    "i64": ("q", "u64"),
    "u64": ("Q", "u64"),
    "fp32": ("f", "f32"),
    "fp64": ("d", "f64"),
}
_TYPE = re.compile(rf"(\*\w+|{'|'.join(_SCALARS)})(:[1-9]\d*)?|tensordesc<.*>")
_MAP = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]")


@dataclass(frozen=True, eq=False)
class Build:
    """What the compiler needs to know about one kernel.

    Attributes
    ----------
    kernel : JITFunction
        The `@triton.jit` (or `@gluon.jit`) function.
    types : dict of str to str
        Every run-time parameter, in the kernel's order: "*bf16" a pointer, "*bf16:16" one that is 16-byte aligned,
        "i32", "i64:8" (divisible by 8), "fp32", or "tensordesc<...>" for a tensor map (see TensorMap).
    constants : dict of str to object
        Every constexpr parameter.
    num_warps, num_stages : int
        Compiler options.
    maxnreg : int, optional
        Most registers that a thread may use.

    Raises
    ------
    TypeError
        Types and constants together are not the kernel's parameters, or a type is none of the above.
    """

    kernel: Any
    types: dict
    constants: dict
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None

    def __post_init__(self):
        names = self.kernel.arg_names
        expected = [name for name in names if name not in self.constants]
        if list(self.types) != expected or not self.constants.keys() <= set(names):
            raise TypeError(
                f"{self.kernel.__name__}: types must list the run-time parameters in the kernel's order, {expected}, "
                f"and constants the rest; got types {list(self.types)} and constants {list(self.constants)}"
            )
        for name, kind in self.types.items():
            if not _TYPE.fullmatch(kind):
                allowed = f"*dtype, {', '.join(_SCALARS)}, tensordesc<...>"
                raise TypeError(f"{self.kernel.__name__}: type of {name}: got {kind!r}; allowed: {allowed}")


@dataclass(frozen=True, eq=False)
class TensorMap:
    """An argument for a "tensordesc<...>" parameter: a tensor that the copy engine reads or writes block by block.

    Attributes
    ----------
    tensor : Tensor
        Rank 2 to 5, last stride 1; base and other strides multiples of 16 bytes. Reads outside its shape give zeros.
    block : tuple of int
        Elements of one copy along each dimension: the block of the parameter's type.
    """

    tensor: torch.Tensor
    block: tuple[int, ...]


class Launcher:
    """Compiles (through the disk cache) and launches the kernels that `build(problem, config)` describes.

    Parameters
    ----------
    name : str
        The folder of its kernels in the cache.
    build : callable (problem, config) -> Build
    """

    def __init__(self, name: str, build: Callable[[Any, Any], Build]):
        self.name = name
        self.build = build
        self._bound: dict[tuple, Callable] = {}

    def __call__(self, problem, config, grid: tuple[int, int, int], *args) -> None:
        """Launch on the current stream of the first tensor's device. A grid with a zero launches nothing.

        Parameters
        ----------
        problem, config : frozen dataclass
            The compile key.
        grid : (int, int, int)
            Blocks along x, y, z.
        *args
            In the order of `Build.types`: tensors, TensorMaps, ints, floats; a pointer may be None or an address, too.

        Raises
        ------
        OverflowError, TypeError
            An argument does not fit its parameter's type.
        FrozenError
            The kernel is in no cache and frozen mode is on.
        RuntimeError
            The driver refused; the message has its words, the kernel and the grid.
        """
        index = _first_tensor(args).get_device()
        bound = self._bound.get((problem, config, index))
        if bound is None:
            bound = self._bind(problem, config, index)
        bound(grid, *args)

    def prepare(self, problem, config, device: torch.device) -> Callable:
        """The kernel compiled and loaded on `device`: `bound(grid, *args)` launches it with no lookup.

        Under TRITON_INTERPRET=1 it runs in Triton's interpreter, and `device` may be the CPU.
        """
        index = -1
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
        return self._bound.get((problem, config, index)) or self._bind(problem, config, index)

    def entry(self, problem, config, arch: str) -> kernel_cache.Entry:
        """The compiled kernel for `arch`, from a cache or compiled; needs no GPU."""
        return _entry(self.name, problem, config, self.build(problem, config), arch)

    def _bind(self, problem, config, index: int) -> Callable:
        build = self.build(problem, config)
        if not isinstance(build.kernel, JITFunction):
            bound = _Interpreted(self.name, build)
        elif index < 0:
            raise ValueError(f"{self.name}: got CPU tensors; allowed: CUDA tensors (any under TRITON_INTERPRET=1)")
        else:
            target = target_of(torch.device("cuda", index))
            entry = _entry(self.name, problem, config, build, target.arch)
            bound = _loaded(self.name, build, entry, index, target.smem)
        return self._bound.setdefault((problem, config, index), bound)


def _entry(name: str, problem, config, build: Build, arch: str) -> kernel_cache.Entry:
    key = compiler.key_of(name, problem, config, build, arch)
    return kernel_cache.obtain(key, lambda: compiler.compile_kernel(build, arch))


def _first_tensor(args: tuple) -> torch.Tensor:
    for x in args:
        if isinstance(x, torch.Tensor):
            return x
        if isinstance(x, TensorMap):
            return x.tensor
    raise ValueError("a launch needs at least one tensor argument")


def check_arguments(name: str, build: Build, args: tuple, device: torch.device) -> None:
    """Raise ValueError where an argument breaks what its type promises: dtype, device, alignment, divisibility."""
    require(len(args) == len(build.types), f"{name}: arguments", len(args), str(len(build.types)))
    for (parameter, kind), x in zip(build.types.items(), args, strict=True):
        argument = f"{name}: {parameter}"
        base, divisor = compiler.promise_of(kind)
        if base.startswith("tensordesc"):
            require(isinstance(x, TensorMap), argument, type(x).__name__, "a TensorMap")
        elif not base.startswith("*"):
            _pack_one(argument, base, x)
            require(divisor == 1 or x % divisor == 0, argument, x, f"a multiple of {divisor}")
        elif isinstance(x, torch.Tensor):
            require(dtype_name(x.dtype) == base[1:], argument, f"a {dtype_name(x.dtype)} tensor", base[1:])
            require(x.device == device, argument, f"a tensor on {x.device}", f"{device}, where the others are")
            at = x.data_ptr()
            require(at % divisor == 0, argument, f"a tensor at {at:#x}", f"an address divisible by {divisor}")
        else:
            require(x is None or isinstance(x, int), argument, repr(x), "a tensor, an address or None")


def _pack_one(argument: str, kind: str, x) -> None:
    code = _SCALARS[kind][0]
    try:
        struct.pack(code, x)
    except (struct.error, OverflowError, TypeError) as error:
        fits_its_kind = isinstance(x, int) or (isinstance(x, float) and code in "fd")
        raise (OverflowError if fits_its_kind else TypeError)(f"{argument}: got {x!r}; allowed: {kind}") from error


_one_interpreter = threading.Lock()


class _Interpreted:
    """Runs a kernel in Triton's interpreter, whose state belongs to the process: one kernel at a time."""

    def __init__(self, name: str, build: Build):
        self._name = name
        self._build = build

    def __call__(self, grid: tuple[int, int, int], *args) -> None:
        if 0 in grid:
            return
        check_arguments(self._name, self._build, args, _first_tensor(args).device)
        named = dict(zip(self._build.types, map(_for_interpreter, args), strict=True))
        with _one_interpreter:
            self._build.kernel[tuple(grid)](**named, **self._build.constants)


def _for_interpreter(x):
    if isinstance(x, bool):
        return int(x)
    if not isinstance(x, TensorMap):
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.tensor, list(x.block))


class Layout:
    """Where each argument of a compiled kernel stands in its parameter block, checked against the kernel's own list.

    A pointer or scalar is one parameter. A tensor map is the 128 bytes that the copy engine reads, then its sizes
    (i32) and its strides (i64). The parameters after the last argument are scratch pointers, which stay null.

    Attributes
    ----------
    struct : struct.Struct
        Packs the flat values.
    offsets : tuple of int
        Of every parameter, scratch included.
    pointers : tuple of int
        Which arguments are pointers.
    maps : dict of int to (str, tuple, dict)
        Arguments that are tensor maps: dtype and block of the type, and how the compiler wants the map.
    """

    def __init__(self, name: str, build: Build, kernel: dict):
        self.pointers = tuple(i for i, kind in enumerate(build.types.values()) if kind.startswith("*"))
        self.maps = {}
        wanted = []
        wishes = iter(kernel["tensor_maps"])
        for i, kind in enumerate(build.types.values()):
            match = _MAP.match(kind)
            if match:
                block = tuple(int(size) for size in match[2].split(","))
                self.maps[i] = (match[1], block, next(wishes, None))
                wanted += [("128s", "b8"), *[("i", "u32")] * len(block), *[("q", "u64")] * len(block)]
            else:
                wanted.append(("Q", "u64") if kind.startswith("*") else _SCALARS[compiler.promise_of(kind)[0]])
        found = [tuple(parameter) for parameter in kernel["parameters"]]
        scratch = found[len(wanted) :]
        fits = len(found) >= len(wanted) and all(
            size == struct.calcsize(code) and (kind[0] == "f") == (like[0] == "f")
            for (code, like), (kind, size, _) in zip(wanted, found, strict=False)
        )
        if not fits or len(scratch) > 2 or any(size != 8 for _, size, _ in scratch) or next(wishes, None):
            raise RuntimeError(f"{name}: the compiled kernel takes {found}, which is not what {build.types} calls for")
        codes = [code for code, _ in wanted] + ["8x"] * len(scratch)
        text, offsets, end = "<", [], 0
        for code, (_, size, align) in zip(codes, found, strict=True):
            padding = -end % align
            offsets.append(end + padding)
            text += "x" * padding + code
            end += padding + size
        self.struct = struct.Struct(text)
        self.offsets = tuple(offsets)


class _Block(threading.local):
    """One thread's parameter block: the driver reads it without the GIL, so threads do not share one.

    `place` is the buffer, where the block begins in it (aligned to 128 bytes, a tensor map needs 64), and the address
    of the array of pointers, one to each parameter, that cuLaunchKernel takes.
    """

    def __init__(self, layout: Layout, index: int):
        buffer = ctypes.create_string_buffer(layout.struct.size + 128)
        address = ctypes.addressof(buffer)
        start = -address % 128
        self._slots = (ctypes.c_void_p * len(layout.offsets))(*(address + start + o for o in layout.offsets))
        self.place = buffer, start, ctypes.addressof(self._slots)
        driver.use_context(index)


def _loaded(name: str, build: Build, entry: kernel_cache.Entry, index: int, shared_limit: int) -> Callable:
    """Load a kernel on one device. Gives a function that launches it: no allocation on the device, no waiting.

    It is a closure because it is the path of every launch, and local names are what Python finds fastest.
    """
    kernel = entry.kernel
    if kernel["global_scratch"] or kernel["profile_scratch"]:
        raise RuntimeError(f"{name}: the kernel asks for scratch memory, which a launch does not provide: {kernel}")
    if kernel["shared"] > shared_limit:
        raise RuntimeError(f"{name}: needs {kernel['shared']} bytes of shared memory, the device has {shared_limit}")
    layout = Layout(name, build, kernel)
    with torch.cuda.device(index):
        block = _Block(layout, index)
        function = driver.load(name, entry.cubin, kernel)
    threads, shared, count = kernel["threads"], kernel["shared"], len(build.types)
    pointers, maps, pack = layout.pointers, layout.maps, layout.struct.pack_into
    debug, tensor_type = env.DEBUG.is_on(), torch.Tensor
    launch_kernel = driver.bindings().cuLaunchKernel
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def launch(grid: tuple[int, int, int], *args) -> None:
        x, y, z = grid
        if x == 0 or y == 0 or z == 0:
            return
        if current_device() != index:
            with torch.cuda.device(index):
                return launch(grid, *args)
        if len(args) != count:
            raise TypeError(f"{name}: takes {count} arguments, got {len(args)}")
        if debug:
            check_arguments(name, build, args, torch.device("cuda", index))
        values = list(args)
        for i in pointers:
            value = values[i]
            values[i] = value.data_ptr() if isinstance(value, tensor_type) else value or 0
        if maps:
            values = _with_maps(name, build, maps, values)
        buffer, start, slots = block.place
        try:
            pack(buffer, start, *values)
        except (struct.error, OverflowError, TypeError):
            _blame(name, build, args)
            raise
        stream = current_stream(index)
        status = launch_kernel(function, x, y, z, threads, 1, 1, shared, stream, slots, 0)[0]
        if status:
            driver.fail(status, f"{name}: launch of {kernel['symbol']}, grid {grid}, {threads} threads")

    return launch


def _with_maps(name: str, build: Build, maps: dict, values: list) -> list:
    """The values with each tensor map replaced by its bytes, sizes and strides."""
    flat = []
    for i, (parameter, value) in enumerate(zip(build.types, values, strict=True)):
        if i not in maps:
            flat.append(value)
            continue
        argument, (dtype, block, wish) = f"{name}: {parameter}", maps[i]
        require(isinstance(value, TensorMap), argument, type(value).__name__, "a TensorMap")
        require(value.block == block, f"{argument} block", value.block, str(block))
        tensor = value.tensor
        flat += [driver.encode(argument, tensor, dtype, block, wish), *tensor.shape, *tensor.stride()]
    return flat


def _blame(name: str, build: Build, args: tuple) -> None:
    """Raise the error that names the argument which does not fit its type."""
    for (parameter, kind), x in zip(build.types.items(), args, strict=True):
        argument = f"{name}: {parameter}"
        if kind.startswith("*"):
            require(x is None or isinstance(x, (torch.Tensor, int)), argument, repr(x), "a tensor, an address or None")
        elif not kind.startswith("tensordesc"):
            _pack_one(argument, compiler.promise_of(kind)[0], x)

"""Problem + config -> compiled kernel -> launch. After a kernel's first launch: one dict lookup, one pack, one launch.

A prepared launch (`hold`) is cheaper: it keeps its parameter block, and only addresses are written. Cubins are loaded
and launched through the driver API. Triton is used only if no cache has the cubin.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from flashinfer._core import compiler, driver, env, kernel_cache, replay
from flashinfer._core.checks import dtype_name, require
from flashinfer._core.parameters import SCALARS, Block, HeldBlock, Layout
from flashinfer._core.target import target_of

_TYPE = re.compile(rf"(\*\w+|{'|'.join(SCALARS)})(:[1-9]\d*)?|tensordesc<.*>")
# Prefixes of the types of arguments that contain an address, which may change between launches.
_ADDRESSES = ("*", "tensordesc")


@dataclass(frozen=True, eq=False)
class Build:
    """The compiler's input for one kernel.

    Attributes
    ----------
    kernel : JITFunction
        The `@triton.jit` (or `@gluon.jit`) function.
    types : dict of str to str
        Every run-time parameter, in the kernel's order: "*bf16" for a pointer, "*bf16:16" for a 16-byte aligned one,
        "i32", "i64:8" (divisible by 8), "fp32", or "tensordesc<...>" for a tensor map (see TensorMap). Consecutive
        names "p.x", "p.y" are the fields x and y of one parameter p, a named tuple; the arguments of a launch are flat.
        None for one that is absent: no argument is given for it, and it is None in the kernel, a constant.
    constants : dict of str to object
        Every constexpr parameter. "p.x" is a constexpr field of the named tuple p, after its fields in `types`.
    num_warps, num_stages : int
        Compiler options.
    maxnreg : int, optional
        The most registers that a thread may use.
    most_early : int
        The most programs for which a kernel that begins by waiting is launched dependently. Up to 512 programs gained
        0.5 to 0.6 us of the 2 to 4 us of a launch in a graph of small kernels (H100); more were not measured.

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
    most_early: int = 512

    def __post_init__(self):
        absent = {name: None for name, kind in self.types.items() if kind is None}
        if absent:
            object.__setattr__(self, "types", {name: kind for name, kind in self.types.items() if kind is not None})
            object.__setattr__(self, "constants", absent | self.constants)
        names = self.kernel.arg_names
        given = compiler.grouped(self.types)
        constant = {name.partition(".")[0] for name in self.constants}
        expected = [name for name in names if name not in self.constants and (name in given or name not in constant)]
        if list(given) != expected or not constant <= set(names) or self.types.keys() & self.constants.keys():
            raise TypeError(
                f"{self.kernel.__name__}: types must list the run-time parameters in the kernel's order, {expected}, "
                f"and constants the rest; got types {list(self.types)} and constants {list(self.constants)}"
            )
        for name, kind in self.types.items():
            if not _TYPE.fullmatch(kind):
                allowed = f"*dtype, {', '.join(SCALARS)}, tensordesc<...>"
                raise TypeError(f"{self.kernel.__name__}: type of {name}: got {kind!r}; allowed: {allowed}")


@dataclass(frozen=True, eq=False)
class TensorMap:
    """An argument for a "tensordesc<...>" parameter: a tensor that TMA reads or writes in boxes.

    Attributes
    ----------
    tensor : Tensor
        Rank 2 to 5, last stride 1; base and other strides multiples of 16 bytes. Reads outside its shape give zeros.
    block : tuple of int
        The box: elements of one copy along each dimension, as in the parameter's type.
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
        self._bound: dict[tuple, _Loaded | _Interpreted] = {}
        self._coming: dict[tuple, Future] = {}

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
            The driver returned an error; the message has its text, the kernel and the grid.
        """
        index = _first_tensor(args).get_device()
        bound = self._bound.get((problem, config, index))
        if bound is None:
            bound = self._bind(problem, config, index)
        bound(grid, *args)
        recording = replay.recording()
        # Not in the interpreter, which copies tensors from a GPU: the addresses would be those of the host.
        if recording is not None and isinstance(bound, _Loaded):
            moving = {name: x for name, x in zip(bound.types, args) if bound.types[name].startswith(_ADDRESSES)}
            bases = [x.tensor if isinstance(x, TensorMap) else x for x in moving.values()]
            recording.add(partial(bound.hold, grid, args, tuple(moving)), bases)

    def prepare(self, problem, config, device: torch.device) -> _Loaded | _Interpreted:
        """The kernel compiled and loaded on `device`: `bound(grid, *args)` launches it without a lookup.

        `bound.hold(grid, args, moving)` returns a function that launches the kernel with `args`, but with new addresses
        for the arguments named in `moving`, which it takes in that order. These keep their shapes, strides and dtypes;
        the address of None is 0. A tensor map gets a new address and is not encoded again.

        Under TRITON_INTERPRET=1 it runs in Triton's interpreter, and `device` may be the CPU.
        """
        index = _index_of(device)
        return self._bound.get((problem, config, index)) or self._bind(problem, config, index)

    def expect(self, problem, config, device: torch.device) -> None:
        """Start compiling a kernel in the background. The call that needs it waits for it, and raises its errors.

        It is parsed on this thread, and compiled on a thread of its own: Python cannot build ASTs on two threads at
        once, and the caller's other code may also parse.
        """
        key = problem, config, _index_of(device)
        build = self.build(problem, config)
        if device.type != "cuda" or not isinstance(build.kernel, JITFunction):
            return
        if key in self._bound or key in self._coming:
            return
        arch = target_of(device).arch
        stored = compiler.key_of(self.name, problem, config, build, arch)
        entry = kernel_cache.lookup(stored)
        if entry is not None:
            self._coming[key] = coming = Future()
            coming.set_result(entry)
        elif not kernel_cache.frozen():
            try:
                finish = compiler.parsed(build, arch)
            except compiler.CompileError:
                return
            coming = _beside(kernel_cache.obtain, stored, finish)
            if coming is not None:
                self._coming[key] = coming

    def entry(self, problem, config, arch: str) -> kernel_cache.Entry:
        """The compiled kernel for `arch`, from a cache or compiled; needs no GPU."""
        build = self.build(problem, config)
        key = compiler.key_of(self.name, problem, config, build, arch)
        return kernel_cache.obtain(key, lambda: compiler.compile_kernel(build, arch))

    def _bind(self, problem, config, index: int) -> _Loaded | _Interpreted:
        build = self.build(problem, config)
        if not isinstance(build.kernel, JITFunction):
            bound = _Interpreted(self.name, build)
        elif index < 0 and emulator is not None:
            bound = _Emulated(self.name, build)
        elif index < 0:
            raise ValueError(f"{self.name}: got CPU tensors; allowed: CUDA tensors (any under TRITON_INTERPRET=1)")
        else:
            target = target_of(torch.device("cuda", index))
            coming = self._coming.pop((problem, config, index), None)
            entry = coming.result() if coming else self.entry(problem, config, target.arch)
            bound = _Loaded(self.name, build, entry, index, target.smem)
        return self._bound.setdefault((problem, config, index), bound)


def _index_of(device: torch.device) -> int:
    """A GPU's number; -1 for the CPU."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _beside(function: Callable, *args) -> Future | None:
    """A future of `function(*args)` on a thread of its own; None if no thread can be started."""
    done: Future = Future()

    def work() -> None:
        try:
            done.set_result(function(*args))
        except Exception as error:  # raised again where the result is asked for
            done.set_exception(error)

    try:
        threading.Thread(target=work, name="flashinfer-compile").start()
    except RuntimeError:
        return None
    return done


def _first_tensor(args: tuple) -> torch.Tensor:
    for x in args:
        if isinstance(x, torch.Tensor):
            return x
        if isinstance(x, TensorMap):
            return x.tensor
    raise ValueError("a launch needs at least one tensor argument")


def check_arguments(name: str, build: Build, args: tuple, device: torch.device) -> None:
    """Raise ValueError if an argument does not match its type's dtype, device, alignment or divisibility."""
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
            require(x is None or isinstance(x, int), argument, x, "a tensor, an address or None")


def _pack_one(argument: str, kind: str, x) -> None:
    code = SCALARS[kind][0]
    try:
        struct.pack(code, x)
    except (struct.error, OverflowError, TypeError) as error:
        fits_its_kind = isinstance(x, int) or (isinstance(x, float) and code in "fd")
        raise (OverflowError if fits_its_kind else TypeError)(f"{argument}: got {x!r}; allowed: {kind}") from error


_one_interpreter = threading.Lock()
# Runs Gluon kernels on CPU tensors: a function of (build, grid, args). flashinfer.testing.emulator sets it.
emulator: Callable | None = None


class _Interpreted:
    """Runs a kernel in Triton's interpreter, whose state is global: one kernel at a time."""

    def __init__(self, name: str, build: Build):
        self._name = name
        self._build = build
        # The interpreter turns numbers in a tuple into tensors, but leaves constexprs as they are.
        self._constants = {
            name: tl.constexpr(value) if "." in name and value is not None else value
            for name, value in build.constants.items()
        }

    def __call__(self, grid: tuple[int, int, int], *args) -> None:
        if 0 in grid:
            return
        check_arguments(self._name, self._build, args, _first_tensor(args).device)
        values = dict(zip(self._build.types, map(_for_interpreter, args), strict=True)) | self._constants
        with _one_interpreter:
            # A card's launch takes three numbers; the interpreter would take fewer.
            x, y, z = grid
            self._build.kernel[x, y, z](**compiler.grouped(values))

    def hold(self, grid: tuple[int, int, int], args: tuple, moving: tuple[str, ...]) -> Callable:
        places = _places(self._name, self._build, moving)

        def launch(*addresses: int) -> None:
            moved = list(args)
            for place, address in zip(places, addresses, strict=True):
                moved[place] = _at_address(args[place], address)
            self(grid, *moved)

        launch.kept = [arg for i, arg in enumerate(args) if i not in places]
        return launch


class _Emulated(_Interpreted):
    """Runs a Gluon kernel in the emulator, while `emulator` is set."""

    def __call__(self, grid: tuple[int, int, int], *args) -> None:
        require(emulator is not None, self._name, "CPU tensors", "CUDA tensors")
        if 0 not in grid:
            check_arguments(self._name, self._build, args, _first_tensor(args).device)
            emulator(self._build, grid, args)


def _at_address(held, address: int):
    """A tensor or tensor map like `held`, at another address of host memory."""
    if isinstance(held, TensorMap):
        return TensorMap(_at_address(held.tensor, address), held.block)
    if not isinstance(held, torch.Tensor) or not held.numel():
        return held
    count = 1 + sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    memory = (ctypes.c_byte * (count * held.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=held.dtype).as_strided(held.shape, held.stride())


def _for_interpreter(x):
    if isinstance(x, bool):
        return int(x)
    if not isinstance(x, TensorMap):
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.tensor, list(x.block))


class _Loaded:
    """A kernel loaded on one device. A launch allocates nothing there and does not wait."""

    def __init__(self, name: str, build: Build, entry: kernel_cache.Entry, index: int, shared_limit: int):
        kernel = entry.kernel
        if kernel["global_scratch"] or kernel["profile_scratch"]:
            raise RuntimeError(f"{name}: the kernel asks for scratch memory, which a launch does not provide: {kernel}")
        shared = kernel["shared"]
        if shared > shared_limit:
            raise RuntimeError(f"{name}: needs {shared} bytes of shared memory, the device has {shared_limit}")
        self._name, self._build, self._index = name, build, index
        self.types = build.types
        self._layout = Layout(name, build, kernel)
        with torch.cuda.device(index):
            self._config = partial(driver.LaunchConfig, kernel["threads"], shared)
            self._block = Block(self._layout, index, self._config)
            self._function = driver.load(name, entry.cubin, kernel)
        self._threads, self._symbol, self._waits = kernel["threads"], kernel["symbol"], kernel["waits"]
        self._launch_kernel = driver.bindings().cuLaunchKernelEx
        self._current_device, self._current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        self._debug = env.DEBUG.is_on()

    def __call__(self, grid: tuple[int, int, int], *args) -> None:
        x, y, z = grid
        if x == 0 or y == 0 or z == 0:
            return
        if self._current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(grid, *args)
        values = self._values(args)
        buffer, start, slots, config = self._block.place
        try:
            self._layout.struct.pack_into(buffer, start, *values)
        except (struct.error, OverflowError, TypeError):
            _blame(self._name, self._build, args)
            raise
        config.put_grid(x, y, z, self._is_early(grid))
        config.put_stream(self._current_stream(self._index))
        status = self._launch_kernel(config.handle, self._function, slots, 0)[0]
        if status:
            self._fail(status, grid)

    def hold(self, grid: tuple[int, int, int], args: tuple, moving: tuple[str, ...]) -> Callable:
        """A prepared launch, see `Launcher.prepare`."""
        places = _places(self._name, self._build, moving)
        if 0 in grid:
            return _launch_nothing
        index, function = self._index, self._function
        current_device, current_stream, launch_kernel = self._current_device, self._current_stream, self._launch_kernel
        with torch.cuda.device(index):
            values = self._values(args)
            try:
                image = self._layout.struct.pack(*values)
            except (struct.error, OverflowError, TypeError):
                _blame(self._name, self._build, args)
                raise
            named = [(f"{self._name}: {name}", place) for name, place in zip(moving, places, strict=True)]
            block = HeldBlock(self._layout, index, self._config, (*grid, self._is_early(grid)), image, named)

        # Closures, because local names have the fastest lookup in Python.
        def send(addresses: tuple[int, ...]) -> None:
            config, put_stream, slots, move = block.held
            move(*addresses)
            put_stream(current_stream(index))
            status = launch_kernel(config, function, slots, 0)[0]
            if status:
                self._fail(status, grid)

        def launch(*addresses: int) -> None:
            if current_device() == index:
                return send(addresses)
            with torch.cuda.device(index):
                send(addresses)

        # Keeps alive the arguments whose addresses do not change; the caller owns the others.
        launch.kept = [arg for i, arg in enumerate(args) if i not in places]
        return self._checked(launch, named) if self._debug else launch

    def _is_early(self, grid: tuple[int, int, int]) -> bool:
        """Whether the kernel may be launched before those in front of it end: a dependent launch."""
        return self._waits and grid[0] * grid[1] * grid[2] <= self._build.most_early

    def _values(self, args: tuple) -> list:
        """The values of the parameter block for `args`, flat."""
        if len(args) != len(self._build.types):
            raise TypeError(f"{self._name}: takes {len(self._build.types)} arguments, got {len(args)}")
        if self._debug:
            check_arguments(self._name, self._build, args, torch.device("cuda", self._index))
        values = list(args)
        for i in self._layout.pointers:
            value = values[i]
            values[i] = value.data_ptr() if isinstance(value, torch.Tensor) else value or 0
        if self._layout.maps:
            values = _with_maps(self._name, self._build, self._layout.maps, values)
        return values

    def _checked(self, launch: Callable, named: list[tuple[str, int]]) -> Callable:
        kinds = tuple(self._build.types.values())

        def checked(*addresses: int) -> None:
            for (argument, place), at in zip(named, addresses, strict=True):
                _, divisor = compiler.promise_of(kinds[place])
                require(at % divisor == 0, argument, f"an address of {at:#x}", f"one divisible by {divisor}")
            launch(*addresses)

        checked.kept = launch.kept
        return checked

    def _fail(self, status, grid: tuple[int, int, int]) -> None:
        driver.fail(status, f"{self._name}: launch of {self._symbol}, grid {grid}, {self._threads} threads")


def _launch_nothing(*addresses: int) -> None:
    """The launch of an empty grid."""


_launch_nothing.kept = []


def _places(name: str, build: Build, moving: tuple[str, ...]) -> tuple[int, ...]:
    """Indices of the moving parameters among the arguments; ValueError for one that is no pointer or tensor map."""
    names = list(build.types)
    for parameter in moving:
        kind = build.types.get(parameter, "no parameter")
        require(kind.startswith(_ADDRESSES), f"{name}: {parameter}", kind, "a pointer or tensor map")
    return tuple(map(names.index, moving))


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
    """Raise an error that names the argument that does not fit its type."""
    for (parameter, kind), x in zip(build.types.items(), args, strict=True):
        argument = f"{name}: {parameter}"
        if kind.startswith("*"):
            require(x is None or isinstance(x, (torch.Tensor, int)), argument, x, "a tensor, an address or None")
        elif not kind.startswith("tensordesc"):
            _pack_one(argument, compiler.promise_of(kind)[0], x)

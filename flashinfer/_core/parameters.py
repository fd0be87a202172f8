"""The parameter block of a kernel: the offset of each argument, and the memory that the driver reads."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from functools import partial

from flashinfer._core import compiler, driver

# Triton's name of a scalar type -> struct code, PTX kind. A value that does not fit its code is an error.
SCALARS = {
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
_MAP = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]")


class Layout:
    """The offset of each argument in a compiled kernel's parameter block, checked against the kernel's own list.

    A pointer or scalar is one parameter. A tensor map is the 128 bytes that the copy engine reads, then its sizes
    (i32) and its strides (i64). The parameters after the last argument are scratch pointers, which stay null.

    Attributes
    ----------
    struct : struct.Struct
        Packs the flat values.
    offsets : tuple of int
        Of every parameter, scratch included.
    starts : tuple of int
        Of every argument: the offset of its only, or first, parameter.
    pointers : tuple of int
        Which arguments are pointers.
    maps : dict of int to (str, tuple, dict)
        Arguments that are tensor maps: dtype and block of the type, and Triton's metadata of the map, if any.
    """

    def __init__(self, name: str, build, kernel: dict):
        self.pointers = tuple(i for i, kind in enumerate(build.types.values()) if kind.startswith("*"))
        self.maps = {}
        wanted, first = [], []
        metadata = iter(kernel["tensor_maps"])
        for i, kind in enumerate(build.types.values()):
            match = _MAP.match(kind)
            first.append(len(wanted))
            if match:
                block = tuple(int(size) for size in match[2].split(","))
                self.maps[i] = (match[1], block, next(metadata, None))
                wanted += [("128s", "b8"), *[("i", "u32")] * len(block), *[("q", "u64")] * len(block)]
            else:
                wanted.append(("Q", "u64") if kind.startswith("*") else SCALARS[compiler.promise_of(kind)[0]])
        found = [tuple(parameter) for parameter in kernel["parameters"]]
        scratch = found[len(wanted) :]
        fits = len(found) >= len(wanted) and all(
            size == struct.calcsize(code) and (kind[0] == "f") == (like[0] == "f")
            for (code, like), (kind, size, _) in zip(wanted, found, strict=False)
        )
        if not fits or len(scratch) > 2 or any(size != 8 for _, size, _ in scratch) or next(metadata, None):
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
        self.starts = tuple(offsets[i] for i in first)


class Block(threading.local):
    """One parameter block for each thread, because the driver reads it without the GIL.

    Attributes
    ----------
    place : (buffer, int, int, LaunchConfig)
        The buffer, where the block begins in it (aligned to 128 bytes, a tensor map needs 64), the address of the
        array of pointers, one to each parameter, that a launch takes, and its config.
    """

    def __init__(self, layout: Layout, index: int, config: Callable[[], driver.LaunchConfig]):
        buffer = (ctypes.c_uint64 * (-(-layout.struct.size // 8) + 16))()
        address = ctypes.addressof(buffer)
        start = -address % 128
        self._slots = (ctypes.c_void_p * len(layout.offsets))(*(address + start + o for o in layout.offsets))
        self.place = buffer, start, ctypes.addressof(self._slots), config()
        driver.use_context(index)


class HeldBlock(Block):
    """A parameter block that keeps its contents; each thread copies `image` at its first launch.

    Attributes
    ----------
    held : (CUlaunchConfig, callable, int, callable)
        What a launch takes, a function that writes its stream, the address of the array of pointers, and a function
        that writes other addresses of the moving arguments.
    """

    def __init__(self, layout: Layout, index: int, config: Callable, grid: tuple, image: bytes, moving: list):
        """grid : what `put_grid` takes. moving : (what errors call it, its place) of each argument that moves."""
        super().__init__(layout, index, config)
        buffer, start, slots, config = self.place
        config.put_grid(*grid)
        launch = config.handle, config.put_stream, slots
        block = ctypes.addressof(buffer) + start
        ctypes.memmove(block, image, len(image))
        places = [layout.starts[i] for _, i in moving]
        runs = _runs(places)
        if len(runs) <= 2 and not any(i in layout.maps for _, i in moving):
            # Pointers side by side are one pack, a third of the time of one by one.
            packs = [partial(struct.Struct(f"<{count}Q").pack_into, buffer, start + at) for at, count in runs]
            self.held = *launch, packs[0] if len(runs) == 1 else _both(*packs, runs[0][1])
            return
        words = memoryview(buffer).cast("B").cast("Q")
        puts = []
        for (argument, i), at in zip(moving, places, strict=True):
            if i in layout.maps:
                puts.append(driver.readdressing(argument, block + at))
            else:
                puts.append(partial(words.__setitem__, (start + at) // 8))

        def move(*addresses: int) -> None:
            for put, address in zip(puts, addresses, strict=True):
                put(address)

        self.held = *launch, move


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """(start, count) of each run of consecutive 8-byte words."""
    runs: list[tuple[int, int]] = []
    for at in places:
        if runs and at == runs[-1][0] + 8 * runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((at, 1))
    return runs


def _both(first: Callable, second: Callable, count: int) -> Callable[..., None]:
    """A function that passes its first `count` arguments to one function and the others to another."""

    def move(*addresses: int) -> None:
        first(*addresses[:count])
        second(*addresses[count:])

    return move

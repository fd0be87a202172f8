"""Global memory of an emulated launch: the tensors that it was given, and tensor maps."""

from __future__ import annotations

import ctypes
import math
import re

import numpy as np
import torch
import triton.language as tl

from flashinfer.testing.emulator.errors import EmulationError, OutOfBounds, here
from flashinfer.testing.emulator.values import (
    ANY_LAYOUT,
    Tensor,
    cast,
    decode,
    encode,
    raw_type,
    rounded,
)

DTYPES = {
    "bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp64": tl.float64, "fp8e4nv": tl.float8e4nv,
    "fp8e5": tl.float8e5, "i1": tl.int1, "i8": tl.int8, "i16": tl.int16, "i32": tl.int32, "i64": tl.int64,
    "u8": tl.uint8, "u16": tl.uint16, "u32": tl.uint32, "u64": tl.uint64,
}  # fmt: skip


class Memory:
    """What one argument of a launch points at: from a tensor's first element to its last."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.tensor, self.base = name, tensor, tensor.data_ptr()
        steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.size = (1 + steps) * tensor.element_size() if tensor.numel() else 0
        self._bytes = (ctypes.c_char * self.size).from_address(self.base) if self.size else b""
        self._raw: dict[type, np.ndarray] = {}

    def raw(self, kind: type) -> np.ndarray:
        if kind not in self._raw:
            self._raw[kind] = np.frombuffer(self._bytes, kind, self.size // np.dtype(kind).itemsize)
        return self._raw[kind]


def _places(pointer: Tensor, mask, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The memory as an array, where the elements are in it (0 where masked), and the mask of the pointer's shape."""
    element = pointer.dtype.element_ty
    kind = raw_type(element)
    size = np.dtype(kind).itemsize
    memory = pointer.memory
    at = np.asarray(pointer.a)
    if memory is None:
        if mask is not None and not np.any(mask.a):
            return np.zeros(1, kind), np.zeros_like(at), np.broadcast_to(mask.a, at.shape)
        raise OutOfBounds(f"{what} through a null pointer, at {here()}")
    at = at - memory.base
    inside = None
    if mask is not None:
        inside = np.broadcast_to(mask.a, at.shape)
        at = np.where(inside, at, 0)
    if at.size and (inside is None or inside.any()):
        low, high = int(at.min()), int(at.max())
        if low < 0 or high + size > memory.size:
            worst = low if low < 0 else high
            raise OutOfBounds(f"{what} of {element} at byte {worst} of {memory.name}, which has {memory.size} "
                              f"(shape {tuple(memory.tensor.shape)}), at {here()}")  # fmt: skip
        if size > 1 and (at & (size - 1)).any():
            raise EmulationError(f"{what} of {element} in {memory.name} at an odd address, at {here()}")
    raw = memory.raw(kind)
    return raw if raw.size else np.zeros(1, kind), at // size, inside


def load(pointer, mask=None, other=None) -> Tensor:
    """What masked lanes get without `other` is no number."""
    mask = None if mask is None else cast(mask, tl.int1)
    if mask is not None and np.ndim(mask.a) > np.ndim(pointer.a):
        raise EmulationError(f"a mask of shape {mask.shape} for pointers of shape {pointer.shape}: {here()}")
    raw, at, inside = _places(pointer, mask, "a load")
    element = pointer.dtype.element_ty
    found = decode(raw[at], element)
    if inside is not None:
        if other is None:
            fill = np.float32(np.nan) if element.is_floating() else found.dtype.type(0x5A)
        else:
            fill = cast(other, element).a
        found = np.where(inside, found, fill)
    return Tensor(found if np.ndim(found) else found[()], element, pointer.layout)


def store(pointer, value, mask=None) -> None:
    mask = None if mask is None else cast(mask, tl.int1)
    raw, at, inside = _places(pointer, mask, "a store")
    element = pointer.dtype.element_ty
    bits = np.broadcast_to(encode(cast(value, element).a, element).reshape(np.shape(_array(value))), at.shape)
    if inside is None:
        raw[at] = bits
    else:
        raw[at[inside]] = bits[inside]


def _array(value):
    return value.a if isinstance(value, Tensor) else 0


def add_atomically(pointer, value, mask=None) -> Tensor:
    """What was there before, element by element."""
    mask = None if mask is None else cast(mask, tl.int1)
    raw, at, inside = _places(pointer, mask, "an atomic addition")
    element = pointer.dtype.element_ty
    value = np.broadcast_to(cast(value, element).a, at.shape)
    before = np.zeros(at.shape, value.dtype)
    for i in np.ndindex(at.shape):
        if inside is None or inside[i]:
            before[i] = decode(raw[at[i] : at[i] + 1], element)[0]
            total = before[i] + value[i]
            total = rounded(total, element) if element.is_floating() else total
            raw[at[i] : at[i] + 1] = encode(np.asarray([total], value.dtype), element)
    return Tensor(before if before.ndim else before[()], element, pointer.layout)


_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]")


class TensorMap:
    """A tensor that the copy engine reads and writes box by box; zeros outside of its shape."""

    layout = ANY_LAYOUT

    def __init__(self, name: str, kind: str, argument):
        name_of_dtype, sizes = _DESCRIPTOR.match(kind).groups()
        tensor = argument.tensor
        self.name, self.dtype = name, DTYPES[name_of_dtype]
        self.block_shape = [int(n) for n in sizes.split(",")]
        if list(argument.block) != self.block_shape:
            raise EmulationError(f"{name}: a map of boxes {argument.block} for a parameter of {self.block_shape}")
        item, rank = tensor.element_size(), tensor.dim()
        outer = tensor.stride()[:-1]
        fits = rank == len(self.block_shape) and 2 <= rank <= 5 and tensor.numel() > 0 and tensor.stride(-1) == 1
        if not fits or tensor.data_ptr() % 16 or any(s * item % 16 for s in outer) or max(self.block_shape) > 256:
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise EmulationError(f"{name}: no map takes shape {shape}, strides {strides}, boxes {self.block_shape}")
        self._raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]).numpy()
        self._raw = self._raw.view(raw_type(self.dtype))
        self.bytes = math.prod(self.block_shape) * item

    @property
    def shape(self) -> list[int]:
        return list(self._raw.shape)

    def box(self, coordinates: list[int]) -> tuple[tuple, tuple]:
        """What of the tensor, and of the box, there is."""
        if len(coordinates) != len(self.block_shape):
            raise EmulationError(f"{self.name}: coordinates {coordinates} for boxes {self.block_shape}, at {here()}")
        ends = [(max(c, 0), min(c + b, n)) for c, b, n in zip(coordinates, self.block_shape, self.shape, strict=True)]
        source = tuple(slice(low, max(high, low)) for low, high in ends)
        box = tuple(slice(low - c, max(high, low) - c) for (low, high), c in zip(ends, coordinates, strict=True))
        return source, box

    def read(self, coordinates: list[int]) -> np.ndarray:
        source, box = self.box(coordinates)
        found = np.zeros(self.block_shape, self._raw.dtype)
        found[box] = self._raw[source]
        return found

    def write(self, coordinates: list[int], values: np.ndarray) -> None:
        source, box = self.box(coordinates)
        self._raw[source] = values.reshape(self.block_shape)[box]

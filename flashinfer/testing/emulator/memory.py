"""Memory of an emulated launch: tensors in global memory, shared memory, barriers, and tensor maps."""

from __future__ import annotations

import ctypes
import math
import re

import numpy as np
import torch
import triton.language as tl

from flashinfer.testing.emulator.errors import BarrierError, EmulationError, Hazard, OutOfBounds, here
from flashinfer.testing.emulator.values import (
    ANY_LAYOUT,
    InSharedMemory,
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

    def raw(self, kind: type) -> np.ndarray:
        return np.frombuffer(self._bytes, kind, self.size // np.dtype(kind).itemsize)


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
        if size > 1 and np.any(at % size):
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


# Of each byte of shared memory: never written; a copy is on its way there; written by threads since the last fence of
# whoever wrote; by whom (from bit 3 on); whose own fences came later (from bit 8 on).
UNDEFINED, FLIGHT, DIRTY, WRITER, FENCED = 1, 2, 4, 3, 8
MOST_PARTITIONS = 8


class Allocation:
    """A piece of shared memory."""

    def __init__(self, name: str, where: str):
        self.name, self.where = name, where
        self.barriers: dict[int, Barrier] = {}
        # What threads wrote, as (writer, state), since their last fence.
        self.dirty: dict[tuple, tuple[int, np.ndarray]] = {}


class Shared(InSharedMemory):
    """A view of shared memory, as `gl.shared_memory_descriptor`."""

    def __init__(self, allocation: Allocation, dtype, raw, state, readers, layout=None):
        self.allocation, self.dtype, self.layout = allocation, dtype, layout
        # The bits of its elements; of each byte of them its state, and how many products still read it.
        self.raw, self.state, self.readers = raw, state, readers

    @classmethod
    def new(cls, allocation: Allocation, dtype, shape: list[int], layout) -> Shared:
        kind = np.dtype(raw_type(dtype))
        raw = np.full(math.prod(shape) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(shape)
        state = np.full((*shape, kind.itemsize), UNDEFINED, np.uint16)
        return cls(allocation, dtype, raw, state, np.zeros((*shape, kind.itemsize), np.uint8), layout)

    @property
    def shape(self) -> list[int]:
        return list(self.raw.shape)

    @property
    def rank(self) -> int:
        return self.raw.ndim

    @property
    def type(self) -> Shared:
        return self

    @property
    def element_ty(self):
        return self.dtype

    def __repr__(self) -> str:
        return f"{self.allocation.name} {self.dtype}{self.shape}"

    def _seen(self, key) -> Shared:
        return Shared(self.allocation, self.dtype, self.raw[key], self.state[key], self.readers[key], self.layout)

    def index(self, index) -> Shared:
        index = int(index)
        if not 0 <= index < self.shape[0]:
            raise OutOfBounds(f"index {index} of {self}, at {here()}")
        return self._seen(index)

    def slice(self, start, length, dim=0) -> Shared:
        start, length = int(start), int(length)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise OutOfBounds(f"slice {start} ... {start + length} of dimension {dim} of {self}, at {here()}")
        return self._seen((slice(None),) * dim + (slice(start, start + length),))

    def permute(self, order) -> Shared:
        order = [int(n) for n in order]
        raw, states = self.raw.transpose(order), (x.transpose([*order, len(order)]) for x in (self.state, self.readers))
        return Shared(self.allocation, self.dtype, raw, *states, self.layout)

    def reshape(self, shape) -> Shared:
        return self.reinterpret(self.dtype, shape, self.layout)

    def reinterpret(self, dtype, shape, layout) -> Shared:
        kind, shape = np.dtype(raw_type(dtype)), [int(n) for n in shape]
        if not self.raw.flags.c_contiguous or math.prod(shape) * kind.itemsize != self.raw.nbytes:
            raise EmulationError(f"{self} seen as {dtype}{shape}, at {here()}")
        raw = self.raw.reshape(-1).view(kind).reshape(shape)
        states = (x.reshape(*shape, kind.itemsize) for x in (self.state, self.readers))
        return Shared(self.allocation, dtype, raw, *states, layout)

    _reinterpret = reinterpret

    def _flags(self) -> int:
        return int(np.bitwise_or.reduce(self.state, axis=None)) if self.state.size else 0

    def load(self, layout=None) -> Tensor:
        """What was never written reads as NaN, of integers as bits that are all ones."""
        self._refuse_flight("read")
        return Tensor(decode(self.raw.copy(), self.dtype), self.dtype, layout)

    def write(self, value: Tensor, partition: int) -> None:
        """By threads: products see it behind a fence. What is there already may be written again at any time."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise EmulationError(f"{value.dtype}{value.shape} stored to {self}, at {here()}")
        bits = encode(value.a, self.dtype)
        changed = (self.raw != bits)[..., None] | ((self.state & (DIRTY | UNDEFINED | FLIGHT)) != 0)
        if bool((changed & (self.readers > 0)).any()):
            raise Hazard(f"{self} is written while a product that was not waited for reads it, at {here()}")
        self._refuse_flight("written")
        self.raw[...] = bits
        self.mark_written(partition, changed)

    def mark_written(self, partition: int, where=True) -> None:
        np.copyto(self.state, np.uint16(DIRTY | partition << WRITER), where=where)
        interface = self.state.__array_interface__
        key = partition, interface["data"][0], interface["shape"], interface["strides"]
        self.allocation.dirty[key] = partition, self.state

    def _refuse_flight(self, what: str) -> None:
        if self._flags() & FLIGHT:
            raise Hazard(f"{self} is {what} while a copy to it is on its way, at {here()}")

    def begin_copy(self, what: str, by_engine: bool) -> None:
        """What was there is lost from now on."""
        if self.readers.any():
            raise Hazard(f"{self} is {what} while a product that was not waited for reads it, at {here()}")
        self._refuse_flight(what)
        if by_engine:
            dirty = (self.state & DIRTY) != 0
            if dirty.any() and bool(((self.state >> FENCED)[dirty] == 0).any()):
                raise Hazard(f"{self} is {what} by the copy engine after threads wrote it without fence, at {here()}")
        self.raw[...] = np.iinfo(self.raw.dtype).max if self.raw.dtype.kind == "u" else -1
        self.state[...] = FLIGHT

    def check_operand(self, partition: int, what: str) -> None:
        """Refuse what a product, or the copy engine, may not read yet."""
        flags = self._flags()
        if flags & FLIGHT:
            raise Hazard(f"{self} is {what} while a copy to it is on its way, at {here()}")
        if flags & DIRTY:
            dirty = (self.state & DIRTY) != 0
            if bool(((self.state >> (FENCED + partition) & 1)[dirty] == 0).any()):
                raise Hazard(f"{self} is {what}, and no fence stands behind what threads wrote there, at {here()}")

    def values(self) -> np.ndarray:
        return decode(self.raw, self.dtype)

    def barrier(self) -> Barrier:
        at = self.raw.__array_interface__["data"][0]
        found = self.allocation.barriers.get(at)
        if found is None or self.raw.size != 1:
            raise BarrierError(f"{self} is no barrier that was set up, at {here()}")
        return found


def fence(allocations: list[Allocation], partition: int) -> None:
    """What the partition wrote, every product sees that comes after; what others wrote, its own products see."""
    for allocation in allocations:
        for key, (writer, state) in list(allocation.dirty.items()):
            dirty = (state & DIRTY) != 0
            own = dirty & ((state >> WRITER & 7) == partition)
            if writer == partition:
                state[own] = 0
                del allocation.dirty[key]
            state[dirty & ~own] |= 1 << (FENCED + partition)


class Barrier:
    """An mbarrier (PTX ISA, "mbarrier"): a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self, name: str, count: int):
        if not 0 < count < 1 << 20:
            raise BarrierError(f"{name}: a count of {count}, at {here()}")
        self.name, self.count, self.pending, self.bytes, self.phase = name, count, count, 0, 0

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes"
        return f"{self.name} (phase {self.phase}, {missing} missing)"

    def announce(self, count: int) -> None:
        """More threads will arrive in this phase."""
        self.pending += count

    def expect(self, size: int) -> None:
        self.bytes += size
        if self.bytes >= 1 << 20:
            raise BarrierError(f"{self}: more bytes than a barrier counts, at {here()}")
        self.arrive(1)

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise BarrierError(f"{self}: {count} more arrive, at {here()}")
        self.pending -= count
        self._turn()

    def complete(self, size: int) -> None:
        """Bytes of a copy are there."""
        self.bytes -= size
        if self.bytes <= -(1 << 20):
            raise BarrierError(f"{self}: more bytes came than a barrier counts")
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def is_over(self, parity: int) -> bool:
        """Whether the phase of that parity is over; the one before the first counts as over."""
        return self.phase & 1 != parity


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

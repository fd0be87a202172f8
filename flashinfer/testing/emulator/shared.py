"""Shared memory of an emulated block: its bytes, and of each byte who wrote and read it, and what is under way."""

from __future__ import annotations

import math

import numpy as np

from flashinfer.testing.emulator.barriers import MOST_PARTITIONS, Barrier, Clock
from flashinfer.testing.emulator.errors import BarrierError, EmulationError, Hazard, OutOfBounds, here
from flashinfer.testing.emulator.values import InSharedMemory, Tensor, decode, encode, raw_type

# The state of a byte. Never written; a copy is on its way there; written by threads since the last fence of whoever
# wrote; by whom (from bit 3 on); whose own fences came later (from bit 8 on).
UNDEFINED, FLIGHT, DIRTY, WRITER, FENCED = 1, 2, 4, 3, 8
# Marks of a byte: its state; products that still read it; who wrote it, and when by the writer's clock; from here on,
# when each partition read it, by its own.
STATE, READERS, WROTE, READ = 0, 1, 2, 3
# A writer stands above a clock.
SHIFT = 24


class Allocation:
    """A range of shared memory. `schedule` knows who runs."""

    def __init__(self, name: str, schedule):
        self.name, self.schedule = name, schedule
        self.barriers: dict[int, Barrier] = {}
        # What threads wrote since their last fence, as (writer, state, partitions whose fences came later).
        self.dirty: dict[tuple, tuple[int, np.ndarray, set[int]]] = {}
        self.has_read: set[int] = set()


class Shared(InSharedMemory):
    """A view of shared memory, as `gl.shared_memory_descriptor`."""

    def __init__(self, allocation: Allocation, dtype, raw: np.ndarray, marks: np.ndarray, layout=None):
        # The bits of the elements; marks [marks, *shape, bytes of an element].
        self.allocation, self.dtype, self.raw, self.marks, self.layout = allocation, dtype, raw, marks, layout

    @classmethod
    def new(cls, allocation: Allocation, dtype, shape: list[int], layout) -> Shared:
        kind = np.dtype(raw_type(dtype))
        raw = np.full(math.prod(shape) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(shape)
        marks = np.zeros((READ + MOST_PARTITIONS, *shape, kind.itemsize), np.uint32)
        marks[STATE] = UNDEFINED
        return cls(allocation, dtype, raw, marks, layout)

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

    @property
    def state(self) -> np.ndarray:
        return self.marks[STATE]

    @property
    def _clock(self) -> Clock:
        return self.allocation.schedule.running.clock

    def __repr__(self) -> str:
        return f"{self.allocation.name} {self.dtype}{self.shape}"

    # Views.

    def _seen(self, key) -> Shared:
        return Shared(self.allocation, self.dtype, self.raw[key], self.marks[(slice(None), *key)], self.layout)

    def index(self, index) -> Shared:
        index = int(index)
        if not 0 <= index < self.shape[0]:
            raise OutOfBounds(f"index {index} of {self}, at {here()}")
        return self._seen((index,))

    def slice(self, start, length, dim=0) -> Shared:
        start, length = int(start), int(length)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise OutOfBounds(f"slice {start} ... {start + length} of dimension {dim} of {self}, at {here()}")
        return self._seen((slice(None),) * dim + (slice(start, start + length),))

    def permute(self, order) -> Shared:
        order = [int(n) for n in order]
        marks = self.marks.transpose([0, *(n + 1 for n in order), len(order) + 1])
        return Shared(self.allocation, self.dtype, self.raw.transpose(order), marks, self.layout)

    def reshape(self, shape) -> Shared:
        return self.reinterpret(self.dtype, shape, self.layout)

    def reinterpret(self, dtype, shape, layout) -> Shared:
        kind, shape = np.dtype(raw_type(dtype)), [int(n) for n in shape]
        if not self.raw.flags.c_contiguous or math.prod(shape) * kind.itemsize != self.raw.nbytes:
            raise EmulationError(f"{self} seen as {dtype}{shape}, at {here()}")
        raw = self.raw.reshape(-1).view(kind).reshape(shape)
        marks = self.marks.reshape(len(self.marks), *shape, kind.itemsize)
        return Shared(self.allocation, dtype, raw, marks, layout)

    _reinterpret = reinterpret

    # By threads.

    def load(self, layout=None) -> Tensor:
        """What was never written, or what no barrier orders before, reads as NaN; of integers as bits that are ones."""
        self._refuse_flight("read")
        raw, unknown = self.raw.copy(), self._unknown_writes()
        if unknown is not None:
            raw[unknown.any(-1)] = _ones(raw.dtype)
        self.mark_read(self._clock)
        return Tensor(decode(raw, self.dtype), self.dtype, layout)

    def store(self, value: Tensor) -> None:
        """Products see it behind a fence. What is there already may be written again at any time."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise EmulationError(f"{value.dtype}{value.shape} stored to {self}, at {here()}")
        self._refuse_flight("written")
        bits = encode(value.a, self.dtype)
        changed = (self.raw != bits)[..., None] | ((self.state & (DIRTY | UNDEFINED)) != 0)
        if bool((changed & (self.marks[READERS] > 0)).any()):
            raise Hazard(f"{self} is written while a product that was not waited for reads it, at {here()}")
        new = np.broadcast_to((self.raw != bits)[..., None], self.state.shape)
        self._refuse_race("written", new)
        # Who knew of another's write need not know of the same by this one.
        unknown = self._unknown_writes()
        if unknown is not None:
            self.marks[WROTE][unknown & ~new] = 0
        self.raw[...] = bits
        self.mark_written(changed, new | ((self.state & UNDEFINED) != 0))

    def mark_written(self, changed=True, new=True) -> None:
        """By the threads that run."""
        clock = self._clock
        np.copyto(self.marks[WROTE], np.uint32(clock.partition << SHIFT | clock.now), where=new)
        np.copyto(self.state, np.uint32(DIRTY | clock.partition << WRITER), where=changed)
        interface = self.state.__array_interface__
        key = clock.partition, interface["data"][0], interface["shape"], interface["strides"]
        self.allocation.dirty[key] = clock.partition, self.state, set()

    def mark_read(self, clock: Clock) -> None:
        self.allocation.has_read.add(clock.partition)
        self.marks[READ + clock.partition] = clock.now

    # By copies and products.

    def begin_copy(self, by_engine: bool) -> None:
        """A copy to it is on its way: what was there is lost from now on."""
        if self.marks[READERS].any():
            raise Hazard(f"{self} is copied to while a product that was not waited for reads it, at {here()}")
        self._refuse_flight("copied to")
        self._refuse_race("copied to", None)
        if by_engine:
            dirty = (self.state & DIRTY) != 0
            if dirty.any() and bool(((self.state >> FENCED)[dirty] == 0).any()):
                raise Hazard(f"{self} is copied to by the engine after threads wrote it without fence, at {here()}")
        clock = self._clock
        self.raw[...] = _ones(self.raw.dtype)
        self.marks[WROTE] = clock.partition << SHIFT | clock.now
        self.state[...] = FLIGHT

    def land(self, raw: np.ndarray, writer: int | None = None) -> None:
        """What the copy brought; `writer` : the partition whose threads copied it."""
        self.raw[...] = raw.reshape(self.raw.shape)
        if writer is None:
            self.state[...] = 0
            return
        self.state[...] = DIRTY | writer << WRITER
        interface = self.state.__array_interface__
        key = writer, interface["data"][0], interface["shape"], interface["strides"]
        self.allocation.dirty[key] = writer, self.state, set()

    def begin_reading(self, what: str) -> None:
        """A product, or the copy engine, reads it from now on."""
        self._refuse_flight(what)
        state, clock = self.state, self._clock
        dirty = (state & DIRTY) != 0
        if bool((dirty & ((state >> (FENCED + clock.partition) & 1) == 0)).any()):
            raise Hazard(f"{self} is {what}, and no fence stands behind what threads wrote there, at {here()}")
        unknown = self._unknown_writes()
        if unknown is not None:
            self._name_writer(what, unknown)
        self.marks[READERS] += 1

    def end_reading(self, clock: Clock) -> None:
        """What `clock` says from now on comes after it."""
        self.marks[READERS] -= 1
        self.mark_read(clock)

    def values(self) -> np.ndarray:
        return decode(self.raw, self.dtype)

    def barrier(self) -> Barrier:
        found = self.allocation.barriers.get(self.address)
        if found is None or self.raw.size != 1:
            raise BarrierError(f"{self} is no barrier that was set up, at {here()}")
        return found

    @property
    def address(self) -> int:
        return self.raw.__array_interface__["data"][0]

    # What is refused.

    def _refuse_flight(self, what: str) -> None:
        if bool((self.state & FLIGHT).any()):
            raise Hazard(f"{self} is {what} while a copy to it is on its way, at {here()}")

    def _unknown_writes(self) -> np.ndarray | None:
        """The bytes whose writing no barrier orders before what runs; None if there are none."""
        wrote, known = self.marks[WROTE], self._clock.known
        first = int(wrote.flat[0])
        if bool((wrote == first).all()):
            if first & ((1 << SHIFT) - 1) <= known[first >> SHIFT]:
                return None
            return np.ones(wrote.shape, bool)
        unknown = (wrote & np.uint32((1 << SHIFT) - 1)) > known[wrote >> SHIFT]
        return unknown if unknown.any() else None

    def _refuse_race(self, what: str, new: np.ndarray | None) -> None:
        """Refuse to change bytes that others wrote or read, as far as who runs knows, at no certain time before."""
        unknown = self._unknown_writes()
        if unknown is not None and new is not None:
            unknown = unknown & new
        if unknown is not None and unknown.any():
            self._name_writer(what, unknown)
        clock = self._clock
        for partition in self.allocation.has_read - {clock.partition}:
            late = self.marks[READ + partition] > clock.known[partition]
            if bool((late if new is None else late & new).any()):
                raise Hazard(f"{self} is {what}, and nothing orders that behind partition {partition}'s reading it, "
                             f"at {here()}")  # fmt: skip

    def _name_writer(self, what: str, unknown: np.ndarray) -> None:
        writer = int(self.marks[WROTE][unknown][0]) >> SHIFT
        raise Hazard(f"{self} is {what}, and nothing orders that behind partition {writer}'s writing it, at {here()}")


def _ones(kind: np.dtype) -> int:
    return np.iinfo(kind).max if kind.kind == "u" else -1


def fence(allocations: list[Allocation], partition: int) -> None:
    """What the partition wrote, every product sees that comes after; what others wrote, its own products see."""
    for allocation in allocations:
        for key, (writer, state, fenced) in list(allocation.dirty.items()):
            # A fence changes nothing twice: whoever writes there again is dirty again.
            if partition in fenced:
                continue
            fenced.add(partition)
            dirty = (state & DIRTY) != 0
            own = dirty & ((state >> WRITER & 7) == partition)
            if writer == partition:
                np.copyto(state, np.uint32(0), where=own)
                del allocation.dirty[key]
            np.bitwise_or(state, np.uint32(1 << (FENCED + partition)), out=state, where=dirty & ~own)

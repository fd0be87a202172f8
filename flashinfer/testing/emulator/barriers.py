"""Barriers in shared memory, and what has happened for certain before what: a clock for each partition of warps.

A partition's clock counts its releases: arrivals, announcements and copies. It knows of the others' clocks what it
acquired when it waited (vector clocks: Fidge, 1988; Mattern, 1989). What one partition writes another may read only if
it knows of it by then, in whatever order they happened to run.
"""

from __future__ import annotations

import numpy as np

from flashinfer.testing.emulator.errors import BarrierError, here

MOST_PARTITIONS = 8


class Clock:
    """What a partition knows of all partitions' clocks, its own among them."""

    def __init__(self, partition: int, known: np.ndarray | None = None):
        self.partition = partition
        self.known = np.zeros(MOST_PARTITIONS, np.uint32) if known is None else known.copy()
        self.known[partition] += 1

    @property
    def now(self) -> int:
        """Of what it does next."""
        return int(self.known[self.partition])

    def release(self) -> np.ndarray:
        """What it and those that it knows of have done so far, for others to acquire."""
        released = self.known.copy()
        self.known[self.partition] += 1
        return released

    def acquire(self, released: np.ndarray) -> None:
        np.maximum(self.known, released, out=self.known)


class Barrier:
    """An mbarrier (PTX ISA, "mbarrier"): a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self, name: str, count: int):
        if not 0 < count < 1 << 20:
            raise BarrierError(f"{name}: a count of {count}, at {here()}")
        self.name, self.count, self.pending, self.bytes, self.phase = name, count, count, 0, 0
        # What was released by arrivals of this phase, and of those that are over.
        self._arrived, self.released = np.zeros(MOST_PARTITIONS, np.uint32), np.zeros(MOST_PARTITIONS, np.uint32)

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes"
        return f"{self.name} (phase {self.phase}, {missing} missing)"

    def announce(self, count: int) -> None:
        """More threads will arrive in this phase."""
        self.pending += count

    def expect(self, size: int, released: np.ndarray) -> None:
        self.bytes += size
        if self.bytes >= 1 << 20:
            raise BarrierError(f"{self}: more bytes than a barrier counts, at {here()}")
        self.arrive(1, released)

    def arrive(self, count: int, released: np.ndarray) -> None:
        if count > self.pending:
            raise BarrierError(f"{self}: {count} more arrive, at {here()}")
        self.pending -= count
        self._turn(released)

    def complete(self, size: int, released: np.ndarray) -> None:
        """Bytes of a copy are there."""
        self.bytes -= size
        if self.bytes <= -(1 << 20):
            raise BarrierError(f"{self}: more bytes came than a barrier counts")
        self._turn(released)

    def _turn(self, released: np.ndarray) -> None:
        np.maximum(self._arrived, released, out=self._arrived)
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            np.maximum(self.released, self._arrived, out=self.released)
            self._arrived[:] = 0

    def is_over(self, parity: int) -> bool:
        """Whether the phase of that parity is over; the one before the first counts as over."""
        return self.phase & 1 != parity

"""Barriers in shared memory, and what has happened for certain before what: a clock for each partition of warps.

A partition's clock counts what it has told others. It knows of the others' what barriers have told it (vector clocks:
Fidge, 1988; Mattern, 1989). What one partition writes another may read only if it knows of it by then, in whatever
order they happened to run.
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

    def tell(self) -> np.ndarray:
        """What it has done so far, for others to learn."""
        told = self.known.copy()
        self.known[self.partition] += 1
        return told

    def learn(self, told: np.ndarray) -> None:
        np.maximum(self.known, told, out=self.known)


class Barrier:
    """An mbarrier (PTX ISA, "mbarrier"): a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self, name: str, count: int):
        if not 0 < count < 1 << 20:
            raise BarrierError(f"{name}: a count of {count}, at {here()}")
        self.name, self.count, self.pending, self.bytes, self.phase = name, count, count, 0, 0
        # What those who arrived have told in this phase, and in those that are over.
        self._told, self.told = np.zeros(MOST_PARTITIONS, np.uint32), np.zeros(MOST_PARTITIONS, np.uint32)

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes"
        return f"{self.name} (phase {self.phase}, {missing} missing)"

    def announce(self, count: int) -> None:
        """More threads will arrive in this phase."""
        self.pending += count

    def expect(self, size: int, told: np.ndarray) -> None:
        self.bytes += size
        if self.bytes >= 1 << 20:
            raise BarrierError(f"{self}: more bytes than a barrier counts, at {here()}")
        self.arrive(1, told)

    def arrive(self, count: int, told: np.ndarray) -> None:
        if count > self.pending:
            raise BarrierError(f"{self}: {count} more arrive, at {here()}")
        self.pending -= count
        self._turn(told)

    def complete(self, size: int, told: np.ndarray) -> None:
        """Bytes of a copy are there."""
        self.bytes -= size
        if self.bytes <= -(1 << 20):
            raise BarrierError(f"{self}: more bytes came than a barrier counts")
        self._turn(told)

    def _turn(self, told: np.ndarray) -> None:
        np.maximum(self._told, told, out=self._told)
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            np.maximum(self.told, self._told, out=self.told)
            self._told[:] = 0

    def is_over(self, parity: int) -> bool:
        """Whether the phase of that parity is over; the one before the first counts as over."""
        return self.phase & 1 != parity

"""Tiles and warps of the state-space recurrence's kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows of a state (dim) that a program has. num_warps : warps per program.

    capability : of the chip, ten times; it decides which instructions make and read fp8. 0 where no state is fp8.
    """

    rows: int
    num_warps: int
    capability: int = 0


def power_of_two(n: int) -> int:
    """The least power of two that is no less than n, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def update(problem, target) -> Config:
    # The state takes 32 registers a thread of 4 warps, and 16 KiB in float32 are in flight; 8 where each element has an
    # address of its own, or Philox's words, and 4 where A has values of its own beside those. Not measured. With 32 of
    # those, ptxas spills up to 552 bytes.
    aligned, tied = getattr(problem, "aligned", True), getattr(problem, "tied", True)
    elements = 4096 if aligned and not problem.rounds else 1024 if aligned or tied else 512
    # Converting 32 values to FP8 spills 16 bytes on Triton 3.9.
    fp8 = "fp8e4nv" in (problem.state_dtype, getattr(problem, "each_dtype", ""))
    elements = min(elements, 2048) if fp8 else elements
    rows = max(1, min(power_of_two(problem.dim), elements // power_of_two(problem.dstate)))
    return Config(rows, 4, target.capability if fp8 else 0)

"""Tiles and warps of the state-space recurrence's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer._core.sizes import power_of_two


@dataclass(frozen=True)
class Config:
    """rows : rows of a state (dim) that a program has. num_warps : warps per program.

    capability : of the chip, ten times; it decides which instructions make and read fp8. 0 where no state is fp8.
    pdl : dependent launch.
    """

    rows: int
    num_warps: int
    capability: int = 0
    pdl: bool = False


def update(problem, target) -> Config:
    many = replay(problem, target)
    if problem.rounds or not problem.aligned:
        return replace(many, pdl=target.pdl)
    # One warp, so that sums over dstate and copies of B and C need no barrier, with as many elements a thread.
    columns = power_of_two(problem.dstate, 16)
    rows = max(1, many.rows // 4)
    return Config(rows, max(1, rows * columns // 1024), many.capability, target.pdl)


def with_many(problem, config: Config) -> Config | None:
    """The config of an update with many programs: twice the rows; None where there is none. A row's bits are the
    same. With an A for each element ptxas would spill 24 bytes.
    """
    if config.num_warps > 1 or config.capability or problem.rounds or not problem.aligned or not problem.tied:
        return None
    return replace(config, rows=2 * config.rows) if 8 <= config.rows and 2 * config.rows <= problem.dim else None


def replay(problem, target) -> Config:
    # Elements of the state in a program of 4 warps. 4096 are 32 registers a thread, and 16 KiB of loads in flight.
    # Unaligned rows need an address for each element, and stochastic rounding Philox's words: 1024. An A for each
    # element besides: 512. With 4096 there, ptxas spills up to 552 bytes; times were not measured.
    aligned, tied = getattr(problem, "aligned", True), getattr(problem, "tied", True)
    elements = 4096 if aligned and not problem.rounds else 1024 if aligned or tied else 512
    # Converting 32 values to FP8 spills 16 bytes on Triton 3.9.
    fp8 = "fp8e4nv" in (problem.state_dtype, getattr(problem, "each_dtype", ""))
    elements = min(elements, 2048) if fp8 else elements
    rows = max(1, min(power_of_two(problem.dim, 16), elements // power_of_two(problem.dstate, 16)))
    return Config(rows, 4, target.capability if fp8 else 0)

"""Tile of the gated activation kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows per program, each `Problem.block` columns wide. num_warps : warps per program.

    pdl : dependent launch. capability : of the chip, ten times; it decides which instructions quantise. 0 where nothing
    is quantised.
    """

    rows: int
    num_warps: int
    pdl: bool
    capability: int = 0


def portable(problem, target) -> Config:
    # 1024 results a program, 8 for each of 128 threads: two 16-byte loads of bf16, one for each half. 4096 x 8192 take
    # 68.3 us, 8 x 14336 2.6; with 2048 results 68.6 and 3.0 (H100). NVFP4 has 2048, not measured; by the lesser error
    # it has two candidates in registers: 4 elements a thread do not spill on any chip, 8 do (by ptxas). A transpose has
    # a block of 32 rows a program, 2048 elements.
    elements = 2048 if problem.format and not problem.score else 1024
    capability = target.capability if problem.format else 0
    num_warps = 8 if problem.score else 4
    return Config(max(1, elements // problem.block), num_warps, problem.pdl and target.pdl, capability)

"""Tile of the gated activation kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows per program, each `Problem.block` columns wide. num_warps : warps per program.

    capability : of the chip, ten times; it decides which instructions quantise. 0 where nothing is quantised.
    """

    rows: int
    num_warps: int
    capability: int = 0


def portable(problem, target) -> Config:
    # 2048 results a program, 16 for each of 128 threads: four 16-byte loads of bf16 in flight, two for each half.
    # Not measured.
    # NVFP4 by the lesser error has two results in registers; half as many elements then, or they spill (by ptxas).
    elements = 1024 if problem.score else 2048
    capability = target.capability if problem.form else 0
    return Config(rows=max(1, elements // problem.block), num_warps=4, capability=capability)

"""Tile of the gated activation kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows per program, each `Problem.block` columns wide. num_warps : warps per program."""

    rows: int
    num_warps: int


def portable(problem, target) -> Config:
    # 2048 results a program, 16 for each of 128 threads: four 16-byte loads of bf16 in flight, two for each half.
    # Not measured.
    return Config(rows=max(1, 2048 // problem.block), num_warps=4)

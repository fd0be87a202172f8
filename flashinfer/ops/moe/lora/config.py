"""Columns and warps of the adapters' kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """block : columns of a program. num_warps : of a program."""

    block: int
    num_warps: int


def portable(problem, target) -> Config:
    # 16 elements of a matrix for each of 128 threads: 32 bytes on the way. Not measured.
    return Config(block=2048 // problem.together, num_warps=4)

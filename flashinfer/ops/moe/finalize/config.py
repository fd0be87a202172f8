"""Columns and warps of the finalize kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype


@dataclass(frozen=True)
class Config:
    """block : columns of a program. num_warps : of a program."""

    block: int
    num_warps: int


def portable(problem, target) -> Config:
    # 16 bytes of each of a token's rows for each of 128 threads: all rows are asked for before the first is added, so
    # that with 8 choices 128 bytes a thread are on the way. Not measured.
    return Config(block=2048 // torch_dtype(problem.dtype).itemsize, num_warps=4)

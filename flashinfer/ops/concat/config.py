"""Rows per program of the concatenation kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype


@dataclass(frozen=True)
class Config:
    """rows : heads of tokens per program. num_warps : warps per program. pdl : dependent launch."""

    rows: int
    pdl: bool
    num_warps: int = 4


def portable(problem, target) -> Config:
    # 8 KiB of the wider part a program, four 16-byte loads for each of 128 threads; half as much element by element.
    # Not measured.
    row = max(problem.nope_block, problem.rope_block) * torch_dtype(problem.dtype).itemsize
    return Config(rows=max(1, (8192 if problem.aligned else 4096) // row), pdl=target.pdl)

"""Rows per program of the concatenation kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype


@dataclass(frozen=True)
class Config:
    """rows : heads of tokens per program. num_warps : warps per program. pdl : dependent launch.

    capability : of the chip, ten times; it decides which instructions quantise. 0 where nothing is quantised.
    """

    rows: int
    pdl: bool
    num_warps: int = 4
    capability: int = 0


def portable(problem, target) -> Config:
    # 8 KiB of the wider part a program, four 16-byte loads for each of 128 threads; half as much element by element.
    # Not measured.
    row = max(problem.nope_block, problem.rope_block) * torch_dtype(problem.dtype).itemsize
    capability = target.capability if hasattr(problem, "value_block") else 0
    return Config(max(1, (8192 if problem.aligned else 4096) // row), target.pdl, capability=capability)

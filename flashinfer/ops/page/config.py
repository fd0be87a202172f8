"""Rows per program of the page kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype


@dataclass(frozen=True)
class Config:
    """rows : per program; a row is one head of a token, a token, or a request. num_warps : warps per program.

    pdl : dependent launch.
    capability : of the chip, ten times; it decides which instructions quantise. 0 where nothing is quantised.
    """

    rows: int
    pdl: bool
    num_warps: int = 4
    capability: int = 0


def append(problem, target) -> Config:
    # 2 KiB of keys a program, a 16-byte load for each of 128 threads, and as much of values. 16384 tokens of 8 heads
    # take 49 us with 2 to 16 KiB, 8 tokens 2.9 with 2 KiB and 3.2 with 4 (H100).
    row = max(problem.key_block, problem.value_block) * torch_dtype(problem.dtype).itemsize
    capability = target.capability if problem.key_format else 0
    return Config(rows=max(1, 2048 // row), pdl=target.pdl, capability=capability)


def index(problem, target) -> Config:
    # One element a thread: these kernels are launches more than work. Not measured.
    return Config(rows=128, pdl=target.pdl)

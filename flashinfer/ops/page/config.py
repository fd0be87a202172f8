"""Rows per program of the page kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype


@dataclass(frozen=True)
class Config:
    """rows : per program; a row is one head of a token, a token, or a request. num_warps : warps per program.

    capability : of the chip, ten times; it decides which instructions quantise. 0 where nothing is quantised.
    """

    rows: int
    num_warps: int = 4
    capability: int = 0


def append(problem, target) -> Config:
    # 4 KiB of keys a program, two 16-byte loads for each of 128 threads, and as much of values: the chain of three
    # index loads is paid once for all of them. Not measured.
    # Unaligned rows go element by element; half as many at a time then, or registers spill on sm_80.
    row = max(problem.key_block, problem.value_block) * torch_dtype(problem.dtype).itemsize
    capability = target.capability if problem.key_form else 0
    return Config(rows=max(1, (4096 if problem.aligned else 2048) // row), capability=capability)


def index(problem, target) -> Config:
    # One element a thread: these kernels are launches more than work. Not measured.
    return Config(rows=128)

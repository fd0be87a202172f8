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
    # 32 bytes of each of a token's rows for each of 128 threads. With half as many columns a token of DeepSeek-V3 took
    # 3.8 us instead of 3.0, and 4096 of them 181 instead of 180, which is 0.97 of a copy's bandwidth (H100).
    return Config(block=4096 // torch_dtype(problem.dtype).itemsize, num_warps=4)

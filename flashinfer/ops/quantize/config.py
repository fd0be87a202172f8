"""Tiles of the quantisation kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows per program. num_warps : warps per program. capability : of the chip; which conversions it has."""

    rows: int
    num_warps: int
    capability: int


def quantize(problem, target) -> Config:
    # 2048 elements a program, 16 for each of 128 threads: two 16-byte reads of bf16. Not measured.
    rows = max(1, 2048 // problem.block)
    # A row with a scale of its own has one program, so its tiles are larger: 32 elements a thread. Two candidates take
    # the registers of 8 (by ptxas; rows read element by element spill at 16). Not measured.
    num_warps = 8 if getattr(problem, "score", "") else min(max(rows * problem.block // 1024, 4), 8)
    return Config(rows, num_warps, target.capability)


def dequantize(problem, target) -> Config:
    # 16 elements a thread: one 8-byte read of codes, two 16-byte writes of bf16. Not measured.
    return Config(max(1, 2048 // problem.block), 4, target.capability)


def interleave(problem, target) -> Config:
    # Tiles of 32 rows and 16 factors. The whole is small. Not measured.
    return Config(32, 4, target.capability)


def packbits(problem, target) -> Config:
    # 512 bytes of result a program, of 4096 elements: 32 of them a thread. Not measured.
    return Config(512, 4, target.capability)

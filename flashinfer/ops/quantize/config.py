"""Tiles of the quantisation kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows per program. num_warps : warps per program. capability : of the chip; which conversions it has.

    pdl : dependent launch.
    """

    rows: int
    num_warps: int
    capability: int
    pdl: bool = False


def quantize(problem, target) -> Config:
    # 2048 elements a program. Codes of e2m1 cost instructions, and two warps leave each thread 32 elements: NVFP4 of
    # 4096 x 8192 takes 31.7 us; with four warps 32.4 for 4096 elements, and with two 32.2; MXFP4 is taken for alike.
    # MXFP8 has four warps, 36.8 us; with eight and 4096 elements 36.2 (H100). Rows read element by element spill above
    # 1024 elements (by ptxas).
    rows = max(1, (2048 if problem.aligned else 1024) // problem.block)
    # A row with a scale of its own has one program, so its tiles are larger: 32 elements a thread. Two candidates take
    # the registers of 8 warps (by ptxas). Neither is measured.
    if getattr(problem, "score", ""):
        num_warps = 8
    elif getattr(problem, "kind", "") in ("nvfp4", "mxfp4") and problem.aligned and not problem.row_scale:
        num_warps = 2
    else:
        num_warps = min(max(rows * problem.block // 1024, 4), 8)
    return Config(rows, num_warps, target.capability, getattr(problem, "pdl", True) and target.pdl)


def dequantize(problem, target) -> Config:
    # 16 elements a thread: one 8-byte read of codes, two 16-byte writes of bf16. Not measured.
    return Config(max(1, 2048 // problem.block), 4, target.capability, target.pdl)


def interleave(problem, target) -> Config:
    # Tiles of 32 rows and 16 factors. The whole is small. Not measured.
    return Config(32, 4, target.capability)


def packbits(problem, target) -> Config:
    # 512 bytes of result a program, of 4096 elements: 32 of them a thread. Not measured.
    return Config(512, 4, target.capability)

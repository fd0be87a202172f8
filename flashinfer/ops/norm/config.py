"""Rows and warps per program of the norm kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype


@dataclass(frozen=True)
class Config:
    """rows : rows per program. num_warps : warps per program, which share each row.

    weights_first : whether the weights are read before the rows are reduced, or after.
    pdl : dependent launch.
    capability : of the chip, ten times; it decides which instructions quantise. 0 where nothing is quantised.
    chunk : columns that a program reads at a time, of a row that registers do not hold. 0: they hold it.
    """

    rows: int
    num_warps: int
    weights_first: bool
    pdl: bool
    capability: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Gated:
    """num_warps : warps per program, which holds one row. pdl : dependent launch."""

    num_warps: int
    pdl: bool


# The longest row that the registers of a program hold.
LONGEST = 32768


def portable(problem, target) -> Config:
    capability = target.capability if problem.format else 0
    if problem.block > LONGEST:
        # 32 elements a thread, as below. Not measured.
        return Config(1, 16, False, problem.pdl and target.pdl, capability, chunk=16384)
    # Short rows are packed until a program moves 2048 elements: 16 for each of 128 threads, two 16-byte accesses of
    # bf16, so that a QK-norm of head_dim 128 is no launch of tiny programs. Not measured.
    rows = max(1, 2048 // problem.block)
    # 32 elements a thread: four 16-byte loads of bf16 in flight, and a row of 32768 in the 64 registers that a thread
    # of 32 warps has, without spills. rmsnorm of 4096 x 8192 takes 47.6 us with 8 warps, 47.9 with 4, 47.4 with 16,
    # 53.5 with 32; of 8 x 8192 2.91, and 2.95 with 16 (H100).
    num_warps = min(max(rows * problem.block // 1024, 4), 32)
    # Weights that wait for the reduction take registers: 16 of them are there beside 32 elements of a row, but not in a
    # program of 32 warps, and the 64 and more of a LayerNorm's float32 weights are not (they spill, by ptxas).
    vectors = 2 if problem.kind == "layernorm" else 1
    weights = vectors * torch_dtype(problem.weight_dtype).itemsize * problem.block // (32 * num_warps)
    return Config(rows, num_warps, weights <= 64 and num_warps <= 16, problem.pdl and target.pdl, capability)


def gated(problem, target) -> Gated:
    # 16 elements a thread, for beside the branch there are a residual and a gate of float32 on the way. Not measured.
    return Gated(num_warps=min(max(problem.block // 512, 4), 32), pdl=problem.pdl and target.pdl)


def modulated(problem, target) -> Config:
    # As `gated`: three or four rows are on the way. Not measured.
    num_warps = min(max(problem.block // 512, 4), 32)
    return Config(1, num_warps, False, target.pdl, target.capability if problem.format else 0)

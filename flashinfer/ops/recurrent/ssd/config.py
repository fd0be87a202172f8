"""Tiles and warps of the kernels of prefill by state-space duality."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two


@dataclass(frozen=True)
class Config:
    """tile : tokens that are multiplied with one another at a time. rows : rows of the state (dim) of a program.

    passed_rows : the same of the kernel that goes from chunk to chunk.
    operand : what products multiply, "bf16" or "fp32" (as tf32 for fp16, whose range a state may leave).
    num_warps : warps per program.
    """

    tile: int
    rows: int
    passed_rows: int
    operand: str
    num_warps: int


def portable(problem, target) -> Config:
    # Results must not depend on the batch, so nothing here does. Not measured.
    operand = "bf16" if problem.dtype == "bf16" and not target.is_cpu else "fp32"
    # Tiles of B, C, x and the state share the shared memory: 56 KiB in bf16 with 128 columns, and half the tokens and
    # rows where elements or rows are twice as long.
    small = problem.dtype != "bf16" or problem.dstate > 128
    tile = rows = 32 if small else 64
    # 4 registers a thread of a state, and as many on their way: with 8 heads of 64 x 128 there are 64 programs.
    # By ptxas: 8 warps need no stack on Hopper, 4 need 56 bytes where states on the way are wanted.
    passed = max(1, 1024 // power_of_two(problem.dstate, 16))
    return Config(tile, min(rows, power_of_two(problem.dim, 16)), passed, operand, 8)

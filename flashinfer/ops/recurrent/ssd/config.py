"""Tiles and warps of the kernels of prefill by state-space duality."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two


@dataclass(frozen=True)
class Config:
    """chunk : tokens from one kept state to the next. tile : tokens that are multiplied with one another at a time.

    rows, columns : of the state (dim and dstate) of a program; one that computes results has all columns.
    operand : what products multiply, "bf16" or "fp32" (as tf32 for fp16, whose range a state may leave).
    num_warps, num_stages : warps per program, and loads on their way, where results are computed.
    states_warps, states_stages : the same where states are.
    """

    chunk: int
    tile: int
    rows: int
    columns: int
    operand: str
    num_warps: int
    num_stages: int
    states_warps: int
    states_stages: int


def portable(problem, target) -> Config:
    # Results must not depend on the batch, so nothing here does. Times: docs/rooms/ssd.md.
    operand = "bf16" if problem.dtype == "bf16" and not target.is_cpu else "fp32"
    # Tiles of B, C, x and the state share the shared memory: half the tokens and rows where elements or rows are twice
    # as long.
    small = problem.dtype != "bf16" or problem.dstate > 128
    tile = 32 if small else 64
    # By ptxas: on Hopper 64 rows and 4 warps need no stack, and two programs fit on a multiprocessor. Where products
    # are not asynchronous, their operands are in registers too: 64 rows need 328 bytes with 4 warps and 168 with 8, 32
    # rows none. float32 has twice the registers: 32 rows need 296 bytes.
    hopper = target.capability == 90
    most = 16 if problem.dtype == "fp32" else tile if hopper else 32
    rows = min(most, power_of_two(problem.dim, 16))
    # Two tiles, where that divides the chunk asked for: longer ones cost more products, shorter ones more states.
    chunk = tile if problem.chunk % (2 * tile) else 2 * tile
    # 64 x 64 elements of a state read as much of x as of B: with 64 heads of 64 x 128 there are 128 programs.
    return Config(
        chunk=chunk,
        tile=tile,
        rows=rows,
        columns=min(64, power_of_two(problem.dstate, 16)),
        operand=operand,
        num_warps=4 if hopper or problem.dtype == "fp32" else 8,
        num_stages=2,
        states_warps=8,
        states_stages=3,
    )

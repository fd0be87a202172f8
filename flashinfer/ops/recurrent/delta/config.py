"""Tiles and warps of the delta rule's kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : rows of the state (values) that a program has. num_warps : warps per program.

    capability : of the chip, ten times; it decides which instructions make and read fp8. 0 where no state is fp8.
    """

    rows: int
    num_warps: int
    capability: int = 0


def capability_for(target, *dtypes: str) -> int:
    return target.capability if any(dtype.startswith("fp8") for dtype in dtypes) else 0


def power_of_two(n: int) -> int:
    """The least power of two that is no less than n, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def step(problem, target) -> Config:
    key, value = power_of_two(problem.key_dim), power_of_two(problem.value_dim)
    capability = capability_for(target, problem.source_dtype, problem.state_dtype)
    if problem.norm:
        # The norm is over all values of a head, so one program has its whole state: 64 registers a thread of it.
        return Config(value, max(4, key * value // 2048), capability)
    # The state takes 32 registers a thread of 4 warps, and 16 KiB in float32 are in flight. Not measured.
    return Config(max(8, min(value, 4096 // key)), 4, capability)


def commit(problem, target) -> Config:
    key, value = power_of_two(problem.key_dim), power_of_two(problem.value_dim)
    return Config(max(8, min(value, 4096 // key)), 4, capability_for(target, problem.state_dtype))

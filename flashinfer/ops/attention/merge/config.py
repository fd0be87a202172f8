"""Tiles of the merge kernels: functions of the problem alone, since merging is bound by memory on every chip."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two

# A wider row is read in several steps, so that one row always fits a tile.
_WIDEST = 512
# Bytes of one operand's tile: two 16-byte loads in flight for each of 128 threads, and one decoded token of 32 heads of
# 128 in a 2-byte type still makes two blocks. Twice that spills registers in a stack (head_dim 192, Triton 3.9).
_TILE = 4096
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class PairConfig:
    """Rows and columns of a tile; a row is one head of one token."""

    rows: int
    columns: int
    num_warps: int


@dataclass(frozen=True)
class StackConfig:
    """Rows, states and columns of a tile; a row is one head of one token."""

    rows: int
    states: int
    columns: int
    num_warps: int


def _columns(head_dim: int) -> int:
    return min(power_of_two(head_dim), _WIDEST)


def _tile(problem) -> int:
    # Narrow accesses need a register or two for each element's address.
    return _TILE if problem.aligned else _TILE // 2


def pair(problem, target) -> PairConfig:
    columns = _columns(problem.head_dim)
    return PairConfig(_tile(problem) // (columns * _BYTES[problem.dtype]), columns, num_warps=4)


def stack(problem, target) -> StackConfig:
    columns = _columns(problem.head_dim)
    row = columns * _BYTES[problem.dtype]
    states = min(problem.states, _tile(problem) // row)
    return StackConfig(_tile(problem) // (row * states), states, columns, num_warps=4)


def unit(problem) -> int:
    """Elements that the strides of aligned rows are multiples of: 16 bytes."""
    return 16 // _BYTES[problem.dtype] if problem.aligned else 1

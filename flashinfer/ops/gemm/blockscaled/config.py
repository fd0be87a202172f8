"""Tiles of products with block-scaled operands."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.gemm import tiles


@dataclass(frozen=True)
class Quantize:
    """num_warps : of a program, which has one block. capability : of the chip, ten times."""

    num_warps: int
    capability: int


def portable(problem, target) -> tiles.Config:
    return tiles.choose(problem, tiles.compute(problem.scale, (problem.a, problem.b), target), target)


def quantize(problem, target) -> Quantize:
    # 128 elements take a warp, 128 rows of them 32 elements a thread of 16. Not measured.
    return Quantize(1 if problem.rows == 1 else 16, target.capability)


def splits(count: int, blocks: int, sms: int) -> int:
    """Parts of K for a product of so many tiles and blocks of K, so that each multiprocessor has two programs.

    A part has at least 4 blocks: fewer are done before the first loads have come.
    """
    return max(1, min(2 * sms // max(count, 1), blocks // 4, 16))

"""Tiles of products with block-scaled operands."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer.ops.gemm import tiles


@dataclass(frozen=True)
class Quantize:
    """num_warps : of a program, which has one block. capability : of the chip, ten times."""

    num_warps: int
    capability: int


def portable(problem, target) -> tiles.Config:
    return tiles.choose(problem, tiles.compute(problem.scale, (problem.a, problem.b), target), target)


# From so many tokens on, operands that tensor cores do not take are widened once, into memory, and not by every tile:
# M / 128 times each element of the weight. An H100 takes 452, 461 and 435 us for 4096 x 4096 x 7168 in NVFP4, MXFP8 and
# bfloat16 x NVFP4, and 1226, 1161 and 1002 where tiles widen. The number itself is not measured.
WIDEN_FIRST = 512


def after_widening(problem, config: tiles.Config) -> tiles.Config:
    """The tile of the product of operands that have been widened to bfloat16."""
    # A stage is 32 KiB: four of them, or two where only 99 KiB are there.
    stages = 4 if config.capability in (80, 90, 100, 103) else 2
    return replace(config, compute="", block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=stages)


def quantize(problem, target) -> Quantize:
    # 128 elements take a warp, 128 rows of them 32 elements a thread of 16. Not measured.
    return Quantize(1 if problem.rows == 1 else 16, target.capability)


def splits(count: int, blocks: int, sms: int) -> int:
    """Parts of K for a product of so many tiles and blocks of K, so that each multiprocessor has two programs.

    A part has at least 4 blocks: fewer are done before the first loads have come.
    """
    return max(1, min(2 * sms // max(count, 1), blocks // 4, 16))

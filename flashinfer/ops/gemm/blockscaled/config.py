"""Configs of the block-scaled GEMM and of its quantization."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer.ops.gemm import tiles


@dataclass(frozen=True)
class Quantize:
    """num_warps : warps of a program, which quantizes one block. capability : the compute capability times ten."""

    num_warps: int
    capability: int


def portable(problem, target) -> tiles.Config:
    return tiles.choose(problem, tiles.compute(problem.scale, (problem.a, problem.b), target), target)


# From this many tokens on, operands that tensor cores do not take are widened to bfloat16 in memory first. Otherwise
# each tile widens its operands, and each element of the weight is widened M / 128 times. An H100 takes 452, 461 and 435
# us for 4096 x 4096 x 7168 in NVFP4, MXFP8 and bfloat16 x NVFP4 with this, 1226, 1161 and 1002 without. The threshold
# itself is not measured.
WIDEN_FIRST = 512


def after_widening(problem, config: tiles.Config) -> tiles.Config:
    """The config of the GEMM whose operands have been widened to bfloat16."""
    # A stage takes 32 KiB: four stages, or two on chips with 99 KiB of shared memory.
    stages = 4 if config.capability in (80, 90, 100, 103) else 2
    return replace(config, compute="", block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=stages)


def quantize(problem, target) -> Quantize:
    # One warp for 128 elements; 16 warps, 32 elements a thread, for 128 rows of them. Not measured.
    return Quantize(1 if problem.rows == 1 else 16, target.capability)


def splits(count: int, blocks: int, sms: int) -> int:
    """K slices for a GEMM of `count` tiles and `blocks` blocks of K, so that each multiprocessor has two programs.

    A slice has at least 4 blocks: fewer would not fill the pipeline.
    """
    return max(1, min(2 * sms // max(count, 1), blocks // 4, 16))

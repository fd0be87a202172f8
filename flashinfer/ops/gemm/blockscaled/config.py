"""Configs of the block-scaled GEMM, of its quantization and of widening; where operands are widened first."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.gemm import tiles
from flashinfer.ops.gemm.slices import FEW_ROWS


@dataclass(frozen=True)
class Quantize:
    """num_warps : warps of a program, which quantizes one block. capability : the compute capability times ten."""

    num_warps: int
    capability: int


@dataclass(frozen=True)
class Widen:
    """A program's rows and elements of each row; num_warps. capability : the compute capability times ten."""

    rows: int
    block_k: int
    num_warps: int
    capability: int


@dataclass(frozen=True)
class Sm90Widened:
    """Tile, pipeline and registers of the Hopper kernel that widens B.

    Attributes
    ----------
    block_m, block_n : int
        The tile: 64 x 128, 128 x 128 or 128 x 256, and 64 of K.
    stages : int
        Tiles of A and B in the shared memory ring.
    box : int
        Rows of A that one TMA copy loads.
    lead : int
        Blocks of K whose codes are in flight while one is widened.
    group : int
        Tiles along M that are computed before the next column of tiles, so that operands stay in the L2 cache.
    registers, copy_registers : int
        Registers of a thread: in the consumer warpgroups, and in the producer's.
    """

    block_m: int
    block_n: int
    stages: int
    box: int
    lead: int
    group: int
    registers: int
    copy_registers: int


def sm90_widened(problem, target) -> Sm90Widened:
    # As many stages as 227 KiB hold beside the output staging buffer.
    if problem.tokens > FEW_ROWS:
        return Sm90Widened(128, 128, stages=6, box=64, lead=2, group=16, registers=184, copy_registers=144)
    # Bound by memory: two producers have 32 KiB of codes in flight.
    lead = 8 if problem.b == "e2m1" else 4
    return Sm90Widened(64, 128, 8, problem.tokens, lead, group=16, registers=128, copy_registers=128)


def refuses_sm90_widened(problem, target) -> str:
    """Why the Hopper kernel that widens B does not take a Problem; '' if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if problem.a != "bf16" or problem.scale == "fp32":
        return f"{problem.a} with {problem.scale} scales: it takes bfloat16 and codes with factors"
    if problem.tokens < WIDENED[0]:
        return "few tokens: the portable kernel is faster"
    if problem.alpha == "rows":
        return "an alpha for each row"
    return "" if problem.aligned and problem.whole else "rows that are not whole blocks of 128 of K, 16 bytes at a time"


def portable(problem, target) -> tiles.Config:
    return tiles.choose(problem, tiles.compute(problem.scale, (problem.a, problem.b), target), target)


def quantize(problem, target) -> Quantize:
    # One warp for 128 elements; 16 warps, 32 elements a thread, for 128 rows of them. Not measured.
    return Quantize(1 if problem.rows == 1 else 16, target.capability)


def widen(problem, target) -> Widen:
    return Widen(16, 256, 4, target.capability)


def widens_first(problem, tokens: int, target) -> bool:
    """Whether operands become bfloat16 matrices in memory, whose product is then dense.

    Operands that the chip's tensor cores do not take are, where many tokens share them. In the block-scaled kernel
    each tile widens its operands itself, M / 128 times each element of the weight. An H100 takes 1226, 1161 and 1002 us
    so for 4096 x 4096 x 7168 in NVFP4, MXFP8 and bfloat16 x NVFP4, and 452, 461 and 435 with widening first and
    Triton's product of the two matrices.

    From 512 tokens on, which is not measured. On Hopper from 129 on, a prediction: by the rate above a wave of tiles of
    7168 elements of K takes 158 us in the block-scaled kernel, while widening and the dense kernel, which splits K
    where tiles are few, should take 55 for 256 x 4096 x 7168.
    """
    if problem.scale == "fp32" or tiles.compute(problem.scale, (problem.a, problem.b), target) != "bf16":
        return False
    return tokens >= (129 if target.capability == 90 else 512)


# Tokens of the Hopper kernel that widens weights on their way. 7168 x 16384 in NVFP4, MXFP8 and bfloat16 x NVFP4 on an
# H100: 62, 93 and 60 us for 16 tokens in the portable kernel, here 118, 92 and 115; for 64 tokens 98, 115 and 92, here
# 74, 95 and 70; for 128 tokens 129, 193 and 173, here 102, 133 and 100; for 256 tokens 218, 236 and 212 with widening
# first, here 182, 214 and 177; for 512 tokens 283, 296 and 275, here 293, 298 and 286, and for 4096 1.5 x as long.
WIDENED = 17, 384


def widens_rows(problem, tokens: int, weights: int, target) -> bool:
    """Whether rows become bfloat16, where they are not, for the Hopper kernel that widens the weights by itself.

    weights : elements of b. Rows of codes take a launch of their own, which costs more than it gains for few weights.
    """
    if problem.scale == "fp32" or target.capability != 90 or not WIDENED[0] <= tokens <= WIDENED[1]:
        return False
    return problem.a == "bf16" or tokens > 128 or weights >= 1 << 24


def splits(count: int, blocks: int, sms: int) -> int:
    """K slices for a GEMM of `count` tiles and `blocks` blocks of K, so that each multiprocessor has two programs.

    A slice has at least 4 blocks: fewer would not fill the pipeline.
    """
    return max(1, min(2 * sms // max(count, 1), blocks // 4, 16))

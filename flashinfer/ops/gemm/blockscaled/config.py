"""Configs of the block-scaled GEMM, of its quantization and of widening; where operands are widened first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flashinfer.ops.gemm import tiles


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
    """Tile, pipeline and registers of the Hopper kernel that widens the weight in registers.

    Attributes
    ----------
    tokens, rows : int
        Tokens of a tile, and rows of the weight of each of its two warpgroups.
    boxes, stages : int
        Tiles of tokens, 64 of K each, in a stage of the shared memory ring, and its stages.
    code_stages : int
        Stages of the ring of codes, 128 x 128 elements.
    group : int
        Tiles along the tokens that are computed before the next rows of the weight, for the L2 cache.
    registers, copy_registers : int
        Registers of a thread: in the second consumer warpgroup, and in the producer warp.
    """

    tokens: int
    rows: int
    boxes: int
    stages: int
    code_stages: int
    group: int
    registers: int
    copy_registers: int


# Bits of a code of the formats of a weight.
BITS = {"e2m1": 4, "fp8e4nv": 8, "fp8e5": 8}


def sm90_widened(problem, target) -> Sm90Widened:
    """The config of the tile with the most tokens that the problem may have; `widened_tile` chooses by the sizes."""
    return widened_tiles(problem)[-1]


def as_half(problem) -> bool:
    """Whether operands are widened to float16, which products of e2m1 and e4m3 are exactly, and not to bfloat16."""
    return problem.a == problem.b == "e2m1" and problem.scale == "ue4m3"


def _widened(problem, tokens: int, rows: int = 64) -> Sm90Widened:
    # As many stages as 227 KiB hold beside the buffer of results.
    boxes, stages, codes = {256: (1, 5, 3), 128: (2, 4, 4), 64: (2, 5, 8)}.get(tokens, (2, 6 if rows == 64 else 8, 8))
    codes = codes if problem.b == "e2m1" else max(codes // 2, 2)
    # A producer warp keeps the addresses of the factors of its rows.
    registers, copy_registers = {256: (224, 56)}.get(tokens, (232, 40) if rows == 64 else (208, 88))
    return Sm90Widened(tokens, rows, boxes, stages, codes, 8, registers, copy_registers)


def widened_tiles(problem) -> list[Sm90Widened]:
    """The configs that `widened_tile` chooses from."""
    if problem.tokens > 128:
        # With e5m2 and 256 tokens Triton 3.9 spills 56 bytes.
        return [_widened(problem, 128), *([_widened(problem, 256)] if problem.b != "fp8e5" else [])]
    # 128 rows, H200, 16 tokens: 36.8 us for 38.4 in NVFP4, 39.0 for 41.2 in MXFP4, 51.2 for 48.3 in MXFP8. No gain with
    # 64 tokens.
    wide = [_widened(problem, 16, rows=128)] if problem.tokens == 16 and problem.b == "e2m1" else []
    return [*wide, _widened(problem, problem.tokens)]


def _step(problem, c: Sm90Widened) -> float:
    """Microseconds that a tile takes for 128 of K."""
    if problem.b != "e2m1":
        return 0.83 + 0.002 * c.tokens
    if c.rows == 128:
        return 0.9
    return max(0.5, 0.22 + 0.0042 * c.tokens) if as_half(problem) else 0.44 + 0.0034 * c.tokens


@lru_cache(maxsize=4096)
def widened_tile(problem, batch: int, m: int, n: int, k: int, sms: int) -> tuple[Sm90Widened, int]:
    """The config and the number of K slices with the shortest estimated time.

    The estimate is in microseconds, from measurements on an H200, of FP8 and of slices on an H100: slices are stored at
    3 TB/s and read again by one multiprocessor at 100 GB/s.
    """
    found = []
    for c in widened_tiles(problem):
        tiles = batch * -(-m // c.tokens) * -(-n // (2 * c.rows))
        for slices in range(1, max(min(k // 512, 16), 1) + 1):
            time = -(-tiles * slices // sms) * (k / 128 / slices * _step(problem, c) + 3)
            if slices > 1:
                sums = slices * c.tokens * 2 * c.rows * 4
                time += 4 + 2 * tiles * sums / 3e6 + sums / 1e5
            found.append((time, slices, c.tokens, -c.rows, c))
    _, slices, *_, c = min(found, key=lambda one: one[:4])
    return c, slices


def is_small(tokens: int, weights: int) -> bool:
    """Whether a product of so many tokens, and elements of the weight, is faster in the portable kernel, which starts
    without a launch for the tokens: 15.6 us for 16 x 4096 x 4096 and 14.6 for 64 x 2048 x 2048 on an H100, where the
    Hopper kernel takes 17.1 and 16.6. 64 x 4096 x 4096 take 24.3 and 21.3."""
    return tokens <= 16 and weights <= 1 << 24 or tokens <= 64 and weights <= 1 << 22


def refuses_sm90_widened(problem, target) -> str:
    """Why the Hopper kernel that widens the weight does not take a Problem; '' if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if problem.scale == "fp32":
        return "float32 scales: it takes factors"
    if problem.scale == "ue4m3" and problem.b != "e2m1":
        return "factors in e4m3 of a weight in FP8: it takes those of FP4 alone"
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


def widens_first(problem, tokens: int, target, alone: bool) -> bool:
    """Whether operands become bfloat16 matrices in memory, whose product is then dense.

    Operands that the chip's tensor cores do not take are, where many tokens share them. In the portable kernel each
    tile widens its operands itself, M / 128 times each element of the weight. An H100 takes 1226, 1161 and 1002 us so
    for 4096 x 4096 x 7168 in NVFP4, MXFP8 and bfloat16 x NVFP4, and 452, 461 and 435 with widening first and Triton's
    product of the two matrices. From 512 tokens on, which is not measured; on Hopper from 129 on, a prediction.

    alone : the Hopper kernel takes the problem. 7168 x 16384 in NVFP4 take it 188 us for 512 tokens and 1290 for 4096,
    where widening first takes 283 and 1331; in MXFP8 182 and 1335, and first 297 and 1311. Where it has to rearrange
    tokens that need no widening, bfloat16 x NVFP4, it takes 741 for 2048 and 1367 for 4096, and first 766 and 1298.
    """
    if problem.scale == "fp32" or tiles.compute(problem.scale, (problem.a, problem.b), target) != "bf16":
        return False
    if alone:
        return tokens >= 3072 and (problem.a == "bf16" or problem.b != "e2m1")
    return tokens >= (129 if target.capability == 90 else 512)


def splits(count: int, blocks: int, sms: int) -> int:
    """K slices for a GEMM of `count` tiles and `blocks` blocks of K, so that each multiprocessor has two programs.

    A slice has at least 4 blocks: fewer would not fill the pipeline.
    """
    return max(1, min(2 * sms // max(count, 1), blocks // 4, 16))

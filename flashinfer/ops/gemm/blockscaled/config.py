"""Tiles of products with block-scaled operands."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.gemm import operands


@dataclass(frozen=True)
class Config:
    """How a product is tiled.

    Attributes
    ----------
    compute : str
        What codes are widened to before they are multiplied; "" where the tensor cores take them as they are.
    block_m, block_n, block_k : int
        Tokens, rows of the weight, and elements of K of a tile.
    group : int
        Columns of tiles that follow each other.
    num_warps, num_stages : int
    capability : int
        Of the chip, ten times; 0 in the interpreter.
    """

    compute: str
    block_m: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int
    capability: int


@dataclass(frozen=True)
class Quantize:
    """num_warps : of a program, which has one block. capability : of the chip, ten times."""

    num_warps: int
    capability: int


def compute(problem, target) -> str:
    """What the codes are widened to: "" for nothing."""
    if target.is_cpu:
        # In the interpreter, which multiplies bfloat16 wrongly.
        return "fp32"
    if problem.scale == "fp32":
        # From compute capability 8.9 on tensor cores multiply FP8. float16 holds both FP8 formats exactly.
        return "" if target.capability >= 89 else "fp16"
    if target.capability >= 100 and problem.a_layout:
        return ""
    # bfloat16 has the exponents of ue8m0. Of ue4m3, float16 holds the products with e2m1 as exactly, but activations in
    # bfloat16 do not fit it.
    return "bf16"


def portable(problem, target) -> Config:
    how = compute(problem, target)
    small = target.smem < 160 << 10
    block_m = min(problem.tokens, 128)
    block_k = min(problem.width, 128) if problem.scale == "fp32" else 128
    if target.is_cpu:
        return Config(how, 16, 32, block_k, 8, 4, 1, 0)
    # 128 rows of the weight are what one multiplication of tcgen05 takes, two of wgmma; a tile of 128 tokens takes two
    # warpgroups, or its sums and the product to be added do not fit their registers.
    block_n = 128
    num_warps = 8 if block_m == 128 else 4
    # As many stages as fit: 16 KiB and more in flight on a multiprocessor keep memory busy (bandwidth times latency
    # is 3.35 TB/s x 0.7 us / 132 = 18 KiB on an H100).
    stage = block_k * (block_n / operands.PER_BYTE[problem.b] + block_m / operands.PER_BYTE[problem.a])
    widened = 2 * block_k * (block_m + block_n) if how in ("bf16", "fp16") else 0
    room = (90 if small else 144) * 1024 - widened
    num_stages = int(max(2, min(room // stage, 6)))
    return Config(how, block_m, block_n, block_k, 8, num_warps, num_stages, target.capability)


def quantize(problem, target) -> Quantize:
    # 128 elements take a warp, 128 rows of them 128 elements a thread of 4. Not measured.
    return Quantize(1 if problem.rows == 1 else 8, target.capability)


def splits(tiles: int, blocks: int, sms: int) -> int:
    """Parts of K for a product of so many tiles and blocks of K, so that each multiprocessor has two programs.

    A part has at least 4 blocks: fewer are done before the first loads have come.
    """
    return max(1, min(2 * sms // max(tiles, 1), blocks // 4, 16))

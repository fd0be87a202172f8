"""Tiles of the Hopper kernels of FP8 with float32 block scales and of products in groups; which problems they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer._core.checks import torch_dtype
from flashinfer.ops.gemm.slices import FEW_ROWS


@dataclass(frozen=True)
class Sm90Config:
    """How the kernel is cut.

    Attributes
    ----------
    block_m, block_n, block_k : int
        Of a tile: 64 x 128, 128 x 128 or 128 x 256, 128 bytes of K at a time.
    stages : int
        Blocks of K in shared memory.
    unroll : int
        Blocks of K of one step of the loop; 1 without scales.
    box : int
        Rows of A of one copy.
    group : int
        Tiles along M that are walked before the next column of tiles, so that operands stay in the L2 cache.
    registers, copy_registers : int
        Of a thread of the warpgroups that multiply, and of the warps that fill stages.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    unroll: int
    box: int
    group: int
    registers: int
    copy_registers: int


def sm90_grouped(p, target) -> Sm90Config:
    # A group may have more rows than they have on average: whole tiles are copied.
    c = replace(sm90(p, target), box=64, block_k=128 // torch_dtype(p.a).itemsize)
    return c if p.scale else replace(c, unroll=1, registers=232, copy_registers=40)


def sm90(p, target) -> Sm90Config:
    few = p.tokens <= FEW_ROWS
    return Sm90Config(
        block_m=64 if few else 128,
        block_n=128,
        block_k=128,
        # What fits 227 KiB beside staged results: 24 or 32 KiB a stage.
        stages=8 if few else 6,
        # On one H100 5 % faster than 2, at 4096 x 7168 x 16384; with 8, ptxas spills.
        unroll=4,
        box=min(p.tokens, 64),
        group=16,
        # What none of the roles goes beyond, on either Triton.
        registers=216,
        copy_registers=72,
    )


def enlarged(c: Sm90Config) -> Sm90Config:
    """The same with tiles of 256 columns, for much work: they read operands less often, and end less often."""
    # With scales, registers are left for one sum of the tensor cores beside the float32 ones, and for one block of K at
    # a time.
    c = replace(c, block_n=256, stages=4)
    return c if c.unroll == 1 else replace(c, unroll=1, registers=224, copy_registers=56)


def may_enlarge(p, c: Sm90Config) -> bool:
    """Whether the problem can have tiles of 256 columns."""
    # float32 results beside two sums take registers that such a tile does not have.
    return c.block_m == 128 and (p.out != "fp32" or not p.scale)


def is_wide(rows: int, n: int, sms: int) -> bool:
    """Whether a result of so many rows of tiles, and n columns, has tiles of 256 columns."""
    # Such a tile takes 1.8 times as long as one of 128 columns, and each multiprocessor takes whole tiles.
    wide, narrow = (-(-rows * -(-n // width) // sms) for width in (256, 128))
    return 1.8 * wide <= narrow


def boxes(c: Sm90Config, columns_first: bool = False, scaled: bool = True) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What one copy brings of A, and of B."""
    # Each warpgroup has its own columns where rows are few, and where it sums 256 columns in two parts.
    columns = c.block_n // (2 if c.block_m == 64 or (scaled and c.block_n > 128) else 1)
    return (1, c.box, c.block_k), (1, c.block_k, columns) if columns_first else (1, columns, c.block_k)


def refuses_blockscaled(p, target) -> str:
    """Why the Hopper kernel does not take a Problem of `blockscaled`; '' if it does."""
    return _refuses(p, target) or ("a shuffled weight" if p.shuffled else "")


def refuses_grouped(p, target) -> str:
    """Why the Hopper kernel does not take a Problem of `grouped`; '' if it does."""
    if p.scale:
        if p.kind == "lengths" or p.alpha or p.weights or p.padded or p.columns_first:
            return "with scales, groups by length, alpha, weights by number, padded factors or columns that come first"
        return _refuses(p, target)
    if target.capability != 90:
        return _ELSEWHERE.format(target.arch)
    if p.a != p.b or p.a not in ("bf16", "fp16", "fp8e4nv", "fp8e5"):
        return f"operands {p.a} and {p.b}: without scales it takes bf16, fp16 or one format of FP8 for both"
    if p.columns_first and p.a.startswith("fp8"):
        return "wgmma takes FP8 with k contiguous only"
    if p.alpha == "groups":
        return "alpha by group"
    if p.tokens <= FEW_ROWS and not p.a.startswith("fp8"):
        # DeepSeek-V3 TP8 on one H100: with 64 rows to a group 804 to 818 us, portable tiles 738; with 4 rows the same.
        return "16 bits with few rows to a group: portable tiles are as fast or faster"
    return "" if p.aligned else "operands that cannot be copied in boxes"


_ELSEWHERE = "wgmma is compute capability 9.0's, and this is {}"


def _refuses(p, target) -> str:
    if target.capability != 90:
        return _ELSEWHERE.format(target.arch)
    if p.a != p.b or p.a not in ("fp8e4nv", "fp8e5"):
        return f"operands {p.a} and {p.b}: it takes one format of FP8 for both"
    if p.scale != "fp32" or p.width != 128 or p.columns != 128:
        return f"{p.scale} scales of {p.columns} x {p.width}: it takes float32 ones of 128 x 128"
    return "" if p.aligned else "operands that cannot be copied in boxes"

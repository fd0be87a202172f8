"""Tiles of the Hopper kernels of FP8 products with float32 block scales, and which problems they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer.ops.gemm.pieces import FEW_ROWS


@dataclass(frozen=True)
class Sm90Config:
    """How the kernel is cut; blocks of K are 128 long, as those of the scales.

    Attributes
    ----------
    block_m, block_n : int
        Of a tile: 64 x 128, 128 x 128 or 128 x 256.
    stages : int
        Blocks of K in shared memory.
    unroll : int
        Blocks of K of one step of the loop.
    box : int
        Rows of A of one copy.
    group : int
        Tiles along M that are walked before the next column of tiles, so that operands stay in the L2 cache.
    registers, copy_registers : int
        Of a thread of the warpgroups that multiply, and of the warps that fill stages.
    """

    block_m: int
    block_n: int
    stages: int
    unroll: int
    box: int
    group: int
    registers: int
    copy_registers: int


def sm90_grouped(p, target) -> Sm90Config:
    # A group may have more rows than they have on average: whole tiles are copied.
    return replace(sm90(p, target), box=64)


def sm90(p, target) -> Sm90Config:
    few = p.tokens <= FEW_ROWS
    return Sm90Config(
        block_m=64 if few else 128,
        block_n=128,
        # What fits 227 KiB beside staged results: 24 or 32 KiB a stage.
        stages=8 if few else 6,
        # On one H100 5 % faster than 2, at 4096 x 7168 x 16384; with 8, ptxas puts registers aside.
        unroll=4,
        box=min(p.tokens, 64),
        group=16,
        # What none of the roles goes beyond, on either Triton.
        registers=216,
        copy_registers=72,
    )


def widened(c: Sm90Config) -> Sm90Config:
    """The same with tiles of 256 columns, for much work: they read operands less often, and end less often."""
    # Registers are left for one sum of the tensor cores beside the float32 ones, and for one block of K at a time.
    return replace(c, block_n=256, stages=4, unroll=1, registers=224, copy_registers=56)


def is_wide(c: Sm90Config, out: str, rows: int, n: int, sms: int) -> bool:
    """Whether a result of so many rows of tiles, and n columns, has tiles of 256 columns; out : its dtype."""
    # float32 results take registers that a tile of 256 columns does not have.
    if c.block_m < 128 or out == "fp32":
        return False
    # Such a tile takes 1.8 times as long as one of 128 columns, and each multiprocessor takes whole tiles.
    wide, narrow = (-(-rows * -(-n // width) // sms) for width in (256, 128))
    return 1.8 * wide <= narrow


def boxes(c: Sm90Config) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What one copy brings of A, and of B."""
    return (1, c.box, 128), (1, 128 if c.block_m > 64 else 64, 128)


def refuses_blockscaled(p, target) -> str:
    """Why the Hopper kernel does not take a Problem of `blockscaled`; '' if it does."""
    return _refuses(p, target) or ("a shuffled weight" if p.shuffled else "")


def refuses_grouped(p, target) -> str:
    """Why the Hopper kernel does not take a Problem of `grouped`; '' if it does."""
    if p.kind not in ("offsets", "counts", "indices"):
        return f"groups by {p.kind}: it takes them by offsets, counts and indices"
    if p.alpha or p.weights or p.padded or p.columns_first:
        return "alpha, weights by number, padded factors or columns that come first"
    return _refuses(p, target)


def _refuses(p, target) -> str:
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.a != p.b or p.a not in ("fp8e4nv", "fp8e5"):
        return f"operands {p.a} and {p.b}: it takes one format of FP8 for both"
    if p.scale != "fp32" or p.width != 128 or p.columns != 128:
        return f"{p.scale} scales of {p.columns} x {p.width}: it takes float32 ones of 128 x 128"
    return "" if p.aligned else "operands that cannot be copied in boxes"

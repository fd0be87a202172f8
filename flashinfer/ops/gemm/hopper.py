"""Configs of the Hopper kernels: what dense, block-scaled FP8 and grouped GEMM share, and which problems the last two
take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer._core.checks import torch_dtype
from flashinfer.ops.gemm.slices import FEW_ROWS


@dataclass(frozen=True)
class Sm90Config:
    """Tile, pipeline and registers of the kernel.

    Attributes
    ----------
    block_m, block_n, block_k : int
        The tile, of 64 or 128 rows, and 128 bytes of K.
    stages : int
        Blocks of K in the shared memory ring.
    box : int
        Rows of A that one TMA copy loads.
    group : int
        Tiles along M that are computed before the next column of tiles, so that operands stay in the L2 cache.
    registers, copy_registers : int
        Registers of a thread: in the consumer warpgroups, and in the producer warps.
    unroll : int
        Blocks of K in one step of the loop; 1 without block scales.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    box: int
    group: int
    registers: int
    copy_registers: int
    unroll: int = 1


def sm90_grouped(p, target) -> Sm90Config:
    # `tokens` is an average, and a group may have more rows: the box is a whole tile of 64.
    c = replace(sm90(p, target), box=64, block_k=128 // torch_dtype(p.a).itemsize)
    return c if p.scale else replace(c, unroll=1, registers=232, copy_registers=40)


def sm90(p, target) -> Sm90Config:
    few = p.tokens <= FEW_ROWS
    return Sm90Config(
        block_m=64 if few else 128,
        block_n=128,
        block_k=128,
        # A stage takes 24 or 32 KiB; as many as 227 KiB hold beside the output staging buffer.
        stages=8 if few else 6,
        # 5 % faster than 2 on an H100 at 4096 x 7168 x 16384. With 8 ptxas spills.
        unroll=4,
        box=min(p.tokens, 64),
        group=16,
        # No role needs more, by ptxas, on the lowest and on the highest Triton.
        registers=216,
        copy_registers=72,
    )


def enlarged(c: Sm90Config) -> Sm90Config:
    """The config with tiles of 256 columns, for large problems: operands are read less often, and there are fewer
    epilogues."""
    # With scales, registers hold one tensor core accumulator beside the float32 accumulators. UNROLL is 1, since the
    # loop has no second accumulator to alternate with.
    c = replace(c, block_n=256, stages=4)
    return c if c.unroll == 1 else replace(c, unroll=1, registers=224, copy_registers=56)


def may_enlarge(p, c: Sm90Config) -> bool:
    """Whether the problem can have tiles of 256 columns."""
    # A float32 epilogue with scales needs more registers than such a tile leaves.
    return c.block_m == 128 and (p.out != "fp32" or not p.scale)


def is_wide(rows: int, n: int, sms: int) -> bool:
    """Whether tiles of 256 columns are faster for a result of `rows` rows of tiles and n columns."""
    # A tile of 256 columns takes 1.8 times as long as one of 128. The waves of both are compared.
    wide, narrow = (-(-rows * -(-n // width) // sms) for width in (256, 128))
    return 1.8 * wide <= narrow


def boxes(c: Sm90Config, columns_first: bool = False, scaled: bool = True) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The TMA boxes of A and of B."""
    # B comes in two boxes where the warpgroups have columns of their own (few rows), and where 256 columns are summed
    # in two halves.
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
        # DeepSeek-V3 TP8 on an H100, 64 rows to a group: 804 to 818 us here, 738 with portable tiles. With 4 rows both
        # take the same.
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

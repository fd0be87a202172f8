"""Configs of the dense GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype
from flashinfer.ops.gemm.hopper import Sm90Config
from flashinfer.ops.gemm.slices import FEW_ROWS


@dataclass(frozen=True)
class Config:
    """Tile and compiler options of the portable kernel.

    Attributes
    ----------
    block_m, block_n, block_k : int
        The tile.
    stages, num_warps : int
        Compiler options.
    group : int
        Tiles along M that are computed before the next column of tiles, so that operands stay in the L2 cache.
    capability : int
        The compute capability times ten where an operand is FP8, which some chips have to widen. Else 0.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    group: int
    capability: int = 0


def rows_of(p) -> int:
    """Rows of a tile: the problem's rows up to FEW_ROWS, else 128."""
    return p.rows if p.rows <= FEW_ROWS else 128


def sm90(p, target) -> Sm90Config:
    # 128 bytes: the widest swizzle.
    block_k = 128 // torch_dtype(p.a).itemsize
    rows = max(rows_of(p), 64)
    return Sm90Config(
        block_m=rows,
        block_n=p.columns,
        block_k=block_k,
        # As many as 227 KiB hold beside the output staging buffer of at most 32 KiB.
        stages=min((194 << 10) // ((rows + p.columns) * 128), 16),
        box=min(p.rows, 64),
        # 132 blocks compute 16 tiles of 128 rows by about 8 of 256 columns at a time: nearly a square of the result.
        group=16,
        registers=240,
        copy_registers=32,
    )


_SM90_DTYPES = ("bf16", "fp16", "fp8e4nv", "fp8e5")


def refuses_sm90(p, target) -> str:
    """Why the Hopper kernel does not take the problem; '' if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.a != p.b or p.a not in _SM90_DTYPES:
        return f"operands {p.a} and {p.b}: it takes {', '.join(_SM90_DTYPES)} for both"
    if p.a_major != "k":
        return "rows of A that cannot be copied in boxes"
    if p.b_major == "n" and torch_dtype(p.b).itemsize == 1:
        return "wgmma takes FP8 with k contiguous only"
    if p.b_major not in ("k", "n", "blocks"):
        return "a B that cannot be copied in boxes"
    if p.out_major != "n":
        return "rows of the result that are not aligned to 16 bytes"
    return ""


def portable(p, target) -> Config:
    block_m, block_n = rows_of(p), p.columns
    block_k = 128 // torch_dtype(p.a).itemsize
    # mma.sync accumulates in registers, where 128 x 256 leaves too few for operands.
    if block_n == 256 and target.capability not in (90, 100, 103):
        block_n = 128
    # FP8 that is widened to float16 takes registers too.
    if block_k == 128 and (target.capability < 89 or p.a != p.b):
        if p.b_major == "blocks":
            block_m, block_n = min(block_m, 64), 64
        else:
            block_k = 64
    if not (p.a_major and p.b_major):
        # Unaligned loads keep one address in registers for each element.
        block_m, block_n = min(block_m, 64), min(block_n, 64)
        # A block of K is one of the weight, if that has any.
        block_k = block_k if p.b_major == "blocks" else block_k // 2
    # Not measured: as many stages as fit, because B comes from memory.
    stage = (block_m + block_n) * block_k * torch_dtype(p.a).itemsize
    stages = min(max((target.smem - 1024) // stage, 2), 5 if block_m <= FEW_ROWS else 4)
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    capability = target.capability if torch_dtype(p.a).itemsize == 1 else 0
    return Config(block_m, block_n, block_k, stages, num_warps, group=8, capability=capability)

"""Tiles of the dense products, and how many pieces K is cut into."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.checks import torch_dtype
from flashinfer.ops.gemm.operands import bucket

# Up to so many rows a product is bound by reading B.
FEW_ROWS = 64


@dataclass(frozen=True)
class Sm90Config:
    """How the Hopper kernel is cut.

    Attributes
    ----------
    block_m, block_n, block_k : int
        Of a tile; block_m is 64 or 128.
    stages : int
        Blocks of K in shared memory.
    box : int
        Rows of A of one copy.
    group : int
        Tiles along M that are walked before the next column of tiles, so that operands stay in the L2 cache.
    registers, copy_registers : int
        Of a thread of the warpgroups that multiply, and of the warp that copies.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    box: int
    group: int
    registers: int
    copy_registers: int


@dataclass(frozen=True)
class Config:
    """How the portable kernel is cut.

    Attributes
    ----------
    block_m, block_n, block_k : int
        Of a tile.
    stages, num_warps : int
        Compiler options.
    group : int
        Tiles along M that are walked before the next column of tiles, so that operands stay in the L2 cache.
    capability : int
        Of the chip, ten times, where FP8 is read: it decides which instructions take it. Else 0.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    group: int
    capability: int = 0


def _tile(rows: int, tiles: str) -> tuple[int, int]:
    """block_m and block_n of every variant, so that the same work is cut the same way."""
    if rows <= FEW_ROWS:
        return rows, 128
    return 128, 256 if tiles == "large" else 128


def count(rows: int, tiles: str, batch: int, m: int, n: int) -> int:
    """Tiles of a product."""
    block_m, block_n = _tile(rows, tiles)
    return batch * -(-m // block_m) * -(-n // block_n)


def cut(batch: int, m: int, n: int, k_bytes: int, sms: int) -> tuple[str, int]:
    """A Problem's `tiles`, and the number of pieces that K is cut into.

    By the time of the longest-working multiprocessor, in steps of 128 bytes of K of a tile of 128 x 128: a large tile
    takes twice the area at the cost of less than two steps, a tile's end takes a few steps, and so does adding pieces.
    The factors are those of tiles on one H100's tensor cores, estimated, not fitted.
    """
    rows = bucket(m)
    steps = -(-k_bytes // 128)

    def time(tiles: str, pieces: int, step: float, end: float) -> float:
        waves = -(-count(rows, tiles, batch, m, n) * pieces // sms)
        return waves * (step * steps / pieces + end)

    found = [(time("small", 1, 1.15, 3.0), "small", 1)]
    if rows > FEW_ROWS:
        found.append((time("large", 1, 2.0, 5.0), "large", 1))
    # A piece has four steps at least: what fills the pipeline.
    most = min(steps // 4, 16)
    found += [(time("split", pieces, 1.15, 6.0), "split", pieces) for pieces in range(2, most + 1)]
    _, tiles, pieces = min(found)
    return tiles, pieces


def sm90(p, target) -> Sm90Config:
    # 128 bytes: the widest swizzle.
    block_k = 128 // torch_dtype(p.a).itemsize
    rows, columns = _tile(p.rows, p.tiles)
    # Stages that fit 227 KiB beside what results are staged in (16 KiB a warpgroup, 32 KiB together).
    stages = {64: 8, 128: 6, 256: 4}[64 if rows <= 64 else columns]
    return Sm90Config(
        block_m=max(rows, 64),
        block_n=columns,
        block_k=block_k,
        stages=stages,
        box=min(rows, 64),
        # 16 tiles of 128 rows beside as many columns as there are blocks for: nearly a square of the result at a time.
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
    block_m, block_n = _tile(p.rows, p.tiles)
    block_k = 128 // torch_dtype(p.a).itemsize
    # What mma.sync sums is in registers, where 128 x 256 leave none for operands.
    if block_n == 256 and target.capability not in (90, 100, 103):
        block_n = 128
    # FP8 that is widened on the way takes registers too.
    if block_k == 128 and (target.capability < 89 or p.a != p.b):
        if p.b_major == "blocks":
            block_m, block_n = min(block_m, 64), 64
        else:
            block_k = 64
    # Nothing here is measured: as many stages as fit, for B comes from memory.
    stage = (block_m + block_n) * block_k * torch_dtype(p.a).itemsize
    stages = min(max((target.smem - 1024) // stage, 2), 5 if block_m <= FEW_ROWS else 4)
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    capability = target.capability if torch_dtype(p.a).itemsize == 1 else 0
    return Config(block_m, block_n, block_k, stages, num_warps, group=8, capability=capability)

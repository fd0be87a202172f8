"""Tiles of the Hopper prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.target import Target
from flashinfer.ops.attention.problem import Problem
from flashinfer.ops.attention.split import SplitKnobs


@dataclass(frozen=True)
class Sm90Config(SplitKnobs):
    """How the kernel is cut.

    Attributes
    ----------
    block_m : int
        Query rows of a tile, GQA heads included: 64 for each of two warpgroups.
    block_n : int
        Keys per step.
    stages : int
        Blocks of K, and of V, in shared memory.
    staged : bool
        Whether outputs go through shared memory, so that whole rows are written at once.
    gather : bool
        Whether keys and values come row by row through cp.async, and not in boxes: for pages that make none.
    registers, copy_registers : int
        Of a thread of the warpgroups that compute, and of the warps that copy.
    programs_per_sm, least_split, least_alone, whole : int
        How keys are divided: `SplitKnobs`. Persistent blocks of a multiprocessor are programs_per_sm, too.
    transpose_warps : int
        Warps that transpose tiles of FP8 values, so that keys are contiguous; 0 for other types.
    transform : bool
        For an sm_scale that cannot be folded into the exponent (`problem.folds`); compiled at its first use.
    wide : bool
        For pages or rows 2 GiB and more apart, where they are gathered; compiled at its first use.
    """

    block_m: int
    block_n: int
    stages: int
    staged: bool
    gather: bool
    registers: int
    copy_registers: int
    transpose_warps: int = 0
    transform: bool = False
    wide: bool = False


# (head_dim_qk, head_dim_vo) -> keys per step, stages, staged: what fits 227 KiB. Measured at 16384 keys, bf16, on an
# H200: head_dim 128 with 64 keys per step loses 13 to 18 %, and a third stage gains nothing. At 256 the accumulators
# leave registers for 64 keys only.
_TILES = {
    (64, 64): (128, 4, True),
    (96, 96): (128, 2, True),
    (128, 128): (128, 2, True),
    (192, 128): (128, 2, False),
    (256, 256): (64, 2, False),
}
# The same for e4m3, where values lie in shared memory twice. At 256 registers have no room for the second accumulator,
# and sums that stay in the first one lose 0.7 % over 16384 keys (docs/rooms/attention-prefill.md). Nothing is staged: a
# thread has four neighbouring columns, and what four threads store fills a sector.
_FP8_TILES = {
    (64, 64): (128, 4, False),
    (128, 128): (128, 3, False),
}


def _boxes(p: Problem) -> bool:
    """Whether the copy engine takes the tiles: a box is a page or a part of one, and a power of two of rows that fill
    the 8 rows of a swizzle pattern."""
    return p.matrix and (not p.page_size or (p.page_size >= 16 and not p.page_size & (p.page_size - 1)))


def _registers(p: Problem, boxes: bool) -> tuple[int, int]:
    """Of a thread that computes, and of one that copies; three warpgroups have 512 together."""
    if p.q_dtype == "fp8e4nv":
        # Transposing values needs 40, and consumers take the rest.
        return 232, 40
    if boxes:
        # Copying boxes needs few itself. But what LLVM computes for consumers before the first task, ptxas keeps in
        # registers of these warps, too, or spills: 24 bytes with 32 at head_dim 96. 56 are no slower
        # (docs/rooms/attention-prefill.md). Head_dim 64 spills nothing with 32, and 16 bytes with 56 on Triton 3.9; 192
        # nothing with 40, and 48 bytes with 56.
        return {64: (240, 32), 192: (232, 40)}.get(p.head_dim_qk, (224, 56))
    # Warps that gather keep the page ids of a block and compute its addresses: up to 88 registers. Consumers of 128
    # columns live on 208, those of 256 do not.
    if p.head_dim_vo == 256:
        return 224, 64
    # In bf16, with a token a page at head_dim 128, 200 do, too: with 208 and 88, what all warps keep (above)
    # spills 56 bytes on Triton 3.9. At head_dim 96, and with more tokens a page, 208 and 88 take less.
    return (200, 104) if (p.q_dtype, p.page_size, p.head_dim_qk) == ("bf16", 1, 128) else (208, 88)


def choose(p: Problem, target: Target) -> Sm90Config:
    fp8 = p.q_dtype == "fp8e4nv"
    block_n, stages, staged = (_FP8_TILES if fp8 else _TILES)[p.head_dim_qk, p.head_dim_vo]
    if p.window or p.soft_cap or p.pos_encoding == "ALIBI" or p.mask == "custom" or p.variant:
        # What they compute on a tile of 128 keys does not fit the registers beside it.
        narrow = 32 if p.head_dim_qk == 256 else 64
        block_n, stages = narrow, stages * block_n // narrow
        if p.window and p.head_dim_qk == 64 and not fp8:
            # A window of 128 keys, 4 x 8192 queries of 64/8 heads on an H100: 586 us, against 720 with 64 keys a step.
            block_n, stages = 32, 8
    boxes = _boxes(p)
    registers, copy_registers = _registers(p, boxes)
    return Sm90Config(
        block_m=128,
        block_n=block_n,
        stages=stages,
        staged=staged,
        gather=not boxes,
        registers=registers,
        copy_registers=copy_registers,
        # A tile costs about four blocks of keys of its own.
        programs_per_sm=1,
        least_split=512,
        transpose_warps=2 if fp8 else 0,
    )


def refuses(p: Problem, target: Target) -> str:
    """Why the Hopper kernel does not take the problem; '' if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.q_dtype not in ("bf16", "fp16", "fp8e4nv") or p.kv_dtype != p.q_dtype:
        return f"q {p.q_dtype} with k and v {p.kv_dtype}: it takes bf16, fp16 or fp8e4nv for all"
    if p.o_dtype not in ("bf16", "fp16"):
        return f"output {p.o_dtype}: it writes bf16 or fp16"
    tiles = _FP8_TILES if p.q_dtype == "fp8e4nv" else _TILES
    if (p.head_dim_qk, p.head_dim_vo) not in tiles:
        return f"head_dim {p.head_dim_qk} / {p.head_dim_vo}: it takes {', '.join('%d / %d' % dims for dims in tiles)}"
    if p.rows < 128:
        return f"tiles of {p.rows} rows would leave a warpgroup without work"
    if p.pos_encoding == "ROPE_LLAMA":
        return "keys go from memory to the tensor cores, with no register between in which to rotate them"
    if p.q_dtype == "fp8e4nv" and not _boxes(p):
        return f"e4m3 in pages of {p.page_size} or strides that make no boxes: no registers are left to gather rows"
    if p.q_dtype == "fp8e4nv" and not p.softmax:
        return "weights without a softmax, which e4m3 may not hold"
    if not p.aligned:
        return "rows that are not aligned to 16 bytes"
    return ""

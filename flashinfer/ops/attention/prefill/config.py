"""Configs of the Hopper prefill kernel, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.target import Target
from flashinfer.ops.attention.problem import FP8, Problem
from flashinfer.ops.attention.split import SplitKnobs


@dataclass(frozen=True)
class Sm90Config(SplitKnobs):
    """Tile, pipeline and registers of the kernel.

    Attributes
    ----------
    block_m : int
        Query rows of a tile, GQA heads included: 64 for each of two warpgroups.
    block_n : int
        Keys of a block, which is one step of the loop.
    stages : int
        Blocks of K, and of V, in shared memory.
    staged : bool
        Whether outputs pass through shared memory, so that whole rows are written.
    gather : bool
        Whether keys and values are copied row by row with cp.async, for pages that are no TMA box.
    by_head : bool
        Whether tensor maps have an axis of heads, so that boxes are filled with zeros past the head.
    registers, copy_registers : int
        Registers of a thread: in the consumer warpgroups, and in the producer warps.
    programs_per_sm, least_split, least_alone, whole : int
        The policy of split-KV, see `SplitKnobs`; programs_per_sm is also the number of resident thread blocks.
    transpose_warps : int
        Warps that transpose tiles of FP8 values, so that keys are contiguous; 0 for other dtypes.
    copiers : int
        Warps that copy K by TMA, and as many that copy V.
    lead : int
        Slices of FP8 keys, and of values, whose loads are in flight in the warps that widen them under wider queries
        (`sm90_widen.py`); 0 where nothing is widened.
    maxnreg : int
        Registers of a thread at launch, which let programs_per_sm thread blocks on a multiprocessor; 0 for all that one
        block can have.
    turns : bool
        Whether the consumer warpgroups take turns in issuing products.
    late : bool
        Whether weights are rounded to 16 bits behind the next block's scores, which hide it, instead of in front of
        them: float32 weights beside two blocks of scores take 64 registers more.
    by_fma : int
        With a fixed shift, one of so many exponentials is a polynomial; 0 for none (`sm90_exponentials.py`).
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
    by_head: bool
    registers: int
    copy_registers: int
    transpose_warps: int = 0
    copiers: int = 1
    lead: int = 0
    maxnreg: int = 0
    turns: bool = True
    late: bool = False
    by_fma: int = 0
    transform: bool = False
    wide: bool = False


# (head_dim_qk, head_dim_vo) -> block_n, stages, staged: what 227 KiB hold. On an H200 with 16384 keys in bf16,
# head_dim 128 is 13 to 18 % slower with 64 keys a block, and a third stage gains nothing. From 192 columns of values on
# the accumulators have 256, which leave registers for 64 keys only.
_TILES = {
    (64, 64): (128, 4, True),
    (96, 96): (128, 2, True),
    (128, 128): (128, 2, True),
    (192, 128): (128, 2, False),
    (192, 192): (64, 2, False),
    (256, 256): (64, 2, False),
}
# Heads that are narrower than their tiles. From 136 on accumulators have 256 columns. They spill on Triton 3.9 where
# outputs are staged or rows are gathered, and for heads of 168 and more.
_PARTIAL = dict.fromkeys(((dim, dim) for dim in (72, 80, 88, 104, 112, 120)), (128, 2, True))
_PARTIAL |= dict.fromkeys(((dim, dim) for dim in (136, 144, 152, 160)), (64, 2, False))
_TILES |= _PARTIAL
# The same for e4m3, whose values are in shared memory twice. head_dim 256 is missing: registers do not hold the second
# accumulator, and without it the sums over 16384 keys are wrong by 0.7 % (docs/rooms/attention-prefill.md). Outputs are
# not staged: a thread has four neighbouring columns, and the stores of four threads fill a sector.
_FP8_TILES = {
    (64, 64): (128, 4, False),
    (128, 128): (128, 3, False),
}
# FP8 tiles that are widened, by the dtype of queries. On Triton 3.9 the others spill 16 bytes and more.
_WIDENED = {"bf16": ((64, 64), (128, 128)), "fp16": ((64, 64),)}


def _boxes(p: Problem) -> bool:
    """Whether TMA can copy the tiles. A box is a page or a part of one; its rows are a power of two, and a multiple of
    the 8 rows of a swizzle pattern."""
    return p.matrix and (not p.page_size or (p.page_size >= 16 and not p.page_size & (p.page_size - 1)))


def _widens(p: Problem) -> bool:
    """Whether keys and values are FP8 under wider queries."""
    return p.kv_dtype in FP8 and p.q_dtype not in FP8


def _partial(p: Problem) -> bool:
    return (p.head_dim_qk, p.head_dim_vo) in _PARTIAL


def _registers(p: Problem, boxes: bool) -> tuple[int, int]:
    """Registers of a thread in consumer and in producer warps. The three warpgroups have 512 in total."""
    if p.q_dtype == "fp8e4nv":
        # The warps that transpose values need 40; consumers get the rest.
        return 232, 40
    if boxes:
        # TMA copies need few registers. But values that LLVM computes for consumers before the first task take
        # registers in these warps too, or spill: 24 bytes with 32 registers at head_dim 96. 56 are no slower
        # (docs/rooms/attention-prefill.md). head_dim 64 spills nothing with 32, and 16 bytes with 56 on Triton 3.9;
        # head_dim 192 spills nothing with 40, and 48 bytes with 56.
        return {64: (240, 32), 192: (232, 40)}.get(p.head_dim_qk, (224, 56))
    # Warps that gather keep a block's page ids and compute its addresses, with up to 88 registers. 208 are enough for
    # consumers of 128 columns, not for those of 256.
    if p.head_dim_vo == 256:
        return 224, 64
    if _partial(p):
        # With 208 and 88 they spill 8 bytes.
        return 216, 80
    return 208, 88


def _widening(p: Problem, block_n: int) -> tuple[int, int, int, bool]:
    """Registers as above where FP8 is widened, slices in flight, each 8 registers of a thread, and `staged`.

    Four slices hide a latency of 700 cycles. All else is for what Triton 3.9 spills at head_dim 128 with 200, 104, 4
    and staged outputs: 40 bytes with scales per head or a full mask, 16 with a soft cap, 8 with 64 keys a block.
    """
    if p.head_dim_qk == 64:
        return 200, 104, 4, True
    if p.soft_cap:
        return 216, 72, 2, True
    if block_n == 64:
        return 208, 88, 4, True
    return (216, 72, 3, True) if p.head_scales else (200, 104, 4, p.mask == "causal")


def _copiers(p: Problem, block_n: int) -> int:
    """Warps that copy K in boxes, and as many that copy V."""
    # Page 16, 32/8 heads, causal, bf16 on an H100: 4 x 4096 take 859 us, and 894 with one warp each. A request of a
    # page of 128 columns takes its warp 40 to 80 cycles. The warps are there: a warpgroup has four.
    return 2 if p.page_size and block_n // p.page_size >= 4 and p.q_dtype not in FP8 else 1


def choose(p: Problem, target: Target) -> Sm90Config:
    fp8 = p.q_dtype == "fp8e4nv"
    block_n, stages, staged = (_FP8_TILES if fp8 else _TILES)[p.head_dim_qk, p.head_dim_vo]
    if p.window or p.soft_cap or p.pos_encoding == "ALIBI" or p.mask == "custom" or p.variant:
        # The computations on logits do not fit the registers beside a tile of 128 keys.
        narrow = 32 if p.head_dim_vo > 128 else 64
        block_n, stages = narrow, stages * block_n // narrow
        if p.window and p.head_dim_qk == 64 and p.kv_dtype not in FP8:
            # A window of 128 keys, 4 x 8192 queries of 64/8 heads on an H100: 586 us; 720 with 64 keys a block.
            block_n, stages = 32, 8
        if _partial(p) and not _boxes(p):
            # With 64 keys a block they spill 16 to 40 bytes on Triton 3.9.
            block_n, stages = 32, 8
    boxes = _boxes(p) and not _widens(p)
    registers, copy_registers = _registers(p, boxes)
    lead = maxnreg = 0
    if p.window and p.head_dim_qk == 64 and boxes and block_n == 32 and p.mask != "custom" and not p.variant:
        # A task of a window of 128 keys is a chain of 1753 instructions, and took 8700 cycles where two warps shared a
        # scheduler (docs/rooms/attention-prefill.md). 104 registers are enough beside 32 keys, not for custom masks.
        maxnreg, registers, copy_registers = 80, 104, 32
    if _widens(p):
        registers, copy_registers, lead, staged = _widening(p, block_n)
    # Registers are left over, and products take no longer than exponentials.
    plain = p.head_dim_qk == 64 and boxes and block_n == 128 and not fp8
    return Sm90Config(
        block_m=128,
        block_n=block_n,
        stages=stages,
        staged=staged,
        gather=not boxes,
        by_head=boxes and _partial(p),
        registers=registers,
        copy_registers=copy_registers,
        # The fixed cost of a work item is about that of four blocks of keys.
        programs_per_sm=2 if maxnreg else 1,
        least_split=512,
        transpose_warps=2 if fp8 else 0,
        copiers=_copiers(p, block_n) if boxes else 1,
        lead=lead,
        maxnreg=maxnreg,
        turns=not fp8 and not maxnreg,
        late=plain,
        # 1 x 16384 causal on an H100, polynomials of degree 3: 1961 us with one of eight, 2071 with none, 2112 with one
        # of four. With degree 3 the LSE was wrong by 3e-5.
        by_fma=8 if plain else 0,
    )


def refuses(p: Problem, target: Target) -> str:
    """Why the Hopper kernel does not take the problem; '' if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.q_dtype not in ("bf16", "fp16", "fp8e4nv") or not (p.kv_dtype == p.q_dtype or _widens(p)):
        return (
            f"q {p.q_dtype} with k and v {p.kv_dtype}: it takes bf16, fp16 or fp8e4nv for all, and {' or '.join(FP8)} "
            "under bf16 or fp16"
        )
    if p.o_dtype not in ("bf16", "fp16"):
        return f"output {p.o_dtype}: it writes bf16 or fp16"
    tiles = _FP8_TILES if p.q_dtype == "fp8e4nv" else _WIDENED[p.q_dtype] if _widens(p) else _TILES
    if (p.head_dim_qk, p.head_dim_vo) not in tiles:
        return f"head_dim {p.head_dim_qk} / {p.head_dim_vo}: it takes {', '.join('%d / %d' % dims for dims in tiles)}"
    if p.rows < 128:
        return f"tiles of {p.rows} rows would leave a warpgroup without work"
    if p.pos_encoding == "ROPE_LLAMA":
        return "keys go from memory to the tensor cores, with no register between in which to rotate them"
    if p.q_dtype == "fp8e4nv" and not _boxes(p):
        return f"e4m3 in pages of {p.page_size} or strides that make no boxes: no registers are left to gather rows"
    if 128 < p.head_dim_vo < 256 and not _boxes(p):
        return f"head_dim {p.head_dim_vo} in pages of {p.page_size}, which are no boxes: no registers to gather rows"
    if p.q_dtype == "fp8e4nv" and not p.softmax:
        return "weights without a softmax, which e4m3 may not hold"
    if not p.aligned:
        return "rows that are not aligned to 16 bytes"
    return ""

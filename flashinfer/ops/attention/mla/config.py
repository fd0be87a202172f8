"""Tiles of the latent-attention kernels. What was not measured says what it is from."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.target import Target
from flashinfer.ops.attention.config import SIZE, Config
from flashinfer.ops.attention.problem import FP8, LATENT_Q_DTYPES, wrong_dtype
from flashinfer.ops.attention.split import SplitKnobs


def padded(n: int) -> int:
    """The power of two, at least 16, that a tile has for n columns."""
    return max(16, 1 << (n - 1).bit_length())


def _shared_bytes(p, target: Target, block_m: int, block_n: int, stages: int) -> int:
    """Shared memory the compiler will take: the ring of keys, what FP8 is widened to, Q, and P."""
    columns = padded(p.head_dim_ckv) + (padded(p.head_dim_kpe) if p.head_dim_kpe else 0)
    # Tensor cores that read shared memory while the program runs on need one buffer more.
    buffers = stages if _reads_shared(target) else stages - 1
    ring = buffers * block_n * columns * SIZE[p.kv_dtype]
    widened = block_n * columns * 2 if p.kv_dtype.startswith("fp8") else 0
    return ring + widened + block_m * columns * 2 + block_m * block_n * 2


def _reads_shared(target: Target) -> bool:
    """Whether the tensor cores take operands from shared memory (wgmma, tcgen05), which then need no registers."""
    return 90 <= target.capability < 120


def choose(p, target: Target) -> Config:
    """The largest tile that registers hold, and the deepest ring behind it that shared memory holds."""
    # A thread has block_m x head_dim_ckv / threads registers of the accumulator: at 64 x 512 on 8 warps 128 of 255, and
    # as many again where the queries have to be in registers too.
    block_m = min(p.rows, 64 if _reads_shared(target) else 32)
    by_bits = target.capability < 89 and "fp8e4nv" in (p.q_dtype, p.kv_dtype)
    steps = ((32, 3), (16, 4), (16, 3), (32, 2), (16, 2))
    if not p.aligned or by_bits:
        # In registers: an address per element of narrow loads; copies of a block in bit arithmetic.
        block_m = min(block_m, 16 if by_bits else 32)
        steps = ((16, 3), (16, 2))
    elif p.kv_dtype.startswith("fp8"):
        # Both the bytes and what they widen to are live at once: with 64 rows 320 bytes spill, most in the loop.
        block_m = min(block_m, 32)
    block_n, stages = next(
        (s for s in steps if _shared_bytes(p, target, block_m, *s) <= target.smem or target.is_cpu), steps[-1]
    )
    # One row of tensor-core tiles is little work for 8 warps; two blocks of 4 overlap their waits. Bit arithmetic wants
    # the registers of 8: on 4, 296 bytes spill.
    num_warps = 4 if block_m == 16 and not by_bits else 8
    rows = min(block_m, 8)
    # A round of the combination takes 64 registers of each thread.
    splits = max(1, min(16, 64 * 32 * num_warps // (rows * padded(p.head_dim_ckv))))
    return Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages,
        native_fp8=target.capability >= 89,
        combine_splits=splits,
        combine_rows=rows,
        # A split's partial result is block_m x 512 float32, as much as so many keys in bf16.
        programs_per_sm=2 if block_m == 16 else 1,
        least_split=max(64, 2 * block_m),
    )


def refuses_everywhere(p, target: Target | None = None) -> str:
    """Why no variant takes the problem on any target; '' if one does. So the CPU is no more liberal than chips are."""
    wrong = wrong_dtype(p.q_dtype, p.kv_dtype, p.o_dtype, LATENT_Q_DTYPES, FP8)
    if wrong:
        return "%s %s; it takes %s" % wrong
    if not 16 <= p.head_dim_ckv <= 512:
        return f"head_dim_ckv {p.head_dim_ckv} is not in 16 ... 512"
    if p.head_dim_kpe and not 8 <= p.head_dim_kpe <= 128:
        return f"head_dim_kpe {p.head_dim_kpe} is neither 0 nor in 8 ... 128"
    return ""


def refuses(p, target: Target) -> str:
    """Why the portable kernel does not take the problem; '' if it does."""
    why = refuses_everywhere(p)
    if why:
        return why
    if p.o_dtype == "fp8e4nv" and not target.is_cpu and target.capability < 89:
        return f"output dtype {p.o_dtype}: this chip has no conversion to it"
    return ""


@dataclass(frozen=True)
class Sm90Config(SplitKnobs):
    """How the Hopper kernel is cut.

    Attributes
    ----------
    block_m, block_n : int
        Query rows of a tile, and keys of a step: a block for each of two warpgroups.
    gather : bool
        Whether keys come row by row, and not in boxes: for tokens by name, pages that make none, and FP8.
    registers, copy_registers : int
        Of a thread of the warpgroups that compute, and of the warps that copy.
    programs_per_sm, least_split, least_alone, whole : int
        How keys are divided: `SplitKnobs`. Persistent blocks of a multiprocessor are programs_per_sm, too.
    combine_splits, combine_rows, combine_parts, combine_programs : int
        Of the combination: partial results of a row that are read at a time, rows where there are so many times fewer,
        parts of a row where there are more, and programs on a multiprocessor.
    transform : bool
        For factors that cannot be folded into the exponent: of positional products alone, read from the device, or not
        positive. Where a call says so, it is compiled at its first use.
    """

    block_m: int
    block_n: int
    gather: bool
    registers: int
    copy_registers: int
    combine_splits: int
    combine_rows: int
    combine_parts: int
    combine_programs: int
    transform: bool


def choose_sm90(p, target: Target) -> Sm90Config:
    # A box is a page or a part of one, and a power of two of rows that fill the 8 rows of a swizzle pattern.
    boxes = p.matrix and not p.sparse and p.page_size >= 16 and not p.page_size & (p.page_size - 1)
    widened = p.kv_dtype.startswith("fp8")
    boxes = boxes and not widened
    return Sm90Config(
        block_m=64,
        block_n=128,
        gather=not boxes,
        # Three warpgroups have 504 together, the first what the others leave: so divided, none spills on Triton
        # 3.6 and 3.9. FP8 passes through the third's.
        registers=240 if boxes else 208 if widened else 216,
        copy_registers=32 if boxes else 96 if widened else 72,
        # A split's partial result is 64 x 512 float32, as much as 114 keys; two steps fill the pipeline.
        programs_per_sm=1,
        least_split=256,
        # 64 registers of each of 64 threads, and as many programs as have room beside each other.
        combine_splits=8,
        combine_rows=4,
        combine_parts=4,
        combine_programs=8,
        transform=p.scales,
    )


def refuses_sm90(p, target: Target) -> str:
    """Why the Hopper kernel does not take the problem; '' if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.q_dtype not in ("bf16", "fp16", "fp8e4nv", "fp8e5") or p.kv_dtype not in ("fp8e4nv", "fp8e5", p.q_dtype):
        return f"q {p.q_dtype} with keys {p.kv_dtype}: it takes bf16, fp16 or fp8, and keys as q or fp8"
    if p.o_dtype not in ("bf16", "fp16"):
        return f"output {p.o_dtype}: it writes bf16 or fp16"
    if p.head_dim_ckv != 512 or p.head_dim_kpe not in (0, 64):
        return f"head_dim_ckv {p.head_dim_ckv} and head_dim_kpe {p.head_dim_kpe}: it takes 512 with 64 or 0"
    if p.first:
        return "keys in two caches"
    if p.variant:
        return "a user's variant"
    if not p.aligned:
        return "rows that are not aligned to 16 bytes"
    return ""

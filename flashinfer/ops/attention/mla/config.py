"""Configs of the latent attention kernels, and which problems they take."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two
from flashinfer._core.target import Target
from flashinfer.ops.attention.config import SIZE, Config, refuses_output
from flashinfer.ops.attention.problem import FP8, LATENT_Q_DTYPES, wrong_dtype
from flashinfer.ops.attention.split import SplitKnobs


def _shared_bytes(p, target: Target, block_m: int, block_n: int, stages: int) -> int:
    """Estimated shared memory: the ring of keys, widened FP8 keys, Q, and P."""
    columns = power_of_two(p.head_dim_ckv, 16) + (power_of_two(p.head_dim_kpe, 16) if p.head_dim_kpe else 0)
    # Asynchronous tensor cores that read shared memory need one more buffer.
    buffers = stages if _reads_shared(target) else stages - 1
    ring = buffers * block_n * columns * SIZE[p.kv_dtype]
    widened = block_n * columns * 2 if p.kv_dtype.startswith("fp8") else 0
    return ring + widened + block_m * columns * 2 + block_m * block_n * 2


def _reads_shared(target: Target) -> bool:
    """Whether the tensor cores read operands from shared memory (wgmma, tcgen05) instead of registers."""
    return 90 <= target.capability < 120


def choose(p, target: Target) -> Config:
    """The largest tile that registers hold, and the deepest ring that shared memory holds beside it."""
    # The accumulator takes block_m x head_dim_ckv / threads registers: 128 of 255 for 64 x 512 with 8 warps. Queries
    # take as many where they have to be in registers.
    block_m = min(p.rows, 64 if _reads_shared(target) else 32)
    by_bits = target.capability < 89 and "fp8e4nv" in (p.q_dtype, p.kv_dtype)
    steps = ((32, 3), (16, 4), (16, 3), (32, 2), (16, 2))
    if not p.aligned or by_bits:
        # Unaligned loads keep an address for each element, and bit arithmetic copies of a block, in registers.
        block_m = min(block_m, 16 if by_bits else 32)
        steps = ((16, 3), (16, 2))
    elif p.kv_dtype.startswith("fp8"):
        # Bytes and widened keys are live at the same time: 64 rows spill 320 bytes, most of them in the loop.
        block_m = min(block_m, 32)
    block_n, stages = next(
        (s for s in steps if _shared_bytes(p, target, block_m, *s) <= target.smem or target.is_cpu), steps[-1]
    )
    # 16 rows are one tensor core tile, too little work for 8 warps; two programs of 4 warps overlap their waits. Bit
    # arithmetic needs the registers of 8 warps: with 4 it spills 296 bytes.
    num_warps = 4 if block_m == 16 and not by_bits else 8
    rows = min(block_m, 8)
    # One round of the combination takes 64 registers of each thread.
    splits = max(1, min(16, 64 * 32 * num_warps // (rows * power_of_two(p.head_dim_ckv, 16))))
    return Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages,
        native_fp8=target.capability >= 89,
        combine_splits=splits,
        combine_rows=rows,
        # A split's partial result of block_m x 512 float32 has as many bytes as 2 * block_m keys in bf16.
        programs_per_sm=2 if block_m == 16 else 1,
        least_split=max(64, 2 * block_m),
    )


def refuses_everywhere(p, target: Target | None = None) -> str:
    """Why no variant takes the problem on any target; '' if one does. It also applies to the CPU, so that the CPU takes
    the same problems as GPUs."""
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
    return refuses_everywhere(p) or refuses_output(p, target)


@dataclass(frozen=True)
class Sm90Config(SplitKnobs):
    """Tile, registers and split-KV policy of the Hopper kernel.

    Attributes
    ----------
    block_m, block_n : int
        Query rows of a tile, and keys of a step: one block of 64 for each of two warpgroups.
    gather : bool
        Whether keys are copied row by row instead of by TMA: for sparse tokens, pages that are no TMA box, and FP8.
    registers, copy_registers : int
        Registers of a thread: in the consumer warpgroups, and in the producer warps.
    programs_per_sm, least_split, least_alone, whole : int
        The policy of split-KV, see `SplitKnobs`; programs_per_sm is also the number of resident thread blocks.
    combine_splits, combine_rows, combine_parts, combine_programs : int
        The combination: partial results of a row that are loaded at a time; rows at a time if a row has at most
        combine_splits / combine_rows of them; parts of a row if it has more; programs on a multiprocessor.
    transform : bool
        For factors that cannot be folded into the exponent: those of positional products alone, read from the device,
        or not positive. If only a call needs it, it is compiled at its first use.
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
    # A TMA box is a page or a part of one; its rows are a power of two, and a multiple of the 8 rows of a swizzle
    # pattern.
    boxes = p.matrix and not p.sparse and p.page_size >= 16 and not p.page_size & (p.page_size - 1)
    widened = p.kv_dtype.startswith("fp8")
    boxes = boxes and not widened
    return Sm90Config(
        block_m=64,
        block_n=128,
        gather=not boxes,
        # The three warpgroups have 504 in total; the first gets what the others leave. With these numbers none spills
        # on Triton 3.6 and 3.9. The third warpgroup needs more where it widens FP8 in registers.
        registers=240 if boxes else 208 if widened else 216,
        copy_registers=32 if boxes else 96 if widened else 72,
        # A split's partial result, 64 x 512 float32, has as many bytes as 114 keys; two steps of 128 fill the pipeline.
        programs_per_sm=1,
        least_split=256,
        # One step where that gives more multiprocessors work, and all of a split's keys are on their way at once:
        # 16 x 1024 of 16 heads take 27.9 us instead of 29.5, 1 x 4096 21.6 instead of 24.8 (H100, in turns).
        least_alone=128,
        # 64 registers of each of 64 threads, and as many programs as are resident.
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

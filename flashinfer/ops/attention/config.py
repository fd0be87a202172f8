"""Tiles of the portable attention kernel. The numbers were not measured yet unless a reason says so."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two
from flashinfer._core.target import Target
from flashinfer.ops.attention.problem import NARROW, Problem, wrong_dtype
from flashinfer.ops.attention.split import SplitKnobs
from flashinfer.ops.formats import KV_FORMATS


@dataclass(frozen=True)
class Config(SplitKnobs):
    """How the portable kernel is cut.

    Attributes
    ----------
    block_m : int
        Query rows of a tile, GQA heads included.
    block_n : int
        Keys per step.
    num_warps, num_stages : int
        Compiler options.
    native_fp8 : bool
        Whether the chip converts FP8 itself; else it is done in bit arithmetic.
    combine_splits, combine_rows : int
        Partial results read at a time, and rows per program, when split tiles are combined.
    programs_per_sm, least_split, least_alone, whole : int
        How keys are divided: `SplitKnobs`.
    pdl : bool
        Whether the kernel begins by waiting for those before it, and so may be launched while they run.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    native_fp8: bool
    combine_splits: int
    combine_rows: int
    pdl: bool = False


# Bytes of what is stored; of packed formats, two elements.
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1, "fp8e5": 1, **dict.fromkeys(KV_FORMATS, 1)}


def factor_alignment(dim: int) -> int:
    """Bytes that rows of nvfp4 factors of `dim` elements are a multiple of, as far as a load can use it."""
    return min(16, dim // 16 & -(dim // 16))


def _element(p: Problem) -> str:
    """Of the codes of keys and values, or their dtype."""
    return KV_FORMATS[p.kv_dtype].element if p.kv_dtype in KV_FORMATS else p.kv_dtype


def _packed(p: Problem) -> bool:
    """Whether keys and values are two in a byte."""
    return p.kv_dtype in KV_FORMATS and KV_FORMATS[p.kv_dtype].per_byte == 2


def _shared_bytes(p: Problem, block_m: int, block_n: int, stages: int) -> int:
    """Shared memory the compiler will take: a ring of K and V blocks, the widened or rotated operands, Q, and P."""
    d_qk, d_vo = power_of_two(p.head_dim_qk, 16), power_of_two(p.head_dim_vo, 16)
    compute = 4 if p.q_dtype == "fp32" else 2
    ring = stages * block_n * (d_qk + d_vo) * SIZE[p.kv_dtype] // (2 if _packed(p) else 1)
    widened = block_n * (d_qk + d_vo) * compute if p.kv_dtype != p.q_dtype or p.pos_encoding == "ROPE_LLAMA" else 0
    return ring + widened + block_m * d_qk * compute + block_m * block_n * compute


def choose(p: Problem, target: Target) -> Config:
    """The largest tile, from a list in order of preference, that fits the chip's shared memory and registers."""
    widest = max(power_of_two(p.head_dim_qk, 16), power_of_two(p.head_dim_vo, 16))
    native_fp8 = target.capability >= 89
    # A thread holds block_m x head_dim_vo / threads of the accumulator: beyond 64 x 512 on 8 warps it spills.
    block_m = min(p.rows, 128 if widest <= 128 else 64 if widest <= 256 else 32)
    steps = ((128, 2), (64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1))
    if p.rows > 16:
        steps = steps[1:]
    by_bits = _packed(p) or not native_fp8 and "fp8e4nv" in (p.q_dtype, _element(p))
    # Factors of keys take registers, too: beside 128 rows int8 spilled 256 bytes on sm_80.
    by_bits = by_bits or p.kv_dtype in KV_FORMATS and p.rows > 64
    if by_bits or not p.aligned or p.mask == "custom":
        # In registers: copies of a block in bit arithmetic; an address per element of narrow loads, or per mask byte.
        block_m = min(block_m, 64)
        steps = tuple(s for s in steps if s[0] <= 32)
    if p.kv_dtype in NARROW or widest >= 256 and p.soft_cap:
        # Both the bytes and what they widen to, or both the products and their tanh, are live at once.
        steps = tuple(s for s in steps if s[0] <= (32 if widest >= 256 else 64))
    if p.q_dtype == "fp32":
        # Each product is three of half the width, whose operands stay in registers.
        block_m = min(block_m, 16 if widest > 128 else 32)
        steps = ((32, 2), (16, 2), (16, 1))[widest > 128 :]
    crowded = widest >= 512 or (p.q_dtype == "fp32" and widest > 128)
    num_warps = 8 if block_m == 128 or (block_m == 64 and widest >= 128) or crowded else 4
    block_n, stages = next(
        (s for s in steps if _shared_bytes(p, block_m, *s) <= target.smem or target.is_cpu), steps[-1]
    )
    # A round of the combination takes 64 registers of each thread; rows of a single token first, then splits.
    rows = min(block_m, power_of_two(min(p.group, 8)))
    splits = max(1, min(16, 64 * 32 * num_warps // (rows * power_of_two(p.head_dim_vo, 16))))
    return Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages,
        native_fp8=native_fp8,
        combine_splits=splits,
        combine_rows=rows,
        programs_per_sm=4 if block_m <= 32 else 2,
        least_split=block_n,
    )


def refuses_everywhere(p: Problem, target: Target | None = None) -> str:
    """Why no variant takes the problem on any target; '' if one does. So the CPU is no more liberal than chips are."""
    wrong = wrong_dtype(p.q_dtype, p.kv_dtype, p.o_dtype)
    if wrong:
        return "%s %s; it takes %s" % wrong
    for name in ("head_dim_qk", "head_dim_vo"):
        dim = getattr(p, name)
        if not 8 <= dim <= 1024:
            return f"{name} {dim} is not in 8 ... 1024"
    if p.pos_encoding == "ROPE_LLAMA" and p.head_dim_qk % 2:
        return f"ROPE_LLAMA pairs elements, and head_dim_qk {p.head_dim_qk} is odd"
    if _packed(p) and p.pos_encoding == "ROPE_LLAMA":
        known = KV_FORMATS[p.kv_dtype]
        unit = known.width or known.per_byte
        if p.head_dim_qk % (2 * unit):
            odd = f"head_dim_qk {p.head_dim_qk} is odd times {unit}"
            return f"ROPE_LLAMA of {p.kv_dtype} keys takes halves of whole blocks, and {odd}"
    return ""


def refuses(p: Problem, target: Target) -> str:
    """Why the portable kernel does not take the problem; '' if it does."""
    if p.requests:
        return "it reads a work list"
    return refuses_everywhere(p) or refuses_output(p, target)


def refuses_output(p, target: Target) -> str:
    """Why a Triton kernel cannot round to the output's dtype; '' if it can."""
    if p.o_dtype == "fp8e4nv" and not target.is_cpu and target.capability < 89:
        return f"output dtype {p.o_dtype}: this chip has no conversion to it"
    return ""

"""Tiles of the RoPE kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two


@dataclass(frozen=True)
class Config:
    """tokens : per program. heads : per program, of queries or of keys. num_warps : per program.

    pdl : dependent launch.
    """

    tokens: int
    heads: int
    num_warps: int
    pdl: bool


@dataclass(frozen=True)
class Quantize:
    """rows : heads of tokens per program. capability : of the chip, ten times. num_warps : per program.

    pdl : dependent launch.
    """

    rows: int
    capability: int
    pdl: bool
    num_warps: int = 4


@dataclass(frozen=True)
class Video:
    """num_warps : per program, which holds the queries, keys or values of one patch. capability : of the chip."""

    num_warps: int
    capability: int


def portable(problem, target) -> Config:
    # 256 pairs of a head, 8 for each thread of a warp: two 16-byte loads of bf16.
    half = power_of_two(problem.rotary_dim // 2)
    tokens = max(1, 256 // half)
    # What is copied beside them, 128 elements a thread at most: 512 rows of 64 took 89 s to compile.
    if not problem.inplace and problem.head_dim > problem.rotary_dim:
        tokens = min(tokens, max(1, 2048 // power_of_two(problem.head_dim - problem.rotary_dim)))
    # A program's cosines and sines, some 60 instructions each, serve two heads, which are both in flight; a warp waits
    # for no other. 4096 tokens of 72 heads take 53.8 us, 8 tokens of 40 heads 2.8. With four warps 55.3 and 3.2; with
    # one head 54.2 and 3.0, with four 54.9 and 3.2; with eight, one after the other, 57.0 and 6.5 (H100).
    return Config(tokens=tokens, heads=2, num_warps=1, pdl=target.pdl)


def quantize(problem, target) -> Quantize:
    # 2048 elements of the longest part of a head, 16 for each of 128 threads: two 16-byte loads of bf16. A head looks
    # its cosines up for itself, so that 8 tokens of 128 heads are hundreds of programs; they are in L1. Not measured.
    # Elements that are not aligned have an address each: of twice as many, Triton 3.9 spills.
    longest = max(problem.rotary_dim, problem.q_rest, problem.k_rest, problem.value_dim)
    elements = 2048 if problem.aligned else 1024
    rows = max(1, elements // power_of_two(longest))
    return Quantize(rows, target.capability, problem.pdl and target.pdl)


def video(problem, target) -> Video:
    # 32 elements a thread, as the norms have them: the row is in registers while it is summed up. Not measured.
    row = problem.heads * power_of_two(problem.head_dim)
    return Video(num_warps=min(max(row // 1024, 4), 32), capability=target.capability if problem.out else 0)

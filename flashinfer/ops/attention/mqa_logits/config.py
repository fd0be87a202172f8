"""Tiles of the kernels of an indexer's scores."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two
from flashinfer._core.target import Target


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes
    ----------
    block_n : int
        Keys per step.
    num_warps, num_stages : int
        Compiler options.
    native_fp8 : bool
        Whether the chip converts FP8 itself; else it is done in bit arithmetic.
    wide : str
        What mxfp4 and bf16 are multiplied in: "bf16", or "fp32" where tensor cores have none.
    """

    block_n: int
    num_warps: int
    num_stages: int
    native_fp8: bool
    wide: str


def choose(p, target: Target) -> Config:
    # 64 keys x 64 heads of scores are 32 registers a thread of 4 warps, and the query waits in as many.
    wide = "bf16" if target.capability >= 80 else "fp32"
    return Config(block_n=64, num_warps=4, num_stages=3, native_fp8=target.capability >= 89, wide=wide)


def refuses(p, target: Target) -> str:
    """Why the kernel does not take the problem; '' if it does."""
    if p.head_dim > 256 or p.head_dim % 16:
        return f"head_dim {p.head_dim} is no multiple of 16 up to 256"
    if p.qk_format == "mxfp4" and p.head_dim % 32:
        return f"head_dim {p.head_dim} is no multiple of 32, the block of mxfp4"
    if p.num_heads > 128:
        return f"num_heads {p.num_heads} is more than 128"
    return ""


@dataclass(frozen=True)
class Sm90Config:
    """How the kernel for Hopper is cut.

    Attributes
    ----------
    queries : int
        Queries of a program, a power of two.
    heads : int
        Columns of a query in the product: its heads, rounded up to a power of two.
    block_n : int
        Keys per step.
    num_warps, num_stages : int
        Compiler options.
    programs : int
        Programs that a multiprocessor holds at once, for which the keys of a group of queries are shared out.
    """

    queries: int
    heads: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


# Columns of a product, and bytes of its queries, which stay in shared memory.
_COLUMNS, _QUERY_BYTES = 256, 32768


def choose_sm90(p, target: Target) -> Sm90Config:
    heads = power_of_two(p.num_heads, 16)
    size = heads * power_of_two(p.head_dim, 32) * (1 if p.qk_format == "fp8" else 2)
    most = max(1, min(_COLUMNS // heads, _QUERY_BYTES // size))
    queries = most if p.page_size == 0 else min(most, power_of_two(p.tokens))
    # By registers and shared memory: 64 registers a thread and 34 KiB, 120 and 42 KiB, 255 and 58 KiB.
    programs = 2 if queries * heads > 128 else 4 if queries * heads > 64 else 6
    return Sm90Config(queries, heads, block_n=64, num_warps=4, num_stages=3, programs=programs)


def refuses_sm90(p, target: Target) -> str:
    """Why the kernel for Hopper does not take the problem; '' if it does."""
    if not target.is_cpu and target.capability != 90:
        return "needs sm_90"
    if p.qk_format == "mxfp4":
        return "mxfp4 has no product on sm_90"
    if not p.aligned:
        return "pages do not start on 16 bytes"
    return refuses(p, target)

"""Compiler options of the portable kernel of block scores. None was measured yet."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.target import Target


@dataclass(frozen=True)
class Config:
    """How the kernel is compiled.

    Attributes
    ----------
    num_warps, num_stages : int
        Compiler options.
    native_fp8 : bool
        Whether the chip converts FP8 itself; else it is done in bit arithmetic.
    wide : str
        What bf16 is multiplied in: itself, or "fp32" where tensor cores have none.
    """

    num_warps: int
    num_stages: int
    native_fp8: bool
    wide: str


def choose(p, target: Target) -> Config:
    # A block of keys is 128 x 128 elements: 32 KiB in 16 bits, of which two fit every chip's shared memory. Widened, it
    # is 64 registers a thread of 8 warps.
    wide = "bf16" if target.capability >= 80 else "fp32"
    return Config(num_warps=8, num_stages=2, native_fp8=target.capability >= 89, wide=wide)


def refuses(p, target: Target) -> str:
    """Why the kernel does not take the problem; '' if it does."""
    if p.head_dim > 256 or p.head_dim % 16:
        return f"head_dim {p.head_dim} is no multiple of 16 up to 256"
    if p.num_heads // p.num_kv_heads > 128:
        return f"{p.num_heads // p.num_kv_heads} heads share a KV head, more than 128"
    return ""

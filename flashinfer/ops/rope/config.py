"""Tile of the RoPE kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """tokens : per program. heads : per program, of queries or of keys. num_warps : per program."""

    tokens: int
    heads: int
    num_warps: int = 4


def portable(problem, target) -> Config:
    # 1024 pairs a step, 8 for each of 128 threads: two 16-byte loads of bf16, for one head after the other.
    half = 1 << (problem.rotary_dim // 2 - 1).bit_length()
    # A program's cosines and sines, some 60 instructions each, serve 8 heads; with more heads a program, batches of few
    # tokens would fill fewer SMs. Neither number is measured.
    return Config(tokens=max(1, 1024 // half), heads=8)

"""Tiles of the causal convolution."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """channels : of a program. tokens : of a program, where they are side by side. num_warps : warps of it."""

    channels: int
    tokens: int
    num_warps: int


def portable(problem, target) -> Config:
    # One token: 256 channels are 512 bytes of bf16 a warp, and a layer of 8192 channels is 32 programs a sequence.
    # Many: 32 x 128 elements are 32 a thread, with those before them read again from L1. Not measured.
    return Config(128, 32, 4) if problem.long else Config(256, 1, 4)

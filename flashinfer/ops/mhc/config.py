"""Blocks of columns and warps of the hyper-connection kernels. Not measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """block : columns of a step, of every stream. num_warps : warps per program. pdl : dependent launch."""

    block: int
    num_warps: int
    pdl: bool


def pre(problem, target) -> Config:
    # A program has a token: 4 streams of 1024 columns are 32 values a thread of 4 warps, all in flight at once.
    return Config(1024, 4, target.pdl)


def post(problem, target) -> Config:
    # A program has 1024 columns of a token: 5 reads and 4 writes of 8 values a thread.
    return Config(1024, 4, target.pdl)

"""Tokens of a program of the routing by token id."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows : tokens per program. num_warps : warps per program. pdl : dependent launch."""

    rows: int
    num_warps: int
    pdl: bool


def portable(problem, target) -> Config:
    # A lane has one expert of one token; a warp of 4 tokens of 8 experts. Not measured.
    return Config(max(1, 32 // problem.slots), 1, target.pdl)

"""Tiles of products in groups."""

from __future__ import annotations

from flashinfer.ops.gemm import tiles


def compute(problem, target) -> str:
    """What the codes are widened to: "" for nothing."""
    if problem.scale:
        return tiles.compute(problem.scale, (problem.a, problem.b), target)
    if problem.a in ("bf16", "fp16"):
        return "fp32" if target.is_cpu else ""
    return tiles.compute("fp32", (problem.a, problem.b), target)


def portable(problem, target) -> tiles.Config:
    return tiles.choose(problem, compute(problem, target), target)

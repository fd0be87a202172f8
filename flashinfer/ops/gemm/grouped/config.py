"""The portable kernel's config of the grouped GEMM."""

from __future__ import annotations

from flashinfer.ops.gemm import tiles


def compute(problem, target) -> str:
    """The dtype that codes are widened to; "" where the tensor cores take them."""
    if problem.scale:
        return tiles.compute(problem.scale, (problem.a, problem.b), target)
    if problem.a in ("bf16", "fp16"):
        return "fp32" if target.is_cpu else ""
    return tiles.compute("fp32", (problem.a, problem.b), target)


def portable(problem, target) -> tiles.Config:
    return tiles.choose(problem, compute(problem, target), target)

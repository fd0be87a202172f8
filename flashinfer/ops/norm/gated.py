"""A gated residual in Triton: alpha * residual + beta * rmsnorm(branch * weight), and the norm that comes next.

Grid: one program a row, which stays in registers. Warps: each has a part of the row. Shared memory: reductions.
Inputs: branch [rows, hidden], a float32 residual, weight, alpha and beta [hidden].
Outputs: out and next_out [rows, hidden].
Method: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit


@triton.jit
def gated_kernel(
    branch, residual, weight, alpha, beta, out, next_weight, next_out, branch_strides, residual_strides, out_strides,
    next_strides, hidden, eps, center, next_eps, next_center,
    WEIGHTED: tl.constexpr, ALPHA: tl.constexpr, NEXT: tl.constexpr, UNIT: tl.constexpr, UNIT_FP32: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = column < hidden
    begin(PDL)

    at = row_offset(row, 1, branch_strides.row, 0, UNIT) + column_offset(column, branch_strides.column, UNIT)
    y = tl.load(branch + at, inside, other=0).to(tl.float32)
    at = row_offset(row, 1, residual_strides.row, 0, UNIT_FP32) + column_offset(column, residual_strides.column, UNIT)
    stream = tl.load(residual + at, inside, other=0)
    if WEIGHTED:
        y *= tl.load(weight + column, inside, other=0).to(tl.float32) + center
    y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + eps)
    if ALPHA:
        stream *= tl.load(alpha + column, inside, other=0)
    else:
        stream *= alpha
    y = stream + tl.load(beta + column, inside, other=0) * y
    at = row_offset(row, 1, out_strides.row, 0, UNIT_FP32) + column_offset(column, out_strides.column, UNIT)
    tl.store(out + at, y, inside)
    if NEXT:
        y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + next_eps)
        y *= tl.load(next_weight + column, inside, other=0).to(tl.float32) + next_center
        at = row_offset(row, 1, next_strides.row, 0, UNIT) + column_offset(column, next_strides.column, UNIT)
        tl.store(next_out + at, y.to(next_out.dtype.element_ty), inside)


def build(problem, config):
    rows, weights, fp32 = (pointer(t, problem.aligned) for t in (problem.dtype, problem.weight_dtype, "fp32"))
    types = {"branch": rows, "residual": fp32, "weight": weights, "alpha": fp32 if problem.alpha else "fp32"}
    types |= {"beta": fp32, "out": fp32, "next_weight": weights, "next_out": rows}
    types |= {f"{t}_strides.{s}": "i64" for t in ("branch", "residual", "out", "next") for s in ("row", "column")}
    types |= {"hidden": "i32"} | dict.fromkeys(("eps", "center", "next_eps", "next_center"), "fp32")
    constants = {
        "WEIGHTED": problem.weighted,
        "ALPHA": problem.alpha,
        "NEXT": problem.next,
        "UNIT": unit(problem.dtype, problem.aligned),
        "UNIT_FP32": unit("fp32", problem.aligned),
        "BLOCK": problem.block,
        "PDL": config.pdl,
    }
    return Build(gated_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack that a thread may use, of a row of more than 16384.
STACK_BUDGET = 128

launch = Launcher("norm_gated", build)


def run(problem, config, branch, residual, weight, alpha, beta, out, eps, center, following=(None, None, 0.0, 0.0)):
    """out = alpha * residual + beta * rmsnorm(branch * (weight + center)).

    following : weight, result, eps and center of the norm of `out` that comes next, where the problem has one.
    """
    next_weight, next_out, next_eps, next_center = following
    next_strides = (0, 0) if next_out is None else next_out.stride()
    tensors = branch, residual, weight, alpha, beta, out, next_weight, next_out
    strides = branch.stride() + residual.stride() + out.stride() + next_strides
    numbers = branch.shape[1], eps, center, next_eps, next_center
    launch(problem, config, (branch.shape[0], 1, 1), *tensors, *strides, *numbers)


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

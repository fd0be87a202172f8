"""RMSNorm and LayerNorm in Triton: a row stays in registers, so every input is read once."""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    x_outer,
    x_inner,
    x_column,
    residual_outer,
    residual_inner,
    residual_column,
    out_outer,
    out_inner,
    out_column,
    rows,
    inner,
    hidden,
    eps,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    GEMMA: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]

    # Asked for first, the weights' latency passes behind that of the rows, and not after the reduction.
    if WEIGHTS_FIRST:
        w = tl.load(weight + column, column < hidden, other=0)
        if CENTRE:
            b = tl.load(bias + column, column < hidden, other=0)
    offset = row_offset(row, inner, x_outer, x_inner, UNIT)
    x += offset[:, None] + column_offset(column, x_column, UNIT)[None, :]
    y = tl.load(x, inside, other=0).to(tl.float32)
    if ADD:
        offset = row_offset(row, inner, residual_outer, residual_inner, UNIT)
        residual += offset[:, None] + column_offset(column, residual_column, UNIT)[None, :]
        y += tl.load(residual, inside, other=0).to(tl.float32)
        tl.store(residual, y.to(residual.dtype.element_ty), inside)
    if CENTRE:
        y = tl.where(inside, y - (tl.sum(y, 1) / hidden)[:, None], 0)
    y *= tl.rsqrt(tl.sum(y * y, 1) / hidden + eps)[:, None]

    if not WEIGHTS_FIRST:
        w = tl.load(weight + column, column < hidden, other=0)
    w = w.to(tl.float32)
    if GEMMA:
        w += 1
    y *= w[None, :]
    if CENTRE:
        if not WEIGHTS_FIRST:
            b = tl.load(bias + column, column < hidden, other=0)
        y += b.to(tl.float32)[None, :]
    offset = row_offset(row, inner, out_outer, out_inner, UNIT)
    out += offset[:, None] + column_offset(column, out_column, UNIT)[None, :]
    tl.store(out, y.to(out.dtype.element_ty), inside)


def build(problem, config):
    rows, weights = pointer(problem.dtype, problem.aligned), pointer(problem.weight_dtype, problem.aligned)
    types = {"x": rows, "residual": rows, "weight": weights, "bias": weights, "out": rows}
    types |= {f"{t}_{s}": "i64" for t in ("x", "residual", "out") for s in ("outer", "inner", "column")}
    types |= {"rows": "i32", "inner": "i32", "hidden": "i32", "eps": "fp32"}
    constants = {
        "ADD": problem.kind == "fused_add_rmsnorm",
        "CENTRE": problem.kind == "layernorm",
        "GEMMA": problem.gemma,
        "WEIGHTS_FIRST": config.weights_first,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
    }
    return Build(norm_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack a thread may use: LayerNorm's float32 weights beside a row of more than 16384, 64 registers a thread.
STACK_BUDGET = 288

launch = Launcher("norm", build)
LAUNCHERS = (launch,)


def run(problem, config, x, residual, weight, bias, out, eps):
    """Normalise the rows of x (of x + residual, which then becomes the residual) into out."""
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    grid = (triton.cdiv(rows, config.rows), 1, 1)
    strides = row_strides(x) + (row_strides(residual) if residual is not None else (0, 0, 0)) + row_strides(out)
    launch(problem, config, grid, x, residual, weight, bias, out, *strides, rows, inner, x.shape[-1], eps)


def row_strides(x) -> tuple[int, int, int]:
    """Strides of x as [outer, inner, columns]; a 2-D tensor has an inner dimension of 1."""
    outer, *inner, column = x.stride()
    return outer, inner[0] if inner else 0, column

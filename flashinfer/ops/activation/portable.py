"""Gated activations in Triton: each element is read once and written once."""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit


@triton.jit
def act_and_mul_kernel(
    x,
    out,
    x_row,
    x_column,
    out_row,
    out_column,
    rows,
    hidden,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]

    x += row_offset(row, 1, x_row, 0, UNIT)[:, None]
    gate = tl.load(x + column_offset(column, x_column, UNIT)[None, :], inside, other=0)
    up = tl.load(x + column_offset(column + hidden, x_column, UNIT)[None, :], inside, other=0)
    y = activation(gate.to(tl.float32), KIND) * up.to(tl.float32)
    out += row_offset(row, 1, out_row, 0, UNIT)[:, None] + column_offset(column, out_column, UNIT)[None, :]
    tl.store(out, y.to(out.dtype.element_ty), inside)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """SiLU, GELU, or GELU's tanh form (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415) of float32 x."""
    if KIND == "silu":
        return x / (1 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1 + tl.exp(-2 * u))


def build(problem, config):
    rows = pointer(problem.dtype, problem.aligned)
    types = {"x": rows, "out": rows, "x_row": "i64", "x_column": "i64", "out_row": "i64", "out_column": "i64"}
    types |= {"rows": "i32", "hidden": "i32"}
    constants = {
        "KIND": problem.kind,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
    }
    return Build(act_and_mul_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("act_and_mul", build)
LAUNCHERS = (launch,)


def run(problem, config, x, out):
    """out = act(first half of x) * second half; x is [rows, 2 * hidden]."""
    rows, hidden = out.shape
    grid = (triton.cdiv(rows, config.rows), triton.cdiv(hidden, problem.block), 1)
    launch(problem, config, grid, x, out, *x.stride(), *out.stride(), rows, hidden)

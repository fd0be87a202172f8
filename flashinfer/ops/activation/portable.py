"""Gated activations in Triton: each element is read once and written once."""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops._device.scales import quantize_nvfp4, scale_offset


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
    column_tiles,
    global_scale,
    counts,
    factors,
    x_batch,
    out_batch,
    scale_batch,
    factors_batch,
    blocks,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that follow each other have neighbouring columns of the same rows.
    first = tl.program_id(0) // column_tiles * ROWS
    tile = tl.program_id(0) % column_tiles
    begin(PDL)
    if FORM == "nvfp4":
        batch = tl.program_id(1).to(tl.int64)
        rows = tl.minimum(rows, tl.load(counts + batch))
        if first >= rows:
            return
        x += batch * multiple(x_batch, UNIT)
    row = first + tl.arange(0, ROWS)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]

    x += row_offset(row, 1, x_row, 0, UNIT)[:, None]
    gate = tl.load(x + column_offset(column, x_column, UNIT)[None, :], inside, other=0)
    up = tl.load(x + column_offset(column + hidden, x_column, UNIT)[None, :], inside, other=0)
    y = activation(gate.to(tl.float32), KIND) * up.to(tl.float32)
    if FORM == "nvfp4":
        y = y.to(x.dtype.element_ty).to(tl.float32)
        codes, found = quantize_nvfp4(y, tl.load(global_scale + batch * scale_batch), CAPABILITY, SCORE)
        pair = tile * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        out += batch * out_batch + row_offset(row, 1, out_row, 0, 1)[:, None] + pair[None, :]
        tl.store(out, codes, (row < rows)[:, None] & (pair < hidden // 2)[None, :])
        block = tile * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
        at = batch * factors_batch + scale_offset(row[:, None], block[None, :], blocks, "128x4")
        tl.store(factors + at, found, (row < rows)[:, None] & (block < blocks)[None, :])
    else:
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
    types |= {"rows": "i32", "hidden": "i32", "column_tiles": "i32"}
    experts = {"global_scale": "*fp32", "counts": "*i32", "factors": "*u8"}
    experts |= dict.fromkeys(("x_batch", "out_batch", "scale_batch", "factors_batch"), "i64") | {"blocks": "i32"}
    if problem.form:
        types |= experts | {"out": "*u8"}
    # What only the experts' form has is no parameter of the other.
    constants = {name: None for name in experts if name not in types} | {
        "KIND": problem.kind,
        "FORM": problem.form,
        "SCORE": problem.score,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(act_and_mul_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("act_and_mul", build)
LAUNCHERS = (launch,)


def run(problem, config, x, out, experts=None):
    """out = act(first half of x) * second half; x is [rows, 2 * hidden]. experts : Experts, for the NVFP4 form."""
    if experts is not None:
        return _run_experts(problem, config, x, out, experts)
    rows, hidden = out.shape
    column_tiles = triton.cdiv(hidden, problem.block)
    grid = (triton.cdiv(rows, config.rows) * column_tiles, 1, 1)
    launch(problem, config, grid, x, out, *x.stride(), *out.stride(), rows, hidden, column_tiles)


def _run_experts(problem, config, x, out, experts):
    batch, rows, hidden = *x.shape[:2], x.shape[2] // 2
    _, blocks = layouts.padded(rows, hidden // 16, "128x4")
    column_tiles = triton.cdiv(blocks * 16, problem.block)
    grid = (triton.cdiv(rows, config.rows) * column_tiles, batch, 1)
    scale_batch = 0 if experts.global_scale.numel() == 1 else 1
    strides = *x.stride()[1:], *out.stride()[1:], rows, hidden, column_tiles
    batches = x.stride(0), out.stride(0), scale_batch, experts.factors.stride(0)
    launch(problem, config, grid, x, out, *strides, *experts, *batches, blocks)

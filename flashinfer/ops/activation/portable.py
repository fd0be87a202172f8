"""Gated activations in Triton, act(first half of x) * second half: each element is read once and written once.

Grid: (tiles of rows x tiles of columns, batch); programs that follow one another have neighbouring columns.
Warps: all share a tile of [ROWS, BLOCK]. Shared memory: the reductions of quantised results.
Inputs: x [rows, 2 hidden]; of quantised results x [batch, rows, 2 hidden], global_scale [1] or [batch], counts [batch].
Outputs: out [rows, hidden]; or codes [batch, rows, .] and their factors [batch, .], in LAYOUT.
Method: Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops._device.scales import quantize_blocks, scale_offset
from flashinfer.ops.formats import FORMATS


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
    padded_rows,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    V: tl.constexpr,
    LAYOUT: tl.constexpr,
    COUNTED: tl.constexpr,
    ACROSS: tl.constexpr,
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
    if FORMAT != "":
        batch = tl.program_id(1).to(tl.int64)
        if COUNTED:
            rows = tl.minimum(rows, tl.load(counts + batch))
            padded_rows = rows
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
    if FORMAT != "":
        y = y.to(x.dtype.element_ty).to(tl.float32)
        if ACROSS:
            # Blocks go down the columns: of the transpose they go along its rows.
            column_tile = tl.program_id(0) // column_tiles
            y = tl.trans(y)
            row, rows, padded_rows, hidden, tile = column, hidden, hidden, rows, column_tile
        WIDE: tl.constexpr = ROWS if ACROSS else BLOCK
        scale = 1.0 if global_scale is None else tl.load(global_scale + batch * scale_batch)
        codes, found = quantize_blocks(y, scale, FORMAT, CAPABILITY, SCORE)
        BYTES: tl.constexpr = codes.shape[1]
        code_bytes = hidden // (WIDE // BYTES)
        byte = tile * BYTES + tl.arange(0, BYTES)
        out += batch * out_batch + row_offset(row, 1, out_row, 0, 1)[:, None] + byte[None, :]
        tl.store(out, codes, (row < rows)[:, None] & (byte < code_bytes)[None, :])
        block = (tile * (WIDE // V) + tl.arange(0, WIDE // V))[None, :]
        # Padding is 0, whatever the global scale is.
        found = tl.where((row < rows)[:, None] & (block * V < hidden), found, 0)
        at = batch * factors_batch + scale_offset(row[:, None], block, blocks, LAYOUT)
        tl.store(factors + at, found, (row < padded_rows)[:, None] & (block < blocks))
    else:
        out += row_offset(row, 1, out_row, 0, UNIT)[:, None] + column_offset(column, out_column, UNIT)[None, :]
        tl.store(out, y.to(out.dtype.element_ty), inside)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """SiLU, GELU, or GELU by tanh (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415) of float32 x."""
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
    # What only some formats have is no parameter of the others.
    quantised = {"global_scale": "*fp32" if problem.format == "nvfp4" else None}
    quantised |= {"counts": "*i32" if problem.counted else None, "factors": "*u8"}
    quantised |= dict.fromkeys(("x_batch", "out_batch", "scale_batch", "factors_batch"), "i64")
    quantised |= dict.fromkeys(("blocks", "padded_rows"), "i32")
    types |= quantised | {"out": "*u8"} if problem.format else dict.fromkeys(quantised)
    constants = {
        "KIND": problem.kind,
        "FORMAT": problem.format,
        "V": FORMATS[problem.format].width if problem.format else 1,
        "LAYOUT": problem.layout,
        "COUNTED": problem.counted,
        "ACROSS": problem.across,
        "SCORE": problem.score,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(act_and_mul_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("act_and_mul", build)


def run(problem, config, x, out, quantised=None):
    """out = act(first half of x) * second half; x is [rows, 2 * hidden]. quantised : Quantised, for the formats."""
    if quantised is not None:
        return _run_quantised(problem, config, x, out, quantised)
    rows, hidden = out.shape
    column_tiles = triton.cdiv(hidden, problem.block)
    grid = (triton.cdiv(rows, config.rows) * column_tiles, 1, 1)
    launch(problem, config, grid, x, out, *x.stride(), *out.stride(), rows, hidden, column_tiles)


def _run_quantised(problem, config, x, out, given):
    batch, rows, hidden = *x.shape[:2], x.shape[2] // 2
    width = FORMATS[problem.format].width
    high, wide = (hidden, rows) if problem.across else (rows, hidden)
    padded_rows, blocks = layouts.padded(high, wide // width, problem.layout)
    # Padding of the layout is written by the same programs, but for rows that do not count.
    column_tiles = triton.cdiv(hidden if problem.across else blocks * width, problem.block)
    row_tiles = triton.cdiv(rows if problem.across or problem.counted else padded_rows, config.rows)
    scale_batch = 0 if given.global_scale is None or given.global_scale.numel() == 1 else 1
    strides = *x.stride()[1:], *out.stride()[1:], rows, hidden, column_tiles
    tensors = [t for t in (given.global_scale, given.counts, given.factors) if t is not None]
    batches = x.stride(0), out.stride(0), scale_batch, given.factors.stride(0)
    grid = (row_tiles * column_tiles, batch, 1)
    launch(problem, config, grid, x, out, *strides, *tensors, *batches, blocks, padded_rows)


IMPLEMENTATION = Implementation(run, (launch,))

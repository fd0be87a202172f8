"""RMSNorm and LayerNorm in Triton: a row stays in registers, so every input is read once."""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops._device.scales import quantize_fp8, quantize_mxfp4, quantize_nvfp4, scale_offset
from flashinfer.ops.norm import Gated, Problem, Quantised


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
    scale,
    block_scale,
    linear_scale,
    scale_pitch,
    scale_rows,
    normed,
    normed_outer,
    normed_inner,
    normed_column,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    GEMMA: tl.constexpr,
    AFTER: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    LAYOUT: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    GATE: tl.constexpr = AFTER == "sigmoid_gate"
    begin(PDL)

    # Asked for first, the latency of weights and scale passes behind that of the rows, and not after the reduction.
    if WEIGHTS_FIRST and not GATE:
        w = tl.load(weight + column, column < hidden, other=0)
        if CENTRE:
            b = tl.load(bias + column, column < hidden, other=0)
        # Loads stay before a barrier; ptxas would put these behind the use of the rows.
        tl.debug_barrier()
    factor = factor_of(scale, SCALE, FORM != "nvfp4")
    offset = row_offset(row, inner, x_outer, x_inner, UNIT)
    x += offset[:, None] + column_offset(column, x_column, UNIT)[None, :]
    y = tl.load(x, inside, other=0).to(tl.float32)
    if ADD or GATE:
        offset = row_offset(row, inner, residual_outer, residual_inner, UNIT)
        residual += offset[:, None] + column_offset(column, residual_column, UNIT)[None, :]
        beside = tl.load(residual, inside, other=0).to(tl.float32)
    if ADD:
        y += beside
        tl.store(residual, y.to(residual.dtype.element_ty), inside)
    if CENTRE:
        y = tl.where(inside, y - (tl.sum(y, 1) / hidden)[:, None], 0)
    y *= tl.rsqrt(tl.sum(y * y, 1) / hidden + eps)[:, None]

    if GATE:
        y /= 1 + tl.exp(-beside)
    else:
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
    if AFTER == "silu":
        y /= 1 + tl.exp(-y)
    if normed is not None:
        offset = row_offset(row, inner, normed_outer, normed_inner, UNIT)
        normed += offset[:, None] + column_offset(column, normed_column, UNIT)[None, :]
        rounded = y.to(normed.dtype.element_ty)
        tl.store(normed, rounded, inside)
        if FORM == "fp8_block":
            y = rounded.to(tl.float32)

    offset = row_offset(row, inner, out_outer, out_inner, UNIT)
    if FORM == "":
        out += offset[:, None] + column_offset(column, out_column, UNIT)[None, :]
        tl.store(out, y.to(out.dtype.element_ty), inside)
    elif FORM == "nvfp4" or FORM == "mxfp4":
        # What the norm alone would have written is quantised.
        y = y.to(x.dtype.element_ty).to(tl.float32)
        if FORM == "nvfp4":
            PER: tl.constexpr = 16
            codes, factors = quantize_nvfp4(y, factor, CAPABILITY)
        else:
            PER: tl.constexpr = 32
            codes, factors = quantize_mxfp4(y, CAPABILITY)
        pair = tl.arange(0, BLOCK // 2)
        out += offset[:, None] + column_offset(pair, out_column, UNIT)[None, :]
        tl.store(out, codes, (row < rows)[:, None] & (pair < hidden // 2)[None, :])
        block = tl.arange(0, BLOCK // PER)[None, :]
        # Padding of tiled scales is 0, also where eps is, and a row past the last is 0 / 0.
        factors = tl.where((row < rows)[:, None], factors, 0)
        if LAYOUT == "both":
            at = row[:, None].to(tl.int64) * (hidden // PER) + block
            tl.store(linear_scale + at, factors, (row < rows)[:, None] & (block < hidden // PER))
        TILED: tl.constexpr = "linear" if LAYOUT == "linear" else "128x4"
        at = scale_offset(row[:, None], block, scale_pitch, TILED)
        tl.store(block_scale + at, factors, (row < scale_rows)[:, None] & (block < scale_pitch))
    else:
        if FORM == "fp8_block":
            codes, factors = quantize_fp8(y, 128, "fp8e4nv", False, CAPABILITY)
            block = tl.arange(0, BLOCK // 128)[None, :]
            at = block.to(tl.int64) * scale_pitch + row[:, None]
            tl.store(block_scale + at, factors, (row < rows)[:, None] & (block < hidden // 128))
        else:
            codes = to_fp8(y * factor, FORM, CAPABILITY)
        out += offset[:, None] + column_offset(column, out_column, UNIT)[None, :]
        tl.store(out, codes, inside)


@triton.jit
def factor_of(scale, SCALE: tl.constexpr, DIVIDES: tl.constexpr):
    """The scale, or its inverse, rounded once. SCALE: the address of a "tensor", a "number", or "" for 1."""
    value = tl.full([], 1.0, tl.float32)
    if SCALE == "tensor":
        value = tl.load(scale)
    elif SCALE == "number":
        value *= scale
    if DIVIDES and SCALE != "":
        value = tl.div_rn(tl.full([], 1.0, tl.float32), value)
    return value


@triton.jit
def gated_kernel(
    branch,
    residual,
    weight,
    alpha,
    beta,
    out,
    next_weight,
    next_out,
    branch_row,
    branch_column,
    residual_row,
    residual_column,
    out_row,
    out_column,
    next_row,
    next_column,
    hidden,
    eps,
    center,
    next_eps,
    next_center,
    WEIGHTED: tl.constexpr,
    ALPHA: tl.constexpr,
    NEXT: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_FP32: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = column < hidden
    begin(PDL)

    at = row_offset(row, 1, branch_row, 0, UNIT) + column_offset(column, branch_column, UNIT)
    y = tl.load(branch + at, inside, other=0).to(tl.float32)
    at = row_offset(row, 1, residual_row, 0, UNIT_FP32) + column_offset(column, residual_column, UNIT)
    stream = tl.load(residual + at, inside, other=0)
    if WEIGHTED:
        y *= tl.load(weight + column, inside, other=0).to(tl.float32) + center
    y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + eps)
    if ALPHA:
        stream *= tl.load(alpha + column, inside, other=0)
    else:
        stream *= alpha
    y = stream + tl.load(beta + column, inside, other=0) * y
    at = row_offset(row, 1, out_row, 0, UNIT_FP32) + column_offset(column, out_column, UNIT)
    tl.store(out + at, y, inside)
    if NEXT:
        y *= tl.rsqrt(tl.sum(y * y, 0) / hidden + next_eps)
        y *= tl.load(next_weight + column, inside, other=0).to(tl.float32) + next_center
        at = row_offset(row, 1, next_row, 0, UNIT) + column_offset(column, next_column, UNIT)
        tl.store(next_out + at, y.to(next_out.dtype.element_ty), inside)


def build(problem, config):
    return _BUILD[type(problem)](problem, config)


def _build_norm(problem, config):
    rows, weights = pointer(problem.dtype, problem.aligned), pointer(problem.weight_dtype, problem.aligned)
    codes = pointer("u8", problem.aligned) if problem.form else rows
    types = {"x": rows, "residual": rows, "weight": weights, "bias": weights, "out": codes}
    types |= {f"{t}_{s}": "i64" for t in ("x", "residual", "out") for s in ("outer", "inner", "column")}
    types |= {"rows": "i32", "inner": "i32", "hidden": "i32", "eps": "fp32"}
    # What only some forms have is no parameter of the others.
    absent = dict.fromkeys(("scale", "block_scale", "linear_scale", "scale_pitch", "scale_rows", "normed"))
    absent |= dict.fromkeys(("normed_outer", "normed_inner", "normed_column"))
    if problem.scale:
        types["scale"] = "fp32" if problem.scale == "number" else "*fp32"
    if problem.form in ("fp8_block", "nvfp4", "mxfp4"):
        types["block_scale"] = "*fp32" if problem.form == "fp8_block" else "*u8"
        if problem.layout == "both":
            types["linear_scale"] = "*u8"
        types |= {"scale_pitch": "i32", "scale_rows": "i32"}
    if problem.normed:
        types |= {"normed": rows, "normed_outer": "i64", "normed_inner": "i64", "normed_column": "i64"}
    constants = {name: None for name in absent if name not in types} | {
        "ADD": problem.kind == "fused_add_rmsnorm",
        "CENTRE": problem.kind == "layernorm",
        "GEMMA": problem.gemma,
        "AFTER": problem.after,
        "FORM": problem.form,
        "SCALE": problem.scale,
        "LAYOUT": problem.layout,
        "WEIGHTS_FIRST": config.weights_first,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(norm_kernel, types, constants, num_warps=config.num_warps)


def _build_gated(problem, config):
    rows, weights, fp32 = (pointer(t, problem.aligned) for t in (problem.dtype, problem.weight_dtype, "fp32"))
    types = {"branch": rows, "residual": fp32, "weight": weights, "alpha": fp32 if problem.alpha else "fp32"}
    types |= {"beta": fp32, "out": fp32, "next_weight": weights, "next_out": rows}
    types |= {f"{t}_{s}": "i64" for t in ("branch", "residual", "out", "next") for s in ("row", "column")}
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


_BUILD = {Problem: _build_norm, Gated: _build_gated}

# Bytes of stack a thread may use: LayerNorm's float32 weights beside a row of more than 16384, 64 registers a thread.
# So long a row's NVFP4 takes up to 24 of them, and a gated residual up to 128.
STACK_BUDGET = 288

launch = Launcher("norm", build)


def run(problem, config, *args):
    _RUN[type(problem)](problem, config, *args)


def norm(problem, config, x, residual, weight, bias, out, eps, quantised=None):
    """Normalise the rows of x (of x + residual, which then becomes the residual) into out.

    With a sigmoid gate, `residual` is the gate, and only read. quantised : Quantised, where the problem has a form.
    """
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    programs, more = rows, ()
    if quantised is not None:
        out = out.view(torch.uint8)
        programs, more = _quantised_arguments(problem, rows, x.shape[-1], quantised)
    grid = (triton.cdiv(programs, config.rows), 1, 1)
    strides = row_strides(x) + (row_strides(residual) if residual is not None else (0, 0, 0)) + row_strides(out)
    launch(problem, config, grid, x, residual, weight, bias, out, *strides, rows, inner, x.shape[-1], eps, *more)


def _quantised_arguments(problem, rows: int, hidden: int, given: Quantised) -> tuple[int, tuple]:
    """The rows to cover, padding of block scales included, and the arguments that only quantised forms have."""
    padded, more = rows, [] if not problem.scale else [given.scale]
    if problem.form == "fp8_block":
        more += [given.block_scale, given.block_scale.stride(0), rows]
    elif problem.layout:
        blocks = hidden // (16 if problem.form == "nvfp4" else 32)
        if problem.layout != "linear":
            padded, blocks = layouts.padded(rows, blocks, "128x4")
        more.append(given.block_scale.view(torch.uint8))
        if problem.layout == "both":
            more.append(given.linear_scale.view(torch.uint8))
        more += [blocks, padded]
    if problem.normed:
        more += [given.normed, *row_strides(given.normed)]
    return padded, tuple(more)


def gated(problem, config, branch, residual, weight, alpha, beta, out, eps, center, following=(None, None, 0.0, 0.0)):
    """out = alpha * residual + beta * rmsnorm(branch * (weight + center)).

    following : weight, result, eps and center of the norm of `out` that comes next, where the problem has one.
    """
    next_weight, next_out, next_eps, next_center = following
    next_strides = (0, 0) if next_out is None else next_out.stride()
    tensors = branch, residual, weight, alpha, beta, out, next_weight, next_out
    strides = branch.stride() + residual.stride() + out.stride() + next_strides
    numbers = branch.shape[1], eps, center, next_eps, next_center
    launch(problem, config, (branch.shape[0], 1, 1), *tensors, *strides, *numbers)


_RUN = {Problem: norm, Gated: gated}


def row_strides(x) -> tuple[int, int, int]:
    """Strides of x as [outer, inner, columns]; a 2-D tensor has an inner dimension of 1."""
    outer, *inner, column = x.stride()
    return outer, inner[0] if inner else 0, column


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

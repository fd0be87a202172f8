"""RMSNorm and LayerNorm in Triton: a row stays in registers, so every input is read once. Longer rows: `looped.py`.

Grid: (rows / ROWS), padding of tiled block scales included. Warps: each has a part of every row. Shared memory:
reductions.
Inputs: x [outer, inner, hidden], residual like x, weight [hidden], bias [hidden]; `given` has what quantised results
take: scale [1]. Outputs: out like x, or codes; block_scale and linear_scale in the layouts of
`scale_offset`, normed like x.
Method: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops._device.scales import quantize_blocks, quantize_fp8, scale_offset
from flashinfer.ops.formats import FORMATS
from flashinfer.ops.norm import Quantised
from flashinfer.ops.norm.looped import factor_of, looped_kernel


@triton.jit
def norm_kernel(
    x, residual, weight, bias, out, given, x_strides, residual_strides, out_strides, normed_strides, rows, inner,
    hidden, eps,
    ADD: tl.constexpr, CENTRE: tl.constexpr, GEMMA: tl.constexpr, AFTER: tl.constexpr, FORMAT: tl.constexpr,
    V: tl.constexpr, SCALE: tl.constexpr, LAYOUT: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    hidden = multiple(hidden, UNIT)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    GATE: tl.constexpr = AFTER == "sigmoid_gate"
    begin(PDL)

    # Read first, the latency of weights and scale passes behind that of the rows, and not after the reduction.
    if WEIGHTS_FIRST and not GATE:
        w = tl.load(weight + column, column < hidden, other=0)
        if CENTRE:
            b = tl.load(bias + column, column < hidden, other=0)
        # Loads stay before a barrier; ptxas would put these behind the use of the rows.
        tl.debug_barrier()
    factor = factor_of(given.scale, SCALE, FORMAT != "nvfp4")
    x = places(x, row, inner, column, x_strides, UNIT)
    y = tl.load(x, inside, other=0).to(tl.float32)
    if ADD or GATE:
        residual = places(residual, row, inner, column, residual_strides, UNIT)
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
    if given.normed is not None:
        rounded = y.to(given.normed.dtype.element_ty)
        tl.store(places(given.normed, row, inner, column, normed_strides, UNIT), rounded, inside)
        if FORMAT == "fp8_block":
            y = rounded.to(tl.float32)

    # Before the conversions: behind them ptxas takes 70 instructions more.
    offset = row_offset(row, inner, out_strides.outer, out_strides.inner, UNIT)
    if FORMAT == "":
        out += offset[:, None] + column_offset(column, out_strides.column, UNIT)[None, :]
        tl.store(out, y.to(out.dtype.element_ty), inside)
    elif FORMAT == "nvfp4" or FORMAT == "mxfp4":
        # What the norm alone would have written is quantised.
        y = y.to(x.dtype.element_ty).to(tl.float32)
        codes, factors = quantize_blocks(y, factor, FORMAT, CAPABILITY)
        pair = tl.arange(0, BLOCK // 2)
        out += offset[:, None] + column_offset(pair, out_strides.column, UNIT)[None, :]
        tl.store(out, codes, (row < rows)[:, None] & (pair < hidden // 2)[None, :])
        block = tl.arange(0, BLOCK // V)[None, :]
        # Padding of tiled scales is 0, also where eps is, and a row past the last is 0 / 0.
        factors = tl.where((row < rows)[:, None], factors, 0)
        if LAYOUT == "both":
            at = row[:, None].to(tl.int64) * (hidden // V) + block
            tl.store(given.linear_scale + at, factors, (row < rows)[:, None] & (block < hidden // V))
        TILED: tl.constexpr = "linear" if LAYOUT == "linear" else "128x4"
        at = scale_offset(row[:, None], block, given.pitch, TILED)
        tl.store(given.block_scale + at, factors, (row < given.rows)[:, None] & (block < given.pitch))
    else:
        if FORMAT == "fp8_block":
            codes, factors = quantize_fp8(y, 128, "fp8e4nv", False, CAPABILITY)
            block = tl.arange(0, BLOCK // 128)[None, :]
            at = block.to(tl.int64) * given.pitch + row[:, None]
            tl.store(given.block_scale + at, factors, (row < rows)[:, None] & (block < hidden // 128))
        else:
            codes = to_fp8(y * factor, FORMAT, CAPABILITY)
        out += offset[:, None] + column_offset(column, out_strides.column, UNIT)[None, :]
        tl.store(out, codes, inside)


@triton.jit
def places(x, row, inner, column, strides, UNIT: tl.constexpr):
    """Pointers to columns of rows of x [outer, inner, columns]."""
    offset = row_offset(row, inner, strides.outer, strides.inner, UNIT)
    return x + (offset[:, None] + column_offset(column, strides.column, UNIT)[None, :])


def build(problem, config):
    rows, weights = pointer(problem.dtype, problem.aligned), pointer(problem.weight_dtype, problem.aligned)
    codes = pointer("u8", problem.aligned) if problem.format else rows
    types = {"x": rows, "residual": rows, "weight": weights, "bias": weights, "out": codes}
    # What only some formats have is no parameter of the others.
    blocked = problem.format in ("fp8_block", "nvfp4", "mxfp4")
    kinds = {"scale": "fp32" if problem.scale == "number" else "*fp32" if problem.scale else None}
    kinds["block_scale"] = ("*fp32" if problem.format == "fp8_block" else "*u8") if blocked else None
    kinds["linear_scale"] = "*u8" if problem.layout == "both" else None
    kinds["normed"] = rows if problem.normed else None
    kinds |= dict.fromkeys(("pitch", "rows"), "i32" if blocked else None)
    types |= {f"given.{name}": kind for name, kind in kinds.items()}
    strided = ("x", "residual", "out") + (("normed",) if problem.normed else ())
    types |= {f"{t}_strides.{axis}": "i64" for t in strided for axis in ("outer", "inner", "column")}
    types |= {"rows": "i32", "inner": "i32", "hidden": "i32", "eps": "fp32"}
    constants = ({} if problem.normed else {"normed_strides": None}) | {
        "ADD": problem.kind == "fused_add_rmsnorm",
        "CENTRE": problem.kind == "layernorm",
        "GEMMA": problem.gemma,
        "AFTER": problem.after,
        "FORMAT": problem.format,
        "SCALE": problem.scale,
        "UNIT": unit(problem.dtype, problem.aligned),
        "BLOCK": config.chunk or problem.block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    if config.chunk:
        return Build(looped_kernel, types, constants, num_warps=config.num_warps)
    constants |= {
        "V": FORMATS[problem.format].width if problem.format else 1,
        "LAYOUT": problem.layout,
        "WEIGHTS_FIRST": config.weights_first,
        "ROWS": config.rows,
    }
    return Build(norm_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack that a thread may use: LayerNorm's float32 weights beside a row of more than 16384, 64 registers a
# thread. So long a row's NVFP4 takes up to 24 of them.
STACK_BUDGET = 288

launch = Launcher("norm", build)


def run(problem, config, x, residual, weight, bias, out, eps, quantised=None):
    """Normalise the rows of x (of x + residual, which then becomes the residual) into out.

    With a sigmoid gate, `residual` is the gate, and only read. quantised : Quantised, where the problem has a format.
    """
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    programs, given = rows, ()
    strided = [x, residual, out]
    if quantised is not None:
        out = out.view(torch.uint8)
        programs, given = _quantised_arguments(problem, rows, x.shape[-1], quantised)
        strided += [quantised.normed] if problem.normed else []
    grid = (triton.cdiv(programs, config.rows), 1, 1)
    strides = [n for t in strided for n in ((0, 0, 0) if t is None else row_strides(t))]
    launch(problem, config, grid, x, residual, weight, bias, out, *given, *strides, rows, inner, x.shape[-1], eps)


def _quantised_arguments(problem, rows: int, hidden: int, given: Quantised) -> tuple[int, list]:
    """The rows to cover, padding of block scales included, and the arguments that only quantised results have."""
    padded, blocks, pitch = rows, [], []
    if problem.format == "fp8_block":
        blocks, pitch = [given.block_scale], [given.block_scale.stride(0), rows]
    elif problem.layout:
        count = hidden // FORMATS[problem.format].width
        if problem.layout != "linear":
            padded, count = layouts.padded(rows, count, "128x4")
        tensors = (given.block_scale, given.linear_scale) if problem.layout == "both" else (given.block_scale,)
        blocks, pitch = [x.view(torch.uint8) for x in tensors], [count, padded]
    scale, normed = [given.scale] if problem.scale else [], [given.normed] if problem.normed else []
    return padded, [*scale, *blocks, *normed, *pitch]


def row_strides(x) -> tuple[int, int, int]:
    """Strides of x as [outer, inner, columns]; a 2-D tensor has an inner dimension of 1."""
    outer, *inner, column = x.stride()
    return outer, inner[0] if inner else 0, column


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

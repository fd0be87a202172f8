"""The experts' products in Triton: one kernel for every format, its loads and its epilogue chosen at compile time."""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import from_e2m1, from_fp8, from_ue8m0, to_fp8
from flashinfer.ops._device.scales import (
    block_amax,
    quantize_fp8,
    quantize_mxfp8,
    quantize_nvfp4,
    scale_offset,
    times_blocks,
)
from flashinfer.ops.moe.experts import GATED, PACKED, WIDTH, Finish, Problem, Quantize, Rows, Weights, extents


@triton.jit
def weight_rows(column, n, GATED: tl.constexpr, PAIRED: tl.constexpr, SHUFFLE: tl.constexpr):
    """Where rows of the weights are, for columns of the product.

    Columns of gated weights alternate, factor and gate, so that both of a result are in one tile. Rows alternate in
    groups of PAIRED, or are halves.
    """
    row = column
    if GATED and PAIRED == 0:
        row = (column % 2) * (n // 2) + column // 2
    elif GATED:
        row = column // 2 // PAIRED * (2 * PAIRED) + column % 2 * PAIRED + column // 2 % PAIRED
    if SHUFFLE:
        EIGHTH: tl.constexpr = SHUFFLE // 8
        row = row // SHUFFLE * SHUFFLE + row % EIGHTH * 8 + row % SHUFFLE // EIGHTH
    return row


@triton.jit
def load_factors(
    scale, row, first, live, k, row_stride, block_stride,
    WIDTH: tl.constexpr, TILE_K: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The scale factors of rows' elements `first` to `first + TILE_K`, [rows, TILE_K / WIDTH]."""
    block = first // WIDTH + tl.arange(0, TILE_K // WIDTH)
    inside = live[:, None] & (block * WIDTH < k)[None, :]
    if LAYOUT == "linear":
        at = row.to(tl.int64)[:, None] * row_stride + block.to(tl.int64)[None, :] * block_stride
    elif LAYOUT == "strips":
        EACH: tl.constexpr = 128 // WIDTH
        at = (block // EACH).to(tl.int64)[None, :] * row_stride + row[:, None] * EACH + (block % EACH)[None, :]
    else:
        blocks = (tl.cdiv(k, WIDTH) + 3) // 4 * 4
        at = scale_offset(row[:, None], block[None, :], blocks, LAYOUT)
    return tl.load(scale + at, inside, other=0)


@triton.jit
def operand(
    codes, factors, FORM: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """A tile as an operand of the product, its scale factors inside. FP8: the product takes e4m3."""
    if FP8:
        return codes
    elif FORM == "fp8" or FORM == "fp8_block":
        return from_fp8(codes, "fp8e4nv", CAPABILITY).to(DTYPE)
    elif FORM == "mxfp8":
        return times_blocks(from_fp8(codes, "fp8e4nv", CAPABILITY), from_ue8m0(factors), 32).to(DTYPE)
    elif FORM == "nvfp4":
        return times_blocks(from_e2m1(codes), from_fp8(factors, "fp8e4nv", CAPABILITY), 16).to(DTYPE)
    elif FORM == "mxfp4":
        return times_blocks(from_e2m1(codes), from_ue8m0(factors), 32).to(DTYPE)
    elif FORM == "mxint4":
        return times_blocks(from_int4(codes), factors.to(tl.float32), 32).to(DTYPE)
    else:
        return codes.to(DTYPE)


@triton.jit
def from_int4(code):
    """Bytes of two's complement halves [rows, n] as float32 [rows, 2 n], low halves in even columns."""
    wide = code.to(tl.int32)
    pairs = tl.join(((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8)
    return tl.reshape(pairs, [code.shape[0], code.shape[1] * 2]).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def bounded(x, bound):
    """bound * tanh(x / bound), without the cancellation that 2 * sigmoid - 1 has where x / bound is small.

    tanh(t) = t * (1 - t^2 / 3 + 2 t^4 / 15) up to 0.03 (the next term is below 4e-11), else by the exponential.
    """
    t = x / bound
    square = t * t
    small = x * (1 - square * (1.0 / 3 - square * (2.0 / 15)))
    return tl.where(square < 0.0009, small, bound * (2 * sigmoid(2 * t) - 1))


@triton.jit
def gelu_tanh(x):
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated(factor, gate, alpha, beta, limit, ACT: tl.constexpr, SHAPE: tl.constexpr):
    """act(gate) times the factor."""
    a: tl.constexpr = SHAPE == "a" or SHAPE == "ab" or SHAPE == "al" or SHAPE == "abl"
    b: tl.constexpr = SHAPE == "b" or SHAPE == "ab" or SHAPE == "bl" or SHAPE == "abl"
    c: tl.constexpr = SHAPE == "l" or SHAPE == "al" or SHAPE == "bl" or SHAPE == "abl"
    if c or ACT == "swiglu_step":
        factor = tl.minimum(tl.maximum(factor, -limit), limit)
        if ACT != "swiglu_step":
            gate = tl.minimum(gate, limit)
    if ACT == "situ" or ACT == "situ_gate":
        if ACT == "situ":
            factor = bounded(factor, beta)
        return bounded(gate, alpha) * sigmoid(gate) * factor
    if ACT == "geglu":
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACT == "geglu_tanh":
        gate = gelu_tanh(gate)
    elif a:
        gate *= sigmoid(alpha * gate)
    else:
        gate *= sigmoid(gate)
    if ACT == "swiglu_step":
        gate = tl.minimum(gate, limit)
    if b:
        factor += beta
    return gate * factor


@triton.jit
def plain(y, limit, ACT: tl.constexpr):
    """act(y)."""
    if ACT == "silu":
        return y * sigmoid(y)
    elif ACT == "gelu":
        return 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACT == "relu":
        return tl.maximum(y, 0.0)
    elif ACT == "relu2":
        y = tl.maximum(y, 0.0)
        return y * y
    elif ACT == "clamped_relu2":
        y = bounded(tl.maximum(y, 0.0), limit)
        return y * y
    else:
        return y


@triton.jit
def entry(vector, expert, entries):
    """An element a vector has for each expert, or its only one."""
    return tl.load(vector + tl.where(entries == 1, 0, expert))


@triton.jit
def product_kernel(
    x,
    x_scale,
    w,
    w_scale,
    out,
    tile_expert,
    tile_end,
    tiles,
    row_pair,
    bias,
    scale,
    scale_out,
    alpha,
    beta,
    limit,
    weight,
    n,
    k,
    top_k,
    x_row,
    x_scale_row,
    x_scale_block,
    w_expert,
    w_row,
    w_block,
    w_scale_expert,
    w_scale_row,
    out_row,
    scale_entries,
    scale_out_entries,
    alpha_number,
    beta_number,
    limit_number,
    ROWS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    X_WIDTH: tl.constexpr,
    W_WIDTH: tl.constexpr,
    X_PACK: tl.constexpr,
    W_PACK: tl.constexpr,
    X_LAYOUT: tl.constexpr,
    W_LAYOUT: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    SHAPE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PAIRED: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    FP8: tl.constexpr,
    DTYPE: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    # Tiles of rows go in groups that share strips of weights.
    strips = tl.cdiv(n, TILE_N)
    count = tl.load(tiles)
    program = tl.program_id(0)
    if program >= count * strips:
        return
    group = program // (GROUP * strips)
    within = program % (GROUP * strips)
    size = tl.minimum(count - group * GROUP, GROUP)
    tile = group * GROUP + within % size
    strip = within // size

    expert = tl.load(tile_expert + tile)
    row = tile * TILE_M + tl.arange(0, TILE_M)
    live = row < tl.load(tile_end + tile)
    pair = tl.load(row_pair + row, live, other=0)
    source = pair // top_k if GATHER else row
    column = strip * TILE_N + tl.arange(0, TILE_N)
    used = column < n
    # Columns past the last take the last one's weights: they are read, and their sums are not stored.
    stored = weight_rows(tl.minimum(column, n - 1), n, GATED, PAIRED, SHUFFLE)
    wide_expert = expert.to(tl.int64)

    x_at = tl.arange(0, TILE_K // X_PACK)
    w_at = tl.arange(0, TILE_K // W_PACK)
    x += source.to(tl.int64)[:, None] * x_row + x_at[None, :]
    w += wide_expert * w_expert
    if BLOCK:
        w += stored.to(tl.int64)[:, None] * BLOCK + (w_at // BLOCK * w_block + w_at % BLOCK)[None, :]
    else:
        w += stored.to(tl.int64)[:, None] * w_row + w_at[None, :]
    strip_row = strip * (TILE_N // 2 if GATED else TILE_N)
    SCALED: tl.constexpr = ROWS == "fp8_block" and WEIGHTS == "fp8_block"
    x_factors, w_factors, gate_factors = 0, 0, 0
    if W_WIDTH:
        w_scale += wide_expert * w_scale_expert
    # Scale factors are asked for a step ahead: they are too small for the copies that run ahead of the products.
    if SCALED:
        x_scale += source.to(tl.int64) * x_scale_row
        gate_scale = w_scale + (n // 2 + strip_row) // 128 * w_scale_row
        w_scale += strip_row // 128 * w_scale_row
        x_factors = tl.load(x_scale, live, other=0)
        w_factors = tl.load(w_scale)
        if GATED:
            gate_factors = tl.load(gate_scale)
    else:
        if X_WIDTH:
            x_factors = load_factors(
                x_scale, source, 0, live, k, x_scale_row, x_scale_block, X_WIDTH, TILE_K, X_LAYOUT
            )
        if W_WIDTH:
            w_factors = load_factors(w_scale, stored, 0, used, k, w_scale_row, 1, W_WIDTH, TILE_K, W_LAYOUT)
    acc = tl.zeros([TILE_N, TILE_M] if SWAP else [TILE_M, TILE_N], tl.float32)
    for at in range(0, k, TILE_K):
        a = tl.load(x + at // X_PACK, live[:, None] & (at // X_PACK + x_at < k // X_PACK)[None, :], other=0.0)
        w_first = at // W_PACK
        if BLOCK:
            w_start = w_first // BLOCK * w_block + w_first % BLOCK
        else:
            w_start = w_first
        b = tl.load(w + w_start, (w_first + w_at < k // W_PACK)[None, :], other=0.0)
        x_now, w_now, gate_now = x_factors, w_factors, gate_factors
        ahead = at + TILE_K
        if SCALED:
            # One factor for a row, and for 128 rows of the weights, for each 128 elements. A tile's rows of the weights
            # are of one block of 128, or of two if they are of both halves.
            block = ahead // 128
            more = ahead < k
            x_factors = tl.load(x_scale + block.to(tl.int64) * x_scale_block, live & more, other=0)
            w_factors = tl.load(w_scale + block, more, other=0)
            if GATED:
                gate_factors = tl.load(gate_scale + block, more, other=0)
        else:
            if X_WIDTH:
                x_factors = load_factors(
                    x_scale, source, ahead, live, k, x_scale_row, x_scale_block, X_WIDTH, TILE_K, X_LAYOUT
                )
            if W_WIDTH:
                w_factors = load_factors(w_scale, stored, ahead, used, k, w_scale_row, 1, W_WIDTH, TILE_K, W_LAYOUT)
        a = operand(a, x_now, ROWS, FP8, DTYPE, CAPABILITY)
        b = operand(b, w_now, WEIGHTS, FP8, DTYPE, CAPABILITY)
        if SCALED or FP8:
            # Sums of e4m3 products keep few bits inside Hopper's tensor cores; each 128 go to float32.
            if SWAP:
                part = tl.trans(tl.dot(b, tl.trans(a)))
            else:
                part = tl.dot(a, tl.trans(b))
            if SCALED and GATED:
                part *= x_now[:, None] * tl.where(column % 2 == 0, w_now, gate_now)[None, :]
            elif SCALED:
                part *= (x_now * w_now)[:, None]
            acc += tl.trans(part) if SWAP else part
        elif SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)

    if scale is not None:
        factor = entry(scale, expert, scale_entries)
        acc *= factor
    if weight is not None:
        acc *= tl.load(weight + (pair if WEIGHTED == "pair" else source), live, other=0).to(tl.float32)[:, None]
    if bias is not None:
        acc += tl.load(bias + wide_expert * n + stored).to(tl.float32)[None, :]
    c_value = tl.load(limit + expert) if limit is not None else limit_number
    if GATED:
        up, gate = tl.split(tl.reshape(acc, [TILE_M, TILE_N // 2, 2]))
        a_value = tl.load(alpha + expert) if alpha is not None else alpha_number
        b_value = tl.load(beta + expert) if beta is not None else beta_number
        y = gated(up, gate, a_value, b_value, c_value, ACT, SHAPE)
        result = strip * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
        width = n // 2
    else:
        y = plain(acc, c_value, ACT)
        result = column
        width = n
    if scale_out is not None:
        factor_out = entry(scale_out, expert, scale_out_entries)
        if RATIO:
            factor_out /= factor
        y *= factor_out
    if out.dtype.element_ty == tl.uint8:
        y = to_fp8(y, "fp8e4nv", CAPABILITY)
    out += row.to(tl.int64)[:, None] * out_row + result[None, :]
    tl.store(out, y.to(out.dtype.element_ty), live[:, None] & (result < width)[None, :])


@triton.jit
def quantize_tile(
    x, its, codes, factors, row, live, start, n, x_row, codes_row, factors_row, factors_block,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Columns `start` to `start + COLUMNS` of rows as codes and scale factors. its : [ROWS, 1], their global scales."""
    column = start + tl.arange(0, COLUMNS)
    inside = live[:, None] & (column < n)[None, :]
    y = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], inside, other=0).to(tl.float32)
    if FORM == "fp8":
        WIDTH: tl.constexpr = 1
        made = to_fp8(y * its, "fp8e4nv", CAPABILITY)
    elif FORM == "fp8_block":
        WIDTH: tl.constexpr = 128
        made, factor = quantize_fp8(y, 128, "fp8e4nv", False, CAPABILITY)
    elif FORM == "mxfp8":
        WIDTH: tl.constexpr = 32
        made, factor = quantize_mxfp8(y, CAPABILITY)
    else:
        WIDTH: tl.constexpr = 16
        made, factor = quantize_nvfp4(y, its, CAPABILITY)
    PACK: tl.constexpr = COLUMNS // made.shape[1]
    byte = start // PACK + tl.arange(0, COLUMNS // PACK)
    at = row.to(tl.int64)[:, None] * codes_row + byte[None, :]
    tl.store(codes + at, made, live[:, None] & (byte < n // PACK)[None, :])
    if FORM != "fp8":
        block = start // WIDTH + tl.arange(0, COLUMNS // WIDTH)
        at = row.to(tl.int64)[:, None] * factors_row + block.to(tl.int64)[None, :] * factors_block
        tl.store(factors + at, factor, live[:, None] & (block * WIDTH < n)[None, :])


@triton.jit
def quantize_kernel(
    x,
    codes,
    factors,
    row_scales,
    global_scale,
    tile_expert,
    tile_end,
    rows,
    n,
    x_row,
    codes_row,
    factors_row,
    factors_block,
    entries,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    """A program has columns of its rows; with a scale of each row all columns, which it reads twice."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    live = row < rows
    expert = tl.zeros_like(row)
    if TILE:
        expert = tl.load(tile_expert + row // TILE, live, other=-1)
        live = live & (expert >= 0)
        live = live & (row < tl.load(tile_end + row // TILE, live, other=0))
        expert = tl.where(live, expert, 0)
    if global_scale is not None:
        its = tl.load(global_scale + tl.where(entries == 1, 0, expert))[:, None]
    else:
        its = tl.full([ROWS, 1], 1.0, tl.float32)
    if row_scales is not None:
        most = tl.zeros([ROWS, 1], tl.int32)
        for first in range(0, n, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = live[:, None] & (column < n)[None, :]
            y = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], inside, other=0).to(tl.float32)
            most = tl.maximum(most, tl.max(block_amax(y, 16), 1, keep_dims=True))
        its *= most.to(tl.float32, bitcast=True)
        tl.store(row_scales + row[:, None], its, live[:, None])
        its = tl.where(its == 0, 0.0, tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), its))
        for first in range(0, n, COLUMNS):
            quantize_tile(
                x, its, codes, factors, row, live, first, n, x_row, codes_row, factors_row, factors_block,
                FORM, ROWS, COLUMNS, CAPABILITY,
            )  # fmt: skip
    else:
        quantize_tile(
            x, its, codes, factors, row, live, start, n, x_row, codes_row, factors_row, factors_block,
            FORM, ROWS, COLUMNS, CAPABILITY,
        )  # fmt: skip


_TL = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp8e4nv": tl.float8e4nv}


def _unit(form: str, aligned: bool) -> int:
    """Stored elements in 16 bytes, where strides and lengths are multiples of them."""
    return 16 // {"bf16": 2, "fp16": 2, "fp32": 4}.get(form, 1) if aligned else 1


def _pointer(form: str, compute: str, aligned: bool) -> str:
    dtype = form if form in ("bf16", "fp16", "fp32") else "fp8e4nv" if compute == "fp8e4nv" else "u8"
    return f"*{dtype}:16" if aligned else f"*{dtype}"


def _factor(form: str) -> str:
    return "*fp32" if form == "fp8_block" else "*bf16" if form == "mxint4" else "*u8"


def _build_product(problem, config):
    units = [_unit(form, problem.aligned) for form in (problem.rows, problem.weights)]
    stride = [f"i64:{unit}" if unit > 1 else "i64" for unit in units]
    # Elements of a row: a packed byte holds two.
    packs = [2 if form in PACKED else 1 for form in (problem.rows, problem.weights)]
    most = max(unit * pack for unit, pack in zip(units, packs))
    scaled = problem.rows in WIDTH, problem.weights in WIDTH
    types = {
        "x": _pointer(problem.rows, config.compute, problem.aligned),
        "x_scale": _factor(problem.rows) if scaled[0] else None,
        "w": _pointer(problem.weights, config.compute, problem.aligned),
        "w_scale": _factor(problem.weights) if scaled[1] else None,
        "out": "*u8" if problem.out == "fp8" else f"*{problem.out}:16",
        **dict.fromkeys(("tile_expert", "tile_end", "tiles", "row_pair"), "*i32"),
        "bias": f"*{problem.bias}" if problem.bias else None,
        "scale": "*fp32" if problem.scale else None,
        "scale_out": "*fp32" if problem.scale_out else None,
        **{name: "*fp32" if name[0] in problem.shape else None for name in ("alpha", "beta", "limit")},
        "weight": "*fp32" if problem.weighted else None,
        "n": "i32:32" if problem.aligned else "i32",
        "k": f"i32:{most}" if most > 1 else "i32",
        "top_k": "i32",
        "x_row": stride[0],
        **dict.fromkeys(("x_scale_row", "x_scale_block"), "i64"),
        **dict.fromkeys(("w_expert", "w_row", "w_block"), stride[1]),
        **dict.fromkeys(("w_scale_expert", "w_scale_row"), "i64"),
        "out_row": "i64:16" if problem.aligned else "i64",
        **dict.fromkeys(("scale_entries", "scale_out_entries"), "i32"),
        **dict.fromkeys(("alpha_number", "beta_number", "limit_number"), "fp32"),
    }
    constants = {name: None for name, kind in types.items() if kind is None} | {
        "ROWS": problem.rows,
        "WEIGHTS": problem.weights,
        "X_WIDTH": WIDTH.get(problem.rows, 0),
        "W_WIDTH": WIDTH.get(problem.weights, 0),
        "X_PACK": packs[0],
        "W_PACK": packs[1],
        "X_LAYOUT": problem.row_layout,
        "W_LAYOUT": problem.weight_layout,
        "GATHER": problem.gather,
        "GATED": problem.act in GATED,
        "ACT": problem.act,
        "SHAPE": problem.shape.lower(),
        "WEIGHTED": problem.weighted,
        "PAIRED": problem.paired,
        "SHUFFLE": problem.shuffle,
        "BLOCK": problem.block,
        "RATIO": problem.scale_out == "ratio",
        "TILE_M": problem.tile,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "GROUP": config.group,
        "SWAP": config.swap,
        "FP8": config.compute == "fp8e4nv",
        "DTYPE": _TL[config.compute],
        "CAPABILITY": config.capability,
    }
    types = {name: kind for name, kind in types.items() if kind is not None}
    return Build(product_kernel, types, constants, config.num_warps, config.num_stages)


def _build_quantize(problem, config):
    types = {"x": f"*{problem.dtype}:16" if problem.aligned else f"*{problem.dtype}", "codes": "*u8"}
    types["factors"] = "*fp32" if problem.form == "fp8_block" else "*u8" if problem.form != "fp8" else None
    types["row_scales"] = "*fp32" if problem.row_scale else None
    types["global_scale"] = "*fp32" if problem.scaled else None
    types |= dict.fromkeys(("tile_expert", "tile_end"), "*i32" if problem.tile else None)
    unit = _unit(problem.dtype, problem.aligned)
    types |= {"rows": "i32", "n": f"i32:{unit}" if unit > 1 else "i32", "x_row": f"i64:{unit}" if unit > 1 else "i64"}
    types |= dict.fromkeys(("codes_row", "factors_row", "factors_block"), "i64") | {"entries": "i32"}
    constants = {name: None for name, kind in types.items() if kind is None} | {
        "FORM": problem.form,
        "TILE": problem.tile,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "CAPABILITY": config.capability,
    }
    types = {name: kind for name, kind in types.items() if kind is not None}
    return Build(quantize_kernel, types, constants, config.num_warps)


def build(problem, config):
    return _BUILD[type(problem)](problem, config)


_BUILD = {Problem: _build_product, Quantize: _build_quantize}

# Bytes of stack a thread may use: one value is kept there on sm_120a by Triton 3.9, of bfloat16 rows with MXFP4
# weights.
STACK_BUDGET = 8

launch = Launcher("moe_experts", build)


def run(problem, config, *args):
    _RUN[type(problem)](problem, config, *args)


def product(problem, config, rows: Rows, weights: Weights, finish: Finish, token_map, out):
    """out[r] = finish(rows of r @ weights of r's expert) for the rows r of the map."""
    n, k = extents(problem, weights)
    x, w = (_stored(t.codes, config.compute) for t in (rows, weights))
    w_row, w_block = (0, w.stride(1)) if problem.block else (w.stride(1), 0)
    x_strides = (0, 0)
    if problem.rows in WIDTH:
        x_strides = rows.scale.stride() if problem.row_layout == "linear" else (0, 0)
    w_strides = (0, 0)
    if problem.weights in WIDTH:
        tiled = problem.weight_layout == "128x4"
        w_strides = (weights.scale.stride(0), 0) if tiled else weights.scale.stride()[:2]
    factors = [None if t.scale is None else t.scale if t.scale.element_size() > 1 else t.scale.view(torch.uint8)
               for t in (rows, weights)]  # fmt: skip
    given = {
        "x": x,
        "x_scale": factors[0],
        "w": w,
        "w_scale": factors[1],
        "out": out.view(torch.uint8) if problem.out == "fp8" else out,
        "tile_expert": token_map.tile_expert,
        "tile_end": token_map.tile_end,
        "tiles": token_map.tiles,
        "row_pair": token_map.row_pair,
        "bias": weights.bias,
        "scale": finish.scale,
        "scale_out": finish.scale_out,
        "alpha": finish.alpha,
        "beta": finish.beta,
        "limit": finish.limit,
        "weight": finish.weight,
    }
    tensors = [value for value in given.values() if value is not None]
    numbers = [n, k, rows.top_k, x.stride(0), *x_strides, w.stride(0), w_row, w_block, *w_strides, out.stride(0)]
    numbers += [0 if t is None else t.numel() for t in (finish.scale, finish.scale_out)]
    grid = (token_map.tile_expert.numel() * triton.cdiv(n, config.tile_n), 1, 1)
    launch(problem, config, grid, *tensors, *numbers, *finish.numbers)


def _stored(codes, compute: str):
    """Codes of a byte as the kernel reads them."""
    if codes.element_size() > 1:
        return codes
    return codes.view(torch.float8_e4m3fn if compute == "fp8e4nv" else torch.uint8)


def quantize(problem, config, x, global_scale, token_map, codes, factors, row_scales=None):
    """Rows of x, all or those of the map, as codes and scale factors; with a scale of each row, float32 [rows]."""
    tensors = [x, codes.view(torch.uint8)]
    if factors is not None:
        tensors.append(factors if problem.form == "fp8_block" else factors.view(torch.uint8))
    if problem.row_scale:
        tensors.append(row_scales)
    if problem.scaled:
        tensors.append(global_scale)
    if problem.tile:
        tensors += [token_map.tile_expert, token_map.tile_end]
    rows, n = x.shape
    strides = (0, 0) if factors is None else factors.stride()
    numbers = [rows, n, x.stride(0), codes.stride(0), *strides, global_scale.numel() if problem.scaled else 0]
    grid = (triton.cdiv(rows, config.rows), 1 if problem.row_scale else triton.cdiv(n, config.columns), 1)
    launch(problem, config, grid, *tensors, *numbers)


_RUN = {Problem: product, Quantize: quantize}

IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

"""The experts' products in Triton: one kernel for every format, its loads and its epilogue chosen at compile time.

Computes: out[r] = finish(rows of r @ weights of r's expert), r in the order of the token map.
Grid: tiles of TILE.M rows times strips of TILE.N rows of weights; tiles of rows go in groups that share strips in L2.
Programs past the map's tiles end at once.
Warps: all share a tile. Shared memory: copies run TILE's stages ahead; scale factors are read one step of K ahead.
Inputs: rows.codes [tokens, k], weights.codes [experts, n, k] or [experts, k / block, n, block], their scale factors,
and the token map of `flashinfer/ops/moe/token_map.py`. Outputs: out [map's rows, n or n / 2].
Method: Triton's grouped products; how 4-bit weights are decoded is in `portable_operands.py`.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops.moe.experts import GATED, PACKED, WIDTH, Finish, Rows, Weights, extents
from flashinfer.ops.moe.experts.portable_activations import gated, plain
from flashinfer.ops.moe.experts.portable_operands import (
    halves_of, load_arranged, load_factors, operand, packed_operand, weight_rows,
)  # fmt: skip


@triton.jit
def entry(vector, expert, entries):
    """An element a vector has for each expert, or its only one."""
    return tl.load(vector + tl.where(entries == 1, 0, expert))


@triton.jit
def times(b, a, acc, SWAP: tl.constexpr):
    """acc + a @ b.T, or its transpose where the weights are the first operand."""
    if SWAP:
        return tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def promoted(b, a, b_factor, a_factor, gate_factor, column, acc, SCALED: tl.constexpr, GATE: tl.constexpr,
             SWAP: tl.constexpr):  # fmt: skip
    """acc + a @ b.T of e4m3, with one factor for each row, and for the columns or, with a GATE, for each half.

    Sums of e4m3 products keep few bits inside Hopper's tensor cores; each step's go to float32.
    """
    if SWAP:
        part = tl.trans(tl.dot(b, tl.trans(a)))
    else:
        part = tl.dot(a, tl.trans(b))
    if SCALED and GATE:
        part *= a_factor[:, None] * tl.where(column % 2 == 0, b_factor, gate_factor)[None, :]
    elif SCALED:
        part *= (a_factor * b_factor)[:, None]
    return acc + (tl.trans(part) if SWAP else part)


@triton.jit
def finished(acc, finish, weights, expert, row, live, column, n):
    """What stands behind a product [rows, columns]: factors, bias, activation. `row` : of finish.weight."""
    factor = 1.0
    if finish.scale is not None:
        factor = entry(finish.scale, expert, finish.scale_entries)
        acc *= factor
    if finish.weight is not None:
        acc *= tl.load(finish.weight + row, live, other=0).to(tl.float32)[:, None]
    at = expert.to(tl.int64) * n + column
    if weights.channels is not None:
        acc *= tl.load(weights.channels + at)[None, :]
    if weights.bias is not None:
        acc += tl.load(weights.bias + at).to(tl.float32)[None, :]
    limit = tl.load(finish.limit + expert) if finish.limit is not None else finish.limit_number
    if finish.GATED:
        up, gate = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
        alpha = tl.load(finish.alpha + expert) if finish.alpha is not None else finish.alpha_number
        beta = tl.load(finish.beta + expert) if finish.beta is not None else finish.beta_number
        y = gated(up, gate, alpha, beta, limit, finish.ACT, finish.SHAPE)
    else:
        y = plain(acc, limit, finish.ACT)
    if finish.scale_out is not None:
        factor_out = entry(finish.scale_out, expert, finish.scale_out_entries)
        if finish.RATIO:
            factor_out /= factor
        y *= factor_out
    return y


@triton.jit
def product_kernel(
    rows, weights, places, finish, out, out_row, n, k, top_k,
    GATHER: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    TILE_M: tl.constexpr = TILE.M
    TILE_N: tl.constexpr = TILE.N
    TILE_K: tl.constexpr = TILE.K
    SWAP: tl.constexpr = TILE.SWAP
    GATED: tl.constexpr = finish.GATED
    BLOCK: tl.constexpr = weights.BLOCK
    SCALED: tl.constexpr = rows.FORMAT == "fp8_block" and weights.FORMAT == "fp8_block"
    X_BLOCKS: tl.constexpr = rows.WIDTH > 0 and not SCALED
    W_BLOCKS: tl.constexpr = weights.WIDTH > 0 and not SCALED
    strips = tl.cdiv(n, TILE_N)
    count = tl.load(places.tiles)
    program = tl.program_id(0)
    if program >= count * strips:
        return
    group = program // (TILE.GROUP * strips)
    within = program % (TILE.GROUP * strips)
    size = tl.minimum(count - group * TILE.GROUP, TILE.GROUP)
    tile = group * TILE.GROUP + within % size
    strip = within // size

    expert = tl.load(places.tile_expert + tile)
    row = tile * TILE_M + tl.arange(0, TILE_M)
    live = row < tl.load(places.tile_end + tile)
    pair = tl.load(places.row_pair + row, live, other=0)
    source = pair // top_k if GATHER else row
    column = strip * TILE_N + tl.arange(0, TILE_N)
    used = column < n
    # Columns past the last take the last one's weights: they are read, and their sums are not stored.
    stored = weight_rows(tl.minimum(column, n - 1), n, GATED, weights.PAIRED, weights.SHUFFLE)
    wide_expert = expert.to(tl.int64)

    x_at = tl.arange(0, TILE_K // rows.PACK)
    w_at = tl.arange(0, TILE_K // weights.PACK)
    x = rows.codes + (source.to(tl.int64)[:, None] * rows.row + x_at[None, :])
    w = weights.codes + wide_expert * weights.expert
    if weights.FRAGMENTS:
        arranged = w
    elif BLOCK:
        w += stored.to(tl.int64)[:, None] * BLOCK + (w_at // BLOCK * weights.block + w_at % BLOCK)[None, :]
    else:
        w += stored.to(tl.int64)[:, None] * weights.row + w_at[None, :]
    strip_row = strip * (TILE_N // 2 if GATED else TILE_N)
    x_strides = (rows.scale_row, rows.scale_block)
    w_strides = (weights.scale_row, 1)
    x_scale, w_scale, gate_scale = rows.scale, weights.scale, weights.scale
    x_factors, w_factors, gate_factors = 0, 0, 0
    if weights.WIDTH:
        w_scale += wide_expert * weights.scale_expert
    # Scale factors are asked for a step ahead: they are too small for the copies that run ahead of the products.
    if SCALED:
        x_scale += source.to(tl.int64) * rows.scale_row
        gate_scale = w_scale + (n // 2 + strip_row) // 128 * weights.scale_row
        w_scale += strip_row // 128 * weights.scale_row
        x_factors = tl.load(x_scale, live, other=0)
        w_factors = tl.load(w_scale)
        if GATED:
            gate_factors = tl.load(gate_scale)
    if X_BLOCKS:
        x_factors = load_factors(x_scale, source, 0, live, k, x_strides, rows.WIDTH, TILE_K, rows.LAYOUT)
    if W_BLOCKS:
        w_factors = load_factors(w_scale, stored, 0, used, k, w_strides, weights.WIDTH, TILE_K, weights.LAYOUT)
    acc = tl.zeros([TILE_N, TILE_M] if SWAP else [TILE_M, TILE_N], tl.float32)
    for at in range(0, k, TILE_K):
        x_first = at // rows.PACK
        a = tl.load(x + x_first, live[:, None] & (x_first + x_at < k // rows.PACK)[None, :], other=0.0)
        w_first = at // weights.PACK
        if BLOCK:
            w_start = w_first // BLOCK * weights.block + w_first % BLOCK
        else:
            w_start = w_first
        if weights.FRAGMENTS:
            b = load_arranged(arranged, stored, w_first + w_at, k)
        else:
            b = tl.load(w + w_start, (w_first + w_at < k // weights.PACK)[None, :], other=0.0)
        x_now, w_now, gate_now = x_factors, w_factors, gate_factors
        ahead = at + TILE_K
        if SCALED:
            # One factor for a row, and for 128 rows of the weights, for each 128 elements. A tile's rows of the weights
            # are of one block of 128, or of two if they are of both halves.
            block = ahead // 128
            more = ahead < k
            x_factors = tl.load(x_scale + block.to(tl.int64) * rows.scale_block, live & more, other=0)
            w_factors = tl.load(w_scale + block, more, other=0)
            if GATED:
                gate_factors = tl.load(gate_scale + block, more, other=0)
        if X_BLOCKS:
            x_factors = load_factors(x_scale, source, ahead, live, k, x_strides, rows.WIDTH, TILE_K, rows.LAYOUT)
        if W_BLOCKS:
            w_factors = load_factors(w_scale, stored, ahead, used, k, w_strides, weights.WIDTH, TILE_K, weights.LAYOUT)
        if weights.PACK == 2:
            a, a_odd = halves_of(a, x_now, rows.FORMAT, rows.WIDTH, rows.PACK, DTYPE, CAPABILITY)
            b, b_odd = packed_operand(b, w_now, weights.FORMAT, weights.WIDTH, DTYPE, CAPABILITY)
            acc = times(b, a, acc, SWAP)
            acc = times(b_odd, a_odd, acc, SWAP)
        else:
            a = operand(a, x_now, rows.FORMAT, FP8, DTYPE, CAPABILITY)
            b = operand(b, w_now, weights.FORMAT, FP8, DTYPE, CAPABILITY)
            if SCALED or FP8:
                acc = promoted(b, a, w_now, x_now, gate_now, column, acc, SCALED, GATED, SWAP)
            else:
                acc = times(b, a, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)

    y = finished(acc, finish, weights, expert, pair if finish.WEIGHTED == "pair" else source, live, stored, n)
    if GATED:
        result = strip * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
        width = n // 2
    else:
        result = column
        width = n
    if out.dtype.element_ty == tl.uint8:
        y = to_fp8(y, "fp8e4nv", CAPABILITY)
    out += row.to(tl.int64)[:, None] * out_row + result[None, :]
    tl.store(out, y.to(out.dtype.element_ty), live[:, None] & (result < width)[None, :])


_TL = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp8e4nv": tl.float8e4nv}


def _unit(encoding: str, aligned: bool) -> int:
    """Stored elements in 16 bytes, where strides and lengths are multiples of them."""
    return 16 // {"bf16": 2, "fp16": 2, "fp32": 4}.get(encoding, 1) if aligned else 1


def _pointer(encoding: str, compute: str, aligned: bool) -> str:
    dtype = encoding if encoding in ("bf16", "fp16", "fp32") else "fp8e4nv" if compute == "fp8e4nv" else "u8"
    return f"*{dtype}:16" if aligned else f"*{dtype}"


def _factor(encoding: str) -> str | None:
    if encoding not in WIDTH:
        return None
    return "*fp32" if encoding == "fp8_block" else "*bf16" if encoding in ("mxint4", "int4") else "*u8"


def build(p, c) -> Build:
    units = [_unit(encoding, p.aligned) for encoding in (p.rows, p.weights)]
    x_stride, w_stride = (f"i64:{unit}" if unit > 1 else "i64" for unit in units)
    # Elements of a row: a packed byte holds two.
    packs = [2 if encoding in PACKED else 1 for encoding in (p.rows, p.weights)]
    most = max(unit * pack for unit, pack in zip(units, packs))
    types = {
        "rows.codes": _pointer(p.rows, c.compute, p.aligned),
        "rows.scale": _factor(p.rows),
        "rows.row": x_stride,
        **dict.fromkeys(("rows.scale_row", "rows.scale_block"), "i64"),
        "weights.codes": _pointer(p.weights, c.compute, p.aligned),
        "weights.scale": _factor(p.weights),
        "weights.bias": f"*{p.bias}" if p.bias else None,
        "weights.channels": "*fp32" if p.channels else None,
        **dict.fromkeys(("weights.expert", "weights.row", "weights.block"), w_stride),
        **dict.fromkeys(("weights.scale_expert", "weights.scale_row"), "i64"),
        **{f"places.{name}": "*i32" for name in ("tile_expert", "tile_end", "tiles", "row_pair")},
        "finish.scale": "*fp32" if p.scale else None,
        "finish.scale_out": "*fp32" if p.scale_out else None,
        **{f"finish.{name}": "*fp32" if name[0] in p.shape else None for name in ("alpha", "beta", "limit")},
        "finish.weight": "*fp32" if p.weighted else None,
        **dict.fromkeys(("finish.scale_entries", "finish.scale_out_entries"), "i32"),
        **dict.fromkeys(("finish.alpha_number", "finish.beta_number", "finish.limit_number"), "fp32"),
        "out": "*u8" if p.out == "fp8" else f"*{p.out}:16",
        "out_row": "i64:16" if p.aligned else "i64",
        "n": "i32:32" if p.aligned else "i32",
        "k": f"i32:{most}" if most > 1 else "i32",
        "top_k": "i32",
    }
    constants = {name: None for name, kind in types.items() if kind is None} | {
        **_format("rows", p.rows, p.row_layout),
        **_format("weights", p.weights, p.weight_layout),
        "weights.PAIRED": p.paired,
        "weights.SHUFFLE": p.shuffle,
        "weights.BLOCK": p.block,
        "weights.FRAGMENTS": p.fragments,
        "finish.GATED": p.act in GATED,
        "finish.ACT": p.act,
        "finish.SHAPE": p.shape.lower(),
        "finish.WEIGHTED": p.weighted,
        "finish.RATIO": p.scale_out == "ratio",
        "GATHER": p.gather,
        "TILE.M": p.tile,
        "TILE.N": c.tile_n,
        "TILE.K": c.tile_k,
        "TILE.GROUP": c.group,
        "TILE.SWAP": c.swap,
        "FP8": c.compute == "fp8e4nv",
        "DTYPE": _TL[c.compute],
        "CAPABILITY": c.capability,
    }
    types = {name: kind for name, kind in types.items() if kind is not None}
    return Build(product_kernel, types, constants, c.num_warps, c.num_stages)


def _format(operand: str, encoding: str, layout: str) -> dict:
    made = {"FORMAT": encoding, "WIDTH": WIDTH.get(encoding, 0), "PACK": 2 if encoding in PACKED else 1}
    return {f"{operand}.{name}": value for name, value in (made | {"LAYOUT": layout}).items()}


# Bytes of stack a thread may use, of bfloat16 rows with MXFP4 weights by Triton 3.9: one value on sm_120a, and three on
# sm_90a where the weights are arranged as fragments and a tile has 16 rows.
STACK_BUDGET = 24

launch = Launcher("moe_experts", build)


def run(p, c, rows: Rows, weights: Weights, finish: Finish, token_map, out) -> None:
    """out[r] = finish(rows of r @ weights of r's expert) for the rows r of the map."""
    n, k = extents(weights.codes, p.weights, p.block)
    x, w = (_stored(t.codes, c.compute) for t in (rows, weights))
    x_strides = rows.scale.stride() if p.rows in WIDTH and p.row_layout == "linear" else (0, 0)
    w_strides = (0, 0)
    if p.weights in WIDTH:
        w_strides = weights.scale.stride()[:2] if p.weight_layout != "128x4" else (weights.scale.stride(0), 0)
    # In the order of `build`'s types; what is None has no parameter.
    arguments = {
        "rows.codes": x,
        "rows.scale": _factors(rows.scale),
        "rows.row": x.stride(0),
        "rows.scale_row": x_strides[0],
        "rows.scale_block": x_strides[1],
        "weights.codes": w,
        "weights.scale": _factors(weights.scale),
        "weights.bias": weights.bias,
        "weights.channels": weights.channels,
        "weights.expert": w.stride(0),
        "weights.row": 0 if p.block else w.stride(1),
        "weights.block": w.stride(1) if p.block else 0,
        "weights.scale_expert": w_strides[0],
        "weights.scale_row": w_strides[1],
        "places.tile_expert": token_map.tile_expert,
        "places.tile_end": token_map.tile_end,
        "places.tiles": token_map.tiles,
        "places.row_pair": token_map.row_pair,
        "finish.scale": finish.scale,
        "finish.scale_out": finish.scale_out,
        "finish.alpha": finish.alpha,
        "finish.beta": finish.beta,
        "finish.limit": finish.limit,
        "finish.weight": finish.weight,
        "finish.scale_entries": 0 if finish.scale is None else finish.scale.numel(),
        "finish.scale_out_entries": 0 if finish.scale_out is None else finish.scale_out.numel(),
        "finish.alpha_number": finish.numbers[0],
        "finish.beta_number": finish.numbers[1],
        "finish.limit_number": finish.numbers[2],
        "out": out.view(torch.uint8) if p.out == "fp8" else out,
        "out_row": out.stride(0),
        "n": n,
        "k": k,
        "top_k": rows.top_k,
    }
    grid = (token_map.tile_expert.numel() * triton.cdiv(n, c.tile_n), 1, 1)
    launch(p, c, grid, *(value for value in arguments.values() if value is not None))


def _stored(codes, compute: str):
    """Codes of a byte as the kernel reads them."""
    if codes.element_size() > 1:
        return codes
    return codes.view(torch.float8_e4m3fn if compute == "fp8e4nv" else torch.uint8)


def _factors(scale):
    """Scale factors as the kernel reads them: bytes, or what is wider."""
    return scale if scale is None or scale.element_size() > 1 else scale.view(torch.uint8)


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

"""The experts' GEMM in Triton: one kernel for every format; loads and epilogue are chosen at compile time.

Computes: out[r] = finish(rows of r @ weights of r's expert), r in the order of the token map.
Grid: tiles of TILE.M rows times strips of TILE.N rows of weights; groups of TILE.GROUP tiles use a strip while it is in
L2. Programs past the map's last tile end at once.
Warps: all share a tile. Shared memory: operand tiles of Triton's software pipeline; scale factors are loaded one step
of K ahead.
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
    even_odd_operands, load_arranged, load_factors, operand, packed_operand, weight_rows,
)  # fmt: skip


@triton.jit
def entry(vector, expert, entries):
    """The expert's element of a vector, or the only element of a vector that has one."""
    return tl.load(vector + tl.where(entries == 1, 0, expert))


@triton.jit
def add_product(b, a, acc, SWAP: tl.constexpr):
    """acc + a @ b.T; with SWAP the weights b are the first operand, and acc is transposed."""
    if SWAP:
        return tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def promoted_product(b, a, b_factor, a_factor, gate_factor, column, acc, SCALED: tl.constexpr, GATE: tl.constexpr,
             SWAP: tl.constexpr):  # fmt: skip
    """acc + factors * (a @ b.T) of e4m3: a_factor for each row, b_factor for all columns, or with GATE b_factor for
    even and gate_factor for odd columns.

    Hopper's tensor cores accumulate e4m3 products with about 14 bits, so each step's sum is added to a float32
    accumulator.
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
def epilogue(acc, finish, weights, expert, row, pair, row_ok, column, logical, n):
    """The epilogue of a product [rows, columns]: factors, bias, activation. `row` indexes finish.weight, `column` the
    stored rows of the weights, `logical` the columns of the result before the activation."""
    factor = 1.0
    if finish.scale is not None:
        factor = entry(finish.scale, expert, finish.scale_entries)
        acc *= factor
    if finish.weight is not None:
        acc *= tl.load(finish.weight + row, row_ok, other=0).to(tl.float32)[:, None]
    at = expert.to(tl.int64) * n + column
    if weights.channels is not None:
        acc *= tl.load(weights.channels + at)[None, :]
    if weights.bias is not None:
        acc += tl.load(weights.bias + at).to(tl.float32)[None, :]
    if finish.delta is not None:
        half = logical // 2 + logical % 2 * (n // 2) if finish.GATED else logical
        at_delta = finish.delta + pair.to(tl.int64)[:, None] * n + half[None, :]
        acc += tl.load(at_delta, row_ok[:, None] & (logical < n)[None, :], other=0).to(tl.float32)
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
    """One tile of out. rows, weights and finish are the records of the room, `places` are the token map's tensors."""
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
    row_ok = row < tl.load(places.tile_end + tile)
    pair = tl.load(places.row_pair + row, row_ok, other=0)
    source = pair // top_k if GATHER else row
    column = strip * TILE_N + tl.arange(0, TILE_N)
    col_ok = column < n
    # Columns past the last load the last column's weights; their results are not stored.
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
    # Scale factors are loaded one step ahead: cp.async copies at least 4 bytes, so Triton does not pipeline them.
    if SCALED:
        x_scale += source.to(tl.int64) * rows.scale_row
        gate_scale = w_scale + (n // 2 + strip_row) // 128 * weights.scale_row
        w_scale += strip_row // 128 * weights.scale_row
        x_factors = tl.load(x_scale, row_ok, other=0)
        w_factors = tl.load(w_scale)
        if GATED:
            gate_factors = tl.load(gate_scale)
    if X_BLOCKS:
        x_factors = load_factors(x_scale, source, 0, row_ok, k, x_strides, rows.WIDTH, TILE_K, rows.LAYOUT)
    if W_BLOCKS:
        w_factors = load_factors(w_scale, stored, 0, col_ok, k, w_strides, weights.WIDTH, TILE_K, weights.LAYOUT)
    acc = tl.zeros([TILE_N, TILE_M] if SWAP else [TILE_M, TILE_N], tl.float32)
    for at in range(0, k, TILE_K):
        x_first = at // rows.PACK
        a = tl.load(x + x_first, row_ok[:, None] & (x_first + x_at < k // rows.PACK)[None, :], other=0.0)
        w_first = at // weights.PACK
        if BLOCK:
            w_start = w_first // BLOCK * weights.block + w_first % BLOCK
        else:
            w_start = w_first
        if weights.FRAGMENTS:
            b = load_arranged(arranged, stored, w_first + w_at, k)
        else:
            b = tl.load(w + w_start, (w_first + w_at < k // weights.PACK)[None, :], other=0.0)
        x_current, w_current, gate_current = x_factors, w_factors, gate_factors
        ahead = at + TILE_K
        if SCALED:
            # For each 128 elements of K one factor for a row, and one for 128 rows of the weights. A tile's rows of the
            # weights lie in one block of 128, or in two where they are of the factor and of the gate.
            block = ahead // 128
            more = ahead < k
            x_factors = tl.load(x_scale + block.to(tl.int64) * rows.scale_block, row_ok & more, other=0)
            w_factors = tl.load(w_scale + block, more, other=0)
            if GATED:
                gate_factors = tl.load(gate_scale + block, more, other=0)
        if X_BLOCKS:
            x_factors = load_factors(x_scale, source, ahead, row_ok, k, x_strides, rows.WIDTH, TILE_K, rows.LAYOUT)
        if W_BLOCKS:
            w_factors = load_factors(
                w_scale, stored, ahead, col_ok, k, w_strides, weights.WIDTH, TILE_K, weights.LAYOUT
            )  # fmt: skip
        if weights.PACK == 2:
            a, a_odd = even_odd_operands(a, x_current, rows.FORMAT, rows.WIDTH, rows.PACK, DTYPE, CAPABILITY)
            b_factors = tl.full(w_current.shape, 1, tl.float32) if weights.WIDTH == TILE_K else w_current
            b, b_odd = packed_operand(b, b_factors, weights.FORMAT, weights.WIDTH, DTYPE, CAPABILITY)
            if weights.WIDTH == TILE_K:
                # One factor for a row of the tile: the codes are multiplied exactly, and their sum by the factor.
                part = add_product(b, a, tl.zeros_like(acc), SWAP)
                part = add_product(b_odd, a_odd, part, SWAP)
                factor = tl.reshape(w_current, [TILE_N]).to(tl.float32)
                acc += part * (factor[:, None] if SWAP else factor[None, :])
            else:
                acc = add_product(b, a, acc, SWAP)
                acc = add_product(b_odd, a_odd, acc, SWAP)
        else:
            a = operand(a, x_current, rows.FORMAT, FP8, DTYPE, CAPABILITY)
            b = operand(b, w_current, weights.FORMAT, FP8, DTYPE, CAPABILITY)
            if SCALED or FP8:
                acc = promoted_product(b, a, w_current, x_current, gate_current, column, acc, SCALED, GATED, SWAP)
            else:
                acc = add_product(b, a, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)

    weighted = pair if finish.WEIGHTED == "pair" else source
    y = epilogue(acc, finish, weights, expert, weighted, pair, row_ok, stored, column, n)
    if GATED:
        result = strip * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
        width = n // 2
    else:
        result = column
        width = n
    if out.dtype.element_ty == tl.uint8:
        y = to_fp8(y, "fp8e4nv", CAPABILITY)
    out += row.to(tl.int64)[:, None] * out_row + result[None, :]
    tl.store(out, y.to(out.dtype.element_ty), row_ok[:, None] & (result < width)[None, :])


_TL = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp8e4nv": tl.float8e4nv}


def _unit(encoding: str, aligned: bool) -> int:
    """Stored elements in 16 bytes if strides and lengths are multiples of them, else 1."""
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
    # k counts elements, and a packed byte holds two.
    packs = [2 if encoding in PACKED else 1 for encoding in (p.rows, p.weights)]
    largest = max(unit * pack for unit, pack in zip(units, packs))
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
        "finish.delta": f"*{p.delta}" if p.delta else None,
        **dict.fromkeys(("finish.scale_entries", "finish.scale_out_entries"), "i32"),
        **dict.fromkeys(("finish.alpha_number", "finish.beta_number", "finish.limit_number"), "fp32"),
        "out": "*u8" if p.out == "fp8" else f"*{p.out}:16",
        "out_row": "i64:16" if p.aligned else "i64",
        "n": "i32:32" if p.aligned else "i32",
        "k": f"i32:{largest}" if largest > 1 else "i32",
        "top_k": "i32",
    }
    constants = {
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
    return Build(product_kernel, types, constants, c.num_warps, c.num_stages)


def _format(operand: str, encoding: str, layout: str) -> dict:
    fields = {"FORMAT": encoding, "WIDTH": WIDTH.get(encoding, 0), "PACK": 2 if encoding in PACKED else 1}
    return {f"{operand}.{name}": value for name, value in (fields | {"LAYOUT": layout}).items()}


# Bytes of stack a thread may use. With bfloat16 rows and MXFP4 weights Triton 3.9 spills one value on sm_120a, and
# three on sm_90a for arranged weights and tiles of 16 rows.
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
    # In the order of `build`'s types. The kernel is compiled without the parameters that are None.
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
        "finish.delta": finish.delta,
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
    """One-byte codes in the dtype in which the kernel reads them."""
    if codes.element_size() > 1:
        return codes
    return codes.view(torch.float8_e4m3fn if compute == "fp8e4nv" else torch.uint8)


def _factors(scale):
    """One-byte scale factors as uint8; wider ones unchanged."""
    return scale if scale is None or scale.element_size() > 1 else scale.view(torch.uint8)


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

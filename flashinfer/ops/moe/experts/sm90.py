"""The experts' GEMM on Hopper, in Gluon: persistent, tiles of 128 rows of one expert, operands loaded by TMA.

TMA copies boxes of consecutive rows, so before the first GEMM gather_kernel copies rows into the order of the token
map. A tile has 256 columns of weights. Of gated weights these are 128 columns of the factor and the same 128 of the
gate, in one warpgroup's registers, so the activation is in the epilogue.

Grid: product_sm90_kernel any number of persistent blocks, which loop over the token map's tiles; gather_kernel
(rows / ROWS, blocks of words). Warps: two consumer warpgroups of 64 rows, one producer warp, and one scale warp for
block scales. Shared memory: the ring of STAGES tiles, factors, and a staging buffer for 16-bit output.
Inputs: rows [row of the token map, k] and weights [expert, n, k] by their maps, scale factors, and tiles of the token
map. Outputs: out [row of the token map, n, or n / 2 if GATED].
Method: that of `flashinfer/ops/gemm/dense/sm90_kernel.py`, over a token map.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashinfer._core.gluon_compat import gl, gluon, tensordesc, tma_load
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, halves, make_ring, sum_products
from flashinfer.ops._device.sm90.scales import Scales, load_factors, make_factors, rows_of, sum_wide_blocks
from flashinfer.ops._device.sm90.store import make_staging, write_tile
from flashinfer.ops._device.sm90.walk import raster
from flashinfer.ops.moe.experts import GATED, Finish, Rows, Weights, extents

# Columns of weights in one TMA box, and columns of a gated result in a tile.
_HALF = gl.constexpr(128)


@triton.jit
def gather_kernel(
    x, gathered_rows, tile_expert, tile_end, row_pair, words, top_k, x_row,
    TILE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy rows of tokens, as words of 4 bytes, into the order of the token map. Padding is not written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) * ROWS // TILE
    if tl.load(tile_expert + tile) < 0:
        return
    live = row < tl.load(tile_end + tile)
    source = tl.load(row_pair + row, live, other=0) // top_k
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = live[:, None] & (word < words)[None, :]
    found = tl.load(x + source.to(tl.int64)[:, None] * x_row + word[None, :], inside)
    tl.store(gathered_rows + row.to(tl.int64)[:, None] * words + word[None, :], found, inside)


@gluon.jit
def _produce(a_map, b_map, tile_expert, sizes, ring: Ring, GATED: gl.constexpr):
    """Producer warp: copies the operands of each tile."""
    tiles, tiles_n, n, steps = sizes
    settings = ring.settings
    BYTES: gl.constexpr = ring.a.dtype.primitive_bitwidth // 8
    TILE_COLUMNS: gl.constexpr = _HALF if GATED else settings.BLOCK_N
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        expert = gl.load(tile_expert + tile)
        left = tile_n * TILE_COLUMNS
        right = left + (n // 2 if GATED else _HALF)
        row = tile * (2 * ROWS)
        for block in range(0, steps):
            k = block * settings.BLOCK_K
            stage, full = ring.channel.expect(step, (2 * ROWS + settings.BLOCK_N) * settings.BLOCK_K * BYTES)
            tma_load(a_map, [row, k], full, ring.a.index(stage * 2))
            tma_load(a_map, [row + ROWS, k], full, ring.a.index(stage * 2 + 1))
            if settings.B_PARTS == 2:
                tma_load(b_map, [expert, left, k], full, ring.b.index(stage * 2))
                tma_load(b_map, [expert, right, k], full, ring.b.index(stage * 2 + 1))
            else:
                b = ring.b.index(stage)
                tma_load(b_map, [expert, left, k], full, b.slice(0, _HALF, dim=0))
                tma_load(b_map, [expert, right, k], full, b.slice(_HALF, _HALF, dim=0))
            step += 1


@gluon.jit
def _load_scales(
    x_scale, w_scale, token_map, sizes, strides, top_k, ring: Ring, factors, GATED: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Scale warp: loads the factors of each block of K of each tile."""
    tiles, tiles_n, n, steps = sizes
    tile_expert, tile_end, row_pair = token_map
    x_row, x_block, w_expert, w_row, w_block = strides
    settings = ring.settings
    TILE_COLUMNS: gl.constexpr = _HALF if GATED else settings.BLOCK_N
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        expert = gl.load(tile_expert + tile)
        column = tile_n * TILE_COLUMNS
        rows = rows_of(tile * (2 * ROWS), settings)
        live = rows < gl.load(tile_end + tile)
        source = rows
        if GATHER:
            source = gl.load(row_pair + rows, mask=live, other=0) // top_k
        a = x_scale + source.to(gl.int64) * x_row
        b = w_scale + expert.to(gl.int64) * w_expert + (column // 128).to(gl.int64) * w_row
        half_stride = w_row * (n // 256) if GATED else w_row
        right_ok = (column + 128 < n) | GATED
        scales = Scales(a, b, live, right_ok, x_block, w_block, half_stride)
        step = load_factors(ring, factors, scales, step, 0, steps, steps)


@gluon.jit
def _gated(factor, gate, scale):
    """SwiGLU of factor * scale and gate * scale."""
    gate *= scale
    return factor * scale * (gate / (1 + gl.exp(-gate)))


@gluon.jit
def _consume(
    WG: gl.constexpr, tensors, token_map, sizes, numbers, ring: Ring, factors, staging, GATED: gl.constexpr
):  # fmt: skip
    """Consumer warpgroup WG: multiplies and writes 64 rows of each tile."""
    out, scale, scale_out = tensors
    tiles, tiles_n, n, steps = sizes
    tile_expert, tile_end, row_pair = token_map
    out_row, scale_entries, scale_out_entries = numbers
    settings = ring.settings
    FP8: gl.constexpr = settings.B_PARTS == 2
    WIDTH: gl.constexpr = _HALF if FP8 else 2 * _HALF
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32 if FP8 else 16])
    stage = staging.index(WG)
    if FP8:
        zeros = gl.zeros([ROWS, _HALF], gl.float32, LAYOUT)
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        if FP8:
            left = gl.zeros([ROWS, _HALF], gl.float32, LAYOUT)
            right = gl.zeros([ROWS, _HALF], gl.float32, LAYOUT)
            left, right, step = sum_wide_blocks(WG, ring, factors, left, right, zeros, step, steps)
        else:
            acc = gl.zeros([ROWS, 2 * _HALF], gl.float32, LAYOUT)
            acc, step = sum_products(WG, ring, acc, step, 0, steps)
            left, right = halves(acc)
        # The tile's coordinates are computed again here: they would take registers during the loop over K.
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        end = gl.load(tile_end + tile)
        row = tile * (2 * ROWS) + WG * ROWS
        factor = 1.0
        factor_out = 1.0
        if scale is not None:
            expert = gl.load(tile_expert + tile)
            factor *= gl.load(scale + gl.where(scale_entries == 1, 0, expert))
        if scale_out is not None:
            expert = gl.load(tile_expert + tile)
            factor_out *= gl.load(scale_out + gl.where(scale_out_entries == 1, 0, expert))
        if GATED:
            y = _gated(left, right, factor)
            write_tile(y, factor_out, stage, out, out, row, tile_n * _HALF, end, n // 2, out_row, False)
        else:
            factor *= factor_out
            column = tile_n * settings.BLOCK_N
            write_tile(left, factor, stage, out, out, row, column, end, n, out_row, False)
            write_tile(right, factor, stage, out, out, row, column + _HALF, end, n, out_row, False)


@gluon.jit
def product_sm90_kernel(
    a_map, b_map, out, x_scale, w_scale, scale, scale_out, tile_expert, tile_end, tiles, row_pair, n, k, top_k,
    x_scale_row, x_scale_block, w_scale_expert, w_scale_row, w_scale_block, out_row, scale_entries, scale_out_entries,
    GATED: gl.constexpr, GATHER: gl.constexpr, SCALED: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_map is of [row, k], rows in the order of the token map; b_map of [expert, n, k]."""
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    FP8: gl.constexpr = DTYPE.primitive_bitwidth == 8
    settings = Settings(
        BLOCK_N=256, BLOCK_K=BLOCK_K, STAGES=STAGES, A_PARTS=2, B_PARTS=2 if FP8 else 1, BOX=ROWS, GROUP=GROUP,
        B_MAJOR="k", SPLIT=False, SCALES=0, BIAS=False, UNROLL=1,
    )  # fmt: skip
    ring = make_ring(DTYPE, settings, 2 if SCALED else 1)
    factors = make_factors(settings)
    if FP8 and not SCALED:
        # FP8 without block scales is promoted with factors of 1.
        ones = gl.full([2 * ROWS], 1.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
        for i in gl.static_range(2 * STAGES):
            factors.index(i).store(ones)
    staging = make_staging(OUT, 64)
    GATED_ARG: gl.constexpr = gl.constexpr(GATED)
    GATHER_ARG: gl.constexpr = gl.constexpr(GATHER)
    tiles_n = gl.cdiv(n // 2, _HALF) if GATED else gl.cdiv(n, 2 * _HALF)
    sizes = (gl.load(tiles), tiles_n, n, gl.cdiv(k, BLOCK_K))
    tensors = (out, scale, scale_out)
    token_map = (tile_expert, tile_end, row_pair)
    numbers = (out_row, scale_entries, scale_out_entries)
    if SCALED:
        strides = (x_scale_row, x_scale_block, w_scale_expert, w_scale_row, w_scale_block)
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, token_map, sizes, numbers, ring, factors, staging, GATED_ARG)),
                (_consume, (gl.constexpr(1), tensors, token_map, sizes, numbers, ring, factors, staging, GATED_ARG)),
                (_produce, (a_map, b_map, tile_expert, sizes, ring, GATED_ARG)),
                (_load_scales, (x_scale, w_scale, token_map, sizes, strides, top_k, ring, factors, GATED_ARG,
                GATHER_ARG)),
            ],
            [4, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, token_map, sizes, numbers, ring, factors, staging, GATED_ARG)),
                (_consume, (gl.constexpr(1), tensors, token_map, sizes, numbers, ring, factors, staging, GATED_ARG)),
                (_produce, (a_map, b_map, tile_expert, sizes, ring, GATED_ARG)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


_DTYPES = {"fp8": "fp8e4nv", "fp8_block": "fp8e4nv"}


def _boxes(c):
    """The TMA boxes of rows and of weights."""
    return (64, c.block_k), (1, 128, c.block_k)


def _build(p, c) -> Build:
    dtype = _DTYPES.get(p.rows, p.rows)
    a_box, b_box = _boxes(c)
    scaled = p.rows == "fp8_block"
    types = dict(
        a_map=tensordesc(dtype, a_box), b_map=tensordesc(dtype, b_box),
        out=f"*{_DTYPES.get(p.out, p.out)}:16", x_scale="*fp32" if scaled else None,
        w_scale="*fp32" if scaled else None, scale="*fp32" if p.scale else None,
        scale_out="*fp32" if p.scale_out else None, tile_expert="*i32", tile_end="*i32", tiles="*i32", row_pair="*i32",
        n="i32:32", k="i32:8", top_k="i32", x_scale_row="i64", x_scale_block="i64", w_scale_expert="i64",
        w_scale_row="i64", w_scale_block="i64", out_row="i64:16", scale_entries="i32", scale_out_entries="i32",
    )  # fmt: skip
    constants = dict(
        GATED=p.act in GATED, GATHER=p.gather, SCALED=scaled, BLOCK_K=c.block_k, STAGES=c.stages, GROUP=c.group,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers,
    )  # fmt: skip
    return Build(product_sm90_kernel, types, constants, num_warps=4)


def _build_gather(p, c) -> Build:
    types = dict(x="*i32:16", gathered_rows="*i32:16", **dict.fromkeys(("tile_expert", "tile_end", "row_pair"), "*i32"),
                 words="i32:4", top_k="i32", x_row="i64:4")  # fmt: skip
    return Build(gather_kernel, types, dict(TILE=p.tile, ROWS=c.gather_rows, WORDS=c.gather_words), num_warps=8)


product_sm90 = Launcher("moe_product_sm90", _build)
gather = Launcher("moe_gather", _build_gather)


def kernels(p, c):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield product_sm90, p, c
    if p.gather:
        yield gather, p, c


def run(p, c, rows: Rows, weights: Weights, finish: Finish, token_map, out) -> None:
    n, k = extents(weights.codes, p.weights, p.block)
    x = rows.codes
    if p.gather:
        x = gathered(p, c, rows, token_map)
    a_box, b_box = _boxes(c)
    tensors = [out, *((rows.scale, weights.scale) if p.rows == "fp8_block" else ())]
    tensors += [t for t in (finish.scale, finish.scale_out) if t is not None]
    tensors += [token_map.tile_expert, token_map.tile_end, token_map.tiles, token_map.row_pair]
    strides = (*rows.scale.stride(), *weights.scale.stride()) if p.rows == "fp8_block" else (0,) * 5
    entries = [0 if t is None else t.numel() for t in (finish.scale, finish.scale_out)]
    product_sm90(
        p, c, (target_of(out.device).sms, 1, 1), TensorMap(x, a_box), TensorMap(weights.codes, b_box), *tensors,
        n, k, rows.top_k, *strides, out.stride(0), *entries,
    )  # fmt: skip


def gathered(p, c, rows: Rows, token_map) -> torch.Tensor:
    """The tokens' rows in the order of the token map, [rows of the map, k]."""
    x, count = rows.codes, token_map.row_pair.numel()
    gathered_rows = torch.empty(count, x.shape[1], dtype=x.dtype, device=x.device)
    source = x.view(torch.int32)
    words = source.shape[1]
    gather(
        p, c, (count // c.gather_rows, triton.cdiv(words, c.gather_words), 1), source, gathered_rows.view(torch.int32),
        token_map.tile_expert, token_map.tile_end, token_map.row_pair, words, rows.top_k, source.stride(0),
    )  # fmt: skip
    return gathered_rows


IMPLEMENTATION = Implementation(run, (product_sm90, gather), kernels=kernels)

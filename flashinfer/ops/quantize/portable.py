"""Block-scaled formats in Triton: each element is read once and its code written once, with its block's factor."""

import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import from_e2m1, from_fp8, from_ue8m0
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import (
    block_amax,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    scale_offset,
    times_blocks,
)
from flashinfer.ops.quantize import Dequantize, Interleave, Packbits, Problem


@triton.jit
def quantize_kernel(
    x,
    global_scale,
    counts,
    codes,
    factors,
    row_scales,
    x_batch,
    x_row,
    scale_batch,
    factors_batch,
    rows,
    columns,
    code_bytes,
    padded_rows,
    blocks,
    column_tiles,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCORE: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    INVERSE: tl.constexpr,
    COUNTED: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) // column_tiles * ROWS
    tile = tl.program_id(0) % column_tiles
    row = first + tl.arange(0, ROWS)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    limit = rows
    if COUNTED:
        limit = tl.minimum(rows, tl.load(counts + batch))
        if first >= limit:
            return
    columns = multiple(columns, UNIT)
    there = (row < limit)[:, None]
    at = row.to(tl.int64) * multiple(x_row, UNIT)
    x += batch * multiple(x_batch, UNIT) + at[:, None] + column[None, :]
    y = tl.load(x, there & (column < columns)[None, :], other=0)
    if DTYPE == "fp8e4nv":
        y = from_fp8(y, DTYPE, CAPABILITY)
    else:
        y = y.to(tl.float32)

    if KIND == "nvfp4":
        scale = tl.load(global_scale + batch * scale_batch)
        if ROW_SCALE:
            # The tile is the whole row.
            amax = tl.max(block_amax(y, 16), 1, keep_dims=True).to(tl.float32, bitcast=True)
            row_scale = amax * scale
            tl.store(row_scales + batch * rows + row[:, None], row_scale, there)
            one = tl.full(row_scale.shape, 1.0, tl.float32)
            scale = tl.where(row_scale == 0, 0.0, tl.div_rn(one, row_scale))
        elif INVERSE:
            scale = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), tl.full([ROWS, 1], 0.0, tl.float32) + scale)
        V: tl.constexpr = 16
        code, factor = quantize_nvfp4(y, scale, CAPABILITY, SCORE)
    elif KIND == "mxfp4":
        V: tl.constexpr = 32
        code, factor = quantize_mxfp4(y, CAPABILITY)
    else:
        V: tl.constexpr = 32
        code, factor = quantize_mxfp8(y, CAPABILITY)

    BYTES: tl.constexpr = BLOCK if KIND == "mxfp8" else BLOCK // 2
    byte = tile * BYTES + tl.arange(0, BYTES)
    code_bytes = multiple(code_bytes, 8)
    at = (batch * rows + row) * code_bytes
    tl.store(codes + at[:, None] + byte[None, :], code, there & (byte < code_bytes)[None, :])
    # Past the last row and the last block, y is zero, and so are NVFP4's factors; those of MX are made so.
    block = tile * (BLOCK // V) + tl.arange(0, BLOCK // V)
    factor = tl.where(there & (block * V < columns)[None, :], factor, 0)
    at = scale_offset(row[:, None], block[None, :], blocks, LAYOUT)
    factors += batch * factors_batch
    tl.store(factors + at, factor, (row < padded_rows)[:, None] & (block < blocks)[None, :])


@triton.jit
def dequantize_kernel(
    codes,
    factors,
    global_scale,
    out,
    codes_row,
    rows,
    columns,
    blocks,
    column_tiles,
    ELEMENT: tl.constexpr,
    FACTOR: tl.constexpr,
    SCALED: tl.constexpr,
    V: tl.constexpr,
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) % column_tiles
    there = (row < rows)[:, None]
    wide_row = row.to(tl.int64)[:, None]
    columns = multiple(columns, 16)
    codes += wide_row * multiple(codes_row, UNIT)
    if ELEMENT == "e2m1":
        byte = tile * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        y = from_e2m1(tl.load(codes + byte, there & (byte * 2 < columns), other=0))
    else:
        byte = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        y = from_fp8(tl.load(codes + byte, there & (byte < columns), other=0), "fp8e4nv", CAPABILITY)
    block = tile * (BLOCK // V) + tl.arange(0, BLOCK // V)[None, :]
    at = scale_offset(row[:, None], block, blocks, LAYOUT)
    factor = tl.load(factors + at, there & (block * V < columns), other=0)
    if FACTOR == "ue8m0":
        wide = from_ue8m0(factor)
    else:
        wide = from_fp8(factor, "fp8e4nv", CAPABILITY)
    y = times_blocks(y, wide, V)
    if SCALED:
        y *= tl.load(global_scale)
    column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + wide_row * columns + column, y.to(out.dtype.element_ty), there & (column < columns))


@triton.jit
def interleave_kernel(
    factors,
    out,
    factors_batch,
    factors_row,
    factors_block,
    out_batch,
    rows,
    columns,
    padded_rows,
    blocks,
    column_tiles,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS))[:, None]
    block = (tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    at = batch * factors_batch + row.to(tl.int64) * factors_row + block.to(tl.int64) * factors_block
    factor = tl.load(factors + at, (row < rows) & (block < columns), other=0)
    at = batch * out_batch + scale_offset(row, block, blocks, LAYOUT)
    tl.store(out + at, factor, (row < padded_rows) & (block < blocks))


@triton.jit
def packbits_kernel(
    x, indptr, packed_indptr, out, n, segments, count,
    LITTLE: tl.constexpr, SEGMENTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = byte < count
    begin, end = byte * 8, tl.zeros_like(byte) + n
    if SEGMENTED:
        segment = request_of(packed_indptr, segments, tl.where(there, byte, 0))
        begin = tl.load(indptr + segment, there, other=0).to(tl.int64)
        begin += (byte - tl.load(packed_indptr + segment, there, other=0)) * 8
        end = tl.load(indptr + segment + 1, there, other=0).to(tl.int64)
    bit = tl.arange(0, 8)[None, :]
    at = begin[:, None] + bit
    element = tl.load(x + at, there[:, None] & (at < end[:, None]), other=0)
    place = bit if LITTLE else 7 - bit
    tl.store(out + byte, tl.sum((element != 0).to(tl.int32) << place, 1).to(tl.uint8), there)


def _integers(names: str, kind: str) -> dict:
    return dict.fromkeys(names.split(), kind)


def _build_quantize(problem, config):
    dtype = "u8" if problem.dtype == "fp8e4nv" else problem.dtype
    types = {"x": pointer(dtype, problem.aligned), "global_scale": "*fp32", "counts": "*i32"}
    types |= {"codes": "*u8:16", "factors": "*u8:16", "row_scales": "*fp32"}
    types |= _integers("x_batch x_row scale_batch factors_batch", "i64")
    types |= _integers("rows columns code_bytes padded_rows blocks column_tiles", "i32")
    constants = {
        "KIND": problem.kind,
        "DTYPE": problem.dtype,
        "LAYOUT": problem.layout,
        "SCORE": problem.score,
        "ROW_SCALE": problem.row_scale,
        "INVERSE": problem.inverse,
        "COUNTED": problem.counted,
        "UNIT": unit(dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
    }
    return Build(quantize_kernel, types, constants, num_warps=config.num_warps)


def _build_dequantize(problem, config):
    types = {"codes": pointer("u8", problem.aligned), "factors": "*u8", "global_scale": "*fp32"}
    types |= {"out": f"*{problem.dtype}:16"}
    types |= {"codes_row": "i64"} | _integers("rows columns blocks column_tiles", "i32")
    constants = {
        "ELEMENT": problem.element,
        "FACTOR": problem.factor,
        "SCALED": problem.scaled,
        "V": problem.width,
        "LAYOUT": problem.layout,
        "UNIT": 16 if problem.aligned else 1,
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
    }
    return Build(dequantize_kernel, types, constants, num_warps=config.num_warps)


_BLOCKS = 16


def _build_interleave(problem, config):
    types = {"factors": f"*{problem.dtype}", "out": f"*{problem.dtype}:16"}
    types |= _integers("factors_batch factors_row factors_block out_batch", "i64")
    types |= _integers("rows columns padded_rows blocks column_tiles", "i32")
    constants = {"LAYOUT": problem.layout, "ROWS": config.rows, "BLOCK": _BLOCKS}
    return Build(interleave_kernel, types, constants, num_warps=config.num_warps)


def _build_packbits(problem, config):
    index = problem.index or "i32"
    types = {"x": "*u8", "indptr": f"*{index}", "packed_indptr": f"*{index}", "out": "*u8:16"}
    types |= {"n": "i64", "segments": "i32", "count": "i64"}
    constants = {"LITTLE": problem.little, "SEGMENTED": problem.index != "", "BLOCK": config.rows}
    return Build(packbits_kernel, types, constants, num_warps=config.num_warps)


_quantize = Launcher("quantize", _build_quantize)
_dequantize = Launcher("dequantize", _build_dequantize)
_interleave = Launcher("interleave", _build_interleave)
_packbits = Launcher("packbits", _build_packbits)
LAUNCHERS = (_quantize, _dequantize, _interleave, _packbits)
_LAUNCHER_OF = {Problem: _quantize, Dequantize: _dequantize, Interleave: _interleave, Packbits: _packbits}


def kernels(problem, config):
    """The kernel of a problem, as (launcher, problem, config)."""
    yield _LAUNCHER_OF[type(problem)], problem, config


def run(problem, config, *args):
    """The op of this problem."""
    _RUN[type(problem)](problem, config, *args)


def _run_quantize(problem, config, x, global_scale, counts, codes, factors, row_scales):
    """x [batch, rows, n] to codes, bytes [batch, rows, .], and factors, bytes [batch, .], in their layout."""
    batch, rows, columns = x.shape
    width = 16 if problem.kind == "nvfp4" else 32
    code_bytes = codes.shape[-1]
    padded_rows, blocks = layouts.padded(rows, _elements(problem, code_bytes) // width, problem.layout)
    column_tiles = triton.cdiv(blocks * width, problem.block)
    grid = (triton.cdiv(padded_rows, config.rows) * column_tiles, batch, 1)
    scale_batch = 0 if global_scale is None or global_scale.numel() == 1 else 1
    x = x.view(torch.uint8) if problem.dtype == "fp8e4nv" else x
    _quantize(
        problem, config, grid, x, global_scale, counts, codes, factors, row_scales, x.stride(0), x.stride(1),
        scale_batch, factors.stride(0), rows, columns, code_bytes, padded_rows, blocks, column_tiles,
    )  # fmt: skip


def _elements(problem, code_bytes: int) -> int:
    return code_bytes if problem.kind == "mxfp8" else 2 * code_bytes


def _run_dequantize(problem, config, codes, factors, global_scale, out):
    """Codes, bytes [rows, .], and factors in their layout to out [rows, n]; global_scale [1] or None."""
    rows, columns = out.shape
    _, blocks = layouts.padded(rows, columns // problem.width, problem.layout)
    column_tiles = triton.cdiv(columns, problem.block)
    grid = (triton.cdiv(rows, config.rows) * column_tiles, 1, 1)
    strides = codes.stride(0), rows, columns, blocks, column_tiles
    _dequantize(problem, config, grid, codes, factors, global_scale, out, *strides)


def _run_interleave(problem, config, factors, out):
    """Factors [batch, rows, blocks] to out [batch, .]."""
    batch, rows, columns = factors.shape
    padded_rows, blocks = layouts.padded(rows, columns, problem.layout)
    column_tiles = triton.cdiv(blocks, _BLOCKS)
    grid = (triton.cdiv(padded_rows, config.rows) * column_tiles, batch, 1)
    sizes = rows, columns, padded_rows, blocks, column_tiles
    _interleave(problem, config, grid, factors, out, *factors.stride(), out.stride(0), *sizes)


def _run_packbits(problem, config, x, indptr, packed_indptr, out):
    """x, bytes [n], to out, bytes; segment i from indptr[i] on, to out from packed_indptr[i] on."""
    segments = 1 if indptr is None else indptr.numel() - 1
    grid = (triton.cdiv(out.numel(), config.rows), 1, 1)
    _packbits(problem, config, grid, x, indptr, packed_indptr, out, x.numel(), segments, out.numel())


_RUN = {Problem: _run_quantize, Dequantize: _run_dequantize, Interleave: _run_interleave, Packbits: _run_packbits}

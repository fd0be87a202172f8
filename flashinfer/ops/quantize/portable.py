"""Block-scaled formats in Triton: each element is read once and its code written once, with its block's factor."""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import from_e2m1, from_fp8, from_ue8m0
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import block_amax, quantize_blocks, scale_offset, times_blocks
from flashinfer.ops.formats import FORMATS
from flashinfer.ops.quantize import Dequantize, Interleave, Packbits, Problem


@triton.jit
def _load_rows(x, tile, there, columns, DTYPE: tl.constexpr, BLOCK: tl.constexpr, CAPABILITY: tl.constexpr):
    """Tile `tile` of the rows at x [ROWS, 1], float32 [ROWS, BLOCK]."""
    column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    y = tl.load(x + column, there & (column < columns), other=0)
    if DTYPE == "fp8e4nv":
        return from_fp8(y, DTYPE, CAPABILITY)
    if DTYPE == "bf16" and CAPABILITY >= 80:
        # An instruction for each of a pair; the compiler takes two for the upper one.
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [y], dtype=tl.float32, is_pure=True, pack=2
        )
    return y.to(tl.float32)


@triton.jit
def _quantize_tile(
    x, scale, codes, factors, tile, row, there, columns, code_bytes, padded_rows, blocks,
    KIND: tl.constexpr, V: tl.constexpr, DTYPE: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr,
    BLOCK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of rows `row` [ROWS, 1], which are at x and whose codes are at codes, and its factors."""
    y = _load_rows(x, tile, there, columns, DTYPE, BLOCK, CAPABILITY)
    code, factor = quantize_blocks(y, scale, KIND, CAPABILITY, SCORE)
    BYTES: tl.constexpr = code.shape[1]
    byte = tile * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes + byte, code, there & (byte < code_bytes))
    # Past the last row and the last block y is zero, but times a global scale of infinity it is not.
    block = tile * (BLOCK // V) + tl.arange(0, BLOCK // V)[None, :]
    factor = tl.where(there & (block * V < columns), factor, 0)
    at = scale_offset(row, block, blocks, LAYOUT)
    tl.store(factors + at, factor, (row < padded_rows) & (block < blocks))


@triton.jit
def quantize_kernel(
    x, global_scale, counts, codes, factors, row_scales,
    x_batch, x_row, scale_batch, factors_batch,
    rows, columns, code_bytes, padded_rows, blocks, column_tiles,
    KIND: tl.constexpr, V: tl.constexpr, DTYPE: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr,
    ROW_SCALE: tl.constexpr, INVERSE: tl.constexpr, COUNTED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one tile; with a scale per row all tiles of its rows, which it reads twice."""
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    tile = 0
    if not ROW_SCALE:
        first = tl.program_id(0) // column_tiles * ROWS
        tile = tl.program_id(0) % column_tiles
    limit = rows
    begin(PDL)
    if COUNTED:
        limit = tl.minimum(rows, tl.load(counts + batch))
        if first >= limit:
            return
    row = (first + tl.arange(0, ROWS))[:, None]
    there = row < limit
    columns = multiple(columns, UNIT)
    x += batch * multiple(x_batch, UNIT) + row.to(tl.int64) * multiple(x_row, UNIT)
    code_bytes = multiple(code_bytes, 8)
    codes += (batch * rows + row) * code_bytes
    factors += batch * factors_batch

    scale = tl.full([ROWS, 1], 1.0, tl.float32)
    if KIND == "nvfp4":
        given = scale * tl.load(global_scale + batch * scale_batch)
        if ROW_SCALE:
            most = tl.zeros([ROWS, 1], tl.int32)
            for i in range(column_tiles):
                y = _load_rows(x, i, there, columns, DTYPE, BLOCK, CAPABILITY)
                most = tl.maximum(most, tl.max(block_amax(y, 16), 1, keep_dims=True))
            given = most.to(tl.float32, bitcast=True) * given
            tl.store(row_scales + batch * rows + row, given, there)
            scale = tl.where(given == 0, 0.0, tl.div_rn(scale, given))
        elif INVERSE:
            scale = tl.div_rn(scale, given)
        else:
            scale = given
    if ROW_SCALE:
        for i in range(column_tiles):
            _quantize_tile(
                x, scale, codes, factors, i, row, there, columns, code_bytes, padded_rows, blocks,
                KIND, V, DTYPE, LAYOUT, SCORE, BLOCK, CAPABILITY,
            )  # fmt: skip
    else:
        _quantize_tile(
            x, scale, codes, factors, tile, row, there, columns, code_bytes, padded_rows, blocks,
            KIND, V, DTYPE, LAYOUT, SCORE, BLOCK, CAPABILITY,
        )  # fmt: skip


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
    PDL: tl.constexpr,
):
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) % column_tiles
    begin(PDL)
    there = (row < rows)[:, None]
    wide_row = row.to(tl.int64)[:, None]
    columns = multiple(columns, 16)
    half = multiple(columns // 2, 8)
    codes += wide_row * multiple(codes_row, UNIT)
    if ELEMENT == "e2m1":
        byte = tile * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        y = from_e2m1(tl.load(codes + byte, there & (byte < half), other=0))
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
    bit = tl.arange(0, 8)[None, :]
    if SEGMENTED:
        segment = request_of(packed_indptr, segments, tl.where(there, byte, 0))
        begin = tl.load(indptr + segment, there, other=0).to(tl.int64)
        begin += (byte - tl.load(packed_indptr + segment, there, other=0)) * 8
        end = tl.load(indptr + segment + 1, there, other=0).to(tl.int64)
        at = begin[:, None] + bit
        element = tl.load(x + at, there[:, None] & (at < end[:, None]), other=0)
    else:
        # Eight elements that are all there are one read; the last byte may have fewer.
        at = byte[:, None] * 8 + bit
        whole = (byte < n // 8)[:, None]
        element = tl.load(x + at, whole, other=0) | tl.load(x + at, (whole == 0) & (at < n), other=0)
    place = bit if LITTLE else 7 - bit
    tl.store(out + byte, tl.sum((element != 0).to(tl.int32) << place, 1).to(tl.uint8), there)


def _all(names: str, kind: str) -> dict:
    return dict.fromkeys(names.split(), kind)


def _build_quantize(problem, config):
    dtype = "u8" if problem.dtype == "fp8e4nv" else problem.dtype
    types = {"x": pointer(dtype, problem.aligned), "global_scale": "*fp32", "counts": "*i32"}
    types |= {"codes": "*u8:16", "factors": "*u8:16", "row_scales": "*fp32"}
    types |= _all("x_batch x_row scale_batch factors_batch", "i64")
    types |= _all("rows columns code_bytes padded_rows blocks column_tiles", "i32")
    constants = {
        "KIND": problem.kind,
        "V": FORMATS[problem.kind].width,
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
        "PDL": config.pdl,
    }
    return Build(quantize_kernel, types, constants, num_warps=config.num_warps)


def _build_dequantize(problem, config):
    types = {"codes": pointer("u8", problem.aligned), "factors": "*u8", "global_scale": "*fp32"}
    types |= {"out": f"*{problem.dtype}:16"}
    types |= {"codes_row": "i64"} | _all("rows columns blocks column_tiles", "i32")
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
        "PDL": config.pdl,
    }
    return Build(dequantize_kernel, types, constants, num_warps=config.num_warps)


_BLOCKS = 16


def _build_interleave(problem, config):
    types = {"factors": f"*{problem.dtype}", "out": f"*{problem.dtype}:16"}
    types |= _all("factors_batch factors_row factors_block out_batch", "i64")
    types |= _all("rows columns padded_rows blocks column_tiles", "i32")
    constants = {"LAYOUT": problem.layout, "ROWS": config.rows, "BLOCK": _BLOCKS}
    return Build(interleave_kernel, types, constants, num_warps=config.num_warps)


def _build_packbits(problem, config):
    index = problem.index or "i32"
    types = {"x": pointer("u8", problem.aligned), "indptr": f"*{index}", "packed_indptr": f"*{index}", "out": "*u8:16"}
    types |= {"n": "i64", "segments": "i32", "count": "i64"}
    constants = {"LITTLE": problem.little, "SEGMENTED": problem.index != "", "BLOCK": config.rows}
    return Build(packbits_kernel, types, constants, num_warps=config.num_warps)


_quantize = Launcher("quantize", _build_quantize)
_dequantize = Launcher("dequantize", _build_dequantize)
_interleave = Launcher("interleave", _build_interleave)
_packbits = Launcher("packbits", _build_packbits)
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
    format, code_bytes = FORMATS[problem.kind], codes.shape[-1]
    width = format.width
    blocks = code_bytes // format.code_bytes(width)
    padded_rows, blocks = layouts.padded(rows, blocks, problem.layout)
    column_tiles = triton.cdiv(blocks * width, problem.block)
    grid = (triton.cdiv(padded_rows, config.rows) * (1 if problem.row_scale else column_tiles), batch, 1)
    scale_batch = 0 if global_scale is None or global_scale.numel() == 1 else 1
    x = x.view(torch.uint8) if problem.dtype == "fp8e4nv" else x
    _quantize(
        problem, config, grid, x, global_scale, counts, codes, factors, row_scales, x.stride(0), x.stride(1),
        scale_batch, factors.stride(0), rows, columns, code_bytes, padded_rows, blocks, column_tiles,
    )  # fmt: skip


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


_RUN = {
    Problem: _run_quantize,
    Dequantize: _run_dequantize,
    Interleave: _run_interleave,
    Packbits: _run_packbits,
}

IMPLEMENTATION = Implementation(run, _LAUNCHER_OF.values(), kernels=kernels)

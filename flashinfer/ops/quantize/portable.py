"""Rows in block-scaled formats in Triton: an element is read once, and its code is written with its factor.

Grid: (tiles of rows x tiles of columns, batch); with a scale of each row (tiles of rows, batch), and it reads them
twice. Padding of the factors' layout is in the grid.
Warps: all share a tile of [ROWS, BLOCK]. Shared memory: the reductions of a scale of each row.
Inputs: x [batch, rows, n], global_scale [1] or [batch], counts [batch] or none.
Outputs: codes [batch, rows, .], factors [batch, .] in LAYOUT, row_scales float32 where a row has one.
Method: OCP Microscaling Formats (MX) Specification 1.0, 2023; NVFP4 as in `flashinfer/ops/_device/scales.py`.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import from_fp8
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import block_amax, quantize_blocks, scale_offset
from flashinfer.ops.formats import FORMATS


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


def build(problem, config):
    dtype = "u8" if problem.dtype == "fp8e4nv" else problem.dtype
    types = {"x": pointer(dtype, problem.aligned), "global_scale": "*fp32", "counts": "*i32"}
    types |= {"codes": "*u8:16", "factors": "*u8:16", "row_scales": "*fp32"}
    types |= dict.fromkeys(("x_batch", "x_row", "scale_batch", "factors_batch"), "i64")
    types |= dict.fromkeys(("rows", "columns", "code_bytes", "padded_rows", "blocks", "column_tiles"), "i32")
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


launch = Launcher("quantize", build)


def run(problem, config, x, global_scale, counts, codes, factors, row_scales):
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
    launch(
        problem, config, grid, x, global_scale, counts, codes, factors, row_scales, x.stride(0), x.stride(1),
        scale_batch, factors.stride(0), rows, columns, code_bytes, padded_rows, blocks, column_tiles,
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))

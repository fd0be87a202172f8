"""Codes times their factors, in Triton: each element is read once and written once.

Grid: tiles of rows x tiles of columns. Warps: all share a tile of [ROWS, BLOCK]. Shared memory: none but what changes
of layout take.
Inputs: codes [rows, .], factors in LAYOUT, global_scale [1] or none. Outputs: out [rows, n].
Method: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.formats import from_e2m1, from_fp8, from_ue8m0
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import multiple, pointer
from flashinfer.ops._device.scales import scale_offset, times_blocks


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


def build(problem, config):
    types = {"codes": pointer("u8", problem.aligned), "factors": "*u8", "global_scale": "*fp32"}
    types |= {"out": f"*{problem.dtype}:16"}
    types |= {"codes_row": "i64"} | dict.fromkeys(("rows", "columns", "blocks", "column_tiles"), "i32")
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


launch = Launcher("dequantize", build)


def run(problem, config, codes, factors, global_scale, out):
    """Codes, bytes [rows, .], and factors in their layout to out [rows, n]; global_scale [1] or None."""
    rows, columns = out.shape
    _, blocks = layouts.padded(rows, columns // problem.width, problem.layout)
    column_tiles = triton.cdiv(columns, problem.block)
    grid = (triton.cdiv(rows, config.rows) * column_tiles, 1, 1)
    strides = codes.stride(0), rows, columns, blocks, column_tiles
    launch(problem, config, grid, codes, factors, global_scale, out, *strides)


IMPLEMENTATION = Implementation(run, (launch,))

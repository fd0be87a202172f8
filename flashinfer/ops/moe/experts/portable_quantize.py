"""Quantizes rows to codes and scale factors in Triton: the inputs of the experts' two GEMMs.

Grid: (rows / ROWS, columns / COLUMNS); with row scales a program has all columns, and reads them twice. With a token
map, rows of padding are skipped.
Warps: all share the rows. Shared memory: reductions.
Inputs: x [rows, n]. Outputs: codes [rows, n or n / 2], factors [rows, blocks].
Method: the formats of `flashinfer/ops/_device/scales.py`.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.scales import block_amax, quantize_fp8, quantize_mxfp8, quantize_nvfp4


@triton.jit
def quantize_tile(
    x, row_scale, codes, factors, row, row_ok, start, n, x_row, codes_row, factors_row, factors_block,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Quantize columns `start` to `start + COLUMNS` of rows. row_scale : [ROWS, 1], the global scale of each row."""
    column = start + tl.arange(0, COLUMNS)
    inside = row_ok[:, None] & (column < n)[None, :]
    y = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], inside, other=0).to(tl.float32)
    if FORMAT == "fp8":
        WIDTH: tl.constexpr = 1
        converted = to_fp8(y * row_scale, "fp8e4nv", CAPABILITY)
    elif FORMAT == "fp8_block":
        WIDTH: tl.constexpr = 128
        converted, factor = quantize_fp8(y, 128, "fp8e4nv", False, CAPABILITY)
    elif FORMAT == "mxfp8":
        WIDTH: tl.constexpr = 32
        converted, factor = quantize_mxfp8(y, CAPABILITY)
    else:
        WIDTH: tl.constexpr = 16
        converted, factor = quantize_nvfp4(y, row_scale, CAPABILITY)
    PACK: tl.constexpr = COLUMNS // converted.shape[1]
    byte = start // PACK + tl.arange(0, COLUMNS // PACK)
    at = row.to(tl.int64)[:, None] * codes_row + byte[None, :]
    tl.store(codes + at, converted, row_ok[:, None] & (byte < n // PACK)[None, :])
    if FORMAT != "fp8":
        block = start // WIDTH + tl.arange(0, COLUMNS // WIDTH)
        at = row.to(tl.int64)[:, None] * factors_row + block.to(tl.int64)[None, :] * factors_block
        tl.store(factors + at, factor, row_ok[:, None] & (block * WIDTH < n)[None, :])


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
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    """A program quantizes COLUMNS columns of ROWS rows; with row scales all columns, which it reads twice."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    row_ok = row < rows
    expert = tl.zeros_like(row)
    if TILE:
        expert = tl.load(tile_expert + row // TILE, row_ok, other=-1)
        row_ok = row_ok & (expert >= 0)
        row_ok = row_ok & (row < tl.load(tile_end + row // TILE, row_ok, other=0))
        expert = tl.where(row_ok, expert, 0)
    if global_scale is not None:
        row_scale = tl.load(global_scale + tl.where(entries == 1, 0, expert))[:, None]
    else:
        row_scale = tl.full([ROWS, 1], 1.0, tl.float32)
    if row_scales is not None:
        amax = tl.zeros([ROWS, 1], tl.int32)
        for first in range(0, n, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = row_ok[:, None] & (column < n)[None, :]
            y = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], inside, other=0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(block_amax(y, 16), 1, keep_dims=True))
        row_scale *= amax.to(tl.float32, bitcast=True)
        tl.store(row_scales + row[:, None], row_scale, row_ok[:, None])
        row_scale = tl.where(row_scale == 0, 0.0, tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), row_scale))
        for first in range(0, n, COLUMNS):
            quantize_tile(
                x, row_scale, codes, factors, row, row_ok, first, n, x_row, codes_row, factors_row, factors_block,
                FORMAT, ROWS, COLUMNS, CAPABILITY,
            )  # fmt: skip
    else:
        quantize_tile(
            x, row_scale, codes, factors, row, row_ok, start, n, x_row, codes_row, factors_row, factors_block,
            FORMAT, ROWS, COLUMNS, CAPABILITY,
        )  # fmt: skip


def build(problem, config):
    types = {"x": f"*{problem.dtype}:16" if problem.aligned else f"*{problem.dtype}", "codes": "*u8"}
    types["factors"] = "*fp32" if problem.encoding == "fp8_block" else "*u8" if problem.encoding != "fp8" else None
    types["row_scales"] = "*fp32" if problem.row_scale else None
    types["global_scale"] = "*fp32" if problem.scaled else None
    types |= dict.fromkeys(("tile_expert", "tile_end"), "*i32" if problem.tile else None)
    unit = (4 if problem.dtype == "fp32" else 8) if problem.aligned else 1
    types |= {"rows": "i32", "n": f"i32:{unit}" if unit > 1 else "i32", "x_row": f"i64:{unit}" if unit > 1 else "i64"}
    types |= dict.fromkeys(("codes_row", "factors_row", "factors_block"), "i64") | {"entries": "i32"}
    constants = {
        "FORMAT": problem.encoding,
        "TILE": problem.tile,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "CAPABILITY": config.capability,
    }
    return Build(quantize_kernel, types, constants, config.num_warps)


launch = Launcher("moe_quantize_rows", build)


def run(problem, config, x, global_scale, token_map, codes, factors, row_scales=None):
    """Rows of x, all or those of the map, as codes and scale factors; with a scale of each row, float32 [rows]."""
    tensors = [x, codes.view(torch.uint8)]
    if factors is not None:
        tensors.append(factors if problem.encoding == "fp8_block" else factors.view(torch.uint8))
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


IMPLEMENTATION = Implementation(run, (launch,))

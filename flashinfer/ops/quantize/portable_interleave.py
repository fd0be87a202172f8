"""Factors in the order of tiles, in Triton: each is read once and written once, and padding is 0.

Grid: (tiles of rows x tiles of columns, batch). Warps: all share a tile. Shared memory: none.
Inputs: factors [batch, rows, blocks], bytes. Outputs: out [batch, .], the order of LAYOUT.
Method: `scale_offset` in `flashinfer/ops/_device/scales.py` states the order.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.scales import scale_offset


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


_BLOCKS = 16


def build(problem, config):
    types = {"factors": f"*{problem.dtype}", "out": f"*{problem.dtype}:16"}
    types |= dict.fromkeys(("factors_batch", "factors_row", "factors_block", "out_batch"), "i64")
    types |= dict.fromkeys(("rows", "columns", "padded_rows", "blocks", "column_tiles"), "i32")
    constants = {"LAYOUT": problem.layout, "ROWS": config.rows, "BLOCK": _BLOCKS}
    return Build(interleave_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("interleave", build)


def run(problem, config, factors, out):
    """Factors [batch, rows, blocks] to out [batch, .]."""
    batch, rows, columns = factors.shape
    padded_rows, blocks = layouts.padded(rows, columns, problem.layout)
    column_tiles = triton.cdiv(blocks, _BLOCKS)
    grid = (triton.cdiv(padded_rows, config.rows) * column_tiles, batch, 1)
    sizes = rows, columns, padded_rows, blocks, column_tiles
    launch(problem, config, grid, factors, out, *factors.stride(), out.stride(0), *sizes)


IMPLEMENTATION = Implementation(run, (launch,))

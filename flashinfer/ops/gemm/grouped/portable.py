"""Grouped GEMM in Triton, for every chip: out[r] = alpha a[r] b[weight of r's group]^T.

Grid: tiles of rows x tiles of columns; each program finds the rows and the group of its tile on the device.
Warps: all share a tile. Shared memory: operand tiles of Triton's software pipeline.
Inputs: a [rows, k] or [groups, m, k], b [weights, n, k] or [weights, k, n], groups as offsets, counts or the group of
each row, factors as of `flashinfer/ops/gemm/blockscaled/portable.py`.
Outputs: out [rows, n] or [groups, m, n].
Method: docs/rooms/gemm-grouped.md.
"""

import triton
import triton.language as tl

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.rows import multiple
from flashinfer.ops.gemm import operands
from flashinfer.ops.gemm._device.scaled import (
    COMPUTE,
    blocked_product,
    promoted_product,
    store_tile,
    tile_of,
    unscaled_product,
)
from flashinfer.ops.gemm.tiles import element, unit


@triton.jit
def find_rows(groups, count, tile, KIND: tl.constexpr, BM: tl.constexpr):
    """(group, its first row, row of the tile, end of the group) of tile `tile`; group -1 past the last tile.

    Tiles have BM rows and are numbered group after group; a group's last tile ends with the group. With BM 64 and
    offsets 0, 100, 130 tile 1 is (group 0, 0, 64, 100) and tile 2 is (group 1, 100, 100, 130).
    """
    # Groups looked at together.
    CHUNK: tl.constexpr = 256
    group = tl.full([], -1, tl.int32)
    begin = tl.full([], 0, tl.int64)
    row = begin
    end = begin
    tiles_before = begin
    rows_before = begin
    for first in range(0, count, CHUNK):
        g = first + tl.arange(0, CHUNK)
        ok = g < count
        if KIND == "lengths":
            length = tl.maximum(tl.load(groups + g, ok, other=0).to(tl.int64), 0)
            ends = rows_before + tl.cumsum(length, 0)
            starts = ends - length
            rows_before += tl.sum(length, 0)
        else:
            starts = tl.load(groups + g, ok, other=0).to(tl.int64)
            ends = tl.load(groups + g + 1, ok, other=0).to(tl.int64)
        tiles = tl.maximum(ends - starts + BM - 1, 0) // BM
        after = tiles_before + tl.cumsum(tiles, 0)
        group_of_row = ok & (after - tiles <= tile) & (tile < after)
        group += tl.sum(tl.where(group_of_row, g + 1, 0), 0)
        begin += tl.sum(tl.where(group_of_row, starts, 0), 0)
        row += tl.sum(tl.where(group_of_row, starts + (tile - after + tiles) * BM, 0), 0)
        end += tl.sum(tl.where(group_of_row, ends, 0), 0)
        tiles_before += tl.sum(tiles, 0)
    return group, begin, row, end


@triton.jit
def group_tile(
    a, b, out, alpha, entry, group, weight, row, row_ok, factor_row, column_tile, N, K,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALPHA: tl.constexpr,
    COMPUTE: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """Compute and write the tile of rows `row` [BM] of one group, in batch entry `entry` of a and out."""
    column = column_tile * BN + tl.arange(0, BN)
    column_ok = column < multiple(N, out.UNIT)
    weight = weight.to(tl.int64)
    at_a = a.codes + entry * multiple(a.batch, a.UNIT) + row.to(tl.int64) * multiple(a.row, a.UNIT)
    at_b = b.codes + weight * multiple(b.weight, b.UNIT)
    if b.COLUMNS_FIRST:
        at_b += column
    else:
        at_b += column.to(tl.int64) * multiple(b.row, b.UNIT)
    if SCALE == "":
        sum = unscaled_product(
            at_a, row_ok, at_b, column_ok, multiple(b.k, b.UNIT), K,
            a.FORMAT, b.FORMAT, COMPUTE, b.COLUMNS_FIRST, WHOLE, ALIGNED, BM, BN, BK, CAPABILITY,
        )  # fmt: skip
    elif SCALE == "fp32":
        UNIFORM: tl.constexpr = COLUMNS % BN == 0
        at_a_scale = a.scale + entry * a.scale_batch + (row // ROWS).to(tl.int64) * a.scale_row
        at_b_scale = b.scale + weight * b.scale_weight
        if UNIFORM:
            at_b_scale += (column_tile * BN // COLUMNS).to(tl.int64) * b.scale_row
        else:
            at_b_scale += (column // COLUMNS).to(tl.int64) * b.scale_row
        sum = promoted_product(
            at_a, row_ok, at_a_scale, a.scale_block, at_b, column_ok, at_b_scale, b.scale_block, 0, K, K,
            a.FORMAT, b.FORMAT, WIDTH, COMPUTE, UNIFORM, WHOLE, ALIGNED, BM, BN, BK, CAPABILITY,
        )  # fmt: skip
    else:
        sum = blocked_product(
            at_a, row_ok, factor_row, a.scale + entry * a.scale_batch, at_b, column_ok, column,
            b.scale + weight * b.scale_weight, 0, K, K, a.scale_row, b.scale_row, a.FORMAT, b.FORMAT, SCALE, WIDTH,
            "128x4", "128x4", ALIGNED, COMPUTE, WHOLE, BM, BN, BK, CAPABILITY,
        )  # fmt: skip
    if ALPHA == "one":
        sum *= tl.load(alpha)
    elif ALPHA == "groups":
        sum *= tl.load(alpha + group)
    to = out.rows + entry * multiple(out.batch, out.UNIT)
    store_tile(to, sum, row, row_ok, column, column_ok, multiple(out.row, out.UNIT), False)


@triton.jit
def grouped_kernel(
    a, b, out, alpha, groups, weights, M, N, K, count, weight_count, row_tiles,
    KIND: tl.constexpr, PADDED: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ALPHA: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """A program computes a tile [BM, BN] of one group; with KIND "indices" one for each group among the tile's rows."""
    tile, column_tile = tile_of(tl.program_id(0), row_tiles, tl.cdiv(N, BN), GROUP)
    lane = tl.arange(0, BM)
    if KIND == "indices":
        row = tile * BM + lane
        group_of_row = tl.load(groups + row, row < M, other=-1)
        # Rows in no group, and rows already computed, get the group `count`.
        group_of_row = tl.where((group_of_row >= 0) & (group_of_row < count), group_of_row, count).to(tl.int32)
        group = tl.min(group_of_row, 0)
        while group < count:
            group_tile(
                a, b, out, alpha, 0, group, group, row, group_of_row == group, row, column_tile, N, K,
                SCALE, WIDTH, ROWS, COLUMNS, ALPHA, COMPUTE, WHOLE, ALIGNED, BM, BN, BK, CAPABILITY,
            )  # fmt: skip
            group_of_row = tl.where(group_of_row == group, count, group_of_row)
            group = tl.min(group_of_row, 0)
    else:
        if KIND == "counts":
            tiles = tl.cdiv(M, BM)
            group = tile // tiles
            entry = group.to(tl.int64)
            row = (tile % tiles) * BM + lane
            row_ok = row < tl.minimum(tl.load(groups + group).to(tl.int32), M)
            factor_row = row
            exists = (tile % tiles) * BM < tl.load(groups + group)
        else:
            group, begin, first, end = find_rows(groups, count, tile, KIND, BM)
            entry = 0
            row = (first + lane).to(tl.int32)
            row_ok = (row >= 0) & (row < tl.minimum(end, M))
            factor_row = row
            if PADDED:
                factor_row += ((begin + 127 * group) // 128 * 128 - begin).to(tl.int32)
            exists = group >= 0
        weight = group
        if weights is not None:
            weight = tl.load(weights + group, exists, other=-1).to(tl.int32)
        if exists & (weight >= 0) & (weight < weight_count):
            group_tile(
                a, b, out, alpha, entry, group, weight, row, row_ok, factor_row, column_tile, N, K,
                SCALE, WIDTH, ROWS, COLUMNS, ALPHA, COMPUTE, WHOLE, ALIGNED, BM, BN, BK, CAPABILITY,
            )  # fmt: skip


def build(problem, config):
    by = ":16" if problem.aligned else ""
    scale = None
    if problem.scale:
        scale = "*fp32" if problem.scale == "fp32" else "*u8" + (":4" if problem.aligned else "")
    types = {
        "a.codes": f"*{element(problem.a, config.compute)}{by}",
        "a.scale": scale,
        **dict.fromkeys(("a.batch", "a.row", "a.scale_batch", "a.scale_row", "a.scale_block"), "i64"),
        "b.codes": f"*{element(problem.b, config.compute)}{by}",
        "b.scale": scale,
        **dict.fromkeys(("b.weight", "b.row", "b.k", "b.scale_weight", "b.scale_row", "b.scale_block"), "i64"),
        "out.rows": f"*{problem.out}{by}",
        **dict.fromkeys(("out.batch", "out.row"), "i64"),
        "alpha": "*fp32" if problem.alpha else None,
        "groups": f"*{problem.index}",
        "weights": f"*{problem.weights}" if problem.weights else None,
        **dict.fromkeys(("M", "N", "K", "count", "weight_count", "row_tiles"), "i32"),
    }
    constants = {
        "a.FORMAT": problem.a,
        "a.UNIT": unit(problem.a, problem.aligned),
        "b.FORMAT": problem.b,
        "b.UNIT": unit(problem.b, problem.aligned),
        "b.COLUMNS_FIRST": problem.columns_first,
        "out.UNIT": unit(problem.out, problem.aligned),
        "KIND": problem.kind,
        "PADDED": problem.padded,
        "SCALE": problem.scale,
        "WIDTH": problem.width,
        "ROWS": problem.rows,
        "COLUMNS": problem.columns,
        "ALPHA": problem.alpha,
        "COMPUTE": COMPUTE[config.compute],
        "WHOLE": problem.whole,
        "ALIGNED": problem.aligned,
        "GROUP": config.group,
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "CAPABILITY": config.capability,
    }
    return Build(grouped_kernel, types, constants, num_warps=config.num_warps, num_stages=config.num_stages)


# Bytes of stack a thread may use. With 8 warps and mma.sync, ptxas keeps to 128 registers, so that a multiprocessor
# holds two programs, and spills up to 32 bytes; with operands loaded element by element 40.
STACK_BUDGET = 40

launch = Launcher("gemm_grouped", build)


def run(problem, config, a, b, a_scale, b_scale, alpha, out, groups, weights):
    batched = problem.kind == "counts"
    M, N = out.shape[-2:]
    K = a.shape[-1] * operands.PER_BYTE[problem.a]
    count = len(groups) - 1 if problem.kind == "offsets" else len(b) if problem.kind == "indices" else len(groups)
    row_tiles = triton.cdiv(M, config.block_m)
    if batched:
        row_tiles *= count
    elif problem.kind != "indices":
        # Each group has whole tiles, and at most one partial tile.
        row_tiles = M // config.block_m + min(count, M)
    grid = (row_tiles * triton.cdiv(N, config.block_n), 1, 1)
    a_codes, b_codes = (
        x.view(torch_dtype(element(encoding, config.compute))) for x, encoding in ((a, problem.a), (b, problem.b))
    )
    b_row, b_k = (0, b.stride(1)) if problem.columns_first else (b.stride(1), 0)
    a_batch, out_batch = (a.stride(0), out.stride(0)) if batched else (0, 0)
    a_scale_batch = a_scale.stride(0) if batched and problem.scale else 0
    if problem.scale == "fp32":
        a_steps, b_steps = a_scale.stride()[-2:], b_scale.stride()
    else:
        # Factors are flat: the number in a row of the layout.
        blocks = layouts.padded(1, K // problem.width, "128x4")[1] if problem.scale else 0
        a_steps, b_steps = (blocks, 0), (b_scale.stride(0) if problem.scale else 0, blocks, 0)
    arguments = (
        a_codes, a_scale, a_batch, a.stride(-2), a_scale_batch, *a_steps,
        b_codes, b_scale, b.stride(0), b_row, b_k, *b_steps,
        out, out_batch, out.stride(-2), alpha, groups, weights, M, N, K, count, len(b), row_tiles,
    )  # fmt: skip
    # The kernel is compiled without the parameters that are None.
    launch(problem, config, grid, *(x for x in arguments if x is not None))


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

"""Grouped GEMM on Hopper, FP8 with block scales: out[r] = a[r] b[group of r]^T.

Grid: any number of persistent blocks. Warps: two consumer warpgroups, one producer warp for tiles, one for scales. A
tile has rows of one group. With KIND "indices" a tile may have rows of several groups, and is computed once for each.
The producer warps find the groups ahead of the products, each for itself. The scale warp publishes a record of each
product with the product's first stage, so the consumers search for nothing and keep no record in registers through
their loop over K. Shared memory: the ring, factors, published products, a staging buffer for output.

Inputs: a [entry, m, k] (one entry unless KIND is "counts"), b [weights, n, k]; scales of 128 x 128, those of a for each
row or 128. Outputs: out [entry, m, n].
Method: DeepGEMM (DeepSeek, 2025), with the sums of `flashinfer/ops/_device/sm90/scales.py`.
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, copy_blocks, make_ring
from flashinfer.ops._device.sm90.publish import make_slots
from flashinfer.ops._device.sm90.registers import opaque
from flashinfer.ops._device.sm90.scales import (
    Scales,
    load_factors,
    make_factors,
    rows_of,
    sum_blocks,
    sum_wide_blocks,
)
from flashinfer.ops._device.sm90.store import make_staging
from flashinfer.ops._device.sm90.walk import raster
from flashinfer.ops.gemm.grouped.sm90_groups import (
    MORE,
    NONE,
    Products,
    count_tiles,
    first_of,
    group_after,
    make_products,
    write_group,
)


@gluon.jit
def _produce(a_map, b_map, groups, sizes, ring: Ring, KIND: gl.constexpr):
    """Producer warp: copies the operands of each product of each tile."""
    M, N, steps, count, tiles = sizes
    settings = ring.settings
    BLOCK_M: gl.constexpr = settings.A_PARTS * ROWS
    tiles_n = gl.cdiv(N, settings.BLOCK_N)
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        group, row, last = first_of(groups, tile, count, M, KIND, BLOCK_M, 1)
        if KIND == "indices":
            step = _skip(ring, step, group == count)
        while group < count:
            entry = group if KIND == "counts" else 0
            step = copy_blocks(a_map, b_map, ring, step, entry, row, group, tile_n * settings.BLOCK_N, 0, steps)
            group = group_after(groups, row, group, count, M, KIND, BLOCK_M)


@gluon.jit
def _skip(ring: Ring, step, is_empty):
    """Publish an empty stage for a tile without products; returns the next step."""
    if is_empty:
        ring.channel.acquire(step)
        ring.channel.commit(step)
    return step + is_empty.to(gl.int32)


@gluon.jit
def _load_scales(
    sizes, strides, a_scale, b_scale, groups, K, ring: Ring, factors, products: Products, KIND: gl.constexpr,
    ROW_BLOCK: gl.constexpr,
):  # fmt: skip
    """Scale warp: publishes each product of each tile, and loads its factors."""
    M, N, steps, count, tiles = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
    settings = ring.settings
    BLOCK_M: gl.constexpr = settings.A_PARTS * ROWS
    tiles_n = gl.cdiv(N, settings.BLOCK_N)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        column = tile_n * settings.BLOCK_N
        group, row, last = first_of(groups, tile, count, M, KIND, BLOCK_M, 1)
        if KIND == "indices":
            products.write(number, -1, 0, 0, 0, 0)
            step = _skip(ring, step, group == count)
            number += (group == count).to(gl.int32)
        while group < count:
            after = group_after(groups, row, group, count, M, KIND, BLOCK_M)
            products.write(number, group, row, last, tile_n, (after < count).to(gl.int32))
            if KIND == "indices":
                products.write_rows(number, groups, row, M)
            number += 1
            rows = row + opaque(rows_of(0, settings))
            a = a_scale + (rows // ROW_BLOCK).to(gl.int64) * a_row
            if KIND == "counts":
                a += group.to(gl.int64) * a_entry
            b = b_scale + group.to(gl.int64) * b_entry + (column // 128).to(gl.int64) * b_column
            scales = Scales(a, b, rows < last, column + 128 < N, a_k, b_k, b_column)
            step = load_factors(ring, factors, scales, step, 0, steps, gl.cdiv(opaque(K), settings.BLOCK_K))
            group = after


@gluon.jit
def _consume(
    WG: gl.constexpr, out, sizes, out_steps, ring: Ring, factors, products: Products, staging, KIND: gl.constexpr
):  # fmt: skip
    """Consumer warpgroup WG: computes and writes its half of each product."""
    M, N, steps, count, tiles = sizes
    out_entry, out_row = out_steps
    settings = ring.settings
    WIDE: gl.constexpr = settings.BLOCK_N > 128
    WIDTH: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    stage = staging.index(WG)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * gl.cdiv(N, settings.BLOCK_N), gl.num_programs(0)):
        kind = MORE
        if KIND == "indices":
            ring.channel.wait(step)
            kind = products.kind(number)
            is_empty = kind == NONE
            ring.channel.release(step, pred=is_empty)
            step += is_empty.to(gl.int32)
            number += is_empty.to(gl.int32)
        while kind != NONE:
            acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
            if WIDE:
                right = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
                acc, right, step = sum_wide_blocks(WG, ring, factors, acc, right, zeros, step, steps)
            else:
                acc, step = sum_blocks(WG, ring, factors, acc, zeros, step, 0, steps)
            group, row, last, tile_n = products.read(number)
            row_groups = products.row_groups_of(WG, number, KIND, settings)
            row += settings.row_of(WG)
            column = tile_n * settings.BLOCK_N
            to = out
            if KIND == "counts":
                to += group.to(gl.int64) * out_entry
            if WIDE:
                write_group(acc, 1.0, stage, to, row_groups, group, row, last, column, N, out_row, KIND)
                write_group(right, 1.0, stage, to, row_groups, group, row, last, column + 128, N, out_row, KIND)
            else:
                column += settings.column_of(WG)
                write_group(acc, 1.0, stage, to, row_groups, group, row, last, column, N, out_row, KIND)
            kind = NONE
            if KIND == "indices":
                kind = gl.where(products.kind(number) == MORE, MORE, NONE)
            number += 1


@gluon.jit
def grouped_sm90_kernel(
    a_map, b_map, out, a_scale, b_scale, groups, M, N, K, count, a_entry, a_row, a_k, b_entry, b_column, b_k,
    out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, KIND: gl.constexpr, ROW_BLOCK: gl.constexpr,
):  # fmt: skip
    """a_map is of [entry, m, k], b_map of [weight, n, k]. `count` groups; KIND is the kind of the room's Problem."""
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 2 if BLOCK_N > 128 else 3 - A_PARTS
    settings = Settings(
        BLOCK_N=BLOCK_N, BLOCK_K=128, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=ROWS, GROUP=GROUP,
        B_MAJOR="k", SPLIT=False, SCALES=0, BIAS=False, UNROLL=UNROLL,
    )  # fmt: skip
    KIND_ARG: gl.constexpr = gl.constexpr(KIND)
    ring = make_ring(DTYPE, settings, 2)
    factors = make_factors(settings)
    # Records need no mbarrier: the scale warp is at most STAGES stages ahead of the consumers, and a product has at
    # least one stage, so with STAGES + 2 slots a record is overwritten only after it was read.
    products = make_products(make_slots(STAGES + 2, 4), KIND_ARG, settings)
    staging = make_staging(OUT, 64)
    tiles = count_tiles(groups, count, M, KIND, BLOCK_M, 1)
    # Opaque values are computed once, here. Otherwise the compiler would repeat their computation in each role, ahead
    # of its loop, where it takes registers.
    sizes = (M, N, opaque(gl.cdiv(K, 128 * UNROLL)), count, opaque(tiles))
    strides = (a_entry, a_row, a_k, b_entry, b_column, b_k)
    out_steps = (out_entry, out_row)
    ROW_BLOCK_ARG: gl.constexpr = gl.constexpr(ROW_BLOCK)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), out, sizes, out_steps, ring, factors, products, staging, KIND_ARG)),
            (_consume, (gl.constexpr(1), out, sizes, out_steps, ring, factors, products, staging, KIND_ARG)),
            (_produce, (a_map, b_map, groups, sizes, ring, KIND_ARG)),
            (_load_scales, (sizes, strides, a_scale, b_scale, groups, K, ring, factors, products, KIND_ARG,
            ROW_BLOCK_ARG)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

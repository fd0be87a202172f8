"""Block-scaled FP8 GEMM on Hopper, out = alpha * A B^T: scales of 128 of K for a row of A, and for 128 rows of B.

Grid: any number of persistent blocks, over tiles of the result and K slices. Warps: two consumer warpgroups, one
producer warp for tiles, one for scales. Shared memory: the ring of tiles, their factors, records of the tiles, and a
staging buffer for 16-bit output. The main loop is in `flashinfer/ops/_device/sm90/scales.py`.

Inputs: a [batch, m, k], b [batch, n, k], a_scale [batch, m or m / 128, k / 128], b_scale [batch, n / 128, k / 128].
Outputs: out [batch, m, n]. Method: DeepGEMM's promotion of each 128 of K to float32 (DeepSeek, 2025).
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, make_ring
from flashinfer.ops._device.sm90.publish import Slots, make_slots
from flashinfer.ops._device.sm90.scales import (
    Scales,
    load_factors,
    make_factors,
    rows_of,
    sum_blocks,
    sum_wide_blocks,
)
from flashinfer.ops._device.sm90.store import make_staging, write_tile
from flashinfer.ops.gemm._device.sm90_slices import Size, add_slices, produce, size_of


@gluon.jit
def _load_scales(sizes, a_scale, b_scale, ring: Ring, factors, tiles: Slots, size: Size, ROW_BLOCK: gl.constexpr):
    """Scale warp: loads the factors of each work item. For tiles of 256 columns it also writes a record of the tile,
    which the warpgroups read in their epilogue."""
    M, N, K, out_entry, out_row = sizes
    settings = ring.settings
    step = 0
    number = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, settings.GROUP)
        row = tile_m * (settings.A_PARTS * ROWS)
        column = tile_n * settings.BLOCK_N
        if settings.BLOCK_N > 128:
            tiles.write(number, (entry, row, tile_n, 0))
            number += 1
        rows = rows_of(row, settings)
        a = a_scale.at + entry.to(gl.int64) * a_scale.entry + (rows // ROW_BLOCK).to(gl.int64) * a_scale.row
        b = b_scale.at + entry.to(gl.int64) * b_scale.entry + (column // 128).to(gl.int64) * b_scale.column
        scales = Scales(a, b, rows < M, column + 128 < N, a_scale.k, b_scale.k, b_scale.column)
        step = load_factors(ring, factors, scales, step, begin, end, gl.cdiv(K, settings.BLOCK_K))


@gluon.jit
def _consume_wide(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, tiles: Slots, size: Size, staging):
    """Consumer warpgroup WG, tiles of 256 columns without K slices: computes and writes its half of each tile. It reads
    the tile's record after the loop over K, so that the tile's coordinates take no registers in it."""
    out, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zeros = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
    step = 0
    number = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        left = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
        right = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
        left, right, step = sum_wide_blocks(WG, ring, factors, left, right, zeros, step, size.steps)
        to = out + tiles.read(number, 0).to(gl.int64) * out_entry
        row = tiles.read(number, 1) + WG * ROWS
        column = tiles.read(number, 2) * ring.settings.BLOCK_N
        number += 1
        factor = 1.0
        if ring.settings.SCALES > 0:
            factor *= gl.load(alpha)
        write_tile(left, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
        write_tile(right, factor, staging.index(WG), to, out, row, column + 128, M, N, out_row, False)


@gluon.jit
def _consume(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, tiles: Slots, size: Size, staging):
    """Consumer warpgroup WG: its half of each tile. `tensors` and `sizes` are kernel arguments."""
    if ring.settings.BLOCK_N > 128:
        _consume_wide(WG, tensors, sizes, ring, factors, tiles, size, staging)
    else:
        _consume_narrow(WG, tensors, sizes, ring, factors, size, staging)


@gluon.jit
def _consume_narrow(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, size: Size, staging):
    """Consumer warpgroup WG, tiles of up to 128 columns: computes its half of each tile or K slice, and writes it."""
    out, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    settings = ring.settings
    WIDTH: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    step = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, settings.GROUP)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_blocks(WG, ring, factors, acc, zeros, step, begin, end)
        row = tile_m * (settings.A_PARTS * ROWS) + settings.row_of(WG)
        column = tile_n * settings.BLOCK_N + settings.column_of(WG)
        to = out + entry.to(gl.int64) * out_entry
        factor = 1.0
        if settings.SCALES > 0:
            factor *= gl.load(alpha)
        last = True
        if size.slices > 1:
            last, acc = add_slices(acc, partial, arrived, tile * 2 + WG, index, size.slices, M - row)
        if last:
            write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)


@gluon.jit
def blockscaled_sm90_kernel(
    a_map, b_map, out, a_scale, b_scale, alpha, partial, arrived, M, N, K, batch, slices,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, BOX: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, ROW_BLOCK: gl.constexpr,
    ALPHA: gl.constexpr,
):  # fmt: skip
    """a_map is of [batch, m, k], b_map of [batch, n, k]. Tiles of 256 columns have one K slice.

    With slices > 1, `partial` has room for 2 * tiles * slices warpgroup tiles, and `arrived` 2 * tiles counters, all 0.
    A slice has a multiple of UNROLL blocks of K.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.rows.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 2 if BLOCK_N > 128 else 3 - A_PARTS
    settings = Settings(
        BLOCK_N=BLOCK_N, BLOCK_K=128, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=BOX, GROUP=GROUP,
        B_MAJOR="k", SPLIT=True, SCALES=1 if ALPHA else 0, BIAS=False, UNROLL=UNROLL,
    )  # fmt: skip
    ring = make_ring(DTYPE, settings, 2)
    factors = make_factors(settings)
    # Records need no mbarrier: the scale warp is at most STAGES stages ahead of the consumers, and a tile has at least
    # one stage, so with STAGES + 2 slots a record is overwritten only after it was read.
    tiles = make_slots(STAGES + 2, 4)
    staging = make_staging(OUT, 64)
    size = size_of(M, N, K, batch, slices, settings)
    tensors = (out.rows, alpha, partial, arrived)
    sizes = (M, N, K, out.entry, out.row)
    ROW_BLOCK_ARG: gl.constexpr = gl.constexpr(ROW_BLOCK)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, sizes, ring, factors, tiles, size, staging)),
            (_consume, (gl.constexpr(1), tensors, sizes, ring, factors, tiles, size, staging)),
            (produce, (a_map, b_map, ring, size)),
            (_load_scales, (sizes, a_scale, b_scale, ring, factors, tiles, size, ROW_BLOCK_ARG)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

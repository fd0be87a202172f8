"""A B^T of FP8 on Hopper, with a scale for each 128 of K of a row of A, and of 128 rows of B.

Tiles are walked and copied as in `dense_sm90`; how they are summed is in `block_scales_sm90`.
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.block_scales_sm90 import (
    Scales,
    bring_factors,
    make_factors,
    rows_of,
    sum_blocks,
    sum_wide_blocks,
)
from flashinfer.ops._device.products_sm90 import ROWS, Form, Ring, make_ring, make_staging, write_tile
from flashinfer.ops.gemm._device.dense_sm90 import Size, add_pieces, place_of, produce, size_of
from flashinfer.ops.gemm._device.groups_sm90 import Board, make_board, say, told


@gluon.jit
def _bring(
    sizes, strides, scales_of, ring: Ring, factors, board: Board, size: Size, ROW_BLOCK: gl.constexpr, form: Form
):  # fmt: skip
    """One warp: the factors of each work, and, where warpgroups read it, which work it is."""
    M, N, K, out_entry, out_row = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
    a_scale, b_scale = scales_of
    step = 0
    number = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        if form.BLOCK_N > 128:
            say(board, number, entry, tile_m * (form.A_PARTS * ROWS), M, tile_n, 0)
            number += 1
        rows = rows_of(tile_m * (form.A_PARTS * ROWS), form)
        column = tile_n * form.BLOCK_N
        a = a_scale + entry.to(gl.int64) * a_entry + (rows // ROW_BLOCK).to(gl.int64) * a_row
        b = b_scale + entry.to(gl.int64) * b_entry + (column // 128).to(gl.int64) * b_column
        scales = Scales(a, b, rows < M, column + 128 < N, a_k, b_k, b_column)
        step = bring_factors(ring, factors, scales, step, begin, end, gl.cdiv(K, form.BLOCK_K), form)


@gluon.jit
def _consume_wide(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, board: Board, size: Size, staging, form: Form):
    """One warpgroup: its half of each tile of 256 columns, of one piece; where a tile is, it reads at the end."""
    out, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zeros = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
    step = 0
    number = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        left = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
        right = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
        left, right, step = sum_wide_blocks(WG, ring, factors, left, right, zeros, step, 0, size.steps, form)
        entry, row, end, tile_n = told(board, number)
        number += 1
        row += WG * ROWS
        column = tile_n * form.BLOCK_N
        to = out + entry.to(gl.int64) * out_entry
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        write_tile(left, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
        write_tile(right, factor, staging.index(WG), to, out, row, column + 128, M, N, out_row, False)


@gluon.jit
def _consume(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, board: Board, size: Size, staging, form: Form):
    """One warpgroup: its half of each tile. `tensors` and `sizes` are the kernel's arguments."""
    if form.BLOCK_N > 128:
        _consume_wide(WG, tensors, sizes, ring, factors, board, size, staging, form)
    else:
        _consume_narrow(WG, tensors, sizes, ring, factors, size, staging, form)


@gluon.jit
def _consume_narrow(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, size: Size, staging, form: Form):
    """One warpgroup: its half of each tile, or of a piece of it."""
    out, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    WIDTH: gl.constexpr = form.BLOCK_N // form.B_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_blocks(WG, ring, factors, acc, zeros, step, begin, end, form)
        row = tile_m * (form.A_PARTS * ROWS) + (WG * ROWS if form.A_PARTS == 2 else 0)
        column = tile_n * form.BLOCK_N + (WG * WIDTH if form.B_PARTS == 2 else 0)
        to = out + entry.to(gl.int64) * out_entry
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        last = True
        if size.pieces > 1:
            last, acc = add_pieces(acc, partial, arrived, tile * 2 + WG, piece, size.pieces, M - row)
        if last:
            write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)


@gluon.jit
def blockscaled_sm90_kernel(
    a_map, b_map, out, a_scale, b_scale, alpha, partial, arrived, M, N, K, batch, pieces, a_entry, a_row, a_k, b_entry,
    b_column, b_k, out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, BOX: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, ROW_BLOCK: gl.constexpr,
    ALPHA: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks. Maps are [batch, m, k] of A and [batch, n, k] of B.

    Tiles of 256 columns have one piece.
    Where pieces > 1, `partial` holds 2 * tiles * pieces sums of a warpgroup's tile, and `arrived` 2 * tiles counts, all
    0; a piece is a number of times UNROLL blocks.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 2 if BLOCK_N > 128 else 3 - A_PARTS
    form = Form(
        BLOCK_N=BLOCK_N, BLOCK_K=128, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=BOX, GROUP=GROUP,
        B_MAJOR="k", SPLIT=True, SCALES=1 if ALPHA else 0, BIAS=False, UNROLL=UNROLL,
    )  # fmt: skip
    ring = make_ring(DTYPE, form, 2)
    factors = make_factors(form)
    board = make_board(STAGES + 2, BLOCK_M, "tiles")
    staging = make_staging(OUT, 64)
    size = size_of(M, N, K, batch, pieces, BLOCK_M, BLOCK_N, 128 * UNROLL)
    tensors = (out, alpha, partial, arrived)
    sizes = (M, N, K, out_entry, out_row)
    strides = (a_entry, a_row, a_k, b_entry, b_column, b_k)
    scales_of = (a_scale, b_scale)
    RB: gl.constexpr = gl.constexpr(ROW_BLOCK)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, sizes, ring, factors, board, size, staging, form)),
            (_consume, (gl.constexpr(1), tensors, sizes, ring, factors, board, size, staging, form)),
            (produce, (a_map, b_map, ring, size, form)),
            (_bring, (sizes, strides, scales_of, ring, factors, board, size, RB, form)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

"""Products in groups on Hopper, of FP8 with block scales: sums of `block_scales_sm90`, over groups of rows.

A tile has rows of one group, or, where each row says its group, is computed for each group that is among its rows: once
where they are sorted and groups are tiles. Which they are is found by the warp that copies and by the warp that brings
factors, each for itself, ahead of the products. The latter puts it on a board, beside the first stage of a product,
where the warpgroups read it: they search for nothing, and hold nothing of a tile through its loop over K.
"""

from flashinfer._core.gluon_compat import gl, gluon, mbarrier
from flashinfer.ops._device.block_scales_sm90 import (
    Scales,
    bring_factors,
    make_factors,
    rows_of,
    sum_blocks,
    sum_wide_blocks,
)
from flashinfer.ops._device.products_sm90 import (
    ROWS,
    Form,
    Ring,
    by_rows,
    copy_blocks,
    halves,
    make_ring,
    make_staging,
    place_of,
)
from flashinfer.ops._device.registers_sm90 import anew
from flashinfer.ops.gemm._device.groups_sm90 import (
    MORE,
    NONE,
    Board,
    count_tiles,
    first_of,
    group_after,
    make_board,
    say,
    say_rows,
    told,
    told_kind,
)


@gluon.jit
def _produce(a_map, b_map, groups, sizes, ring: Ring, KIND: gl.constexpr, form: Form):
    """One warp: copies what each product of each tile needs."""
    M, N, steps, count, tiles = sizes
    BLOCK_M: gl.constexpr = form.A_PARTS * ROWS
    tiles_n = gl.cdiv(N, form.BLOCK_N)
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = place_of(work, tiles, tiles_n, form.GROUP)
        group, row, last = first_of(groups, tile, count, M, KIND, BLOCK_M, 1, 1)
        if KIND == "indices":
            step = _skip(ring, step, group == count, form)
        while group < count:
            entry = group if KIND == "counts" else 0
            step = copy_blocks(a_map, b_map, ring, step, entry, row, group, tile_n * form.BLOCK_N, 0, steps, form)
            group = group_after(groups, row, group, count, M, KIND, BLOCK_M, 1)


@gluon.jit
def _skip(ring: Ring, step, none, form: Form):
    """Of a tile that has no products, a stage with nothing in it."""
    stage = step % form.STAGES
    if none:
        mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
        mbarrier.arrive(ring.full.index(stage), count=1)
    return step + none.to(gl.int32)


@gluon.jit
def _bring(
    sizes, strides, a_scale, b_scale, groups, K, ring: Ring, factors, board: Board, KIND: gl.constexpr,
    ROW_BLOCK: gl.constexpr, form: Form,
):  # fmt: skip
    """One warp: what each product of each tile is, and its factors."""
    M, N, steps, count, tiles = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
    BLOCK_M: gl.constexpr = form.A_PARTS * ROWS
    tiles_n = gl.cdiv(N, form.BLOCK_N)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = place_of(work, tiles, tiles_n, form.GROUP)
        column = tile_n * form.BLOCK_N
        group, row, last = first_of(groups, tile, count, M, KIND, BLOCK_M, 1, 1)
        if KIND == "indices":
            say(board, number, -1, 0, 0, 0, 0)
            step = _skip(ring, step, group == count, form)
            number += (group == count).to(gl.int32)
        while group < count:
            after = group_after(groups, row, group, count, M, KIND, BLOCK_M, 1)
            say(board, number, group, row, last, tile_n, (after < count).to(gl.int32))
            if KIND == "indices":
                say_rows(board, number, groups, row, M)
            number += 1
            rows = row + anew(rows_of(0, form))
            a = a_scale + (rows // ROW_BLOCK).to(gl.int64) * a_row
            if KIND == "counts":
                a += group.to(gl.int64) * a_entry
            b = b_scale + group.to(gl.int64) * b_entry + (column // 128).to(gl.int64) * b_column
            scales = Scales(a, b, rows < last, column + 128 < N, a_k, b_k, b_column)
            step = bring_factors(ring, factors, scales, step, 0, steps, gl.cdiv(anew(K), form.BLOCK_K), form)
            group = after


@gluon.jit
def write_group(acc, factor, stage, out, of_rows, group, row, end, column, N, row_stride, KIND: gl.constexpr):
    """The rows of a warpgroup's tile that are of the group; `of_rows` : where rows say it, what they say."""
    if acc.shape[1] > (stage.shape[1] if out.dtype.element_ty.primitive_bitwidth < 32 else 128):
        left, right = halves(acc)
        write_group(left, factor, stage, out, of_rows, group, row, end, column, N, row_stride, KIND)
        write_group(right, factor, stage, out, of_rows, group, row, end, column + left.shape[1], N, row_stride, KIND)
    else:
        result = by_rows((acc * factor).to(out.dtype.element_ty), stage)
        rows = row + anew(gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout)))
        columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, result.type.layout))
        mine = rows < end
        if KIND == "indices":
            mine = mine & (of_rows.load(rows.type.layout) == group)
        at = out + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
        gl.store(at, result, mask=mine[:, None] & (columns < N)[None, :])


@gluon.jit
def _consume(
    WG: gl.constexpr, out, sizes, out_steps, ring: Ring, factors, board: Board, staging, KIND: gl.constexpr,
    form: Form,
):  # fmt: skip
    """One warpgroup: its half of each product."""
    M, N, steps, count, tiles = sizes
    out_entry, out_row = out_steps
    WIDE: gl.constexpr = form.BLOCK_N > 128
    WIDTH: gl.constexpr = form.BLOCK_N // form.B_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    stage = staging.index(WG)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * gl.cdiv(N, form.BLOCK_N), gl.num_programs(0)):
        kind = MORE
        if KIND == "indices":
            first = step % form.STAGES
            mbarrier.wait(ring.full.index(first), (step // form.STAGES) & 1)
            kind = told_kind(board, number)
            none = kind == NONE
            mbarrier.arrive(ring.empty.index(first), count=1, pred=none)
            step += none.to(gl.int32)
            number += none.to(gl.int32)
        while kind != NONE:
            acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
            if WIDE:
                right = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
                acc, right, step = sum_wide_blocks(WG, ring, factors, acc, right, zeros, step, 0, steps, form)
            else:
                acc, step = sum_blocks(WG, ring, factors, acc, zeros, step, 0, steps, form)
            group, row, last, tile_n = told(board, number)
            of_rows = board.of_rows.index(number % board.of_rows.shape[0])
            if form.A_PARTS == 2:
                row += WG * ROWS
                if KIND == "indices":
                    of_rows = of_rows.slice(WG * ROWS, ROWS)
            column = tile_n * form.BLOCK_N
            to = out
            if KIND == "counts":
                to += group.to(gl.int64) * out_entry
            if WIDE:
                write_group(acc, 1.0, stage, to, of_rows, group, row, last, column, N, out_row, KIND)
                write_group(right, 1.0, stage, to, of_rows, group, row, last, column + 128, N, out_row, KIND)
            else:
                column += WG * WIDTH if form.B_PARTS == 2 else 0
                write_group(acc, 1.0, stage, to, of_rows, group, row, last, column, N, out_row, KIND)
            kind = NONE
            if KIND == "indices":
                kind = gl.where(told_kind(board, number) == MORE, MORE, NONE)
            number += 1


@gluon.jit
def grouped_sm90_kernel(
    a_map, b_map, out, a_scale, b_scale, groups, M, N, K, count, a_entry, a_row, a_k, b_entry, b_column, b_k,
    out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, KIND: gl.constexpr, ROW_BLOCK: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks. Maps are [entry, m, k] of A and [weight, n, k] of B; `count` groups."""
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 2 if BLOCK_N > 128 else 3 - A_PARTS
    form = Form(
        BLOCK_N=BLOCK_N, BLOCK_K=128, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=ROWS, GROUP=GROUP,
        B_MAJOR="k", SPLIT=False, SCALES=0, BIAS=False, UNROLL=UNROLL,
    )  # fmt: skip
    ring = make_ring(DTYPE, form, 2)
    factors = make_factors(form)
    # So many that what is read of a product is not written over: its copies are STAGES ahead, a product one at least.
    board = make_board(STAGES + 2, BLOCK_M, KIND)
    staging = make_staging(OUT, 64)
    tiles = count_tiles(groups, count, M, KIND, BLOCK_M, 1, 4)
    # Not worked out by each role: that would be hoisted before all of them, and takes a register of each.
    sizes = (M, N, anew(gl.cdiv(K, 128 * UNROLL)), count, anew(tiles))
    strides = (a_entry, a_row, a_k, b_entry, b_column, b_k)
    out_steps = (out_entry, out_row)
    HOW: gl.constexpr = gl.constexpr(KIND)
    RB: gl.constexpr = gl.constexpr(ROW_BLOCK)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), out, sizes, out_steps, ring, factors, board, staging, HOW, form)),
            (_consume, (gl.constexpr(1), out, sizes, out_steps, ring, factors, board, staging, HOW, form)),
            (_produce, (a_map, b_map, groups, sizes, ring, HOW, form)),
            (_bring, (sizes, strides, a_scale, b_scale, groups, K, ring, factors, board, HOW, RB, form)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

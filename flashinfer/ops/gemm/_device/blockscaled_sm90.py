"""A B^T of FP8 on Hopper, with a scale for each 128 of K of a row of A, and of 128 rows of B.

Tiles are walked and copied as in `dense_sm90`. The tensor cores sum 128 of K, with the few bits that they keep; a
float32 sum takes that up with its scale. A warpgroup has two such sums: while one is scaled and added, the tensor cores
fill the other. UNROLL blocks of K make a step of the loop, at whose end both are empty: an accumulator that is in
flight across the loop's back edge makes ptxas wait for every product.
"""

from flashinfer._core.gluon_compat import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from flashinfer.ops.gemm._device.dense_sm90 import (
    ROWS,
    Form,
    Ring,
    Size,
    add_pieces,
    make_ring,
    make_staging,
    place_of,
    produce,
    size_of,
    write_tile,
)


@gluon.jit
def _start(A_PART: gl.constexpr, B_PART: gl.constexpr, ring: Ring, zeros, step, form: Form):
    """Start the products of one block of K."""
    stage = step % form.STAGES
    a = ring.a.index(stage * form.A_PARTS + A_PART)
    b = ring.b.index(stage * form.B_PARTS + B_PART)
    mbarrier.wait(ring.full.index(stage), (step // form.STAGES) & 1)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _scales(a_scale, b_scale, row_ok, right_ok, a_k, b_k, b_column, first, blocks, form: Form):
    """Of UNROLL blocks of K from `first`: a scale for each row, and one for each 128 columns. Past the end, zeros."""
    found = ()
    for i in gl.static_range(form.UNROLL):
        block = first + i
        a = gl.load(a_scale + block * a_k, mask=row_ok & (block < blocks), other=0.0)
        left = gl.load(b_scale + block * b_k, mask=block < blocks, other=0.0)
        right = left
        if form.BLOCK_N > 128:
            right = gl.load(b_scale + b_column + block * b_k, mask=right_ok & (block < blocks), other=0.0)
        found += ((a, left, right),)
    return found


@gluon.jit
def _sum_blocks(
    WG: gl.constexpr, ring: Ring, acc, zeros, step, begin, end, blocks, a_scale, b_scale, row_ok, a_k, b_k, form: Form
):  # fmt: skip
    """acc + the scaled products of blocks of K: while one is scaled and added, the tensor cores sum the next."""
    A_PART: gl.constexpr = WG if form.A_PARTS == 2 else 0
    B_PART: gl.constexpr = WG if form.B_PARTS == 2 else 0
    scales = _scales(a_scale, b_scale, row_ok, False, a_k, b_k, b_k, begin * form.UNROLL, blocks, form)
    for group in range(begin, end):
        now = scales
        # The next ones are asked for now: their way from memory passes under these products.
        scales = _scales(a_scale, b_scale, row_ok, False, a_k, b_k, b_k, (group + 1) * form.UNROLL, blocks, form)
        part = _start(A_PART, B_PART, ring, zeros, step, form)
        for i in gl.static_range(form.UNROLL):
            before = part
            if i + 1 < form.UNROLL:
                # Nothing is waited for that is not there: it keeps the compiler from adding the block before last after
                # this one is started, which would take registers for a third.
                acc = warpgroup_mma_wait(1, [acc])
                part = _start(A_PART, B_PART, ring, zeros, step + i + 1, form)
                done = warpgroup_mma_wait(1, [before])
            else:
                done = warpgroup_mma_wait(0, [before])
            mbarrier.arrive(ring.empty.index((step + i) % form.STAGES), count=1)
            acc += done * (now[i][0] * now[i][1])[:, None]
        step += form.UNROLL
    return acc, step


@gluon.jit
def _sum_wide_blocks(
    WG: gl.constexpr, ring: Ring, left, right, zeros, step, begin, end, blocks, a_scale, b_scale, row_ok, right_ok, a_k,
    b_k, b_column, form: Form,
):  # fmt: skip
    """_sum_blocks of 256 columns: registers are left for one sum of the tensor cores, which the other warpgroup uses
    while this one scales and adds."""
    scales = _scales(
        a_scale, b_scale, row_ok, right_ok, a_k, b_k, b_column, begin * form.UNROLL, blocks, form
    )  # fmt: skip
    for group in range(begin, end):
        now = scales
        scales = _scales(
            a_scale, b_scale, row_ok, right_ok, a_k, b_k, b_column, (group + 1) * form.UNROLL, blocks, form
        )  # fmt: skip
        for i in gl.static_range(form.UNROLL):
            part = _start(WG, 0, ring, zeros, step + i, form)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            left += done * (now[i][0] * now[i][1])[:, None]
            left = warpgroup_mma_wait(0, [left])
            part = _start(WG, 1, ring, zeros, step + i, form)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            mbarrier.arrive(ring.empty.index((step + i) % form.STAGES), count=1)
            right += done * (now[i][0] * now[i][2])[:, None]
            right = warpgroup_mma_wait(0, [right])
        step += form.UNROLL
    return left, right, step


@gluon.jit
def _consume(
    WG: gl.constexpr, tensors, sizes, strides, ring: Ring, size: Size, staging, ROW_BLOCK: gl.constexpr, form: Form
):  # fmt: skip
    """One warpgroup: its half of each tile. `tensors`, `sizes` and `strides` are the kernel's arguments."""
    out, a_scale, b_scale, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
    WIDE: gl.constexpr = form.BLOCK_N > 128
    WIDTH: gl.constexpr = form.BLOCK_N // form.B_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    blocks = gl.cdiv(K, form.BLOCK_K)
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        row = tile_m * (form.A_PARTS * ROWS) + (WG * ROWS if form.A_PARTS == 2 else 0)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        column = tile_n * form.BLOCK_N
        a_from = a_scale + entry.to(gl.int64) * a_entry + (rows // ROW_BLOCK).to(gl.int64) * a_row
        b_from = b_scale + entry.to(gl.int64) * b_entry + (column // 128).to(gl.int64) * b_column
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        to = out + entry.to(gl.int64) * out_entry
        if WIDE:
            right = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
            acc, right, step = _sum_wide_blocks(
                WG, ring, acc, right, zeros, step, begin, end, blocks, a_from, b_from, rows < M, column + 128 < N, a_k,
                b_k, b_column, form,
            )  # fmt: skip
        else:
            acc, step = _sum_blocks(
                WG, ring, acc, zeros, step, begin, end, blocks, a_from, b_from, rows < M, a_k, b_k, form
            )  # fmt: skip
            column += WG * WIDTH if form.B_PARTS == 2 else 0
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        if WIDE:
            write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
            write_tile(right, factor, staging.index(WG), to, out, row, column + 128, M, N, out_row, False)
        elif size.pieces > 1:
            last, acc = add_pieces(acc, partial, arrived, tile * 2 + WG, piece, size.pieces, M - row)
            if last:
                write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
        else:
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
    ring = make_ring(DTYPE, form)
    staging = make_staging(OUT, BLOCK_N // B_PARTS)
    size = size_of(M, N, K, batch, pieces, BLOCK_M, BLOCK_N, 128 * UNROLL)
    tensors = (out, a_scale, b_scale, alpha, partial, arrived)
    sizes = (M, N, K, out_entry, out_row)
    strides = (a_entry, a_row, a_k, b_entry, b_column, b_k)
    RB: gl.constexpr = gl.constexpr(ROW_BLOCK)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, sizes, strides, ring, size, staging, RB, form)),
            (_consume, (gl.constexpr(1), tensors, sizes, strides, ring, size, staging, RB, form)),
            (produce, (a_map, b_map, ring, size, form)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

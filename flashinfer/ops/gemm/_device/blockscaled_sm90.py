"""A B^T of FP8 on Hopper, with a scale for each 128 of K of a row of A, and of 128 rows of B.

Tiles are walked and copied as in `dense_sm90`. The tensor cores sum 128 of K, with the few bits that they keep; a
float32 sum takes that up with its factor, a scale of A times one of B.

With 128 columns or fewer a warpgroup has two sums of the tensor cores: while one is scaled and added, they fill the
other. UNROLL blocks of K make a step of the loop, at whose end both are empty: an accumulator that is in flight across
the loop's back edge makes ptxas wait for every product. With 256 columns registers are left for one sum; a warp of its
own brings the factors, beside the stage of the ring that they belong to, so that the warpgroups wait for no memory and
hold no addresses.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
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
def _scales(a_scale, b_scale, row_ok, a_k, b_k, first, blocks, form: Form):
    """Of UNROLL blocks of K from `first`: a scale for each row, and one for the columns. Past the end, zeros."""
    found = ()
    for i in gl.static_range(form.UNROLL):
        block = first + i
        a = gl.load(a_scale + block * a_k, mask=row_ok & (block < blocks), other=0.0)
        found += ((a, gl.load(b_scale + block * b_k, mask=block < blocks, other=0.0)),)
    return found


@gluon.jit
def _sum_blocks(
    WG: gl.constexpr, ring: Ring, acc, zeros, step, begin, end, blocks, a_scale, b_scale, row_ok, a_k, b_k, form: Form
):  # fmt: skip
    """acc + the scaled products of blocks of K: while one is scaled and added, the tensor cores sum the next."""
    A_PART: gl.constexpr = WG if form.A_PARTS == 2 else 0
    B_PART: gl.constexpr = WG if form.B_PARTS == 2 else 0
    scales = _scales(a_scale, b_scale, row_ok, a_k, b_k, begin * form.UNROLL, blocks, form)
    for group in range(begin, end):
        now = scales
        # The next ones are asked for now: their way from memory passes under these products.
        scales = _scales(a_scale, b_scale, row_ok, a_k, b_k, (group + 1) * form.UNROLL, blocks, form)
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
def _consume(
    WG: gl.constexpr, tensors, sizes, strides, ring: Ring, size: Size, staging, ROW_BLOCK: gl.constexpr, form: Form
):  # fmt: skip
    """One warpgroup: its half of each tile of 128 columns. `tensors`, `sizes`, `strides` are the kernel's arguments."""
    out, a_scale, b_scale, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
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
        acc, step = _sum_blocks(
            WG, ring, acc, zeros, step, begin, end, blocks, a_from, b_from, rows < M, a_k, b_k, form
        )  # fmt: skip
        column += WG * WIDTH if form.B_PARTS == 2 else 0
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        if size.pieces > 1:
            last, acc = add_pieces(acc, partial, arrived, tile * 2 + WG, piece, size.pieces, M - row)
            if last:
                write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
        else:
            write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)


@gluon.jit
def _make_factors(form: Form):
    """Of each stage of tiles of 256 columns: what the sums of each row are multiplied with, for each 128 columns."""
    return gl.allocate_shared_memory(gl.float32, [form.STAGES * 2, 2 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _scales_of(block, blocks, a_scale, b_scale, row_ok, right_ok, a_k, b_k, b_column):
    """Of one block of K: a scale for each row, for the left 128 columns and for the right; past the end zeros."""
    there = block < blocks
    a = gl.load(a_scale + block * a_k, mask=row_ok & there, other=0.0)
    left = gl.load(b_scale + block * b_k, mask=there, other=0.0)
    right = gl.load(b_scale + b_column + block * b_k, mask=there & right_ok, other=0.0)
    return a, left, right


@gluon.jit
def _bring(sizes, strides, a_scale, b_scale, ring: Ring, factors, size: Size, ROW_BLOCK: gl.constexpr, form: Form):
    """One warp: what the sums of each block of K are multiplied with, beside its stage of the ring."""
    M, N, K, out_entry, out_row = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
    blocks = gl.cdiv(K, form.BLOCK_K)
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        rows = tile_m * (2 * ROWS) + gl.arange(0, 2 * ROWS, gl.BlockedLayout([1], [32], [1], [0]))
        column = tile_n * form.BLOCK_N
        a = a_scale + entry.to(gl.int64) * a_entry + (rows // ROW_BLOCK).to(gl.int64) * a_row
        b = b_scale + entry.to(gl.int64) * b_entry + (column // 128).to(gl.int64) * b_column
        row_ok = rows < M
        right_ok = column + 128 < N
        found = _scales_of(begin * form.UNROLL, blocks, a, b, row_ok, right_ok, a_k, b_k, b_column)
        for block in range(begin * form.UNROLL, end * form.UNROLL):
            # The next ones are on their way while a free stage is waited for.
            of_rows, left, right = found
            found = _scales_of(block + 1, blocks, a, b, row_ok, right_ok, a_k, b_k, b_column)
            stage = step % form.STAGES
            mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
            factors.index(stage * 2).store(of_rows * left)
            factors.index(stage * 2 + 1).store(of_rows * right)
            mbarrier.arrive(ring.full.index(stage), count=1)
            step += 1


@gluon.jit
def _factors_of(WG: gl.constexpr, PART: gl.constexpr, factors, step, LAYOUT: gl.constexpr, form: Form):
    """[ROWS, 1]: of one block of K, whose stage is full."""
    its = factors.index((step % form.STAGES) * 2 + PART)
    return its.slice(WG * ROWS, ROWS).load(gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _sum_wide_blocks(WG: gl.constexpr, ring: Ring, factors, left, right, zeros, step, begin, end, form: Form):
    """_sum_blocks of 256 columns: while this warpgroup scales and adds, the other uses the tensor cores."""
    LAYOUT: gl.constexpr = left.type.layout
    for group in range(begin, end):
        for i in gl.static_range(form.UNROLL):
            part = _start(WG, 0, ring, zeros, step + i, form)
            of_left = _factors_of(WG, 0, factors, step + i, LAYOUT, form)
            of_right = _factors_of(WG, 1, factors, step + i, LAYOUT, form)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            left += done * of_left
            left = warpgroup_mma_wait(0, [left])
            part = _start(WG, 1, ring, zeros, step + i, form)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            mbarrier.arrive(ring.empty.index((step + i) % form.STAGES), count=1)
            right += done * of_right
            right = warpgroup_mma_wait(0, [right])
        step += form.UNROLL
    return left, right, step


@gluon.jit
def _consume_wide(WG: gl.constexpr, out, alpha, sizes, ring: Ring, factors, size: Size, staging, form: Form):
    """One warpgroup: its 64 rows of each tile of 256 columns. `sizes` are the kernel's arguments."""
    M, N, K, out_entry, out_row = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zeros = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        left = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
        right = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
        left, right, step = _sum_wide_blocks(WG, ring, factors, left, right, zeros, step, begin, end, form)
        row = tile_m * (2 * ROWS) + WG * ROWS
        column = tile_n * form.BLOCK_N
        to = out + entry.to(gl.int64) * out_entry
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        write_tile(left, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
        write_tile(right, factor, staging.index(WG), to, out, row, column + 128, M, N, out_row, False)


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
    sizes = (M, N, K, out_entry, out_row)
    strides = (a_entry, a_row, a_k, b_entry, b_column, b_k)
    RB: gl.constexpr = gl.constexpr(ROW_BLOCK)
    if BLOCK_N > 128:
        ring = make_ring(DTYPE, form, 2)
        factors = _make_factors(form)
        staging = make_staging(OUT, 64)
        size = size_of(M, N, K, batch, pieces, BLOCK_M, BLOCK_N, 128 * UNROLL)
        gl.warp_specialize(
            [
                (_consume_wide, (gl.constexpr(0), out, alpha, sizes, ring, factors, size, staging, form)),
                (_consume_wide, (gl.constexpr(1), out, alpha, sizes, ring, factors, size, staging, form)),
                (produce, (a_map, b_map, ring, size, form)),
                (_bring, (sizes, strides, a_scale, b_scale, ring, factors, size, RB, form)),
            ],
            [4, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        ring = make_ring(DTYPE, form)
        staging = make_staging(OUT, BLOCK_N // B_PARTS)
        size = size_of(M, N, K, batch, pieces, BLOCK_M, BLOCK_N, 128 * UNROLL)
        tensors = (out, a_scale, b_scale, alpha, partial, arrived)
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, sizes, strides, ring, size, staging, RB, form)),
                (_consume, (gl.constexpr(1), tensors, sizes, strides, ring, size, staging, RB, form)),
                (produce, (a_map, b_map, ring, size, form)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip

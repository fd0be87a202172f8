"""A B^T of FP8 on Hopper, with a scale for each 128 of K of a row of A, and of 128 rows of B.

Tiles are walked and copied as in `dense_sm90`. The tensor cores sum 128 of K, with the few bits that they keep; a
float32 sum takes that up with its factor. Factors, a scale of A times one of B, are brought by a warp of their own,
beside the stage of the ring that they belong to: the warpgroups that multiply wait for no memory and hold no addresses.
One that has 128 columns or fewer has two sums of the tensor cores: while one is scaled and added, they fill the other.
UNROLL blocks of K make a step of the loop, at whose end both are empty: an accumulator that is in flight across the
loop's back edge makes ptxas wait for every product.
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


@aggregate
class Scales:
    """What scales are for one tile: addresses of the first block's, for each row of A and for 128 columns of B."""

    a: gl.tensor
    b: gl.tensor
    row_ok: gl.tensor
    right_ok: gl.tensor
    a_k: gl.tensor
    b_k: gl.tensor
    b_column: gl.tensor

    @gluon.constexpr_function
    def __init__(self, a, b, row_ok, right_ok, a_k, b_k, b_column):
        self.a = a
        self.b = b
        self.row_ok = row_ok
        self.right_ok = right_ok
        self.a_k = a_k
        self.b_k = b_k
        self.b_column = b_column


@gluon.jit
def make_factors(form: Form):
    """Of each stage: what the sums of each row are multiplied with, for each 128 columns."""
    return gl.allocate_shared_memory(
        gl.float32, [form.STAGES * (form.BLOCK_N // 128), form.A_PARTS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip


@gluon.jit
def rows_of(row, form: Form):
    """The rows of a tile, as the warp that brings factors has them."""
    return row + gl.arange(0, form.A_PARTS * ROWS, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _scales_of(first, blocks, scales: Scales, COUNT: gl.constexpr, form: Form):
    """Of COUNT blocks of K: a scale for each row, for the left 128 columns and for the right; past the end zeros."""
    found = ()
    for i in gl.static_range(COUNT):
        block = first + i
        there = block < blocks
        a = gl.load(scales.a + block * scales.a_k, mask=scales.row_ok & there, other=0.0)
        left = gl.load(scales.b + block * scales.b_k, mask=there, other=0.0)
        right = left
        if form.BLOCK_N > 128:
            right = gl.load(scales.b + scales.b_column + block * scales.b_k, mask=there & scales.right_ok, other=0.0)
        found += ((a, left, right),)
    return found


@gluon.jit
def bring_factors(ring: Ring, factors, scales: Scales, step, begin, end, blocks, form: Form):
    """One warp: what the sums of each block of K are multiplied with, beside its stage of the ring."""
    PARTS: gl.constexpr = form.BLOCK_N // 128
    # Blocks at once: their way from memory is longer than the products of one block of 128 columns take.
    COUNT: gl.constexpr = min(form.UNROLL, 2)
    found = _scales_of(begin * form.UNROLL, blocks, scales, COUNT, form)
    for first in range(begin * form.UNROLL, end * form.UNROLL, COUNT):
        # The next ones are on their way while free stages are waited for.
        now = found
        found = _scales_of(first + COUNT, blocks, scales, COUNT, form)
        for i in gl.static_range(COUNT):
            a, left, right = now[i]
            stage = step % form.STAGES
            mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
            factors.index(stage * PARTS).store(a * left)
            if PARTS == 2:
                factors.index(stage * PARTS + 1).store(a * right)
            mbarrier.arrive(ring.full.index(stage), count=1)
            step += 1
    return step


@gluon.jit
def _start(A_PART: gl.constexpr, B_PART: gl.constexpr, ring: Ring, zeros, step, form: Form):
    """Start the products of one block of K."""
    stage = step % form.STAGES
    a = ring.a.index(stage * form.A_PARTS + A_PART)
    b = ring.b.index(stage * form.B_PARTS + B_PART)
    mbarrier.wait(ring.full.index(stage), (step // form.STAGES) & 1)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors_of(A_PART: gl.constexpr, PART: gl.constexpr, factors, step, LAYOUT: gl.constexpr, form: Form):
    """[ROWS, 1]: of one block of K, whose stage is full."""
    its = factors.index((step % form.STAGES) * (form.BLOCK_N // 128) + PART)
    return its.slice(A_PART * ROWS, ROWS).load(gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def sum_blocks(WG: gl.constexpr, ring: Ring, factors, acc, zeros, step, begin, end, form: Form):
    """acc + the scaled products of blocks of K: while one is scaled and added, the tensor cores sum the next."""
    A_PART: gl.constexpr = WG if form.A_PARTS == 2 else 0
    B_PART: gl.constexpr = WG if form.B_PARTS == 2 else 0
    LAYOUT: gl.constexpr = acc.type.layout
    for group in range(begin, end):
        part = _start(A_PART, B_PART, ring, zeros, step, form)
        factor = _factors_of(A_PART, 0, factors, step, LAYOUT, form)
        for i in gl.static_range(form.UNROLL):
            before = part
            now = factor
            if i + 1 < form.UNROLL:
                # Nothing is waited for that is not there: it keeps the compiler from adding the block before last after
                # this one is started, which would take registers for a third.
                acc = warpgroup_mma_wait(1, [acc])
                part = _start(A_PART, B_PART, ring, zeros, step + i + 1, form)
                factor = _factors_of(A_PART, 0, factors, step + i + 1, LAYOUT, form)
                done = warpgroup_mma_wait(1, [before])
            else:
                done = warpgroup_mma_wait(0, [before])
            mbarrier.arrive(ring.empty.index((step + i) % form.STAGES), count=1)
            acc += done * now
        step += form.UNROLL
    return acc, step


@gluon.jit
def sum_wide_blocks(WG: gl.constexpr, ring: Ring, factors, left, right, zeros, step, begin, end, form: Form):
    """sum_blocks of 256 columns: registers are left for one sum of the tensor cores, which the other warpgroup uses
    while this one scales and adds."""
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
def _bring(sizes, strides, a_scale, b_scale, ring: Ring, factors, size: Size, ROW_BLOCK: gl.constexpr, form: Form):
    """One warp: the factors of each work."""
    M, N, K, out_entry, out_row = sizes
    a_entry, a_row, a_k, b_entry, b_column, b_k = strides
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        rows = rows_of(tile_m * (form.A_PARTS * ROWS), form)
        column = tile_n * form.BLOCK_N
        a = a_scale + entry.to(gl.int64) * a_entry + (rows // ROW_BLOCK).to(gl.int64) * a_row
        b = b_scale + entry.to(gl.int64) * b_entry + (column // 128).to(gl.int64) * b_column
        scales = Scales(a, b, rows < M, column + 128 < N, a_k, b_k, b_column)
        step = bring_factors(ring, factors, scales, step, begin, end, gl.cdiv(K, form.BLOCK_K), form)


@gluon.jit
def _consume(WG: gl.constexpr, tensors, sizes, ring: Ring, factors, size: Size, staging, form: Form):
    """One warpgroup: its half of each tile. `tensors` and `sizes` are the kernel's arguments."""
    out, alpha, partial, arrived = tensors
    M, N, K, out_entry, out_row = sizes
    WIDE: gl.constexpr = form.BLOCK_N > 128
    WIDTH: gl.constexpr = form.BLOCK_N // form.B_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        if WIDE:
            right = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
            acc, right, step = sum_wide_blocks(WG, ring, factors, acc, right, zeros, step, begin, end, form)
        else:
            acc, step = sum_blocks(WG, ring, factors, acc, zeros, step, begin, end, form)
        row = tile_m * (form.A_PARTS * ROWS) + (WG * ROWS if form.A_PARTS == 2 else 0)
        column = tile_n * form.BLOCK_N
        to = out + entry.to(gl.int64) * out_entry
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        if WIDE:
            write_tile(acc, factor, staging.index(WG), to, out, row, column, M, N, out_row, False)
            write_tile(right, factor, staging.index(WG), to, out, row, column + 128, M, N, out_row, False)
        else:
            column += WG * WIDTH if form.B_PARTS == 2 else 0
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
    staging = make_staging(OUT, 64)
    size = size_of(M, N, K, batch, pieces, BLOCK_M, BLOCK_N, 128 * UNROLL)
    tensors = (out, alpha, partial, arrived)
    sizes = (M, N, K, out_entry, out_row)
    strides = (a_entry, a_row, a_k, b_entry, b_column, b_k)
    RB: gl.constexpr = gl.constexpr(ROW_BLOCK)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, sizes, ring, factors, size, staging, form)),
            (_consume, (gl.constexpr(1), tensors, sizes, ring, factors, size, staging, form)),
            (produce, (a_map, b_map, ring, size, form)),
            (_bring, (sizes, strides, a_scale, b_scale, ring, factors, size, RB, form)),
        ],
        [4, 1, 1],
        [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

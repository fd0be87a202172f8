"""A B on Hopper: tiles come by the copy engine, products run on wgmma.

A block is persistent: it walks over tiles of the result, and over pieces of K where K is split. One warp copies tiles
of A and B into a ring while two consumer warpgroups multiply. They share the tile's B and have 64 rows of A each, or
share its A and have half of B's columns each (few rows). While they store a tile, the next one's first stages come.
"""

from flashinfer._core.gluon_compat import aggregate, block_barrier, gl, gluon
from flashinfer.ops._device.products_sm90 import (
    ROWS,
    Form,
    Ring,
    copy_blocks,
    make_ring,
    make_staging,
    sum_products,
    write_tile,
)


@aggregate
class Size:
    """Of the whole product: blocks of K, tiles along M and N, pieces of K, and batch entries."""

    steps: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    pieces: gl.tensor
    works: gl.tensor

    @gluon.constexpr_function
    def __init__(self, steps, tiles_m, tiles_n, pieces, works):
        self.steps = steps
        self.tiles_m = tiles_m
        self.tiles_n = tiles_n
        self.pieces = pieces
        self.works = works


@gluon.jit
def size_of(M, N, K, batch, pieces, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    return Size(gl.cdiv(K, BLOCK_K), tiles_m, tiles_n, pieces, tiles_m * tiles_n * pieces * batch)


@gluon.jit
def place_of(work, size: Size, GROUP: gl.constexpr):
    """Batch entry, tile (along M, along N) and piece of one work; the tile's number; the piece's blocks of K."""
    piece = work % size.pieces
    tile = work // size.pieces
    tiles = size.tiles_m * size.tiles_n
    entry = tile // tiles
    rest = tile % tiles
    strip = GROUP * size.tiles_n
    first = rest // strip * GROUP
    height = gl.minimum(size.tiles_m - first, GROUP)
    rest = rest % strip
    begin = piece * size.steps // size.pieces
    end = (piece + 1) * size.steps // size.pieces
    return entry, first + rest % height, rest // height, piece, tile, begin, end


@gluon.jit
def produce(a_map, b_map, ring: Ring, size: Size, form: Form):
    """One warp: copies the tiles of A and B of each work, block of K by block, as stages come free."""
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        row = tile_m * (form.A_PARTS * ROWS)
        column = tile_n * form.BLOCK_N
        step = copy_blocks(a_map, b_map, ring, step, entry, row, entry, column, begin, end, form)


@gluon.jit
def add_pieces(acc, partial, arrived, slot, piece, pieces, height):
    """Store a piece's sums; whoever stores the last of a tile's pieces gets (True, the sum of all in their order).

    `slot` is the tile's place in `partial`, [slots, pieces, rows, columns], and in `arrived`, which is 0 before and
    after. Only `height` rows of it count.
    """
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = acc.type.layout
    # As many at once as 128 registers of a thread hold: each wait is a trip to the L2 cache.
    AT_ONCE: gl.constexpr = min(16384 // (M * N), 8)
    rows = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    there = (rows < height)[:, None]
    at = partial + slot.to(gl.int64) * pieces * (M * N) + rows[:, None] * N + cols[None, :]
    gl.store(at + piece * (M * N), acc, mask=there)
    # The barrier puts the stores of all threads before the one that counts. That one releases them, and acquires what
    # the other pieces released.
    block_barrier()
    last = gl.atomic_add(arrived + slot, 1, sem="acq_rel") == pieces - 1
    if last:
        gl.store(arrived + slot, 0)
        acc = gl.zeros([M, N], gl.float32, LAYOUT)
        for first in range(0, pieces, AT_ONCE):
            found = ()
            for i in gl.static_range(AT_ONCE):
                found += (gl.load(at + (first + i) * (M * N), mask=there & (first + i < pieces), other=0.0),)
            for i in gl.static_range(AT_ONCE):
                acc += found[i]
    return last, acc


@gluon.jit
def _consume(WG: gl.constexpr, tensors, sizes, ring: Ring, size: Size, staging, form: Form):
    """One warpgroup: its half of each tile. `tensors` and `sizes` are the kernel's arguments."""
    out, bias, a_scale, b_scale, partial, arrived = tensors
    M, N, out_entry, out_row = sizes
    WIDTH: gl.constexpr = form.BLOCK_N // form.B_PARTS
    DEPTH: gl.constexpr = 256 // ring.a.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, piece, tile, begin, end = place_of(work, size, form.GROUP)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_products(WG, ring, acc, step, begin, end, form)
        # Before the store, not before the products: it would take a register through all of them.
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(a_scale)
        if form.SCALES > 1:
            factor *= gl.load(b_scale)
        row = tile_m * (form.A_PARTS * ROWS) + (WG * ROWS if form.A_PARTS == 2 else 0)
        column = tile_n * form.BLOCK_N + (WG * WIDTH if form.B_PARTS == 2 else 0)
        to = out + entry.to(gl.int64) * out_entry
        if form.SPLIT:
            last, acc = add_pieces(acc, partial, arrived, tile * 2 + WG, piece, size.pieces, M - row)
            if last:
                write_tile(acc, factor, staging.index(WG), to, bias, row, column, M, N, out_row, form.BIAS)
        else:
            write_tile(acc, factor, staging.index(WG), to, bias, row, column, M, N, out_row, form.BIAS)


@gluon.jit
def dense_sm90_kernel(
    a_map, b_map, out, bias, a_scale, b_scale, partial, arrived, M, N, K, batch, pieces, out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    B_MAJOR: gl.constexpr, SPLIT: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks. Maps are [batch, m, k] of A and [batch, n, k], or [batch, k, n], of B.

    "blocks" of B are [k / 128, n / 32, 8, 4, 128] in the order of n, from rows stored as 4 times 8 (shuffle_matrix_a).
    With SPLIT, `partial` holds 2 * tiles * pieces sums of a warpgroup's tile, and `arrived` 2 * tiles counts, all 0.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 3 - A_PARTS
    PART_N: gl.constexpr = BLOCK_N // B_PARTS
    form = Form(
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=BOX, GROUP=GROUP,
        B_MAJOR=B_MAJOR, SPLIT=SPLIT, SCALES=SCALES, BIAS=BIAS, UNROLL=1,
    )  # fmt: skip
    ring = make_ring(DTYPE, form)
    staging = make_staging(OUT, min(PART_N, 128))
    size = size_of(M, N, K, batch, pieces, BLOCK_M, BLOCK_N, BLOCK_K)
    tensors = (out, bias, a_scale, b_scale, partial, arrived)
    sizes = (M, N, out_entry, out_row)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, sizes, ring, size, staging, form)),
            (_consume, (gl.constexpr(1), tensors, sizes, ring, size, staging, form)),
            (produce, (a_map, b_map, ring, size, form)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

"""What Hopper's products are made of: a ring of tiles that come by the copy engine, sums on wgmma, and how tiles are
written.

Two warpgroups multiply. They share the tile's B and have 64 rows of A each, or share its A and have half of B's columns
each (few rows). One warp copies tiles of A and B, block of K by block, as stages of the ring come free.
"""

from flashinfer._core.gluon_compat import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Rows of a warpgroup's tile: what one wgmma takes.
ROWS = gl.constexpr(64)


@aggregate
class Form:
    """What the kernel is compiled for."""

    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    # Tiles of A, and of B, that the two warpgroups have: one that they share, or one each.
    A_PARTS: gl.constexpr
    B_PARTS: gl.constexpr
    # Rows of A that one copy brings; wgmma reads 64, and of the others nothing is kept.
    BOX: gl.constexpr
    # Tiles of a column that are walked before the next column's, for the L2 cache.
    GROUP: gl.constexpr
    # What is contiguous in memory: "k", "n", or "blocks" of both.
    B_MAJOR: gl.constexpr
    SPLIT: gl.constexpr
    SCALES: gl.constexpr
    BIAS: gl.constexpr
    # Blocks of K that a consumer takes together, and that pieces of K are counted in.
    UNROLL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, *, BLOCK_N, BLOCK_K, STAGES, A_PARTS, B_PARTS, BOX, GROUP, B_MAJOR, SPLIT, SCALES, BIAS, UNROLL
    ):  # fmt: skip
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.STAGES = gl.constexpr(STAGES)
        self.A_PARTS = gl.constexpr(A_PARTS)
        self.B_PARTS = gl.constexpr(B_PARTS)
        self.BOX = gl.constexpr(BOX)
        self.GROUP = gl.constexpr(GROUP)
        self.B_MAJOR = gl.constexpr(B_MAJOR)
        self.SPLIT = gl.constexpr(SPLIT)
        self.SCALES = gl.constexpr(SCALES)
        self.BIAS = gl.constexpr(BIAS)
        self.UNROLL = gl.constexpr(UNROLL)


@aggregate
class Ring:
    """Stages of A and B tiles, and the barriers that say full and empty."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty


@gluon.jit
def make_ring(DTYPE: gl.constexpr, form: Form, FILLERS: gl.constexpr = 1):
    """FILLERS : warps that fill a stage."""
    PART_N: gl.constexpr = form.BLOCK_N // form.B_PARTS
    B_ROWS: gl.constexpr = form.BLOCK_K if form.B_MAJOR == "n" else PART_N
    B_COLUMNS: gl.constexpr = PART_N if form.B_MAJOR == "n" else form.BLOCK_K
    a = gl.allocate_shared_memory(
        DTYPE, [form.STAGES * form.A_PARTS, ROWS, form.BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([ROWS, form.BLOCK_K], DTYPE),
    )  # fmt: skip
    b = gl.allocate_shared_memory(
        DTYPE, [form.STAGES * form.B_PARTS, B_ROWS, B_COLUMNS],
        gl.NVMMASharedLayout.get_default_for([B_ROWS, B_COLUMNS], DTYPE),
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(form.STAGES):
        mbarrier.init(full.index(stage), count=FILLERS)
        mbarrier.init(empty.index(stage), count=2)
    return Ring(a, b, full, empty)


@gluon.jit
def place_of(work, tiles, tiles_n, GROUP: gl.constexpr):
    """(tile of rows, tile of columns) of one work: down GROUP tiles of rows, then to the next columns."""
    strip = GROUP * tiles_n
    first = work // strip * GROUP
    height = gl.minimum(tiles - first, GROUP)
    rest = work % strip
    return first + rest % height, rest // height


@gluon.jit
def copy_blocks(a_map, b_map, ring: Ring, step, a_entry, row, b_entry, column, begin, end, form: Form):
    """Copy the tiles of A from `row` on, and of B from `column` on, of the blocks of K from `begin` to `end`."""
    BYTES: gl.constexpr = ring.a.dtype.primitive_bitwidth // 8
    PART_N: gl.constexpr = form.BLOCK_N // form.B_PARTS
    for block in range(begin * form.UNROLL, end * form.UNROLL):
        stage = step % form.STAGES
        full = ring.full.index(stage)
        k = block * form.BLOCK_K
        mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
        mbarrier.expect(full, (form.A_PARTS * form.BOX + form.BLOCK_N) * form.BLOCK_K * BYTES)
        for part in gl.static_range(form.A_PARTS):
            to = ring.a.index(stage * form.A_PARTS + part)
            if form.BOX < ROWS:
                to = to.slice(0, form.BOX, dim=0)
            tma_load(a_map, [a_entry, row + part * ROWS, k], full, to)
        for part in gl.static_range(form.B_PARTS):
            to = ring.b.index(stage * form.B_PARTS + part)
            if form.B_MAJOR == "k":
                tma_load(b_map, [b_entry, column + part * PART_N, k], full, to)
            elif form.B_MAJOR == "n":
                tma_load(b_map, [b_entry, k, column + part * PART_N], full, to)
            else:
                tma_load(b_map, [block, (column + part * PART_N) // 32, 0, 0, 0], full, to)
        step += 1
    return step


@gluon.jit
def sum_products(WG: gl.constexpr, ring: Ring, acc, step, begin, end, form: Form):
    """acc + the products of the blocks of K from `begin` to `end`."""
    for block in range(begin, end):
        stage = step % form.STAGES
        a = ring.a.index(stage * form.A_PARTS + (WG if form.A_PARTS == 2 else 0))
        b = ring.b.index(stage * form.B_PARTS + (WG if form.B_PARTS == 2 else 0))
        if form.B_MAJOR != "n":
            b = b.permute([1, 0])
        mbarrier.wait(ring.full.index(stage), (step // form.STAGES) & 1)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # The block before is done with: its stage is free while this one is multiplied.
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(ring.empty.index((step + form.STAGES - 1) % form.STAGES), count=1, pred=block > begin)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(ring.empty.index((step + form.STAGES - 1) % form.STAGES), count=1)
    return acc, step


@gluon.jit
def make_staging(OUT: gl.constexpr, WIDTH: gl.constexpr):
    """Where results of 16 bits pass, for each warpgroup, WIDTH columns at a time; next to nothing for others."""
    HIGH: gl.constexpr = ROWS if OUT.primitive_bitwidth < 32 else 8
    WIDE: gl.constexpr = WIDTH if OUT.primitive_bitwidth < 32 else 16
    return gl.allocate_shared_memory(
        OUT, [2, HIGH, WIDE], gl.NVMMASharedLayout.get_default_for([HIGH, WIDE], OUT)
    )  # fmt: skip


@gluon.jit
def by_rows(result, stage):
    """16 bits: in a layout where the threads of a warp have whole rows, through shared memory. Others as they are."""
    if result.dtype.primitive_bitwidth < 32:
        WIDTH: gl.constexpr = result.shape[1]
        stage.store(result)
        result = stage.load(gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0]))
    return result


@gluon.jit
def write_columns(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS: gl.constexpr):
    """Scale, add the bias, round, and write one part of a tile: through shared memory, so that whole rows are written.

    float32 goes as it is: two neighbours in a thread make whole sectors.
    """
    OUT: gl.constexpr = out.dtype.element_ty
    WIDTH: gl.constexpr = acc.shape[1]
    acc *= factor
    if BIAS:
        own = column + gl.arange(0, WIDTH, gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias + own, mask=own < N, other=0.0).to(gl.float32)[None, :]
    result = by_rows(acc.to(OUT), stage)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout))
    cols = column + gl.arange(0, WIDTH, gl.SliceLayout(0, result.type.layout))
    at = out + rows.to(gl.int64)[:, None] * row_stride + cols[None, :]
    gl.store(at, result, mask=(rows < M)[:, None] & (cols < N)[None, :])


@gluon.jit
def halves(acc):
    """The left and the right columns of a warpgroup's tile; no register moves."""
    HALF: gl.constexpr = acc.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
    return left, right


@gluon.jit
def write_tile(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS: gl.constexpr):
    """write_columns of a warpgroup's tile, as many columns at a time as are staged."""
    if acc.shape[1] > (stage.shape[1] if out.dtype.element_ty.primitive_bitwidth < 32 else 128):
        left, right = halves(acc)
        write_tile(left, factor, stage, out, bias, row, column, M, N, row_stride, BIAS)
        write_tile(right, factor, stage, out, bias, row, column + left.shape[1], M, N, row_stride, BIAS)
    else:
        write_columns(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS)

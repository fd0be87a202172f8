"""Products in groups on Hopper, without scales: sums of `products_sm90`, over groups of rows.

Where groups begin and end is read by the warp that copies, and by no other: it tells what each product is on a board,
which the warpgroups read when they come to it. So a group is found while the products before are computed, and nothing
of it is held through a loop over K. Tiles are walked as in `grouped_sm90`.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon, mbarrier
from flashinfer.ops._device.products_sm90 import (
    ROWS,
    Form,
    Ring,
    copy_blocks,
    make_ring,
    make_staging,
    place_of,
    sum_products,
)
from flashinfer.ops.gemm._device.grouped_sm90 import write_group
from flashinfer.ops.gemm._device.groups_sm90 import (
    Board,
    count_tiles,
    first_of,
    group_after,
    make_board,
    say,
    say_rows,
    told,
)

# Groups that are looked at together, for each lane of a warp.
_EACH = gl.constexpr(4)
# Products that the warp that copies may be ahead with.
_SLOTS = gl.constexpr(4)


@aggregate
class Turns:
    """Barriers that say that a slot of the board is full, and empty."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty):
        self.full = full
        self.empty = empty


@gluon.jit
def _make_turns():
    full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return Turns(full, empty)


@gluon.jit
def _told(board: Board, turns: Turns, number):
    """A warpgroup: what product `number` is, when it has been said; no group is -1: there are no more."""
    mbarrier.wait(turns.full.index(number % _SLOTS), (number // _SLOTS) & 1)
    return told(board, number)


@gluon.jit
def _produce(
    a_map, b_map, groups, weights, sizes, ring: Ring, board: Board, turns: Turns, KIND: gl.constexpr,
    WEIGHTS: gl.constexpr, form: Form,
):  # fmt: skip
    """One warp: says what each product of each tile is, and copies what it needs."""
    M, N, steps, count, weight_count = sizes
    BLOCK_M: gl.constexpr = form.A_PARTS * ROWS
    tiles = count_tiles(groups, count, M, KIND, BLOCK_M, _EACH, 1)
    tiles_n = gl.cdiv(N, form.BLOCK_N)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = place_of(work, tiles, tiles_n, form.GROUP)
        group, row, end = first_of(groups, tile, count, M, KIND, BLOCK_M, _EACH, 1)
        while group < count:
            weight = group
            if WEIGHTS:
                weight = gl.load(weights + group).to(gl.int32)
            if (weight >= 0) & (weight < weight_count):
                slot = number % _SLOTS
                mbarrier.wait(turns.empty.index(slot), ((number // _SLOTS) & 1) ^ 1)
                say(board, number, group, row, end, tile_n, 0)
                if KIND == "indices":
                    say_rows(board, number, groups, row, M)
                mbarrier.arrive(turns.full.index(slot), count=1)
                number += 1
                entry = group if KIND == "counts" else 0
                step = copy_blocks(a_map, b_map, ring, step, entry, row, weight, tile_n * form.BLOCK_N, 0, steps, form)
            group = group_after(groups, row, group, count, M, KIND, BLOCK_M, 1)
    mbarrier.wait(turns.empty.index(number % _SLOTS), ((number // _SLOTS) & 1) ^ 1)
    say(board, number, -1, 0, 0, 0, 0)
    mbarrier.arrive(turns.full.index(number % _SLOTS), count=1)


@gluon.jit
def _consume(
    WG: gl.constexpr, tensors, sizes, ring: Ring, board: Board, turns: Turns, staging, KIND: gl.constexpr, form: Form
):  # fmt: skip
    """One warpgroup: its half of each product. `tensors` and `sizes` are of the kernel's arguments."""
    out, alpha = tensors
    N, steps, out_entry, out_row = sizes
    WIDTH: gl.constexpr = form.BLOCK_N // form.B_PARTS
    DEPTH: gl.constexpr = 256 // ring.a.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    step = 0
    number = 0
    while _told(board, turns, number)[0] >= 0:
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_products(WG, ring, acc, step, 0, steps, form)
        group, row, end, tile_n = _told(board, turns, number)
        of_rows = board.of_rows.index(number % _SLOTS)
        if form.A_PARTS == 2:
            row += WG * ROWS
            if KIND == "indices":
                of_rows = of_rows.slice(WG * ROWS, ROWS)
        column = tile_n * form.BLOCK_N + (WG * WIDTH if form.B_PARTS == 2 else 0)
        to = out
        if KIND == "counts":
            to += group.to(gl.int64) * out_entry
        factor = 1.0
        if form.SCALES > 0:
            factor *= gl.load(alpha)
        write_group(acc, factor, staging.index(WG), to, of_rows, group, row, end, column, N, out_row, KIND)
        mbarrier.arrive(turns.empty.index(number % _SLOTS), count=1)
        number += 1


@gluon.jit
def unscaled_sm90_kernel(
    a_map, b_map, out, alpha, groups, weights, M, N, K, count, weight_count, out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, KIND: gl.constexpr, B_MAJOR: gl.constexpr,
    ALPHA: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks. Maps are [entry, m, k] of A and [weight, n, k], or [weight, k, n], of B.

    `count` groups. With ALPHA the result is multiplied by `alpha`; with WEIGHTS each group has a weight by number.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 3 - A_PARTS
    form = Form(
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=ROWS, GROUP=GROUP,
        B_MAJOR=B_MAJOR, SPLIT=False, SCALES=1 if ALPHA else 0, BIAS=False, UNROLL=1,
    )  # fmt: skip
    ring = make_ring(DTYPE, form)
    board = make_board(_SLOTS, BLOCK_M, KIND)
    turns = _make_turns()
    staging = make_staging(OUT, min(BLOCK_N // B_PARTS, 128))
    steps = gl.cdiv(K, BLOCK_K)
    tensors = (out, alpha)
    sizes = (M, N, steps, count, weight_count)
    ends = (N, steps, out_entry, out_row)
    HOW: gl.constexpr = gl.constexpr(KIND)
    BY: gl.constexpr = gl.constexpr(WEIGHTS)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, ends, ring, board, turns, staging, HOW, form)),
            (_consume, (gl.constexpr(1), tensors, ends, ring, board, turns, staging, HOW, form)),
            (_produce, (a_map, b_map, groups, weights, sizes, ring, board, turns, HOW, BY, form)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

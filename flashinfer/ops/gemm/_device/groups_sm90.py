"""Where groups of rows begin and end: tiles of rows, and groups of a tile, which warps that bring operands find for
themselves; and a board in shared memory, where one of them puts what the next products are, for the warpgroups.

All warps of a role do the same. They look at EACH groups for each lane of a warp together.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon
from flashinfer.ops._device.registers_sm90 import anew

_LANES = gl.constexpr(32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _next_groups(
    groups, first, start, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of the groups from `first` on: the first row, the end, how many tiles; by lengths they begin at row `start`, and
    the next ones where the last result says."""
    g = first + gl.arange(0, EACH * _LANES, gl.BlockedLayout([EACH], [_LANES], [WARPS], [0]))
    ends = gl.load(groups + g + (KIND == "offsets"), mask=g < count, other=0)
    ends = gl.minimum(gl.maximum(ends, 0), M).to(gl.int32)
    begins = gl.zeros_like(ends)
    if KIND == "offsets":
        begins = gl.load(groups + g, mask=g < count, other=0)
        begins = gl.minimum(gl.maximum(begins, 0), M).to(gl.int32)
    elif KIND == "lengths":
        # Many lengths of M each, cut off there, are more than 32 bits hold.
        after = start + gl.associative_scan(ends.to(gl.int64), 0, _add)
        start = gl.minimum(start + gl.sum(ends.to(gl.int64), 0), M).to(gl.int32)
        begins = gl.minimum(after - ends, M).to(gl.int32)
        ends = gl.minimum(after, M).to(gl.int32)
    return begins, ends, (gl.maximum(ends - begins, 0) + BLOCK_M - 1) // BLOCK_M, start


@gluon.jit
def count_tiles(groups, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr):
    """Tiles of rows of all groups."""
    tiles = gl.cdiv(M, BLOCK_M)
    if KIND != "indices":
        tiles = 0
        start = 0
        for first in range(0, count, EACH * _LANES):
            begins, ends, its, start = _next_groups(groups, first, start, count, M, KIND, BLOCK_M, EACH, WARPS)
            tiles += gl.sum(its, 0)
    return tiles


@gluon.jit
def _find_tile(
    groups, tile, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(group, first row, end of the group) of a tile that exists."""
    group = -1
    row = 0
    end = 0
    before = 0
    first = 0
    start = 0
    while group < 0:
        begins, ends, tiles, start = _next_groups(groups, first, start, count, M, KIND, BLOCK_M, EACH, WARPS)
        inside = tile - before - (gl.associative_scan(tiles, 0, _add) - tiles)
        mine = (inside >= 0) & (inside < tiles)
        lane = gl.arange(0, EACH * _LANES, mine.type.layout)
        group += gl.sum(gl.where(mine, first + lane + 1, 0), 0)
        row += gl.sum(gl.where(mine, begins + inside * BLOCK_M, 0), 0)
        end += gl.sum(gl.where(mine, ends, 0), 0)
        before += gl.sum(tiles, 0)
        first += EACH * _LANES
    return group, row, end


@gluon.jit
def _next_of_rows(groups, row, after, count, M, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """The least group past `after` among those of BLOCK_M rows, or `count`."""
    rows = row + anew(gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [_LANES], [WARPS], [0])))
    found = gl.load(groups + rows, mask=rows < M, other=-1)
    return gl.min(gl.where((found > after) & (found < count), found, count).to(gl.int32), 0)


@gluon.jit
def first_of(
    groups, tile, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(group, first row, end) of the first product of a tile; no group is `count`."""
    if KIND == "indices":
        row = tile * BLOCK_M
        group = _next_of_rows(groups, row, -1, count, M, BLOCK_M, WARPS)
        end = M
    else:
        group, row, end = _find_tile(groups, tile, count, M, KIND, BLOCK_M, EACH, WARPS)
    return group, row, end


@gluon.jit
def group_after(groups, row, group, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """The group of a tile's next product, or `count`."""
    if KIND == "indices":
        group = _next_of_rows(groups, row, group, count, M, BLOCK_M, WARPS)
    else:
        group = count
    return group


# Of a product: there is none; it is its tile's last one; its tile has another.
NONE = gl.constexpr(0)
LAST = gl.constexpr(1)
MORE = gl.constexpr(2)


@aggregate
class Board:
    """Of the next products, a slot each: group, first row, end of the group, twice the tile of columns and one more if
    the tile has another product; where rows say their groups, what the rows say."""

    said: gl.shared_memory_descriptor
    of_rows: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, said, of_rows):
        self.said = said
        self.of_rows = of_rows


@gluon.jit
def make_board(SLOTS: gl.constexpr, BLOCK_M: gl.constexpr, KIND: gl.constexpr):
    HIGH: gl.constexpr = BLOCK_M if KIND == "indices" else 1
    said = gl.allocate_shared_memory(gl.int32, [SLOTS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    of_rows = gl.allocate_shared_memory(gl.int32, [SLOTS, HIGH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(said, of_rows)


@gluon.jit
def say_rows(board: Board, number, groups, row, M):
    """One warp: the groups of the rows of product `number`; past the last row -1."""
    BLOCK_M: gl.constexpr = board.of_rows.shape[1]
    rows = row + anew(gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [_LANES], [1], [0])))
    its = gl.load(groups + rows, mask=rows < M, other=-1).to(gl.int32)
    board.of_rows.index(number % board.of_rows.shape[0]).store(its)


@gluon.jit
def say(board: Board, number, group, row, end, tile_n, more):
    """One warp: what product `number` is; no group is -1."""
    i = gl.arange(0, 4, gl.BlockedLayout([4], [_LANES], [1], [0]))
    its = gl.where(i < 2, gl.where(i == 0, group, row), gl.where(i == 2, end, 2 * tile_n + more))
    board.said.index(number % board.said.shape[0]).store(its)


@gluon.jit
def _told(board: Board, number, I: gl.constexpr):
    its = board.said.index(number % board.said.shape[0]).load(gl.BlockedLayout([4], [_LANES], [4], [0]))
    return gl.sum(gl.where(gl.arange(0, 4, its.type.layout) == I, its, 0), 0)


@gluon.jit
def told(board: Board, number):
    """A warpgroup: what say said: group, first row, end, tile of columns."""
    return _told(board, number, 0), _told(board, number, 1), _told(board, number, 2), _told(board, number, 3) // 2


@gluon.jit
def told_kind(board: Board, number):
    """A warpgroup: NONE, LAST or MORE. As the greatest of a warp's lanes, which ptxas knows to be the warp's and no
    thread's: what a loop is ended by decides where the addresses of the tensor cores' operands in it may be."""
    its = gl.where(_told(board, number, 0) < 0, NONE, LAST + _told(board, number, 3) % 2)
    return gl.max(gl.full([_LANES], 0, gl.int32, gl.BlockedLayout([1], [_LANES], [4], [0])) + its, 0)

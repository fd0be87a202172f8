"""Where groups of rows begin and end, for the two Hopper kernels of products in groups.

Warps that bring operands find tiles of rows, and the groups of a tile, for themselves: all warps of a role do the same,
and look at EACH groups for each lane of a warp together. One of them publishes each product for the warpgroups.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Settings, halves
from flashinfer.ops._device.sm90.publish import Slots
from flashinfer.ops._device.sm90.registers import opaque
from flashinfer.ops._device.sm90.store import by_rows

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
    rows = row + opaque(gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [_LANES], [WARPS], [0])))
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
class Products:
    """The next products: records of group (-1: none), first row, end of the group, and 2 * tile of columns + more.

    more : 1 if the tile has another product. Where each row names its group, `of_rows` has those of a tile's rows.
    """

    slots: Slots
    of_rows: gl.shared_memory_descriptor

    @gluon.jit
    def write(self, number, group, row, end, tile_n, more):
        self.slots.write(number, (group, row, end, 2 * tile_n + more))

    @gluon.jit
    def write_rows(self, number, groups, row, M):
        """One warp: the groups of the rows of product `number`; past the last row -1."""
        BLOCK_M: gl.constexpr = self.of_rows.shape[1]
        rows = row + opaque(gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [_LANES], [1], [0])))
        its = gl.load(groups + rows, mask=rows < M, other=-1).to(gl.int32)
        self.of_rows.index(number % self.of_rows.shape[0]).store(its)

    @gluon.jit
    def read(self, number):
        """Group, first row, end, tile of columns."""
        slots = self.slots
        return slots.read(number, 0), slots.read(number, 1), slots.read(number, 2), slots.read(number, 3) // 2

    @gluon.jit
    def kind(self, number):
        """NONE, LAST or MORE, as the greatest of a warp's lanes, which ptxas knows to be the same for all: what ends a
        loop decides where the addresses of the tensor cores' operands in it may be."""
        its = gl.where(self.slots.read(number, 0) < 0, NONE, LAST + self.slots.read(number, 3) % 2)
        return gl.max(gl.full([_LANES], 0, gl.int32, gl.BlockedLayout([1], [_LANES], [4], [0])) + its, 0)

    @gluon.jit
    def rows_of(self, WG: gl.constexpr, number, KIND: gl.constexpr, settings: Settings):
        """Where the rows of a warpgroup's tile name their groups."""
        of_rows = self.of_rows.index(number % self.of_rows.shape[0])
        if KIND == "indices" and settings.A_PARTS == 2:
            of_rows = of_rows.slice(WG * ROWS, ROWS)
        return of_rows


@gluon.jit
def make_products(slots: Slots, KIND: gl.constexpr, settings: Settings):
    HIGH: gl.constexpr = settings.A_PARTS * ROWS if KIND == "indices" else 1
    SLOTS: gl.constexpr = slots.words.shape[0]
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Products(slots, gl.allocate_shared_memory(gl.int32, [SLOTS, HIGH], LAYOUT))


@gluon.jit
def write_group(acc, factor, stage, out, of_rows, group, row, end, column, N, row_stride, KIND: gl.constexpr):
    """The rows of a warpgroup's tile that are of the group, by `of_rows` where rows name theirs."""
    if acc.shape[1] > (stage.shape[1] if out.dtype.element_ty.primitive_bitwidth < 32 else 128):
        left, right = halves(acc)
        write_group(left, factor, stage, out, of_rows, group, row, end, column, N, row_stride, KIND)
        write_group(right, factor, stage, out, of_rows, group, row, end, column + left.shape[1], N, row_stride, KIND)
    else:
        result = by_rows((acc * factor).to(out.dtype.element_ty), stage)
        rows = row + opaque(gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout)))
        columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, result.type.layout))
        mine = rows < end
        if KIND == "indices":
            mine = mine & (of_rows.load(rows.type.layout) == group)
        at = out + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
        gl.store(at, result, mask=mine[:, None] & (columns < N)[None, :])

"""The tiles of a grouped GEMM on Hopper: which group's rows a tile has, and records of this for the consumers.

Producer warps find the group of a tile by a running sum of the groups' tiles; PER_LANE groups for each lane of a warp
are summed at a time. One producer warp then publishes a record for each product, which is one tile for one group; the
consumer warpgroups read it.

An example with tiles of 64 rows and offsets 0, 100, 100, 130: group 0 has the tiles at rows 0 and 64, group 1 none, and
group 2 the tile at row 100, of which 30 rows are written.
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
def _next_groups(groups, first, start, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, PER_LANE: gl.constexpr):
    """For the groups from `first` on: first rows, ends, numbers of tiles, and the row where the next groups begin.
    With KIND "lengths" the first of these groups begins at row `start`; other kinds do not use it."""
    g = first + gl.arange(0, PER_LANE * _LANES, gl.BlockedLayout([PER_LANE], [_LANES], [gl.num_warps()], [0]))
    ends = gl.load(groups + g + (KIND == "offsets"), mask=g < count, other=0)
    ends = gl.minimum(gl.maximum(ends, 0), M).to(gl.int32)
    begins = gl.zeros_like(ends)
    if KIND == "offsets":
        begins = gl.load(groups + g, mask=g < count, other=0)
        begins = gl.minimum(gl.maximum(begins, 0), M).to(gl.int32)
    elif KIND == "lengths":
        # Lengths are clamped to M each, but their sum may exceed 32 bits.
        after = start + gl.associative_scan(ends.to(gl.int64), 0, _add)
        start = gl.minimum(start + gl.sum(ends.to(gl.int64), 0), M).to(gl.int32)
        begins = gl.minimum(after - ends, M).to(gl.int32)
        ends = gl.minimum(after, M).to(gl.int32)
    return begins, ends, (gl.maximum(ends - begins, 0) + BLOCK_M - 1) // BLOCK_M, start


@gluon.jit
def count_tiles(groups, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, PER_LANE: gl.constexpr):
    """The number of tiles of rows of all groups."""
    tiles = gl.cdiv(M, BLOCK_M)
    if KIND != "indices":
        tiles = 0
        start = 0
        for first in range(0, count, PER_LANE * _LANES):
            begins, ends, values, start = _next_groups(groups, first, start, count, M, KIND, BLOCK_M, PER_LANE)
            tiles += gl.sum(values, 0)
    return tiles


@gluon.jit
def _find_tile(groups, tile, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, PER_LANE: gl.constexpr):
    """(group, first row, end of the group) of tile `tile`, which exists."""
    group = -1
    row = 0
    end = 0
    before = 0
    first = 0
    start = 0
    while group < 0:
        begins, ends, tiles, start = _next_groups(groups, first, start, count, M, KIND, BLOCK_M, PER_LANE)
        inside = tile - before - (gl.associative_scan(tiles, 0, _add) - tiles)
        inside_tile = (inside >= 0) & (inside < tiles)
        lane = gl.arange(0, PER_LANE * _LANES, inside_tile.type.layout)
        group += gl.sum(gl.where(inside_tile, first + lane + 1, 0), 0)
        row += gl.sum(gl.where(inside_tile, begins + inside * BLOCK_M, 0), 0)
        end += gl.sum(gl.where(inside_tile, ends, 0), 0)
        before += gl.sum(tiles, 0)
        first += PER_LANE * _LANES
    return group, row, end


@gluon.jit
def _next_of_rows(groups, row, after, count, M, BLOCK_M: gl.constexpr):
    """The least group above `after` among the groups of BLOCK_M rows from `row` on; `count` if there is none."""
    rows = row + opaque(gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [_LANES], [gl.num_warps()], [0])))
    found = gl.load(groups + rows, mask=rows < M, other=-1)
    return gl.min(gl.where((found > after) & (found < count), found, count).to(gl.int32), 0)


@gluon.jit
def first_of(groups, tile, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr, PER_LANE: gl.constexpr):
    """(group, first row, end) of the first product of a tile; the group is `count` if the tile has none."""
    if KIND == "indices":
        row = tile * BLOCK_M
        group = _next_of_rows(groups, row, -1, count, M, BLOCK_M)
        end = M
    else:
        group, row, end = _find_tile(groups, tile, count, M, KIND, BLOCK_M, PER_LANE)
    return group, row, end


@gluon.jit
def group_after(groups, row, group, count, M, KIND: gl.constexpr, BLOCK_M: gl.constexpr):
    """The group of a tile's next product after that of `group`; `count` if there is none."""
    if KIND == "indices":
        group = _next_of_rows(groups, row, group, count, M, BLOCK_M)
    else:
        group = count
    return group


# A record's kind: no product; the last product of its tile; a product of a tile that has another.
NONE = gl.constexpr(0)
LAST = gl.constexpr(1)
MORE = gl.constexpr(2)


@aggregate
class Products:
    """Published products. A record has four words: group (-1: none), first row, end of the group, and
    2 * tile of columns + more, where more is 1 if the tile has another product.

    With KIND "indices", `row_groups` [SLOTS, rows] has the groups of the product's rows.
    """

    slots: Slots
    row_groups: gl.shared_memory_descriptor

    @gluon.jit
    def write(self, number, group, row, end, tile_n, more):
        self.slots.write(number, (group, row, end, 2 * tile_n + more))

    @gluon.jit
    def write_rows(self, number, groups, row, M):
        """One warp: stores the groups of the rows of product `number`; -1 past the last row."""
        BLOCK_M: gl.constexpr = self.row_groups.shape[1]
        rows = row + opaque(gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [_LANES], [1], [0])))
        values = gl.load(groups + rows, mask=rows < M, other=-1).to(gl.int32)
        self.row_groups.index(number % self.row_groups.shape[0]).store(values)

    @gluon.jit
    def read(self, number):
        """Group, first row, end of the group, and tile of columns of product `number`."""
        slots = self.slots
        return slots.read(number, 0), slots.read(number, 1), slots.read(number, 2), slots.read(number, 3) // 2

    @gluon.jit
    def kind(self, number):
        """NONE, LAST or MORE, as a maximum over the lanes of a warp: ptxas knows that its result is the same in all
        lanes. A loop whose end depends on it can keep the addresses of wgmma operands in uniform registers."""
        values = gl.where(self.slots.read(number, 0) < 0, NONE, LAST + self.slots.read(number, 3) % 2)
        return gl.max(gl.full([_LANES], 0, gl.int32, gl.BlockedLayout([1], [_LANES], [4], [0])) + values, 0)

    @gluon.jit
    def row_groups_of(self, WG: gl.constexpr, number, KIND: gl.constexpr, settings: Settings):
        """The shared memory with the groups of the rows of warpgroup WG's tile."""
        row_groups = self.row_groups.index(number % self.row_groups.shape[0])
        if KIND == "indices" and settings.A_PARTS == 2:
            row_groups = row_groups.slice(WG * ROWS, ROWS)
        return row_groups


@gluon.jit
def make_products(slots: Slots, KIND: gl.constexpr, settings: Settings):
    HIGH: gl.constexpr = settings.A_PARTS * ROWS if KIND == "indices" else 1
    SLOTS: gl.constexpr = slots.words.shape[0]
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Products(slots, gl.allocate_shared_memory(gl.int32, [SLOTS, HIGH], LAYOUT))


@gluon.jit
def write_group(acc, factor, stage, out, row_groups, group, row, end, column, N, row_stride, KIND: gl.constexpr):
    """Write the rows of a warpgroup's tile that belong to the group; with KIND "indices", those that `row_groups`
    assigns to it."""
    if acc.shape[1] > (stage.shape[1] if out.dtype.element_ty.primitive_bitwidth < 32 else 128):
        left, right = halves(acc)
        write_group(left, factor, stage, out, row_groups, group, row, end, column, N, row_stride, KIND)
        write_group(right, factor, stage, out, row_groups, group, row, end, column + left.shape[1], N, row_stride, KIND)
    else:
        result = by_rows((acc * factor).to(out.dtype.element_ty), stage)
        rows = row + opaque(gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout)))
        columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, result.type.layout))
        inside_tile = rows < end
        if KIND == "indices":
            inside_tile = inside_tile & (row_groups.load(rows.type.layout) == group)
        at = out + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
        gl.store(at, result, mask=inside_tile[:, None] & (columns < N)[None, :])

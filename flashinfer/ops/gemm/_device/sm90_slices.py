"""Work items of a persistent Hopper GEMM: the tiles of the result, and K slices of each tile where K is split.

Used by `dense` and `blockscaled`. A work item is one K slice of one tile of one batch entry; the slices of a tile have
consecutive numbers. The warpgroup that stores the last slice's sums adds those of all slices in order, and writes the
tile.
"""

from flashinfer._core.gluon_compat import aggregate, block_barrier, gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, copy_blocks, sum_products
from flashinfer.ops._device.sm90.store import write_tile
from flashinfer.ops._device.sm90.walk import raster


@aggregate
class Size:
    """The problem in tiles: steps of K, tiles along M and N, K slices of a tile, and the number of work items."""

    steps: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    slices: gl.tensor
    items: gl.tensor

    @gluon.jit
    def place(self, work, GROUP: gl.constexpr):
        """Of work item `work`: batch entry, tile along M, tile along N, slice; the tile's number over all entries; the
        slice's first and last step of K.

        With 3 tiles of 2 slices and 10 steps, item 5 is slice 1 of tile 2, steps 5 to 10.
        """
        index = work % self.slices
        tile = work // self.slices
        tiles = self.tiles_m * self.tiles_n
        tile_m, tile_n = raster(tile % tiles, self.tiles_m, self.tiles_n, GROUP)
        begin = index * self.steps // self.slices
        end = (index + 1) * self.steps // self.slices
        return tile // tiles, tile_m, tile_n, index, tile, begin, end


@gluon.jit
def size_of(M, N, K, batch, slices, settings: Settings):
    tiles_m = gl.cdiv(M, settings.A_PARTS * ROWS)
    tiles_n = gl.cdiv(N, settings.BLOCK_N)
    steps = gl.cdiv(K, settings.BLOCK_K * settings.UNROLL)
    return Size(steps, tiles_m, tiles_n, slices, tiles_m * tiles_n * slices * batch)


@gluon.jit
def produce(a_map, b_map, ring: Ring, size: Size):
    """Producer warp: copies the tiles of A and B of each work item, one block of K after another."""
    settings = ring.settings
    step = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, settings.GROUP)
        row = tile_m * (settings.A_PARTS * ROWS)
        column = tile_n * settings.BLOCK_N
        step = copy_blocks(a_map, b_map, ring, step, entry, row, entry, column, begin, end)


@gluon.jit
def add_slices(acc, partial, arrived, slot, index, slices, height, ROOM: gl.constexpr = 16384):
    """Store a K slice's sums. The caller that stores the last of a tile's slices gets (True, the sum of all slices in
    order), the others (False, acc).

    `slot` is the tile's index in `partial` [slots, slices, rows, columns] and in `arrived` [slots], the counters, which
    are 0 before and after. Only the first `height` rows are stored. ROOM : sums that registers hold beside `acc`.
    """
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = acc.type.layout
    # Slices loaded at once. Each group of loads costs one L2 latency.
    AT_ONCE: gl.constexpr = min(ROOM // (M * N), 8)
    rows = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    stored = (rows < height)[:, None]
    at = partial + slot.to(gl.int64) * slices * (M * N) + rows[:, None] * N + columns[None, :]
    gl.store(at + index * (M * N), acc, mask=stored)
    # The barrier orders the stores of all threads before the atomic of one thread. The atomic releases them, and
    # acquires what the atomics of the other slices released.
    block_barrier()
    last = gl.atomic_add(arrived + slot, 1, sem="acq_rel") == slices - 1
    if last:
        gl.store(arrived + slot, 0)
        acc = gl.zeros([M, N], gl.float32, LAYOUT)
        for first in range(0, slices, AT_ONCE):
            found = ()
            for i in gl.static_range(AT_ONCE):
                found += (gl.load(at + (first + i) * (M * N), mask=stored & (first + i < slices), other=0.0),)
            for i in gl.static_range(AT_ONCE):
                acc += found[i]
    return last, acc


@gluon.jit
def consume(WG: gl.constexpr, tensors, sizes, ring: Ring, size: Size, staging, WRITTEN: gl.constexpr = False):
    """Consumer warpgroup WG: computes and writes its half of each tile. `tensors` and `sizes` are kernel arguments.

    WRITTEN : warps write B to shared memory, as in `sum_products`."""
    out, bias, a_scale, b_scale, partial, arrived = tensors
    M, N, out_entry, out_row = sizes
    settings = ring.settings
    WIDTH: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    # Two warpgroups that write B leave 128 registers a thread on average.
    ROOM: gl.constexpr = 8192 if WRITTEN and settings.B_PARTS == 2 else 16384
    DEPTH: gl.constexpr = 256 // ring.a.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    step = 0
    for work in range(gl.program_id(0), size.items, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, settings.GROUP)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_products(WG, ring, acc, step, begin, end, WRITTEN)
        # Loaded here and not before the loop over K, through which it would take a register.
        factor = 1.0
        if settings.SCALES > 0:
            factor *= gl.load(a_scale)
        if settings.SCALES > 1:
            factor *= gl.load(b_scale)
        row = tile_m * (settings.A_PARTS * ROWS) + settings.row_of(WG)
        column = tile_n * settings.BLOCK_N + settings.column_of(WG)
        to = out + entry.to(gl.int64) * out_entry
        if settings.SPLIT:
            last, acc = add_slices(acc, partial, arrived, tile * 2 + WG, index, size.slices, M - row, ROOM)
            if last:
                write_tile(acc, factor, staging.index(WG), to, bias, row, column, M, N, out_row, settings.BIAS)
        else:
            write_tile(acc, factor, staging.index(WG), to, bias, row, column, M, N, out_row, settings.BIAS)

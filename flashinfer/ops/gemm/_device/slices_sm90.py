"""The work of a persistent product on Hopper: tiles of the result, and K slices of each where K is split.

Used by `dense` and `blockscaled`. A work is one K slice of one tile of one batch entry; a tile's slices follow each
other. Whoever stores the last one's sums adds them all, in their order, and writes the tile.
"""

from flashinfer._core.gluon_compat import aggregate, block_barrier, gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, copy_blocks
from flashinfer.ops._device.sm90.walk import raster


@aggregate
class Size:
    """Of the whole product: steps of K, tiles along M and N, K slices of a tile, and works in all."""

    steps: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    slices: gl.tensor
    works: gl.tensor

    @gluon.jit
    def place(self, work, GROUP: gl.constexpr):
        """Batch entry, tile along M, along N, and slice of one work; the tile's number; the slice's steps of K."""
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
    """One warp: copies the tiles of A and B of each work, block of K by block, as stages come free."""
    settings = ring.settings
    step = 0
    for work in range(gl.program_id(0), size.works, gl.num_programs(0)):
        entry, tile_m, tile_n, index, tile, begin, end = size.place(work, settings.GROUP)
        row = tile_m * (settings.A_PARTS * ROWS)
        column = tile_n * settings.BLOCK_N
        step = copy_blocks(a_map, b_map, ring, step, entry, row, entry, column, begin, end)


@gluon.jit
def add_slices(acc, partial, arrived, slot, index, slices, height):
    """Store a K slice's sums; whoever stores the last of a tile's gets (True, the sum of all in their order).

    `slot` is the tile's place in `partial`, [slots, slices, rows, columns], and in `arrived`, which is 0 before and
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
    at = partial + slot.to(gl.int64) * slices * (M * N) + rows[:, None] * N + cols[None, :]
    gl.store(at + index * (M * N), acc, mask=there)
    # The barrier puts the stores of all threads before the one that counts. That one releases them, and acquires what
    # the other slices released.
    block_barrier()
    last = gl.atomic_add(arrived + slot, 1, sem="acq_rel") == slices - 1
    if last:
        gl.store(arrived + slot, 0)
        acc = gl.zeros([M, N], gl.float32, LAYOUT)
        for first in range(0, slices, AT_ONCE):
            found = ()
            for i in gl.static_range(AT_ONCE):
                found += (gl.load(at + (first + i) * (M * N), mask=there & (first + i < slices), other=0.0),)
            for i in gl.static_range(AT_ONCE):
                acc += found[i]
    return last, acc

"""The main loop of a Hopper GEMM: a ring of operand tiles in shared memory, filled by TMA and read by wgmma.

Two consumer warpgroups multiply. They have 64 rows of A each and share the tile of B; or, for few rows, they share the
tile of A and have half of B's columns each. One producer warp copies tiles of A and B, one block of K after another, as
stages of the ring become free.
"""

from flashinfer._core.gluon_compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.sm90.ring import Channel, make_channel

# Rows of a warpgroup's tile: M of one wgmma.
ROWS = gl.constexpr(64)


@aggregate
class Settings:
    """What a kernel is compiled for."""

    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    # Tiles of A, and of B, in a stage: 1 that the two warpgroups share, or 2, one for each.
    A_PARTS: gl.constexpr
    B_PARTS: gl.constexpr
    # Rows of A that one TMA copy loads. wgmma reads 64; the results of rows past BOX are discarded.
    BOX: gl.constexpr
    # Tiles of a column that are computed before the next column's, for the L2 cache (`raster` in walk.py).
    GROUP: gl.constexpr
    # The contiguous axis of B in memory: "k", "n", or "blocks" of both.
    B_MAJOR: gl.constexpr
    SPLIT: gl.constexpr
    SCALES: gl.constexpr
    BIAS: gl.constexpr
    # Blocks of K in one step of a consumer's loop; K slices are whole steps.
    UNROLL: gl.constexpr

    @gluon.constexpr_function
    def row_of(self, WG):
        """A warpgroup's first row of a tile."""
        return WG * ROWS if self.A_PARTS == 2 else 0

    @gluon.constexpr_function
    def column_of(self, WG):
        """A warpgroup's first column of a tile."""
        return WG * (self.BLOCK_N // 2) if self.A_PARTS == 1 else 0


@aggregate
class Ring:
    """Tiles of A [stages * A_PARTS, ROWS, BLOCK_K] and of B [stages * B_PARTS, n, k or k, n], and their channel."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    channel: Channel
    settings: Settings

    @gluon.jit
    def of_a(self, PART: gl.constexpr, stage):
        """A warpgroup's tile of A; its PART counts where they have one each."""
        return self.a.index(stage * self.settings.A_PARTS + (PART if self.settings.A_PARTS == 2 else 0))

    @gluon.jit
    def of_b(self, PART: gl.constexpr, stage):
        """A warpgroup's tile of B; its PART counts where they have one each."""
        return self.b.index(stage * self.settings.B_PARTS + (PART if self.settings.B_PARTS == 2 else 0))


@gluon.jit
def make_ring(DTYPE: gl.constexpr, settings: Settings, WRITERS: gl.constexpr = 1):
    """WRITERS : warps that fill a stage."""
    PART_N: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    B_ROWS: gl.constexpr = settings.BLOCK_K if settings.B_MAJOR == "n" else PART_N
    B_COLUMNS: gl.constexpr = PART_N if settings.B_MAJOR == "n" else settings.BLOCK_K
    a = gl.allocate_shared_memory(
        DTYPE, [settings.STAGES * settings.A_PARTS, ROWS, settings.BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([ROWS, settings.BLOCK_K], DTYPE),
    )  # fmt: skip
    b = gl.allocate_shared_memory(
        DTYPE, [settings.STAGES * settings.B_PARTS, B_ROWS, B_COLUMNS],
        gl.NVMMASharedLayout.get_default_for([B_ROWS, B_COLUMNS], DTYPE),
    )  # fmt: skip
    return Ring(a, b, make_channel(settings.STAGES, WRITERS, 2), settings)


@gluon.jit
def copy_blocks(a_map, b_map, ring: Ring, step, a_entry, row, b_entry, column, begin, end):
    """Producer warp: copies the tiles of A from `row` on and of B from `column` on, for steps of K `begin` to `end`."""
    settings = ring.settings
    BYTES: gl.constexpr = ring.a.dtype.primitive_bitwidth // 8
    PART_N: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    SIZE: gl.constexpr = (settings.A_PARTS * settings.BOX + settings.BLOCK_N) * settings.BLOCK_K * BYTES
    for block in range(begin * settings.UNROLL, end * settings.UNROLL):
        k = block * settings.BLOCK_K
        stage, full = ring.channel.expect(step, SIZE)
        for part in gl.static_range(settings.A_PARTS):
            to = ring.a.index(stage * settings.A_PARTS + part)
            if settings.BOX < ROWS:
                to = to.slice(0, settings.BOX, dim=0)
            tma_load(a_map, [a_entry, row + part * ROWS, k], full, to)
        for part in gl.static_range(settings.B_PARTS):
            to = ring.b.index(stage * settings.B_PARTS + part)
            if settings.B_MAJOR == "k":
                tma_load(b_map, [b_entry, column + part * PART_N, k], full, to)
            elif settings.B_MAJOR == "n":
                tma_load(b_map, [b_entry, k, column + part * PART_N], full, to)
            else:
                tma_load(b_map, [block, (column + part * PART_N) // 32, 0, 0, 0], full, to)
        step += 1
    return step


@gluon.jit
def sum_products(WG: gl.constexpr, ring: Ring, acc, step, begin, end, WRITTEN: gl.constexpr = False):
    """acc + the products of the blocks of K from `begin` to `end`.

    WRITTEN : warps, and not TMA, write the tiles of B; a fence orders their stores before wgmma's reads."""
    for block in range(begin, end):
        stage = ring.channel.stage(step)
        a = ring.of_a(WG, stage)
        b = ring.of_b(WG, stage)
        if ring.settings.B_MAJOR != "n":
            b = b.permute([1, 0])
        ring.channel.wait(step)
        if WRITTEN:
            fence_async_shared()
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # The previous product is complete, so its stage is free while this one is computed.
        acc = warpgroup_mma_wait(1, [acc])
        ring.channel.release(step + ring.settings.STAGES - 1, pred=block > begin)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    ring.channel.release(step + ring.settings.STAGES - 1)
    return acc, step


@gluon.jit
def halves(acc):
    """The left and the right half of a warpgroup's columns. No register is moved: each thread has both."""
    HALF: gl.constexpr = acc.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
    return left, right

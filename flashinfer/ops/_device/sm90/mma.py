"""Sums of products on Hopper: a ring of operand tiles that come by TMA, and the loop of wgmma over it.

Two warpgroups multiply. They share the tile's B and have 64 rows of A each, or share its A and have half of B's columns
each (few rows). One warp copies tiles of A and B, block of K by block, as stages of the ring come free.
"""

from flashinfer._core.gluon_compat import (
    aggregate,
    gl,
    gluon,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.sm90.ring import Channel, make_channel

# Rows of a warpgroup's tile: what one wgmma takes.
ROWS = gl.constexpr(64)


@aggregate
class Settings:
    """What a kernel is compiled for."""

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
    # Blocks of K that a consumer takes together, and that K slices are counted in.
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
    """One warp: copies the tiles of A from `row` on, and of B from `column` on, of K's blocks from `begin` to `end`."""
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
def sum_products(WG: gl.constexpr, ring: Ring, acc, step, begin, end):
    """acc + the products of the blocks of K from `begin` to `end`."""
    for block in range(begin, end):
        stage = ring.channel.stage(step)
        a = ring.of_a(WG, stage)
        b = ring.of_b(WG, stage)
        if ring.settings.B_MAJOR != "n":
            b = b.permute([1, 0])
        ring.channel.wait(step)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # The block before is done with: its stage is free while this one is multiplied.
        acc = warpgroup_mma_wait(1, [acc])
        ring.channel.release(step + ring.settings.STAGES - 1, pred=block > begin)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    ring.channel.release(step + ring.settings.STAGES - 1)
    return acc, step


@gluon.jit
def halves(acc):
    """The left and the right columns of a warpgroup's tile; no register moves."""
    HALF: gl.constexpr = acc.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
    return left, right

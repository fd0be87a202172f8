"""Products in groups on Hopper, without scales: out[r] = alpha a[r] b[weight of r's group]^T, of 16 bits or FP8.

Grid: any number of persistent blocks. Warps: two consumer warpgroups, one producer warp. The producer alone reads where
groups begin and end; it publishes each product in a slot, which the warpgroups read when they come to it. So a group
is found while the products before are computed, and nothing of it is kept through a loop over K. Tiles are walked
as in `sm90_scaled`. Shared memory: the ring, published products, a tile on its way out.

Inputs: a [entry, m, k] (one entry unless KIND is "counts"), b [weight, n, k] or [weight, k, n].
Outputs: out [entry, m, n]. Method: that of `sm90_scaled.py`, without its scales.
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings, copy_blocks, make_ring, sum_products
from flashinfer.ops._device.sm90.publish import make_slots
from flashinfer.ops._device.sm90.ring import Channel, make_channel
from flashinfer.ops._device.sm90.store import make_staging
from flashinfer.ops._device.sm90.walk import raster
from flashinfer.ops.gemm.grouped.sm90_groups import (
    Products,
    count_tiles,
    first_of,
    group_after,
    make_products,
    write_group,
)

# Groups that are looked at together, for each lane of a warp.
_EACH = gl.constexpr(4)
# Products that the producer may be ahead with.
_SLOTS = gl.constexpr(4)


@gluon.jit
def _produce(
    a_map, b_map, groups, weights, sizes, ring: Ring, products: Products, turns: Channel, KIND: gl.constexpr,
    WEIGHTS: gl.constexpr,
):  # fmt: skip
    """One warp: publishes what each product of each tile is, and copies what it needs."""
    M, N, steps, count, weight_count = sizes
    settings = ring.settings
    BLOCK_M: gl.constexpr = settings.A_PARTS * ROWS
    tiles = count_tiles(groups, count, M, KIND, BLOCK_M, _EACH, 1)
    tiles_n = gl.cdiv(N, settings.BLOCK_N)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        group, row, end = first_of(groups, tile, count, M, KIND, BLOCK_M, _EACH, 1)
        while group < count:
            weight = group
            if WEIGHTS:
                weight = gl.load(weights + group).to(gl.int32)
            if (weight >= 0) & (weight < weight_count):
                turns.acquire(number)
                products.write(number, group, row, end, tile_n, 0)
                if KIND == "indices":
                    products.write_rows(number, groups, row, M)
                turns.commit(number)
                number += 1
                entry = group if KIND == "counts" else 0
                step = copy_blocks(a_map, b_map, ring, step, entry, row, weight, tile_n * settings.BLOCK_N, 0, steps)
            group = group_after(groups, row, group, count, M, KIND, BLOCK_M, 1)
    turns.acquire(number)
    products.write(number, -1, 0, 0, 0, 0)
    turns.commit(number)


@gluon.jit
def _read(products: Products, turns: Channel, number):
    """A warpgroup: product `number`, once it is published; no group is -1: there are no more."""
    turns.wait(number)
    return products.read(number)


@gluon.jit
def _consume(
    WG: gl.constexpr, tensors, sizes, ring: Ring, products: Products, turns: Channel, staging, KIND: gl.constexpr
):  # fmt: skip
    """One warpgroup: its half of each product. `tensors` and `sizes` are of the kernel's arguments."""
    out, alpha = tensors
    N, steps, out_entry, out_row = sizes
    settings = ring.settings
    WIDTH: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    DEPTH: gl.constexpr = 256 // ring.a.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    step = 0
    number = 0
    while _read(products, turns, number)[0] >= 0:
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_products(WG, ring, acc, step, 0, steps)
        group, row, end, tile_n = _read(products, turns, number)
        of_rows = products.rows_of(WG, number, KIND, settings)
        row += settings.row_of(WG)
        column = tile_n * settings.BLOCK_N + settings.column_of(WG)
        to = out
        if KIND == "counts":
            to += group.to(gl.int64) * out_entry
        factor = 1.0
        if settings.SCALES > 0:
            factor *= gl.load(alpha)
        write_group(acc, factor, staging.index(WG), to, of_rows, group, row, end, column, N, out_row, KIND)
        turns.release(number)
        number += 1


@gluon.jit
def unscaled_sm90_kernel(
    a_map, b_map, out, alpha, groups, weights, M, N, K, count, weight_count, out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, KIND: gl.constexpr, B_MAJOR: gl.constexpr,
    ALPHA: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Maps are [entry, m, k] of A and [weight, n, k], or [weight, k, n], of B.

    `count` groups. With ALPHA the result is multiplied by `alpha`; with WEIGHTS each group has a weight by number.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 3 - A_PARTS
    settings = Settings(
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=ROWS, GROUP=GROUP,
        B_MAJOR=B_MAJOR, SPLIT=False, SCALES=1 if ALPHA else 0, BIAS=False, UNROLL=1,
    )  # fmt: skip
    HOW: gl.constexpr = gl.constexpr(KIND)
    BY: gl.constexpr = gl.constexpr(WEIGHTS)
    ring = make_ring(DTYPE, settings)
    products = make_products(make_slots(_SLOTS, 4), HOW, settings)
    turns = make_channel(_SLOTS, 1, 2)
    staging = make_staging(OUT, min(BLOCK_N // B_PARTS, 128))
    steps = gl.cdiv(K, BLOCK_K)
    tensors = (out, alpha)
    sizes = (M, N, steps, count, weight_count)
    ends = (N, steps, out_entry, out_row)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, ends, ring, products, turns, staging, HOW)),
            (_consume, (gl.constexpr(1), tensors, ends, ring, products, turns, staging, HOW)),
            (_produce, (a_map, b_map, groups, weights, sizes, ring, products, turns, HOW, BY)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

"""Grouped GEMM on Hopper without scales: out[r] = alpha a[r] b[weight of r's group]^T, in 16 bits or FP8.

Grid: any number of persistent blocks. Warps: two consumer warpgroups, one producer warp. The producer finds the groups
while earlier products are computed, and publishes a record of each product, which the warpgroups read where they use
it: it takes no registers during the loop over K. Tiles are taken in the order of `sm90_scaled`. Shared memory: the
ring, published products, a staging buffer for output.

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

# Groups that each lane of a warp reads at a time.
_PER_LANE = gl.constexpr(4)
# Products that the producer may publish ahead of the consumers.
_SLOTS = gl.constexpr(4)


@gluon.jit
def _produce(
    a_map, b_map, groups, weights, sizes, ring: Ring, products: Products, published: Channel, KIND: gl.constexpr,
    WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Producer warp: publishes each product of each tile, and copies its operands."""
    M, N, steps, count, weight_count = sizes
    settings = ring.settings
    BLOCK_M: gl.constexpr = settings.A_PARTS * ROWS
    tiles = count_tiles(groups, count, M, KIND, BLOCK_M, _PER_LANE)
    tiles_n = gl.cdiv(N, settings.BLOCK_N)
    step = 0
    number = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, tile_n = raster(work, tiles, tiles_n, settings.GROUP)
        group, row, end = first_of(groups, tile, count, M, KIND, BLOCK_M, _PER_LANE)
        while group < count:
            weight = group
            if WEIGHTS:
                weight = gl.load(weights + group).to(gl.int32)
            if (weight >= 0) & (weight < weight_count):
                published.acquire(number)
                products.write(number, group, row, end, tile_n, 0)
                if KIND == "indices":
                    products.write_rows(number, groups, row, M)
                published.commit(number)
                number += 1
                entry = group if KIND == "counts" else 0
                step = copy_blocks(a_map, b_map, ring, step, entry, row, weight, tile_n * settings.BLOCK_N, 0, steps)
            group = group_after(groups, row, group, count, M, KIND, BLOCK_M)
    published.acquire(number)
    products.write(number, -1, 0, 0, 0, 0)
    published.commit(number)


@gluon.jit
def _read(products: Products, published: Channel, number):
    """Consumer: waits for product `number` and reads its record. A group of -1 means that there are no more."""
    published.wait(number)
    return products.read(number)


@gluon.jit
def _consume(
    WG: gl.constexpr, tensors, sizes, ring: Ring, products: Products, published: Channel, staging, KIND: gl.constexpr
):  # fmt: skip
    """Consumer warpgroup WG: computes and writes its half of each product. `tensors` and `sizes` are kernel
    arguments."""
    out, alpha = tensors
    N, steps, out_entry, out_row = sizes
    settings = ring.settings
    WIDTH: gl.constexpr = settings.BLOCK_N // settings.B_PARTS
    DEPTH: gl.constexpr = 256 // ring.a.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    step = 0
    number = 0
    while _read(products, published, number)[0] >= 0:
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        acc, step = sum_products(WG, ring, acc, step, 0, steps)
        group, row, end, tile_n = _read(products, published, number)
        row_groups = products.row_groups_of(WG, number, KIND, settings)
        row += settings.row_of(WG)
        column = tile_n * settings.BLOCK_N + settings.column_of(WG)
        to = out
        if KIND == "counts":
            to += group.to(gl.int64) * out_entry
        factor = 1.0
        if settings.SCALES > 0:
            factor *= gl.load(alpha)
        write_group(acc, factor, staging.index(WG), to, row_groups, group, row, end, column, N, out_row, KIND)
        published.release(number)
        number += 1


@gluon.jit
def unscaled_sm90_kernel(
    a_map, b_map, out, alpha, groups, weights, M, N, K, count, weight_count, out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, KIND: gl.constexpr, B_MAJOR: gl.constexpr,
    ALPHA: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """a_map is of [entry, m, k], b_map of [weight, n, k] or [weight, k, n].

    There are `count` groups. With ALPHA the result is multiplied by `alpha`; with WEIGHTS `weights` has the number of
    each group's weight.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 3 - A_PARTS
    settings = Settings(
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=ROWS, GROUP=GROUP,
        B_MAJOR=B_MAJOR, SPLIT=False, SCALES=1 if ALPHA else 0, BIAS=False, UNROLL=1,
    )  # fmt: skip
    KIND_ARG: gl.constexpr = gl.constexpr(KIND)
    WEIGHTS_ARG: gl.constexpr = gl.constexpr(WEIGHTS)
    ring = make_ring(DTYPE, settings)
    products = make_products(make_slots(_SLOTS, 4), KIND_ARG, settings)
    published = make_channel(_SLOTS, 1, 2)
    staging = make_staging(OUT, min(BLOCK_N // B_PARTS, 128))
    steps = gl.cdiv(K, BLOCK_K)
    tensors = (out, alpha)
    sizes = (M, N, steps, count, weight_count)
    consumer_sizes = (N, steps, out_entry, out_row)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), tensors, consumer_sizes, ring, products, published, staging, KIND_ARG)),
            (_consume, (gl.constexpr(1), tensors, consumer_sizes, ring, products, published, staging, KIND_ARG)),
            (_produce, (a_map, b_map, groups, weights, sizes, ring, products, published, KIND_ARG, WEIGHTS_ARG)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

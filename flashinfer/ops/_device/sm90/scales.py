"""FP8 products with block scales: one scale for a row of A and 128 of K, one for 128 rows of B and 128 of K.

The tensor cores sum one block of 128 of K, with their reduced accumulator precision. A float32 accumulator in registers
then adds that sum times its factor, which is a scale of A times a scale of B.

A warp of its own loads factors into shared memory, into the stage of the ring that they belong to, so that the consumer
warpgroups wait for no global load and keep no addresses. For tiles of more than 64 rows this warp multiplies the two
scales. Tiles of 64 rows are bound by memory latency: there the warp only copies both scales with cp.async, as many
blocks ahead as the ring has stages, and the warpgroups multiply them.

A warpgroup with 128 columns or fewer has two tensor core accumulators: one is filled while the other is scaled and
added. One loop step has UNROLL blocks of K and ends with both accumulators complete, because ptxas waits after every
wgmma if an accumulator is in flight across the loop's back edge.
"""

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async,
    cp_async_arrive,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.sm90.mma import ROWS, Ring, Settings


@aggregate
class Scales:
    """The scales of one tile.

    a : pointers to the first block's scale of each row of A; b : of the tile's first 128 columns of B. row_ok, right_ok
    : which rows exist, and whether the columns from 128 on do. a_k, b_k : strides from one block of K to the next.
    b_column : stride to the next 128 columns.
    """

    a: gl.tensor
    b: gl.tensor
    row_ok: gl.tensor
    right_ok: gl.tensor
    a_k: gl.tensor
    b_k: gl.tensor
    b_column: gl.tensor


@gluon.jit
def make_factors(settings: Settings):
    """Shared memory of the ring's stages. A stage has a factor of each row for each 128 columns; for tiles of 64 rows,
    the scale of each row of A, then the scale of B."""
    EACH: gl.constexpr = 2 if settings.A_PARTS == 1 else settings.BLOCK_N // 128
    return gl.allocate_shared_memory(
        gl.float32, [settings.STAGES * EACH, settings.A_PARTS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def rows_of(row, settings: Settings):
    """The rows of a tile in the layout of the warp that loads factors."""
    return row + gl.arange(0, settings.A_PARTS * ROWS, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _scales_of(first, blocks, scales: Scales, COUNT: gl.constexpr, WIDE: gl.constexpr):
    """For each of COUNT blocks of K from `first` on: the scales of the rows, of the left 128 columns, and with WIDE of
    the right 128 columns. Zeros past the last block."""
    found = ()
    for i in gl.static_range(COUNT):
        block = first + i
        ok = block < blocks
        a = gl.load(scales.a + block * scales.a_k, mask=scales.row_ok & ok, other=0.0)
        left = gl.load(scales.b + block * scales.b_k, mask=ok, other=0.0)
        right = left
        if WIDE:
            right = gl.load(scales.b + scales.b_column + block * scales.b_k, mask=ok & scales.right_ok, other=0.0)
        found += ((a, left, right),)
    return found


@gluon.jit
def load_factors(ring: Ring, factors, scales: Scales, step, begin, end, blocks):
    """Scale warp: loads the factors of steps of K `begin` to `end` into the ring's stages; zeros past the last
    block."""
    begin *= ring.settings.UNROLL
    end *= ring.settings.UNROLL
    if ring.settings.A_PARTS == 1:
        step = _copy_scales(ring, factors, scales, step, begin, end, blocks)
    else:
        step = _load_products(ring, factors, scales, step, begin, end, blocks)
    return step


@gluon.jit
def _copy_scales(ring: Ring, factors, scales: Scales, step, begin, end, blocks):
    """Copies scales of A and B as stages become free. Only the readers of a stage wait for its copies, so the copies of
    all stages can be in flight."""
    for block in range(begin, end):
        ok = scales.row_ok & (block < blocks)
        stage = ring.channel.acquire(step)
        cp_async(factors.index(stage * 2), scales.a + block * scales.a_k, mask=ok)
        b_scales = scales.b + block * scales.b_k + gl.zeros_like(ok).to(gl.int32)
        cp_async(factors.index(stage * 2 + 1), b_scales, mask=ok)
        # cp_async_arrive keeps the phase incomplete until each thread's copies have arrived. It leaves the number of
        # expected arrivals as it is: the stage expects one, the commit below.
        cp_async_arrive(ring.channel.full.index(stage))
        block_barrier()
        ring.channel.commit(step)
        step += 1
    return step


@gluon.jit
def _load_products(ring: Ring, factors, scales: Scales, step, begin, end, blocks):
    """Multiplies the two scales and stores the factors: the consumer warpgroups have no issue slots to spare for it."""
    PARTS: gl.constexpr = ring.settings.BLOCK_N // 128
    # Blocks loaded at once. The latency of a load is longer than the products of one block of 128 columns.
    COUNT: gl.constexpr = min(ring.settings.UNROLL, 2)
    found = _scales_of(begin, blocks, scales, COUNT, PARTS == 2)
    for first in range(begin, end, COUNT):
        # The next scales are loaded while this warp waits for free stages.
        current = found
        found = _scales_of(first + COUNT, blocks, scales, COUNT, PARTS == 2)
        for i in gl.static_range(COUNT):
            a, left, right = current[i]
            stage = ring.channel.acquire(step)
            factors.index(stage * PARTS).store(a * left)
            if PARTS == 2:
                factors.index(stage * PARTS + 1).store(a * right)
            ring.channel.commit(step)
            step += 1
    return step


@gluon.jit
def _issue_product(A_PART: gl.constexpr, B_PART: gl.constexpr, ring: Ring, zeros, step):
    """Wait for the operands of one block of K, and issue its wgmma."""
    ring.channel.wait(step)
    return _issue(A_PART, B_PART, ring, zeros, step)


@gluon.jit
def _issue(A_PART: gl.constexpr, B_PART: gl.constexpr, ring: Ring, before, step):
    """Issue the wgmma of one block of K, whose stage is full. Its result replaces `before`, which it does not read."""
    stage = ring.channel.stage(step)
    a = ring.of_a(A_PART, stage)
    b = ring.of_b(B_PART, stage)
    return warpgroup_mma(a, b.permute([1, 0]), before, use_acc=False, is_async=True)


@gluon.jit
def _factors_of(WG: gl.constexpr, PART: gl.constexpr, ring: Ring, factors, step, LAYOUT: gl.constexpr):
    """The factors [ROWS, 1] of one block of K and of the PART-th 128 columns. The block's stage is full."""
    A_PARTS: gl.constexpr = ring.settings.A_PARTS
    first = ring.channel.stage(step) * (2 if A_PARTS == 1 else ring.settings.BLOCK_N // 128)
    factor = factors.index(first + PART).slice(ring.settings.row_of(WG), ROWS).load(gl.SliceLayout(1, LAYOUT))
    if A_PARTS == 1:
        factor *= factors.index(first + 1).load(gl.SliceLayout(1, LAYOUT))
    return factor[:, None]


@gluon.jit
def sum_blocks(WG: gl.constexpr, ring: Ring, factors, acc, zeros, step, begin, end):
    """acc + the scaled products of steps of K `begin` to `end`. One block is scaled and added while the tensor cores
    compute the next."""
    LAYOUT: gl.constexpr = acc.type.layout
    UNROLL: gl.constexpr = ring.settings.UNROLL
    for group in range(begin, end):
        part = _issue_product(WG, WG, ring, zeros, step)
        factor = _factors_of(WG, 0, ring, factors, step, LAYOUT)
        for i in gl.static_range(UNROLL):
            before = part
            current = factor
            if i + 1 < UNROLL:
                # At most one product is in flight here, so this wait returns at once. It keeps the compiler from moving
                # the previous addition behind the next wgmma, which would need registers for a third accumulator.
                acc = warpgroup_mma_wait(1, [acc])
                part = _issue_product(WG, WG, ring, zeros, step + i + 1)
                factor = _factors_of(WG, 0, ring, factors, step + i + 1, LAYOUT)
                done = warpgroup_mma_wait(1, [before])
            else:
                done = warpgroup_mma_wait(0, [before])
            ring.channel.release(step + i)
            acc += done * current
        step += UNROLL
    return acc, step


@gluon.jit
def sum_wide_blocks(WG: gl.constexpr, ring: Ring, factors, left, right, zeros, step, blocks):
    """sum_blocks for 256 columns, over `blocks` blocks of K. Registers suffice for one tensor core accumulator; the
    tensor cores work for the other warpgroup while this one scales and adds.

    Between a product and the issue of the next one are only the additions: the waits for the next stage, and the
    barrier of all warps that comes before a release, stand where the tensor cores work for this warpgroup."""
    LAYOUT: gl.constexpr = left.type.layout
    # Steps that differ by a multiple of 2 * STAGES, a power of two, have the same stage and phase. The compiler sees
    # that a masked step is not negative.
    MASK: gl.constexpr = 2 * ring.settings.STAGES - 1
    ring.channel.wait(step & MASK, pred=blocks > 0)
    done = zeros
    for block in range(0, blocks):
        place = step & MASK
        part = _issue(WG, 0, ring, done, place)
        ring.channel.release((step - 1) & MASK, pred=block > 0)
        left_factor = _factors_of(WG, 0, ring, factors, place, LAYOUT)
        right_factor = _factors_of(WG, 1, ring, factors, place, LAYOUT)
        done, left, right = warpgroup_mma_wait(0, [part, left, right])
        left += done * left_factor
        left = warpgroup_mma_wait(0, [left])
        # The product replaces the sums that were added: it gets their registers, and no others.
        part = _issue(WG, 1, ring, done, place)
        step += 1
        ring.channel.wait(step & MASK, pred=block + 1 < blocks)
        done, left, right = warpgroup_mma_wait(0, [part, left, right])
        right += done * right_factor
        right = warpgroup_mma_wait(0, [right])
    ring.channel.release((step - 1) & MASK, pred=blocks > 0)
    return left, right, step

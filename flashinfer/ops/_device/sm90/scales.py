"""Sums of FP8 products with a scale for each 128 of K of a row of A, and of 128 rows of B.

The tensor cores sum 128 of K, with the few bits that they keep; a float32 sum takes that up with its factor. Factors, a
scale of A times one of B, are brought by a warp of their own, beside the stage of the ring that they belong to: the
warpgroups that multiply wait for no memory and hold no addresses. To tiles of 64 rows, which wait for memory, the warp
copies the scales themselves, as deep as the ring, and the warpgroups multiply them. A warpgroup that has 128 columns or
fewer has two sums of the tensor cores: while one is scaled and added, they fill the other. UNROLL blocks of K make a
step of the loop, at whose end both are empty: an accumulator that is in flight across the loop's back edge makes ptxas
wait for every product.
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
    """What scales are for one tile: addresses of the first block's, for each row of A and for 128 columns of B."""

    a: gl.tensor
    b: gl.tensor
    row_ok: gl.tensor
    right_ok: gl.tensor
    a_k: gl.tensor
    b_k: gl.tensor
    b_column: gl.tensor


@gluon.jit
def make_factors(settings: Settings):
    """Of each stage, for each row: its factor for each 128 columns; of tiles of 64 rows its scale, and the columns'."""
    EACH: gl.constexpr = 2 if settings.A_PARTS == 1 else settings.BLOCK_N // 128
    return gl.allocate_shared_memory(
        gl.float32, [settings.STAGES * EACH, settings.A_PARTS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def rows_of(row, settings: Settings):
    """The rows of a tile, as the warp that brings factors has them."""
    return row + gl.arange(0, settings.A_PARTS * ROWS, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _scales_of(first, blocks, scales: Scales, COUNT: gl.constexpr, WIDE: gl.constexpr):
    """Of COUNT blocks of K: a scale for each row, for the left 128 columns and for the right; past the end zeros."""
    found = ()
    for i in gl.static_range(COUNT):
        block = first + i
        there = block < blocks
        a = gl.load(scales.a + block * scales.a_k, mask=scales.row_ok & there, other=0.0)
        left = gl.load(scales.b + block * scales.b_k, mask=there, other=0.0)
        right = left
        if WIDE:
            right = gl.load(scales.b + scales.b_column + block * scales.b_k, mask=there & scales.right_ok, other=0.0)
        found += ((a, left, right),)
    return found


@gluon.jit
def bring_factors(ring: Ring, factors, scales: Scales, step, begin, end, blocks):
    """One warp: what sums of each block of K are multiplied with, beside its stage of the ring; past the end zeros."""
    begin *= ring.settings.UNROLL
    end *= ring.settings.UNROLL
    if ring.settings.A_PARTS == 1:
        step = _copy_scales(ring, factors, scales, step, begin, end, blocks)
    else:
        step = _bring_products(ring, factors, scales, step, begin, end, blocks)
    return step


@gluon.jit
def _copy_scales(ring: Ring, factors, scales: Scales, step, begin, end, blocks):
    """Scales, copied as stages come free and waited for by nobody before their stage is used: those of as many blocks
    are on their way as there are stages."""
    for block in range(begin, end):
        there = scales.row_ok & (block < blocks)
        stage = ring.channel.acquire(step)
        cp_async(factors.index(stage * 2), scales.a + block * scales.a_k, mask=there)
        of_columns = scales.b + block * scales.b_k + gl.zeros_like(there).to(gl.int32)
        cp_async(factors.index(stage * 2 + 1), of_columns, mask=there)
        # Each thread arrives when its copies have, beside the one arrival that a stage waits for: this one is the last.
        cp_async_arrive(ring.channel.full.index(stage))
        block_barrier()
        ring.channel.commit(step)
        step += 1
    return step


@gluon.jit
def _bring_products(ring: Ring, factors, scales: Scales, step, begin, end, blocks):
    """Factors, multiplied here: it would take the time of warpgroups that are bound by what they execute."""
    PARTS: gl.constexpr = ring.settings.BLOCK_N // 128
    # Blocks at once: their way from memory is longer than the products of one block of 128 columns take.
    COUNT: gl.constexpr = min(ring.settings.UNROLL, 2)
    found = _scales_of(begin, blocks, scales, COUNT, PARTS == 2)
    for first in range(begin, end, COUNT):
        # The next ones are on their way while free stages are waited for.
        now = found
        found = _scales_of(first + COUNT, blocks, scales, COUNT, PARTS == 2)
        for i in gl.static_range(COUNT):
            a, left, right = now[i]
            stage = ring.channel.acquire(step)
            factors.index(stage * PARTS).store(a * left)
            if PARTS == 2:
                factors.index(stage * PARTS + 1).store(a * right)
            ring.channel.commit(step)
            step += 1
    return step


@gluon.jit
def _start(A_PART: gl.constexpr, B_PART: gl.constexpr, ring: Ring, zeros, step):
    """Start the products of one block of K."""
    stage = ring.channel.stage(step)
    a = ring.of_a(A_PART, stage)
    b = ring.of_b(B_PART, stage)
    ring.channel.wait(step)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors_of(WG: gl.constexpr, PART: gl.constexpr, ring: Ring, factors, step, LAYOUT: gl.constexpr):
    """[ROWS, 1]: of one block of K, whose stage is full, and of 128 columns."""
    A_PARTS: gl.constexpr = ring.settings.A_PARTS
    first = ring.channel.stage(step) * (2 if A_PARTS == 1 else ring.settings.BLOCK_N // 128)
    its = factors.index(first + PART).slice(ring.settings.row_of(WG), ROWS).load(gl.SliceLayout(1, LAYOUT))
    if A_PARTS == 1:
        its *= factors.index(first + 1).load(gl.SliceLayout(1, LAYOUT))
    return its[:, None]


@gluon.jit
def sum_blocks(WG: gl.constexpr, ring: Ring, factors, acc, zeros, step, begin, end):
    """acc + the scaled products of blocks of K: while one is scaled and added, the tensor cores sum the next."""
    LAYOUT: gl.constexpr = acc.type.layout
    UNROLL: gl.constexpr = ring.settings.UNROLL
    for group in range(begin, end):
        part = _start(WG, WG, ring, zeros, step)
        factor = _factors_of(WG, 0, ring, factors, step, LAYOUT)
        for i in gl.static_range(UNROLL):
            before = part
            now = factor
            if i + 1 < UNROLL:
                # Nothing is waited for that is not there: it keeps the compiler from adding the block before last after
                # this one is started, which would take registers for a third.
                acc = warpgroup_mma_wait(1, [acc])
                part = _start(WG, WG, ring, zeros, step + i + 1)
                factor = _factors_of(WG, 0, ring, factors, step + i + 1, LAYOUT)
                done = warpgroup_mma_wait(1, [before])
            else:
                done = warpgroup_mma_wait(0, [before])
            ring.channel.release(step + i)
            acc += done * now
        step += UNROLL
    return acc, step


@gluon.jit
def sum_wide_blocks(WG: gl.constexpr, ring: Ring, factors, left, right, zeros, step, begin, end):
    """sum_blocks of 256 columns: registers are left for one sum of the tensor cores, which the other warpgroup uses
    while this one scales and adds."""
    LAYOUT: gl.constexpr = left.type.layout
    for group in range(begin, end):
        for i in gl.static_range(ring.settings.UNROLL):
            part = _start(WG, 0, ring, zeros, step + i)
            of_left = _factors_of(WG, 0, ring, factors, step + i, LAYOUT)
            of_right = _factors_of(WG, 1, ring, factors, step + i, LAYOUT)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            left += done * of_left
            left = warpgroup_mma_wait(0, [left])
            part = _start(WG, 1, ring, zeros, step + i)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            ring.channel.release(step + i)
            right += done * of_right
            right = warpgroup_mma_wait(0, [right])
        step += ring.settings.UNROLL
    return left, right, step

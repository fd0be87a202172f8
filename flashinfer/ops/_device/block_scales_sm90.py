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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.products_sm90 import ROWS, Form, Ring


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

    @gluon.constexpr_function
    def __init__(self, a, b, row_ok, right_ok, a_k, b_k, b_column):
        self.a = a
        self.b = b
        self.row_ok = row_ok
        self.right_ok = right_ok
        self.a_k = a_k
        self.b_k = b_k
        self.b_column = b_column


@gluon.jit
def make_factors(form: Form):
    """Of each stage, for each row: its factor for each 128 columns; of tiles of 64 rows its scale, and the columns'."""
    return gl.allocate_shared_memory(
        gl.float32, [form.STAGES * (2 if form.A_PARTS == 1 else form.BLOCK_N // 128), form.A_PARTS * ROWS],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )  # fmt: skip


@gluon.jit
def rows_of(row, form: Form):
    """The rows of a tile, as the warp that brings factors has them."""
    return row + gl.arange(0, form.A_PARTS * ROWS, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _scales_of(first, blocks, scales: Scales, COUNT: gl.constexpr, form: Form):
    """Of COUNT blocks of K: a scale for each row, for the left 128 columns and for the right; past the end zeros."""
    found = ()
    for i in gl.static_range(COUNT):
        block = first + i
        there = block < blocks
        a = gl.load(scales.a + block * scales.a_k, mask=scales.row_ok & there, other=0.0)
        left = gl.load(scales.b + block * scales.b_k, mask=there, other=0.0)
        right = left
        if form.BLOCK_N > 128:
            right = gl.load(scales.b + scales.b_column + block * scales.b_k, mask=there & scales.right_ok, other=0.0)
        found += ((a, left, right),)
    return found


@gluon.jit
def bring_factors(ring: Ring, factors, scales: Scales, step, begin, end, blocks, form: Form):
    """One warp: what sums of each block of K are multiplied with, beside its stage of the ring; past the end zeros."""
    if form.A_PARTS == 1:
        step = _copy_scales(ring, factors, scales, step, begin * form.UNROLL, end * form.UNROLL, blocks, form)
    else:
        step = _bring_products(ring, factors, scales, step, begin * form.UNROLL, end * form.UNROLL, blocks, form)
    return step


@gluon.jit
def _copy_scales(ring: Ring, factors, scales: Scales, step, begin, end, blocks, form: Form):
    """Scales, copied as stages come free and waited for by nobody before their stage is used: those of as many blocks
    are on their way as there are stages."""
    for block in range(begin, end):
        stage = step % form.STAGES
        full = ring.full.index(stage)
        there = scales.row_ok & (block < blocks)
        mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
        cp_async(factors.index(stage * 2), scales.a + block * scales.a_k, mask=there)
        of_columns = scales.b + block * scales.b_k + gl.zeros_like(there).to(gl.int32)
        cp_async(factors.index(stage * 2 + 1), of_columns, mask=there)
        # Each thread arrives when its copies have, beside the one arrival that a stage waits for: this one is the last.
        cp_async_arrive(full)
        block_barrier()
        mbarrier.arrive(full, count=1)
        step += 1
    return step


@gluon.jit
def _bring_products(ring: Ring, factors, scales: Scales, step, begin, end, blocks, form: Form):
    """Factors, multiplied here: it would take the time of warpgroups that are bound by what they execute."""
    PARTS: gl.constexpr = form.BLOCK_N // 128
    # Blocks at once: their way from memory is longer than the products of one block of 128 columns take.
    COUNT: gl.constexpr = min(form.UNROLL, 2)
    found = _scales_of(begin, blocks, scales, COUNT, form)
    for first in range(begin, end, COUNT):
        # The next ones are on their way while free stages are waited for.
        now = found
        found = _scales_of(first + COUNT, blocks, scales, COUNT, form)
        for i in gl.static_range(COUNT):
            a, left, right = now[i]
            stage = step % form.STAGES
            mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
            factors.index(stage * PARTS).store(a * left)
            if PARTS == 2:
                factors.index(stage * PARTS + 1).store(a * right)
            mbarrier.arrive(ring.full.index(stage), count=1)
            step += 1
    return step


@gluon.jit
def _start(A_PART: gl.constexpr, B_PART: gl.constexpr, ring: Ring, zeros, step, form: Form):
    """Start the products of one block of K."""
    stage = step % form.STAGES
    a = ring.a.index(stage * form.A_PARTS + A_PART)
    b = ring.b.index(stage * form.B_PARTS + B_PART)
    mbarrier.wait(ring.full.index(stage), (step // form.STAGES) & 1)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors_of(A_PART: gl.constexpr, PART: gl.constexpr, factors, step, LAYOUT: gl.constexpr, form: Form):
    """[ROWS, 1]: of one block of K, whose stage is full."""
    first = (step % form.STAGES) * (2 if form.A_PARTS == 1 else form.BLOCK_N // 128)
    its = factors.index(first + PART).slice(A_PART * ROWS, ROWS).load(gl.SliceLayout(1, LAYOUT))
    if form.A_PARTS == 1:
        its *= factors.index(first + 1).load(gl.SliceLayout(1, LAYOUT))
    return its[:, None]


@gluon.jit
def sum_blocks(WG: gl.constexpr, ring: Ring, factors, acc, zeros, step, begin, end, form: Form):
    """acc + the scaled products of blocks of K: while one is scaled and added, the tensor cores sum the next."""
    A_PART: gl.constexpr = WG if form.A_PARTS == 2 else 0
    B_PART: gl.constexpr = WG if form.B_PARTS == 2 else 0
    LAYOUT: gl.constexpr = acc.type.layout
    for group in range(begin, end):
        part = _start(A_PART, B_PART, ring, zeros, step, form)
        factor = _factors_of(A_PART, 0, factors, step, LAYOUT, form)
        for i in gl.static_range(form.UNROLL):
            before = part
            now = factor
            if i + 1 < form.UNROLL:
                # Nothing is waited for that is not there: it keeps the compiler from adding the block before last after
                # this one is started, which would take registers for a third.
                acc = warpgroup_mma_wait(1, [acc])
                part = _start(A_PART, B_PART, ring, zeros, step + i + 1, form)
                factor = _factors_of(A_PART, 0, factors, step + i + 1, LAYOUT, form)
                done = warpgroup_mma_wait(1, [before])
            else:
                done = warpgroup_mma_wait(0, [before])
            mbarrier.arrive(ring.empty.index((step + i) % form.STAGES), count=1)
            acc += done * now
        step += form.UNROLL
    return acc, step


@gluon.jit
def sum_wide_blocks(WG: gl.constexpr, ring: Ring, factors, left, right, zeros, step, begin, end, form: Form):
    """sum_blocks of 256 columns: registers are left for one sum of the tensor cores, which the other warpgroup uses
    while this one scales and adds."""
    LAYOUT: gl.constexpr = left.type.layout
    for group in range(begin, end):
        for i in gl.static_range(form.UNROLL):
            part = _start(WG, 0, ring, zeros, step + i, form)
            of_left = _factors_of(WG, 0, factors, step + i, LAYOUT, form)
            of_right = _factors_of(WG, 1, factors, step + i, LAYOUT, form)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            left += done * of_left
            left = warpgroup_mma_wait(0, [left])
            part = _start(WG, 1, ring, zeros, step + i, form)
            done, left, right = warpgroup_mma_wait(0, [part, left, right])
            mbarrier.arrive(ring.empty.index((step + i) % form.STAGES), count=1)
            right += done * of_right
            right = warpgroup_mma_wait(0, [right])
        step += form.UNROLL
    return left, right, step

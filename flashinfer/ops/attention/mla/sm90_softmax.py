"""Latent attention on Hopper: scores, softmax and P V over pairs of key blocks.

Each of two warpgroups computes the scores and weights of one block of a pair, and accumulates one half of the output's
columns over both blocks. It takes its own weights from registers, and the other's from shared memory, where they
overwrite the positional keys of their block (the split of FlashMLA, DeepSeek, 2025). The products of one warpgroup
overlap the softmax of the other.

Pairs that need a mask, and always the last pair, use the online softmax; maxima pass from block to block. In bf16 the
resulting maximum is the fixed shift of the other pairs, as in Hopper prefill.
"""

from flashinfer._core.gluon_compat import (
    block_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.sm90.registers import lane, opaque
from flashinfer.ops.attention.mla.sm90_settings import COPY, HALF, KEYS, PART, ROWS, Settings, Shared


@gluon.jit
def _wait_half(barriers, BLOCK: gl.constexpr, phase, settings: Settings):
    """Wait until both parts of a half can be read by wgmma."""
    for part in gl.static_range(2):
        mbarrier.wait(barriers.index(2 * BLOCK + part), phase)
    if settings.GATHER:
        # Orders writes by threads and cp.async before wgmma's reads.
        fence_async_shared()


@gluon.jit
def _half_scores(
    LEFT: gl.constexpr, BLOCK: gl.constexpr, s, shared: Shared, step, ADD: gl.constexpr, settings: Settings
):
    """Issue the products of half of the columns, each part once it is filled; parts that cp.async fills together."""
    # 0, which the compiler does not know. Otherwise it computes 72 operand descriptors before the loop, which spill.
    zero = step >> 30
    q = (shared.q_left if LEFT else shared.q_right).index(zero)
    keys = (shared.left if LEFT else shared.right).index(BLOCK + zero)
    full = shared.left_full if LEFT else shared.right_full
    TOGETHER: gl.constexpr = settings.Q_COPIED
    if TOGETHER:
        # One fence for both: each takes a barrier of the warpgroup with it.
        _wait_half(full, BLOCK, step & 1, settings)
    for part in gl.static_range(2):
        if not TOGETHER:
            mbarrier.wait(full.index(2 * BLOCK + part), step & 1)
            if settings.GATHER:
                fence_async_shared()
        k = keys.slice(part * PART, PART, dim=1).permute([1, 0])
        s = warpgroup_mma(q.slice(part * PART, PART, dim=1), k, s, use_acc=ADD or part > 0, is_async=True)
    return s


@gluon.jit
def _rest_scores(BLOCK: gl.constexpr, s, shared: Shared, step, ADD: gl.constexpr):
    """Issue the products of positional rows."""
    zero = step >> 30
    rest = shared.rest.index(BLOCK + zero).permute([1, 0])
    return warpgroup_mma(shared.q_rest.index(zero), rest, s, use_acc=ADD, is_async=True)


@gluon.jit
def _scores(BLOCK: gl.constexpr, zeros, shared: Shared, step, pe_ratio, settings: Settings):
    """Issue S = Q K^T of a block, beginning with the half that is filled first."""
    RATIO: gl.constexpr = settings.POSITIONAL and settings.TRANSFORM
    s = zeros
    if RATIO:
        # Positional products have an extra factor: they come first, and are scaled before the others are added.
        _wait_half(shared.right_full if BLOCK == 0 else shared.left_full, BLOCK, step & 1, settings)
        s = _rest_scores(BLOCK, s, shared, step, False)
        s = warpgroup_mma_wait(0, [s]) * pe_ratio
    s = _half_scores(BLOCK == 0, BLOCK, s, shared, step, RATIO, settings)
    s = _half_scores(BLOCK == 1, BLOCK, s, shared, step, True, settings)
    if settings.POSITIONAL and not RATIO:
        s = _rest_scores(BLOCK, s, shared, step, True)
    return s


@gluon.jit
def _clear_tail(tile, start, end):
    """Zero the rows of a tile past the last key: their weight is 0, and 0 times NaN is NaN."""
    SLICE: gl.constexpr = 16
    row = gl.arange(0, SLICE, gl.SliceLayout(1, COPY))
    for i in gl.static_range(KEYS // SLICE):
        if start + (i + 1) * SLICE > end:
            # 16 bytes a thread at a time: the accumulator leaves few registers.
            for j in gl.static_range(HALF // 64):
                part = tile.slice(i * SLICE, SLICE, dim=0).slice(j * 64, 64, dim=1)
                x = part.load(COPY)
                part.store(gl.where((start + i * SLICE + row < end)[:, None], x, 0.0).to(x.dtype))


@gluon.jit
def _hidden(WG: gl.constexpr, s, keys, last, settings: Settings):
    """Mask the logits of a block with `keys` keys, of which a row sees those up to key `last`: the others become -inf.

    Lane c of four has columns 8 i + 2 c + j. The comparison 8 i + j < keys - 2 c has constants on the left and one
    value on the right. Comparing columns would keep 16 registers over the whole loop. Example: lane 1 with 11 keys
    compares 0, 1, 8, 9, 16 ... with 9: of its columns 2, 3, 10, 11, 18 ... it keeps 2, 3 and 10.
    """
    LAYOUT: gl.constexpr = s.type.layout
    s = s.reshape([ROWS, KEYS // 8, 4, 2])
    APART: gl.constexpr = s.type.layout
    i = gl.arange(0, KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, APART))))
    j = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, APART))))
    col = (8 * i)[None, :, None, None] + j[None, None, None, :]
    if WG == 0 or settings.KV_FP8 == "":
        # The lane is read here, because no register is left to keep it. The second warpgroup with FP8 keys keeps it:
        # reading would make it 1 % slower.
        first = 2 * (lane() & 3)
    else:
        LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, APART)))
        first = 2 * opaque(gl.arange(0, 4, LANES))[None, None, :, None]
    s = gl.where(col < keys - first, s, float("-inf"))
    if settings.CAUSAL:
        last = gl.convert_layout(last, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, APART))))
        s = gl.where(col <= last[:, None, None, None] - first, s, float("-inf"))
    return gl.convert_layout(s.reshape([ROWS, KEYS]), LAYOUT)


@gluon.jit
def _masked(
    WG: gl.constexpr, s, start, end, plain_end, position, shared: Shared, phase, PLAIN: gl.constexpr, settings: Settings
):
    """Set the logits of keys that a row does not see to -inf. With PLAIN every row sees all existing keys."""
    if settings.SPARSE:
        # The bias is also -inf past the end.
        mbarrier.wait(shared.bias_full.index(WG), phase)
        s += shared.bias.index(WG).load(gl.SliceLayout(0, s.type.layout))[None, :]
    if not PLAIN and (settings.CAUSAL or not settings.SPARSE):
        if start + KEYS > plain_end:
            s = _hidden(WG, s, end - start, position - start, settings)
    return s


@gluon.jit
def _softmax(s, top, factor):
    """One block of the online softmax in base 2: weights, maxima, and the factor for earlier sums."""
    new_top = gl.maximum(top, gl.max(s, 1))
    # A row that has seen no key has top = -inf, and -inf - -inf is NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * factor - (base * factor)[:, None])
    return p, new_top, gl.exp2((top - base) * factor)


@gluon.jit
def _sums_of_threads(p):
    """Each row's sums over the columns of each of its four lanes: [rows, 4]."""
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _overflows(acc, sums):
    """Zeros to be added to the sums [rows, 4], or NaN in rows whose accumulator is not finite.

    0 times a non-finite number is NaN. Each warpgroup adds the other's sums to its own, so both see it.
    """
    x = gl.sum((acc * 0.0).reshape([ROWS, HALF // 8, 8]), 1).reshape([ROWS, 4, 2])
    return gl.convert_layout(gl.sum(x, 2), sums.type.layout, assert_trivial=True)


@gluon.jit
def _summands(p, settings: Settings):
    """The weights for a later row sum: summed by lane if keys are gathered, where registers are few; else p itself.

    Sums by lane everywhere make two query tokens, and FP8 keys, 0.7 % slower on an H100.
    """
    if settings.GATHER and settings.KV_FP8 == "":
        p = _sums_of_threads(p)
    return p


@gluon.jit
def per_row(x, like):
    """A value per row, as a column that broadcasts over the tile `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _publish(WG: gl.constexpr, shared: Shared, weights, top, keep, start, end, PLAIN: gl.constexpr, settings: Settings):
    """Store weights for the other warpgroup over the block's positional keys, unless PLAIN with the rows' maxima and
    factors, and signal it."""
    shared.rest.index(WG).store(weights)
    if not PLAIN:
        shared.tops.index(WG).store(top)
        shared.keeps.index(WG).store(keep)
        if not settings.GATHER:
            if start + KEYS > end:
                _clear_tail(shared.left.index(WG), start, end)
                _clear_tail(shared.right.index(WG), start, end)
    # Orders the threads' writes before wgmma's reads.
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(shared.ready.index(WG), count=1)


@gluon.jit
def first_steps(
    acc, top, sums, step, count, start, end, plain_end, position, zeros, shared: Shared, factor, scale, pe_ratio,
    settings: Settings,
):  # fmt: skip
    """Warpgroup 0: scores of the first blocks and the output's left half, over `count` pairs down from key `start`."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    for i in range(count):
        phase = step & 1
        zero = step >> 30
        s = _scores(0, zeros, shared, step, pe_ratio, settings)
        s = warpgroup_mma_wait(0, [s])
        if settings.TRANSFORM:
            s = s * scale
        s = _masked(0, s, start, end, plain_end, position, shared, phase, False, settings)
        p, top, keep = _softmax(s, top, factor)
        parts = _summands(p, settings)
        weights = p.to(shared.rest.dtype)
        _publish(0, shared, weights, top, keep, start, end, False, settings)
        acc = acc * per_row(keep, acc)
        operand = gl.convert_layout(weights, P_LAYOUT)
        acc = warpgroup_mma(operand, shared.left.index(zero), acc, is_async=True)
        sums = sums * keep + gl.convert_layout(gl.sum(parts, 1), sums.type.layout)
        mbarrier.wait(shared.ready.index(1), phase)
        _wait_half(shared.left_full, 1, phase, settings)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(shared.left_empty.index(0), count=1)
        top = shared.tops.index(1).load(top.type.layout)
        keep = shared.keeps.index(1).load(top.type.layout)
        sums = sums * keep
        acc = acc * per_row(keep, acc)
        acc = warpgroup_mma(shared.rest.index(1 + zero), shared.left.index(1 + zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.left_empty.index(1), count=1)
        start -= 2 * KEYS
        step += 1
    return acc, top, sums, step


@gluon.jit
def second_steps(
    acc, top, sums, step, count, start, end, plain_end, position, zeros, shared: Shared, factor, scale, pe_ratio,
    settings: Settings,
):  # fmt: skip
    """Warpgroup 1: scores of the second blocks and the output's right half; arguments as in first_steps."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    start += KEYS
    for i in range(count):
        phase = step & 1
        zero = step >> 30
        s = _scores(1, zeros, shared, step, pe_ratio, settings)
        mbarrier.wait(shared.ready.index(0), phase)
        _wait_half(shared.right_full, 0, phase, settings)
        top = shared.tops.index(0).load(top.type.layout)
        keep = shared.keeps.index(0).load(top.type.layout)
        sums = sums * keep
        acc = acc * per_row(keep, acc)
        pv = warpgroup_mma(shared.rest.index(zero), shared.right.index(zero), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        if settings.TRANSFORM:
            s = s * scale
        s = _masked(1, s, start, end, plain_end, position, shared, phase, False, settings)
        p, top, keep = _softmax(s, top, factor)
        parts = _summands(p, settings)
        weights = p.to(shared.rest.dtype)
        _publish(1, shared, weights, top, keep, start, end, False, settings)
        operand = gl.convert_layout(weights, P_LAYOUT)
        # This phase is complete already. The wait is a branch, across which ptxas does not move instructions. It would
        # otherwise move the wait for the products in front of the softmax, which is to overlap them.
        mbarrier.wait(shared.right_full.index(2), phase)
        acc = warpgroup_mma_wait(0, [pv])
        mbarrier.arrive(shared.right_empty.index(0), count=1)
        acc = acc * per_row(keep, acc)
        acc = warpgroup_mma(operand, shared.right.index(1 + zero), acc, is_async=True)
        sums = sums * keep + gl.convert_layout(gl.sum(parts, 1), sums.type.layout)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(shared.right_empty.index(1), count=1)
        start -= 2 * KEYS
        step += 1
    return acc, top, sums, step


@gluon.jit
def _weights_of(WG: gl.constexpr, s, shifted, phase, shared: Shared, factor, scale, settings: Settings):
    """Weights with a fixed shift, for a block that every row sees."""
    if settings.TRANSFORM:
        s = s * scale
    s = _masked(WG, s, 0, 0, 0, 0, shared, phase, True, settings)
    return gl.exp2(s * factor - shifted[:, None])


@gluon.jit
def first_plain_steps(acc, top, sums, step, count, zeros, shared: Shared, factor, scale, pe_ratio, settings: Settings):
    """first_steps for pairs that every row sees, with `top` as the fixed shift: nothing is rescaled, and no warpgroup
    waits for the other's maxima."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    shifted = top * factor
    parts = _sums_of_threads(zeros)
    for i in range(count):
        phase = step & 1
        zero = step >> 30
        s = _scores(0, zeros, shared, step, pe_ratio, settings)
        s = warpgroup_mma_wait(0, [s])
        p = _weights_of(0, s, shifted, phase, shared, factor, scale, settings)
        weights = p.to(shared.rest.dtype)
        _publish(0, shared, weights, top, top, 0, 0, True, settings)
        operand = gl.convert_layout(weights, P_LAYOUT)
        acc = warpgroup_mma(operand, shared.left.index(zero), acc, is_async=True)
        parts += _sums_of_threads(p)
        mbarrier.wait(shared.ready.index(1), phase)
        _wait_half(shared.left_full, 1, phase, settings)
        acc = warpgroup_mma(shared.rest.index(1 + zero), shared.left.index(1 + zero), acc, is_async=True)
        acc, operand = warpgroup_mma_wait(1, [acc, operand])
        mbarrier.arrive(shared.left_empty.index(0), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(shared.left_empty.index(1), count=1)
        step += 1
    parts += gl.where(count > 0, _overflows(acc, parts), 0.0)
    return acc, sums + gl.convert_layout(gl.sum(parts, 1), sums.type.layout), step


@gluon.jit
def second_plain_steps(acc, top, sums, step, count, zeros, shared: Shared, factor, scale, pe_ratio, settings: Settings):
    """second_steps for pairs that every row sees, with `top` as the fixed shift."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    shifted = top * factor
    parts = _sums_of_threads(zeros)
    for i in range(count):
        phase = step & 1
        zero = step >> 30
        s = _scores(1, zeros, shared, step, pe_ratio, settings)
        mbarrier.wait(shared.ready.index(0), phase)
        _wait_half(shared.right_full, 0, phase, settings)
        acc = warpgroup_mma(shared.rest.index(zero), shared.right.index(zero), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        p = _weights_of(1, s, shifted, phase, shared, factor, scale, settings)
        weights = p.to(shared.rest.dtype)
        _publish(1, shared, weights, top, top, 0, 0, True, settings)
        operand = gl.convert_layout(weights, P_LAYOUT)
        # As in second_steps.
        mbarrier.wait(shared.right_full.index(2), phase)
        acc = warpgroup_mma(operand, shared.right.index(1 + zero), acc, is_async=True)
        parts += _sums_of_threads(p)
        acc, operand = warpgroup_mma_wait(1, [acc, operand])
        mbarrier.arrive(shared.right_empty.index(0), count=1)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(shared.right_empty.index(1), count=1)
        step += 1
    parts += gl.where(count > 0, _overflows(acc, parts), 0.0)
    return acc, sums + gl.convert_layout(gl.sum(parts, 1), sums.type.layout), step

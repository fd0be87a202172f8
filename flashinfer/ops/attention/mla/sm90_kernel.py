"""Latent attention on Hopper: a block of latents lies once in shared memory, as keys and as values.

A block of threads is persistent and walks over work items, 64 query rows each. Keys come two blocks at a time. Each of
two warpgroups computes the scores and the softmax of one block, and passes its weights on through shared memory, since
each owns one half of the output columns and so multiplies both blocks' weights: scores are computed once, and 64 x 256
float32 of the output fit the registers of a warpgroup (the split of FlashMLA, DeepSeek, 2025). While one is at its
softmax, the other's products keep the tensor cores busy. Weights take the place of the positional keys that they came
from, which no value is read from.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import (
    block_barrier,
    cp_async_commit,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.registers_sm90 import anew, lane
from flashinfer.ops.attention._device.fixed_shift_sm90 import any_unfair, one_word
from flashinfer.ops.attention._device.logits import LOG2E, with_sink
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_SLOT,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention.mla.sm90_loads import (
    COPY,
    HALF,
    KEYS,
    MOST_FAILED,
    PART,
    REST,
    ROWS,
    Form,
    Tiles,
    fetch,
    gather,
    more_work,
    produce,
    span,
    widen,
    work_of,
)

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _wait_half(barriers, BLOCK: gl.constexpr, phase, form: Form):
    for part in gl.static_range(2):
        mbarrier.wait(barriers.index(2 * BLOCK + part), phase)
    if form.GATHER:
        # What threads and cp.async wrote, the tensor cores see behind this fence.
        fence_async_shared()


@gluon.jit
def _half_scores(LEFT: gl.constexpr, BLOCK: gl.constexpr, s, tiles: Tiles, step, ADD: gl.constexpr, form: Form):
    """Start products with half of the columns, part by part as they come."""
    # 0, which the compiler does not know: else it makes the 72 operand descriptors before the loop, and spills them.
    none = step >> 30
    q = (tiles.q_left if LEFT else tiles.q_right).index(none)
    keys = (tiles.left if LEFT else tiles.right).index(BLOCK + none)
    for part in gl.static_range(2):
        mbarrier.wait((tiles.left_full if LEFT else tiles.right_full).index(2 * BLOCK + part), step & 1)
        if form.GATHER:
            fence_async_shared()
        k = keys.slice(part * PART, PART, dim=1).permute([1, 0])
        s = warpgroup_mma(q.slice(part * PART, PART, dim=1), k, s, use_acc=ADD or part > 0, is_async=True)
    return s


@gluon.jit
def _rest_scores(BLOCK: gl.constexpr, s, tiles: Tiles, step, ADD: gl.constexpr):
    """Start products of positional rows."""
    none = step >> 30
    rest = tiles.rest.index(BLOCK + none).permute([1, 0])
    return warpgroup_mma(tiles.q_rest.index(none), rest, s, use_acc=ADD, is_async=True)


@gluon.jit
def _scores(BLOCK: gl.constexpr, zeros, tiles: Tiles, step, pe_ratio, form: Form):
    """Start S = Q K^T of a block, the half that comes first first."""
    RATIO: gl.constexpr = form.POSITIONAL and form.TRANSFORM
    s = zeros
    if RATIO:
        # What has a factor of its own goes before.
        _wait_half(tiles.right_full if BLOCK == 0 else tiles.left_full, BLOCK, step & 1, form)
        s = _rest_scores(BLOCK, s, tiles, step, False)
        s = warpgroup_mma_wait(0, [s]) * pe_ratio
    s = _half_scores(BLOCK == 0, BLOCK, s, tiles, step, RATIO, form)
    s = _half_scores(BLOCK == 1, BLOCK, s, tiles, step, True, form)
    if form.POSITIONAL and not RATIO:
        s = _rest_scores(BLOCK, s, tiles, step, True)
    return s


@gluon.jit
def _clear_tail(tile, start, end):
    """Zero the rows of a tile past the last key: their weight is 0, and 0 times what lies there may be NaN."""
    SLICE: gl.constexpr = 16
    row = gl.arange(0, SLICE, gl.SliceLayout(1, COPY))
    for i in gl.static_range(KEYS // SLICE):
        if start + (i + 1) * SLICE > end:
            # 16 bytes a thread at a time: few registers beside the output's.
            for j in gl.static_range(HALF // 64):
                part = tile.slice(i * SLICE, SLICE, dim=0).slice(j * 64, 64, dim=1)
                x = part.load(COPY)
                part.store(gl.where((start + i * SLICE + row < end)[:, None], x, 0.0).to(x.dtype))


@gluon.jit
def _hidden(WG: gl.constexpr, s, keys, last, form: Form):
    """Logits of a block that has `keys` keys, of which a row sees those up to number `last`.

    A thread has columns 8 i + 2 lane + j. Taken apart like this, it compares constants with one number of its own; as
    numbers of columns, the compiler has 16 registers hold them over the whole loop.
    """
    LAYOUT: gl.constexpr = s.type.layout
    s = s.reshape([ROWS, KEYS // 8, 4, 2])
    APART: gl.constexpr = s.type.layout
    i = gl.arange(0, KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, APART))))
    j = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, APART))))
    col = (8 * i)[None, :, None, None] + j[None, None, None, :]
    if WG == 0 or form.KV_FP8 == "":
        # No register is left to keep a place for all items, but in the second warpgroup beside FP8 keys, where this
        # takes 1 % longer.
        first = 2 * (lane() & 3)
    else:
        LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, APART)))
        first = 2 * anew(gl.arange(0, 4, LANES))[None, None, :, None]
    s = gl.where(col < keys - first, s, float("-inf"))
    if form.CAUSAL:
        last = gl.convert_layout(last, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, APART))))
        s = gl.where(col <= last[:, None, None, None] - first, s, float("-inf"))
    return gl.convert_layout(s.reshape([ROWS, KEYS]), LAYOUT)


@gluon.jit
def _masked(
    WG: gl.constexpr, s, start, end, plain_end, position, tiles: Tiles, phase, PLAIN: gl.constexpr, form: Form
):
    """Logits of keys that a row does not see are -inf. PLAIN says that every row sees all keys that there are."""
    if form.SPARSE:
        # Past the end there is none either.
        mbarrier.wait(tiles.bias_full.index(WG), phase)
        s += tiles.bias.index(WG).load(gl.SliceLayout(0, s.type.layout))[None, :]
    if not PLAIN and (form.CAUSAL or not form.SPARSE):
        if start + KEYS > plain_end:
            s = _hidden(WG, s, end - start, position - start, form)
    return s


@gluon.jit
def _softmax(s, top, factor):
    """One block of the online softmax in base 2: weights, maximum, and the factor of what was summed before."""
    new_top = gl.maximum(top, gl.max(s, 1))
    # A row that has seen no key yet has top = -inf, and inf - inf is NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * factor - (base * factor)[:, None])
    return p, new_top, gl.exp2((top - base) * factor)


@gluon.jit
def _sums_of_threads(p):
    """Of each row, the sums of what each of four threads has of it."""
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _by_threads(p, form: Form):
    """Where rows are gathered, and registers are few, the sums of what a thread has of each row: so many less until
    lanes add theirs. Elsewhere p itself: with it two query tokens, and FP8 keys, take 0.7 % longer on one H100."""
    if form.GATHER and form.KV_FP8 == "":
        p = _sums_of_threads(p)
    return p


@gluon.jit
def _per_row(x, like):
    """One number per row, as a column beside the tile `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _publish(WG: gl.constexpr, tiles: Tiles, weights, top, keep, start, end, PLAIN: gl.constexpr, form: Form):
    """Store weights where positional keys were, with their rows' maxima and factors unless PLAIN, and tell the other
    warpgroup."""
    tiles.rest.index(WG).store(weights)
    if not PLAIN:
        tiles.tops.index(WG).store(top)
        tiles.keeps.index(WG).store(keep)
        if not form.GATHER:
            if start + KEYS > end:
                _clear_tail(tiles.left.index(WG), start, end)
                _clear_tail(tiles.right.index(WG), start, end)
    # The tensor cores see what threads wrote behind this fence.
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(tiles.ready.index(WG), count=1)


@gluon.jit
def _first_steps(
    acc, top, sums, step, count, start, end, plain_end, position, zeros, tiles: Tiles, factor, scale, pe_ratio,
    form: Form,
):  # fmt: skip
    """The warpgroup of first blocks, and of the left half of the output, over `count` pairs down from `start`."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    for i in range(count):
        phase = step & 1
        none = step >> 30
        s = _scores(0, zeros, tiles, step, pe_ratio, form)
        s = warpgroup_mma_wait(0, [s])
        if form.TRANSFORM:
            s = s * scale
        s = _masked(0, s, start, end, plain_end, position, tiles, phase, False, form)
        p, top, keep = _softmax(s, top, factor)
        parts = _by_threads(p, form)
        weights = p.to(tiles.rest.dtype)
        _publish(0, tiles, weights, top, keep, start, end, False, form)
        acc = acc * _per_row(keep, acc)
        operand = gl.convert_layout(weights, P_LAYOUT)
        acc = warpgroup_mma(operand, tiles.left.index(none), acc, is_async=True)
        sums = sums * keep + gl.convert_layout(gl.sum(parts, 1), sums.type.layout)
        mbarrier.wait(tiles.ready.index(1), phase)
        _wait_half(tiles.left_full, 1, phase, form)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(tiles.left_empty.index(0), count=1)
        top = tiles.tops.index(1).load(top.type.layout)
        keep = tiles.keeps.index(1).load(top.type.layout)
        sums = sums * keep
        acc = acc * _per_row(keep, acc)
        acc = warpgroup_mma(tiles.rest.index(1 + none), tiles.left.index(1 + none), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(tiles.left_empty.index(1), count=1)
        start -= 2 * KEYS
        step += 1
    return acc, top, sums, step


@gluon.jit
def _second_steps(
    acc, top, sums, step, count, start, end, plain_end, position, zeros, tiles: Tiles, factor, scale, pe_ratio,
    form: Form,
):  # fmt: skip
    """The warpgroup of second blocks, and of the right half of the output."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    start += KEYS
    for i in range(count):
        phase = step & 1
        none = step >> 30
        s = _scores(1, zeros, tiles, step, pe_ratio, form)
        mbarrier.wait(tiles.ready.index(0), phase)
        _wait_half(tiles.right_full, 0, phase, form)
        top = tiles.tops.index(0).load(top.type.layout)
        keep = tiles.keeps.index(0).load(top.type.layout)
        sums = sums * keep
        acc = acc * _per_row(keep, acc)
        pv = warpgroup_mma(tiles.rest.index(none), tiles.right.index(none), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        if form.TRANSFORM:
            s = s * scale
        s = _masked(1, s, start, end, plain_end, position, tiles, phase, False, form)
        p, top, keep = _softmax(s, top, factor)
        parts = _by_threads(p, form)
        weights = p.to(tiles.rest.dtype)
        _publish(1, tiles, weights, top, keep, start, end, False, form)
        operand = gl.convert_layout(weights, P_LAYOUT)
        # Over already. It is a branch, in front of which the assembler does not move the wait for the products that are
        # to run beside the softmax.
        mbarrier.wait(tiles.right_full.index(2), phase)
        acc = warpgroup_mma_wait(0, [pv])
        mbarrier.arrive(tiles.right_empty.index(0), count=1)
        acc = acc * _per_row(keep, acc)
        acc = warpgroup_mma(operand, tiles.right.index(1 + none), acc, is_async=True)
        sums = sums * keep + gl.convert_layout(gl.sum(parts, 1), sums.type.layout)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(tiles.right_empty.index(1), count=1)
        start -= 2 * KEYS
        step += 1
    return acc, top, sums, step


@gluon.jit
def _weights_of(WG: gl.constexpr, s, shifted, phase, tiles: Tiles, factor, scale, form: Form):
    """Weights of a fixed shift, of a block that every row sees."""
    if form.TRANSFORM:
        s = s * scale
    s = _masked(WG, s, 0, 0, 0, 0, tiles, phase, True, form)
    return gl.exp2(s * factor - shifted[:, None])


@gluon.jit
def _first_plain_steps(acc, top, sums, step, count, zeros, tiles: Tiles, factor, scale, pe_ratio, form: Form):
    """_first_steps over pairs that every row sees, with `top` for their maximum: nothing is scaled, and neither
    warpgroup waits for what the other knows of its rows."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    shifted = top * factor
    parts = _sums_of_threads(zeros)
    for i in range(count):
        phase = step & 1
        none = step >> 30
        s = _scores(0, zeros, tiles, step, pe_ratio, form)
        s = warpgroup_mma_wait(0, [s])
        p = _weights_of(0, s, shifted, phase, tiles, factor, scale, form)
        weights = p.to(tiles.rest.dtype)
        _publish(0, tiles, weights, top, top, 0, 0, True, form)
        operand = gl.convert_layout(weights, P_LAYOUT)
        acc = warpgroup_mma(operand, tiles.left.index(none), acc, is_async=True)
        parts += _sums_of_threads(p)
        mbarrier.wait(tiles.ready.index(1), phase)
        _wait_half(tiles.left_full, 1, phase, form)
        acc = warpgroup_mma(tiles.rest.index(1 + none), tiles.left.index(1 + none), acc, is_async=True)
        acc, operand = warpgroup_mma_wait(1, [acc, operand])
        mbarrier.arrive(tiles.left_empty.index(0), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(tiles.left_empty.index(1), count=1)
        step += 1
    return acc, sums + gl.convert_layout(gl.sum(parts, 1), sums.type.layout), step


@gluon.jit
def _second_plain_steps(acc, top, sums, step, count, zeros, tiles: Tiles, factor, scale, pe_ratio, form: Form):
    """The same of _second_steps."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    shifted = top * factor
    parts = _sums_of_threads(zeros)
    for i in range(count):
        phase = step & 1
        none = step >> 30
        s = _scores(1, zeros, tiles, step, pe_ratio, form)
        mbarrier.wait(tiles.ready.index(0), phase)
        _wait_half(tiles.right_full, 0, phase, form)
        acc = warpgroup_mma(tiles.rest.index(none), tiles.right.index(none), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        p = _weights_of(1, s, shifted, phase, tiles, factor, scale, form)
        weights = p.to(tiles.rest.dtype)
        _publish(1, tiles, weights, top, top, 0, 0, True, form)
        operand = gl.convert_layout(weights, P_LAYOUT)
        # As in _second_steps.
        mbarrier.wait(tiles.right_full.index(2), phase)
        acc = warpgroup_mma(operand, tiles.right.index(1 + none), acc, is_async=True)
        parts += _sums_of_threads(p)
        acc, operand = warpgroup_mma_wait(1, [acc, operand])
        mbarrier.arrive(tiles.right_empty.index(0), count=1)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(tiles.right_empty.index(1), count=1)
        step += 1
    return acc, sums + gl.convert_layout(gl.sum(parts, 1), sums.type.layout), step


@gluon.jit
def _meet(tiles: Tiles, phase):
    """Both warpgroups wait for each other; what either wrote before, threads and tensor cores see after."""
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(tiles.met, count=1)
    mbarrier.wait(tiles.met, phase)


@gluon.jit
def _rows(LAYOUT: gl.constexpr):
    """The rows of a tile, found anew: a thread's are 8 apart."""
    index = gl.arange(0, ROWS, LAYOUT)
    return anew(index & -9) + (index & 8)


@gluon.jit
def _failed(total, record, form: Form):
    """Whether a fixed shift did not serve some row of the tile."""
    S_ROWS: gl.constexpr = total.type.layout
    token = (gl.load(record + ITEM_TILE_ROW) + _rows(S_ROWS)) // form.HEADS
    return any_unfair(total, token < gl.load(record + ITEM_Q_LEN))


@gluon.jit
def _finish(WG: gl.constexpr, acc, top, total, record, tensors, numbers, out_scale, form: Form):
    """Sums to results: `top` is the maximum in base 2, `total` the sum of a row's weights."""
    _, _, out, lse, partial_out, partial_lse, _, _, sinks, _, _ = tensors
    o_stride_n, o_stride_h = numbers[4:6]
    O_LAYOUT: gl.constexpr = acc.type.layout
    S_ROWS: gl.constexpr = top.type.layout
    q_row = gl.load(record + ITEM_Q_ROW)
    q_len = gl.load(record + ITEM_Q_LEN)
    tile_row = gl.load(record + ITEM_TILE_ROW)
    slot = gl.load(record + ITEM_SLOT)
    # Found again, and not kept: the loop over keys needs the registers.
    rows = _rows(S_ROWS)
    packed = tile_row + rows
    token = packed // form.HEADS
    head = packed % form.HEADS
    row_ok = token < q_len
    if form.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = gl.load(sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * _per_row(keep, acc)
    # Not `> 0`: a NaN among the logits has to come out.
    seen = total != 0
    inverse = gl.where(seen, out_scale / gl.where(seen, total, 1.0), 0.0)
    # 0 * NaN is NaN: a row that saw no key must not show what the accumulator picked up.
    acc = gl.where(_per_row(seen, acc), acc * _per_row(inverse, acc), 0.0)
    state = gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))

    o_rows = _rows(gl.SliceLayout(1, O_LAYOUT))
    o_cols = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
    flat = tile_row + o_rows
    o_ok = (flat // form.HEADS < q_len)[:, None]
    if slot >= 0:
        row = slot.to(gl.int64) * ROWS
        gl.store(partial_out + (row + o_rows)[:, None] * (2 * HALF) + o_cols[None, :], acc, mask=o_ok)
        if WG == 0:
            gl.store(partial_lse + row + rows, state, mask=row_ok)
    else:
        at = (q_row + flat // form.HEADS).to(gl.int64) * o_stride_n + (flat % form.HEADS) * o_stride_h
        gl.store(out + at[:, None] + o_cols[None, :], acc.to(out.dtype.element_ty), mask=o_ok)
        if form.LSE and WG == 0:
            lse_at = (q_row + token).to(gl.int64) * form.HEADS + head
            gl.store(lse + lse_at, state * LN2 if form.BASE_E else state, mask=row_ok)


@gluon.jit
def _consume(WG: gl.constexpr, tensors, numbers, tiles: Tiles, form: Form):
    """One warpgroup. `tensors` and `numbers` are the kernel's arguments."""
    q_nope, q_pe, _, _, _, _, items, counts, _, qk_scale, v_scale = tensors
    q_nope_n, q_nope_h, q_pe_n, q_pe_h, _, _, sm_scale, out_scale, pe_ratio = numbers
    STEPS: gl.constexpr = _first_steps if WG == 0 else _second_steps
    PLAIN_STEPS: gl.constexpr = _first_plain_steps if WG == 0 else _second_plain_steps
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    scale = sm_scale * LOG2E
    if form.DEVICE_SCALES:
        scale *= gl.load(qk_scale)
        out_scale *= gl.load(v_scale)
    factor = 1.0 if form.TRANSFORM else scale
    works = gl.load(counts)
    waves = gl.cdiv(works, gl.num_programs(0))
    last = waves
    step = 0
    wave = 0
    failures = 0
    # What is the same for all items is made for each: the loop over keys has no registers to keep it.
    while tl.condition(wave < last, disable_licm=True):
        work = work_of(wave, waves, tiles, form)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, form)
            plain = 0
            if form.FIXED:
                # The last keys have a maximum in any case: it is the shift of the others.
                if (wave < waves) & (failures < MOST_FAILED):
                    plain = gl.maximum(gl.minimum((plain_end - begin) // (2 * KEYS), pairs - 1), 0)
            packed = gl.load(record + ITEM_TILE_ROW) + _rows(S_ROWS)
            position = packed // form.HEADS + (gl.load(record + ITEM_KV_LEN) - gl.load(record + ITEM_Q_LEN))
            acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
            top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
            total = gl.zeros([ROWS], gl.float32, S_ROWS)
            failed = pairs < 0
            if pairs > 0:
                # The other warpgroup is done with the last tile's queries: its last weights were waited for.
                if WG == 0:
                    fetch(tiles.q_left.index(0), q_nope, record, q_nope_n, q_nope_h, form)
                    if form.POSITIONAL:
                        fetch(tiles.q_rest.index(0), q_pe, record, q_pe_n, q_pe_h, form)
                else:
                    q_right = q_nope + (HALF if form.Q_FP8 == "" else HALF // 4)
                    fetch(tiles.q_right.index(0), q_right, record, q_nope_n, q_nope_h, form)
                cp_async_commit()
                cp_async_wait(0)
                _meet(tiles, 0)
                start = begin + (pairs - 1) * 2 * KEYS
                acc, top, total, step = STEPS(
                    acc, top, total, step, pairs - plain, start, end, plain_end, position, zeros, tiles, factor, scale,
                    pe_ratio, form,
                )  # fmt: skip
                if form.FIXED:
                    # A row that has seen no key yet takes any maximum: whether it serves is asked in the end.
                    top = gl.where((top == float("-inf")) & (plain > 0), 0.0, top)
                    acc, total, step = PLAIN_STEPS(
                        acc, top, total, step, plain, zeros, tiles, factor, scale, pe_ratio, form
                    )
                tiles.sums.index(WG).store(total)
                _meet(tiles, 1)
                # Both from shared memory, so that either warpgroup has the same sum, bit by bit.
                total = tiles.sums.index(0).load(total.type.layout) + tiles.sums.index(1).load(total.type.layout)
                # Found again, and not kept: the loop over keys needs the registers.
                record = items + anew(work) * ITEM_WIDTH
                if form.FIXED:
                    failed = (plain > 0) & _failed(total, record, form)
            if form.FIXED:
                # Either warpgroup finds the same, so that they need not ask each other.
                if failed:
                    if WG == 0:
                        tiles.failed.index(failures).store(one_word(work))
                else:
                    _finish(WG, acc, top * factor, total, record, tensors, numbers, out_scale, form)
                failures += failed.to(gl.int32)
            else:
                _finish(WG, acc, top * factor, total, record, tensors, numbers, out_scale, form)
        wave += 1
        if form.FIXED and WG == 0:
            if wave == waves:
                tiles.failed.index(MOST_FAILED).store(one_word(failures))
                mbarrier.arrive(tiles.judged, count=1)
        last += more_work(wave, waves, tiles, form)


@gluon.jit
def attend_latent_sm90_kernel(
    q_nope, q_pe, ckv_map, kpe_map, out, lse, partial_out, partial_lse, items, counts, kv_indices, sinks,
    qk_scale, v_scale, q_nope_stride_n, q_nope_stride_h, q_pe_stride_n, q_pe_stride_h, ckv_page, ckv_step, kpe_page,
    kpe_step, o_stride_n, o_stride_h, sm_scale, out_scale, pe_ratio,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SPARSE: gl.constexpr, GATHER: gl.constexpr, POSITIONAL: gl.constexpr,
    KV_FP8: gl.constexpr, Q_FP8: gl.constexpr, CAUSAL: gl.constexpr, SINKS: gl.constexpr, DEVICE_SCALES: gl.constexpr,
    TRANSFORM: gl.constexpr, LSE: gl.constexpr, BASE_E: gl.constexpr, REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks of threads. Split tiles are left to combine_latent_kernel. Latent rows have
    2 * HALF columns, positional rows REST or none.

    Keys are the rows of matrices (kv_layout.Matrix), *_page rows from page to page. With GATHER they are anywhere: the
    maps are pointers, and *_page and *_step are elements from page to page and row to row. FP8 comes in words of four
    elements, gathered, and steps are words.
    """
    DTYPE: gl.constexpr = q_nope.dtype.element_ty if Q_FP8 == "" else gl.float16
    form = Form(
        HEADS=HEADS, PAGE_SIZE=PAGE_SIZE, SPARSE=SPARSE, GATHER=GATHER, POSITIONAL=POSITIONAL,
        KV_FP8=KV_FP8, Q_FP8=Q_FP8, CAUSAL=CAUSAL, SINKS=SINKS, DEVICE_SCALES=DEVICE_SCALES, TRANSFORM=TRANSFORM,
        FIXED=DTYPE == gl.bfloat16 and KV_FP8 == "", LSE=LSE, BASE_E=BASE_E,
    )  # fmt: skip
    Q_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], DTYPE)
    Q_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], DTYPE)
    K_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], DTYPE)
    K_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, REST], DTYPE)
    A_ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        q_left=gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_HALF),
        q_right=gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_HALF),
        q_rest=gl.allocate_shared_memory(DTYPE, [1, ROWS, REST], Q_REST),
        left=gl.allocate_shared_memory(DTYPE, [2, KEYS, HALF], K_HALF),
        right=gl.allocate_shared_memory(DTYPE, [2, KEYS, HALF], K_HALF),
        rest=gl.allocate_shared_memory(DTYPE, [2, KEYS, REST], K_REST),
        left_full=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        left_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        right_full=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        right_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        met=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        tops=gl.allocate_shared_memory(gl.float32, [2, ROWS], A_ROW),
        keeps=gl.allocate_shared_memory(gl.float32, [2, ROWS], A_ROW),
        sums=gl.allocate_shared_memory(gl.float32, [2, ROWS], A_ROW),
        bias=gl.allocate_shared_memory(gl.float32, [2, KEYS], A_ROW),
        bias_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        failed=gl.allocate_shared_memory(gl.int32, [MOST_FAILED + 1, 1], A_ROW),
        judged=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    # Every thread that gathers says so; of copies in boxes, the copy engine does.
    WRITERS: gl.constexpr = 128 if GATHER and KV_FP8 == "" else 1
    for part in gl.static_range(4):
        mbarrier.init(tiles.left_full.index(part), count=WRITERS)
        mbarrier.init(tiles.right_full.index(part), count=WRITERS)
    for block in gl.static_range(2):
        mbarrier.init(tiles.left_empty.index(block), count=1)
        mbarrier.init(tiles.right_empty.index(block), count=1)
        mbarrier.init(tiles.ready.index(block), count=1)
        if GATHER:
            # Without a use, its place is another's.
            mbarrier.init(tiles.bias_full.index(block), count=1)
    mbarrier.init(tiles.met, count=2)
    if form.FIXED:
        mbarrier.init(tiles.judged, count=1)
    tensors = (
        q_nope, q_pe, out, lse, partial_out, partial_lse, items, counts, sinks, qk_scale, v_scale,
    )  # fmt: skip
    numbers = (
        q_nope_stride_n, q_nope_stride_h, q_pe_stride_n, q_pe_stride_h, o_stride_n, o_stride_h, sm_scale, out_scale,
        pe_ratio,
    )  # fmt: skip
    if GATHER:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, numbers, tiles, form)),
                (_consume, (gl.constexpr(1), tensors, numbers, tiles, form)),
                (gather if KV_FP8 == "" else widen, (
                    ckv_map, kpe_map, tiles, items, counts, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step, form,
                )),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, numbers, tiles, form)),
                (_consume, (gl.constexpr(1), tensors, numbers, tiles, form)),
                (produce, (
                    gl.constexpr(0), ckv_map, kpe_map, tiles, items, counts, kv_indices, ckv_page, kpe_page, form,
                )),
                (produce, (
                    gl.constexpr(1), ckv_map, kpe_map, tiles, items, counts, kv_indices, ckv_page, kpe_page, form,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip

"""Attention on Hopper: tiles of keys come by the copy engine, products run on wgmma, softmax between them.

A block is persistent: it takes pairs of a work item and a KV head until none is left. One warp copies K tiles into a
ring, another V tiles; each of two consumer warpgroups owns 64 query rows. It starts S = Q K^T of one block of keys
together with O += P V of the block before it, so that its softmax runs beside the products of the other one, with which
it takes turns (FlashAttention-3, Shah et al., 2024). Blocks of keys are taken from the last to the first: those that
need a mask come first, and the rest run without one. The next tile's queries come while the last products are made.

Weights in bf16 have the range of float32. So blocks without a mask take no maximum, and nothing is scaled: weights are
2^(logit - maximum), the maximum that of the blocks with a mask. Should the sum of a row leave the middle of that range,
or be NaN, the tile is made once more, with the maximum of each block.

In FP8 the weights are e4m3 too, 2^8 times as large as a softmax has them, which its range takes. Products of that type
cut what they add, so P V of each block of keys is a sum of its own, which is then added in float32. Values lie in
shared memory turned, keys and columns permuted, see tiles_sm90.turn_values.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops.attention._device.combine import combine_rows
from flashinfer.ops.attention._device.fixed_shift_sm90 import any_unfair
from flashinfer.ops.attention._device.logits import LOG2E, transform, vary, visible, with_sink
from flashinfer.ops.attention._device.schedule import (
    ITEM_FIRST_SLOT,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_PIECES,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_REQUEST,
    ITEM_SLOT,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention.prefill.sm90_loads import (
    ROWS,
    Form,
    Queue,
    Ring,
    again,
    fetch_queries,
    gather,
    judge,
    numbered,
    produce,
    program,
    queue_of,
    ring_of,
    span,
    told,
    turn_values,
)

# Columns that the sums of a row are kept in, see _fold.
FOLD = gl.constexpr(16)
# The same in FP8, where registers are few: one sum for each of the four threads that have columns of a row.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
# Weights in FP8 are 2^SHIFT times what they are: from 2^8 to e4m3's smallest, 2^-9, are 17 octaves.
SHIFT = gl.constexpr(8)


@aggregate
class View:
    """What a warpgroup's rows see of the keys of one piece of work, and how their logits come about."""

    scale: gl.tensor
    slopes: gl.tensor
    token: gl.tensor
    position: gl.tensor
    row_ok: gl.tensor
    kv_end: gl.tensor
    kv_len: gl.tensor
    bits: gl.tensor
    soft_cap: gl.tensor
    window_left: gl.tensor
    # For a user's variant; else of no use.
    request: gl.tensor
    head: gl.tensor



@gluon.jit
def _fold(x, SUM: gl.constexpr):
    """Each row's maximum or sum of every FOLD-th column: independent chains, where one chain would wait for itself."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLD, 16])
    x = x.reshape([x.shape[0], x.shape[1] // FOLD, FOLD])
    x = gl.sum(x, 1) if SUM else gl.max(x, 1)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _softmax(s, top, sums, factor, form: Form):
    """One block of the online softmax in base 2: weights, maximum, sums, and the factor of what was summed before.

    Without a softmax, weights are what `s` is, and nothing is scaled.
    """
    if not form.SOFTMAX:
        return s, top, sums, gl.full([s.shape[0]], 1.0, gl.float32, top.type.layout)
    new_top = gl.maximum(top, gl.convert_layout(gl.max(_fold(s, False), 1), top.type.layout))
    # A row that has seen no key, or logits of -inf alone, has top = -inf, and inf - inf is NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shifted = base * factor
    if form.FP8:
        shifted -= SHIFT
    p = gl.exp2(s * factor - shifted[:, None])
    keep = gl.exp2((top - base) * factor)
    added = _fold(p, True)
    if form.FP8:
        added = gl.sum(gl.sum(added.reshape([added.shape[0], FOLD // 8, 4, 2]), 3), 1)
        added = gl.convert_layout(added, SUMS, assert_trivial=True)
    sums = sums * gl.convert_layout(keep, gl.SliceLayout(1, sums.type.layout))[:, None] + added
    return p, new_top, sums, keep


@gluon.jit
def _logits(s, view: View, params, kv_pos, MASKED: gl.constexpr, form: Form):
    if form.VARIED:
        s, takes_part = vary(
            s, view.scale, view.soft_cap, view.slopes, view.request, view.position, kv_pos, view.kv_len, view.head,
            params, form.SOFT_CAP, form.ALIBI, form.LOGITS, form.MASK, form.SOFTMAX,
        )  # fmt: skip
    elif form.TRANSFORM:
        s = transform(s, view.scale, view.soft_cap, view.slopes, view.position, kv_pos, form.SOFT_CAP, form.ALIBI)
    if MASKED:
        ok = visible(
            view.token, view.position, kv_pos, view.kv_end, view.kv_len, view.bits, view.row_ok, view.window_left,
            form.CAUSAL, form.WINDOW, form.CUSTOM,
        )  # fmt: skip
        if form.MASK is not None:
            ok = ok & takes_part
        s = gl.where(ok, s, float("-inf") if form.SOFTMAX else 0.0)
    return s


@gluon.jit
def _scores(WG, q, q_rest, k: Ring, step, zeros, form: Form):
    """Start S = Q K^T."""
    stage = step % form.STAGES
    at = WG
    if form.D_VO_PAD == 256:
        # And 0, which the compiler does not know: else it makes 16 operand descriptors before the loop, and keeps them.
        at += step >> 30
    s = warpgroup_mma(q.index(at), k.tiles.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if form.TWO:
        s = warpgroup_mma(q_rest.index(at), k.rest.index(stage).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _as_operand(weights, q):
    """Weights as the left operand of P V, in registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=weights.type.layout, k_width=2)
    return gl.convert_layout(weights.to(q.dtype), LAYOUT)


@gluon.jit
def _weigh(p, v: Ring, stage, acc):
    """Start P V in e4m3, a sum of its own of the shape of `acc`."""
    values = v.tiles.index(stage)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=p.type.layout, k_width=4)
    O_LAYOUT: gl.constexpr = acc.type.layout
    # A thread has the columns 8 j + 2 c + b of 16 (c its place in four), and the operand wants 4 c ... 4 c + 3: so they
    # are called 4 c + 2 j + b, and nothing moves. turn_values has the keys of V in this order.
    p = p.reshape([ROWS, p.shape[1] // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, p.shape[1]])
    p = gl.convert_layout(p.to(values.dtype), LAYOUT, assert_trivial=True)
    zeros = gl.zeros([ROWS, acc.shape[1]], gl.float32, O_LAYOUT)
    return warpgroup_mma(p, values.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _per_row(x, like):
    """One number per row, as a column beside the tile `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _in_order(acc, form: Form):
    """The accumulator with its columns as V has them: turn_values put the odd ones of 16 behind the even ones."""
    if form.FP8:
        acc = acc.reshape([ROWS, form.D_VO_PAD // 16, 2, 8]).permute([0, 1, 3, 2]).reshape([ROWS, form.D_VO_PAD])
    return acc


@gluon.jit
def _wait_turn(WG, turn, step):
    # The first warpgroup finds its turn come at once: its barrier's phase before the first counts as over.
    mbarrier.wait(turn.index(WG), (step & 1) ^ 1 ^ WG)


@gluon.jit
def _wait_full(ring: Ring, step, form: Form):
    mbarrier.wait(ring.full.index(step % form.STAGES), (step // form.STAGES) & 1)
    if form.GATHER:
        # What cp.async wrote, the tensor cores see behind this fence.
        fence_async_shared()


@gluon.jit
def _steps(
    WG, count, acc, p, keep, top, sums, step, start, begin, q, q_rest, k: Ring, v: Ring, turn, zeros,
    cols, factor, view: View, params, MASKED: gl.constexpr, form: Form,
):  # fmt: skip
    """`count` blocks of keys before `start`. For each: its scores, P V of the block before it, then its softmax.

    `step` counts the blocks of all work; `p` and `keep` are the weights of the block before and the factor that what
    was summed before them is still to be scaled by. With form.FIXED, blocks without a mask take `top` for their
    maximum, and `keep` for 1.
    """
    FIXED: gl.constexpr = form.FIXED and not MASKED
    shifted = top * factor
    for i in range(count):
        start -= zeros.shape[1]
        stage = step % form.STAGES
        before = (step - 1) % form.STAGES
        _wait_turn(WG, turn, step)
        s = _scores(WG, q, q_rest, k, step, zeros, form)
        if not FIXED:
            acc = acc * _per_row(keep, acc)
        _wait_full(v, step - 1, form)
        pv = warpgroup_mma(p, v.tiles.index(before), acc, is_async=True)
        mbarrier.arrive(turn.index(1 - WG), count=1)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(k.empty.index(stage), count=1)
        s = _logits(s, view, params, numbered(start, cols, 8), MASKED, form)
        if FIXED:
            weights = gl.exp2(s * factor - shifted[:, None])
            sums += _fold(weights, True)
        else:
            weights, top, sums, keep = _softmax(s, top, sums, factor, form)
        # Waiting for the next keys here, and not where they are used, also keeps the assembler from moving the wait for
        # P V up, in front of the softmax that is to run beside it.
        if start > begin:
            _wait_full(k, step + 1, form)
        if FIXED:
            acc, weights, sums = warpgroup_mma_wait(0, [pv, weights, sums])
        else:
            acc, weights, sums, keep = warpgroup_mma_wait(0, [pv, weights, sums, keep])
        mbarrier.arrive(v.empty.index(before), count=1)
        # Only now, so that they take the place of the last ones; through a wait, which keeps them in pairs.
        p = warpgroup_mma_wait(0, [_as_operand(weights, q)])
        step += 1
    return acc, p, keep, top, sums, step, start


@gluon.jit
def _steps_fp8(
    WG, count, acc, p, keep, top, sums, step, start, begin, q, q_rest, k: Ring, v: Ring, turn, zeros,
    cols, factor, view: View, params, MASKED: gl.constexpr, form: Form,
):  # fmt: skip
    """The same in e4m3, where each P V is a sum of its own: it comes before the scores, and is added while they are
    made, so that no registers hold it beside the softmax. `p` are weights in float32: a loop would carry bytes one by
    one. Warpgroups take no turns."""
    for i in range(count):
        start -= zeros.shape[1]
        stage = step % form.STAGES
        before = (step - 1) % form.STAGES
        _wait_full(v, step - 1, form)
        pv = _weigh(p, v, before, acc)
        s = _scores(WG, q, q_rest, k, step, zeros, form)
        pv = warpgroup_mma_wait(1, [pv])
        mbarrier.arrive(v.empty.index(before), count=1)
        acc = acc * _per_row(keep, acc) + pv
        # Here, so that the assembler does not move the wait for the scores up.
        if start > begin:
            _wait_full(k, step + 1, form)
        s, acc = warpgroup_mma_wait(0, [s, acc])
        mbarrier.arrive(k.empty.index(stage), count=1)
        s = _logits(s, view, params, numbered(start, cols, 8), MASKED, form)
        p, top, sums, keep = _softmax(s, top, sums, factor, form)
        step += 1
    return acc, p, keep, top, sums, step, start


@gluon.jit
def _clear_tail(v, start, kv_len):
    """Zero the rows of a V tile past the request's keys: their weight is 0, and 0 times what lies there may be NaN."""
    SLICE: gl.constexpr = 16
    # 64 columns, which a swizzle's pattern has, to eight threads: further ones are at constant places from them.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(v.shape[0] // SLICE):
        if start + (i + 1) * SLICE > kv_len:
            part = v.slice(i * SLICE, SLICE, dim=0)
            x = part.load(LAYOUT)
            part.store(gl.where((start + i * SLICE + row < kv_len)[:, None], x, 0.0).to(x.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    WG, begin, blocks, plain_from, plain_to, step, q, q_rest, k: Ring, v: Ring, turn, zeros, cols, factor,
    view: View, params, form: Form,
):  # fmt: skip
    """All blocks but the product of the last weights: what _steps returns."""
    BLOCK_N: gl.constexpr = zeros.shape[1]
    STEPS: gl.constexpr = _steps_fp8 if form.FP8 else _steps
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.D_VO_PAD, form.MMA_K])
    acc = gl.zeros([ROWS, form.D_VO_PAD], gl.float32, O_LAYOUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, zeros.type.layout))
    if form.FP8:
        sums = gl.zeros([ROWS, 4], gl.float32, SUMS)
    else:
        sums = gl.zeros([ROWS, FOLD], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLD, 16]))
    start = begin + (blocks - 1) * BLOCK_N
    stage = step % form.STAGES
    _wait_full(k, step, form)
    if not form.FP8:
        _wait_turn(WG, turn, step)
    s = _scores(WG, q, q_rest, k, step, zeros, form)
    if not form.FP8:
        mbarrier.arrive(turn.index(1 - WG), count=1)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k.empty.index(stage), count=1)
    s = _logits(s, view, params, numbered(start, cols, 8), True, form)
    p, top, sums, keep = _softmax(s, top, sums, factor, form)
    # Values in FP8 were cleared when they were turned.
    if not form.FP8:
        p = _as_operand(p, q)
        if start + BLOCK_N > view.kv_len:
            _wait_full(v, step, form)
            _clear_tail(v.tiles.index(stage), start, view.kv_len)
    step += 1
    if blocks > 1:
        _wait_full(k, step, form)
    acc, p, keep, top, sums, step, start = STEPS(
        WG, blocks - 1 - plain_to, acc, p, keep, top, sums, step, start, begin, q, q_rest, k, v, turn, zeros, cols,
        factor, view, params, True, form,
    )  # fmt: skip
    plain = gl.minimum(plain_to, blocks - 1) - plain_from
    if form.FIXED:
        acc = acc * _per_row(keep, acc)
        keep = gl.full([ROWS], 1.0, gl.float32, keep.type.layout)
        # A row that has seen no key yet takes any maximum: whether it serves is asked in the end, as of all rows.
        top = gl.where((top == float("-inf")) & (plain > 0), 0.0, top)
    acc, p, keep, top, sums, step, start = STEPS(
        WG, plain, acc, p, keep, top, sums, step, start, begin, q, q_rest, k, v, turn, zeros, cols, factor, view,
        params, False, form,
    )  # fmt: skip
    if form.WINDOW:
        acc, p, keep, top, sums, step, start = STEPS(
            WG, (start - begin) // BLOCK_N, acc, p, keep, top, sums, step, start, begin, q, q_rest, k, v, turn, zeros,
            cols, factor, view, params, True, form,
        )  # fmt: skip
    return acc, p, keep, top, sums, step


@gluon.jit
def _combine_if_last(
    WG, arrivals, partial_out, partial_lse, out, lse, sinks, record, tile_row, q_row, q_len, kv_head,
    num_kv_heads, o_stride_n, o_stride_h, D_PAD: gl.constexpr, form: Form,
):  # fmt: skip
    """Count this warpgroup's part of a piece as stored; whoever counts the last one combines these rows of the tile.

    Each warpgroup has a count of its own, at the slot of its number: a split tile has two pieces or more.
    """
    STEP: gl.constexpr = 8
    LANES: gl.constexpr = min(32, D_PAD // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0])
    first_slot = gl.load(record + ITEM_FIRST_SLOT)
    pieces = gl.load(record + ITEM_PIECES)
    # The barrier puts the stores of all threads before the one that counts. That one releases them, and acquires what
    # the other pieces released.
    block_barrier()
    arrived = arrivals + (first_slot + WG) * num_kv_heads + kv_head
    if gl.atomic_add(arrived, 1, sem="acq_rel") == pieces - 1:
        gl.store(arrived, 0)
        first = tile_row + WG * ROWS
        for at in range(0, gl.minimum(q_len * form.GROUP - first, ROWS), STEP):
            combine_rows(
                partial_out + WG * ROWS * form.D_VO, partial_lse + WG * ROWS, out, lse, sinks, first_slot, pieces,
                at + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :],
                gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None],
                gl.arange(0, D_PAD, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :],
                first, q_row, q_len, kv_head, num_kv_heads, o_stride_n, o_stride_h, form.GROUP, form.D_VO, form.BLOCK_M,
                form.SINKS, form.LSE, form.SOFTMAX,
            )  # fmt: skip


@gluon.jit
def _rows(WG, LAYOUT: gl.constexpr):
    """The rows of a warpgroup in a tile."""
    return numbered(again(WG * ROWS), gl.arange(0, ROWS, LAYOUT), 8)


@gluon.jit
def _view_of(record, kv_head, rows, tensors, numbers, form: Form):
    """What `rows` of a tile see of the keys of a piece of work."""
    mask, mask_indptr, _, qk_scale, _, alibi_slopes = tensors[8:]
    sm_scale, _, soft_cap, window_left = numbers[5:]
    q_len = gl.load(record + ITEM_Q_LEN)
    kv_len = gl.load(record + ITEM_KV_LEN)
    packed = gl.load(record + ITEM_TILE_ROW) + rows
    token = packed // form.GROUP
    row_ok = token < q_len
    head = kv_head * form.GROUP + packed % form.GROUP
    scale = gl.full([ROWS], 1.0, gl.float32, rows.type.layout) * sm_scale
    if form.HEAD_SCALES:
        scale *= gl.load(qk_scale + head, mask=row_ok, other=0.0)
    slopes = scale
    if form.ALIBI:
        slopes = gl.load(alibi_slopes + head, mask=row_ok, other=0.0)
    bits = mask
    if form.CUSTOM:
        bits = mask + gl.load(mask_indptr + gl.load(record + ITEM_REQUEST)).to(gl.int64)
    request = kv_len
    if form.VARIED:
        request = gl.load(record + ITEM_REQUEST)
    return View(
        scale, slopes, token, token + kv_len - q_len, row_ok, gl.load(record + ITEM_KV_END), kv_len, bits, soft_cap,
        window_left, request, head,
    )  # fmt: skip


@gluon.jit
def _finish(WG, acc, top, total, record, kv_head, tensors, numbers, o_tiles, form: Form):
    """Divide a piece's sums by their weights, and store them: as results, or as one of a tile's pieces."""
    _, out, lse, partial_out, partial_lse, _, _, arrivals = tensors[:8]
    _, _, sinks, _, v_scale, _ = tensors[8:]
    num_kv_heads, _, _, o_stride_n, o_stride_h, _, out_scale, _, _ = numbers
    num_kv_heads = again(num_kv_heads)
    D_PAD: gl.constexpr = form.D_VO_PAD
    WHOLE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_PAD, D_PAD // 8], [4, 1], [1, 0])
    # Read again, and not kept: the loop needs the registers.
    S_ROWS: gl.constexpr = top.type.layout
    rows = _rows(WG, S_ROWS)
    view = _view_of(record, kv_head, rows, tensors, numbers, form)
    q_row = gl.load(record + ITEM_Q_ROW)
    q_len = gl.load(record + ITEM_Q_LEN)
    tile_row = gl.load(record + ITEM_TILE_ROW)
    slot = gl.load(record + ITEM_SLOT)
    if not form.SOFTMAX:
        # The weights are what they are: no maximum was taken from their logits, and their sum divides nothing.
        top = gl.full([ROWS], 0.0, gl.float32, rows.type.layout)
        total = top + 1.0
    if form.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = gl.load(sinks + view.head, mask=view.row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * _per_row(keep, acc)
    # Not `> 0`: a NaN among the logits has to come out.
    seen = total != 0
    inverse = gl.where(seen, out_scale / gl.where(seen, total, 1.0), 0.0)
    if form.HEAD_SCALES:
        inverse *= gl.load(v_scale + view.head, mask=view.row_ok, other=0.0)
    # 0 * NaN is NaN: a row that saw no key must not show what the accumulator picked up.
    acc = _in_order(gl.where(_per_row(seen, acc), acc * _per_row(inverse, acc), 0.0), form)
    OWN: gl.constexpr = acc.type.layout
    STORE: gl.constexpr = WHOLE_ROWS if form.STAGED else OWN
    state = gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))

    if slot >= 0:
        row = (slot.to(gl.int64) * num_kv_heads + kv_head) * form.BLOCK_M + WG * ROWS
        o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, OWN))
        o_cols = gl.arange(0, D_PAD, gl.SliceLayout(0, OWN))
        there = ((tile_row + WG * ROWS + o_rows) // form.GROUP < q_len)[:, None] & (o_cols < form.D_VO)[None, :]
        # From a piece's first element: they are fewer than 2^31.
        to = numbered((again(0) + o_rows * form.D_VO)[:, None], o_cols[None, :], 16 if form.FP8 else 8)
        place = partial_out + row * form.D_VO + to
        # Neighbours that a thread has are stored at once: the compiler does not see them any more.
        NEIGHBOURS: gl.constexpr = 4 if form.FP8 else 2
        place = gl.max_contiguous(gl.multiple_of(place, [1, 4 * NEIGHBOURS]), [1, NEIGHBOURS])
        gl.store(place, acc, mask=there)
        gl.store(partial_lse + row + rows - WG * ROWS, state, mask=view.row_ok)
        _combine_if_last(
            WG, arrivals, partial_out, partial_lse, out, lse, sinks, record, tile_row, q_row, q_len, kv_head,
            num_kv_heads, o_stride_n, o_stride_h, D_PAD, form,
        )  # fmt: skip
    else:
        result = acc.to(out.dtype.element_ty)
        if form.STAGED:
            # Through shared memory, so that whole rows are written at once.
            o_tiles.index(WG).store(result)
            result = o_tiles.index(WG).load(STORE)
        ROW_STEP: gl.constexpr = min(1024 // D_PAD, ROWS) if form.STAGED else 8
        flat = numbered(tile_row + WG * ROWS, gl.arange(0, ROWS, gl.SliceLayout(1, STORE)), ROW_STEP)
        dv = gl.arange(0, D_PAD, gl.SliceLayout(0, STORE))
        at = (q_row + flat // form.GROUP).to(gl.int64) * o_stride_n
        at += (kv_head * form.GROUP + flat % form.GROUP) * o_stride_h
        o_ok = (flat // form.GROUP < q_len)[:, None] & (dv < form.D_VO)[None, :]
        gl.store(out + at[:, None] + dv[None, :], result, mask=o_ok)
        if form.LSE:
            lse_at = (q_row + view.token).to(gl.int64) * (num_kv_heads * form.GROUP) + view.head
            gl.store(lse + lse_at, state, mask=view.row_ok)


@gluon.jit
def _failed(WG, total, record, form: Form):
    """Whether the weights of some row are not in the middle of what float32 holds."""
    S_ROWS: gl.constexpr = total.type.layout
    token = (gl.load(record + ITEM_TILE_ROW) + _rows(WG, S_ROWS)) // form.GROUP
    return any_unfair(total, token < gl.load(record + ITEM_Q_LEN))


@gluon.jit
def _piece(
    WG, wave, work, works, step, cols, zeros, q_tiles, q_rests, tensors, numbers, params, k: Ring, v: Ring,
    queue: Queue, retry, o_tiles, turn, form: Form,
):  # fmt: skip
    """One piece of work: its queries are on their way, and the next one's are sent for. Returns that one, whether it is
    told again, and the next `step`."""
    q, items = tensors[0], tensors[5]
    num_kv_heads, q_stride_n, q_stride_h, _, _, sm_scale, _, _, window_left = numbers
    S_ROWS: gl.constexpr = gl.SliceLayout(1, zeros.type.layout)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.D_VO_PAD, form.MMA_K])
    record = items + work // num_kv_heads * ITEM_WIDTH
    kv_head = work % num_kv_heads
    begin, blocks, plain_from, plain_to = span(record, window_left, zeros.shape[1], form)
    if form.FIXED:
        # Told again, it has no block that a fixed shift is tried on.
        plain_from = gl.where(retry > 0, 0, plain_from)
        plain_to = gl.where(retry > 0, 0, plain_to)
    failed = blocks < 0
    view = _view_of(record, kv_head, _rows(WG, S_ROWS), tensors, numbers, form)
    factor = 1.0 if form.TRANSFORM else sm_scale * LOG2E

    cp_async_wait(0)
    # What threads wrote, cp.async included, the tensor cores see behind this fence.
    fence_async_shared()
    block_barrier()
    acc = gl.zeros([ROWS, form.D_VO_PAD], gl.float32, O_LAYOUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    total = gl.zeros([ROWS], gl.float32, S_ROWS)
    if blocks > 0:
        acc, p, keep, top, sums, step = _attend(
            WG, begin, blocks, plain_from, plain_to, step, q_tiles, q_rests, k, v, turn, zeros, cols, factor, view,
            params, form,
        )  # fmt: skip
        total = gl.convert_layout(gl.sum(sums, 1), S_ROWS)
        if form.FIXED:
            failed = (gl.minimum(plain_to, blocks - 1) > plain_from) & _failed(WG, total, record, form)
            judge(queue, WG, wave, work, failed)
        # All warps are done with these queries: the next ones come under what is left to do.
        block_barrier()
        following, next_retry = told(queue, wave)
        fetch_queries(
            WG, q_tiles, q_rests, q, items, following, works, num_kv_heads, q_stride_n, q_stride_h, form
        )  # fmt: skip
        before = (step - 1) % form.STAGES
        if form.FP8:
            _wait_full(v, step - 1, form)
            pv = warpgroup_mma_wait(0, [_weigh(p, v, before, acc)])
        else:
            acc = acc * _per_row(keep, acc)
            _wait_full(v, step - 1, form)
            pv = warpgroup_mma(p, v.tiles.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [pv])
        mbarrier.arrive(v.empty.index(before), count=1)
        if form.FP8:
            acc = (acc * _per_row(keep, acc) + pv) * (1.0 / (1 << SHIFT))
            total *= 1.0 / (1 << SHIFT)
    else:
        if form.FIXED:
            judge(queue, WG, wave, work, failed)
        following, next_retry = told(queue, wave)
        fetch_queries(
            WG, q_tiles, q_rests, q, items, following, works, num_kv_heads, q_stride_n, q_stride_h, form
        )  # fmt: skip
    if form.FP8:
        # Found again, and not kept: the loop over keys has no registers left.
        work = again(work)
        record = items + work // num_kv_heads * ITEM_WIDTH
        kv_head = work % num_kv_heads
    if form.FIXED:
        # Who fails leaves its rows to the second time, when the other one has written its own already.
        if ((retry == 0) & (failed == 0)) | ((retry >> WG & 1) != 0):
            _finish(WG, acc, top * factor, total, record, kv_head, tensors, numbers, o_tiles, form)
    else:
        _finish(WG, acc, top * factor, total, record, kv_head, tensors, numbers, o_tiles, form)
    return following, next_retry, step


@gluon.jit
def _consume(
    WG, tensors, numbers, params, q_tiles, q_rests, k: Ring, v: Ring, queue: Queue, o_tiles, turn, form: Form
):  # fmt: skip
    """One warpgroup: rows WG * 64 ... of each tile. `tensors`, `numbers` and `params` are the kernel's arguments."""
    q, items, counts = tensors[0], tensors[5], tensors[6]
    num_kv_heads, q_stride_n, q_stride_h = numbers[:3]
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, form.MMA_K])
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    works = gl.load(counts) * num_kv_heads
    work = program()
    fetch_queries(WG, q_tiles, q_rests, q, items, work, works, num_kv_heads, q_stride_n, q_stride_h, form)
    step = 0
    retry = 0
    wave = 0
    # What is the same for all pieces is made for each: loops over keys have no registers to keep it.
    while tl.condition(work < works, disable_licm=True):
        work, retry, step = _piece(
            WG, wave, work, works, step, cols, zeros, q_tiles, q_rests, tensors, numbers, params, k, v, queue, retry,
            o_tiles, turn, form,
        )  # fmt: skip
        wave += 1


@gluon.jit
def attend_sm90_kernel(
    q, k_map, k_rest_map, v_map, out, lse, partial_out, partial_lse, items, counts, arrivals, kv_indices, mask,
    mask_indptr, sinks, qk_scale, v_scale, alibi_slopes, num_kv_heads, q_stride_n, q_stride_h, o_stride_n, o_stride_h,
    k_page, k_head, k_step, v_page, v_head, v_step, sm_scale, out_scale, soft_cap,
    window_left, params,
    GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, D: gl.constexpr, D_REST: gl.constexpr, D_VO: gl.constexpr,
    D_VO_PAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STAGED: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr, TURN_WARPS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CUSTOM: gl.constexpr, SOFT_CAP: gl.constexpr,
    ALIBI: gl.constexpr, SCALE_FIRST: gl.constexpr, SINKS: gl.constexpr, HEAD_SCALES: gl.constexpr, LSE: gl.constexpr,
    GATHER: gl.constexpr, LOGITS: gl.constexpr, MASK: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks. head_dim_qk is D + D_REST, and tiles have BLOCK_M = 2 * ROWS rows.

    Keys and values are the rows of matrices (kv_layout.Matrix), where *_page and *_head are rows and *_step is columns
    from head to head. With GATHER they are anywhere: the maps are pointers, *_page and *_step are bytes from page to
    page and row to row, and *_head is elements. LOGITS and MASK are functions of a user's variant, or None; `params`
    is a named tuple for them. Without SOFTMAX, logits are weights.
    """
    VARIED: gl.constexpr = LOGITS is not None or MASK is not None
    DTYPE: gl.constexpr = q.dtype.element_ty
    OUT: gl.constexpr = out.dtype.element_ty
    TWO: gl.constexpr = D_REST > 0
    FP8: gl.constexpr = DTYPE.primitive_bitwidth == 8
    form = Form(
        CAUSAL=CAUSAL, WINDOW=WINDOW, CUSTOM=CUSTOM, SOFT_CAP=SOFT_CAP, ALIBI=ALIBI, SINKS=SINKS,
        HEAD_SCALES=HEAD_SCALES, LSE=LSE, TRANSFORM=SOFT_CAP or ALIBI or HEAD_SCALES or SCALE_FIRST or VARIED,
        GATHER=GATHER, GROUP=GROUP, PAGE_SIZE=PAGE_SIZE, D_VO=D_VO, D_VO_PAD=D_VO_PAD, BLOCK_M=BLOCK_M, STAGES=STAGES,
        TWO=TWO, STAGED=STAGED, FP8=FP8, MMA_K=256 // DTYPE.primitive_bitwidth,
        TURN_WARPS=TURN_WARPS, LOGITS=LOGITS, MASK=MASK,
        VARIED=VARIED, SOFTMAX=SOFTMAX, FIXED=DTYPE == gl.bfloat16 and SOFTMAX and not CUSTOM and MASK is None,
    )  # fmt: skip
    q_tiles = gl.allocate_shared_memory(
        DTYPE, [2, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    )  # fmt: skip
    k_tiles = gl.allocate_shared_memory(
        DTYPE, [STAGES, BLOCK_N, D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], DTYPE)
    )  # fmt: skip
    v_tiles = gl.allocate_shared_memory(
        DTYPE, [STAGES, BLOCK_N, D_VO_PAD], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D_VO_PAD], DTYPE)
    )  # fmt: skip
    q_rests = q_tiles
    k_rests = k_tiles
    if TWO:
        q_rests = gl.allocate_shared_memory(
            DTYPE, [2, ROWS, D_REST], gl.NVMMASharedLayout.get_default_for([ROWS, D_REST], DTYPE)
        )  # fmt: skip
        k_rests = gl.allocate_shared_memory(
            DTYPE, [STAGES, BLOCK_N, D_REST], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D_REST], DTYPE)
        )  # fmt: skip
    # Not the queries' place, since the next ones come meanwhile.
    O_ROWS: gl.constexpr = ROWS if STAGED else 8
    o_tiles = gl.allocate_shared_memory(
        OUT, [2, O_ROWS, D_VO_PAD], gl.NVMMASharedLayout.get_default_for([O_ROWS, D_VO_PAD], OUT)
    )  # fmt: skip
    # Every thread that gathers says so; of copies in boxes, the copy engine does.
    WRITERS: gl.constexpr = 128 if GATHER else 1
    k = ring_of(k_tiles, k_rests, STAGES, WRITERS, 2)
    v = ring_of(v_tiles, v_tiles, STAGES, WRITERS, 1 if FP8 else 2)
    # Who computes, and who copies values or turns them, is told of work by who copies keys.
    queue = queue_of(4 if FP8 else 2 if GATHER else 3, form.FIXED)
    # In FP8 nobody takes turns. Barriers that nobody waits for would share their place with tiles, and were seen there:
    # NaN among the values.
    turn = k.full
    if not FP8:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(turn.index(0), count=1)
        mbarrier.init(turn.index(1), count=1)
    tensors = (
        q, out, lse, partial_out, partial_lse, items, counts, arrivals, mask, mask_indptr, sinks, qk_scale, v_scale,
        alibi_slopes,
    )  # fmt: skip
    numbers = (
        num_kv_heads, q_stride_n, q_stride_h, o_stride_n, o_stride_h, sm_scale, out_scale, soft_cap, window_left,
    )  # fmt: skip
    if FP8:
        t_tiles = gl.allocate_shared_memory(
            DTYPE, [STAGES, D_VO_PAD, BLOCK_N], gl.NVMMASharedLayout.get_default_for([D_VO_PAD, BLOCK_N], DTYPE)
        )  # fmt: skip
        t = ring_of(t_tiles, t_tiles, STAGES, 1, 2)
        gl.warp_specialize(
            [
                (_consume, (
                    gl.to_tensor(0), tensors, numbers, params, q_tiles, q_rests, k, t, queue, o_tiles, turn, form,
                )),
                (_consume, (
                    gl.to_tensor(1), tensors, numbers, params, q_tiles, q_rests, k, t, queue, o_tiles, turn, form,
                )),
                (turn_values, (v, t, queue, items, counts, num_kv_heads, window_left, form)),
                (produce, (
                    k_map, k_rest_map, k, queue, items, counts, kv_indices, num_kv_heads, window_left, k_page, k_head,
                    k_step, gl.constexpr(TWO), gl.constexpr(True), form,
                )),
                (produce, (
                    v_map, v_map, v, queue, items, counts, kv_indices, num_kv_heads, window_left, v_page, v_head,
                    v_step, gl.constexpr(False), gl.constexpr(False), form,
                )),
            ],
            [4, TURN_WARPS, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    elif GATHER:
        gl.warp_specialize(
            [
                (_consume, (
                    gl.to_tensor(0), tensors, numbers, params, q_tiles, q_rests, k, v, queue, o_tiles, turn, form,
                )),
                (_consume, (
                    gl.to_tensor(1), tensors, numbers, params, q_tiles, q_rests, k, v, queue, o_tiles, turn, form,
                )),
                (gather, (
                    k_map, v_map, k, v, queue, items, counts, kv_indices, num_kv_heads, window_left, k_page, k_head,
                    k_step, v_page, v_head, v_step, form,
                )),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    gl.to_tensor(0), tensors, numbers, params, q_tiles, q_rests, k, v, queue, o_tiles, turn, form,
                )),
                (_consume, (
                    gl.to_tensor(1), tensors, numbers, params, q_tiles, q_rests, k, v, queue, o_tiles, turn, form,
                )),
                (produce, (
                    k_map, k_rest_map, k, queue, items, counts, kv_indices, num_kv_heads, window_left, k_page, k_head,
                    k_step, gl.constexpr(TWO), gl.constexpr(True), form,
                )),
                (produce, (
                    v_map, v_map, v, queue, items, counts, kv_indices, num_kv_heads, window_left, v_page, v_head,
                    v_step, gl.constexpr(False), gl.constexpr(False), form,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip

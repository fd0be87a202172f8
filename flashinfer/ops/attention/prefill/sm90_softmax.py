"""Hopper prefill: scores, softmax and P V of one consumer warpgroup over the key blocks of a task.

A step starts S = Q K^T of one block together with O += P V of the block before it, so that the softmax of one warpgroup
runs beside the products of the other one; the two take turns at starting them (FlashAttention-3, Shah et al., 2024).
Blocks go from the last to the first: those that need a mask come first, and the rest run in a loop without one.

There are three loops:

- with the maximum of each block (`steps`, fp16, and blocks with a mask), the online softmax in base 2;
- with a fixed shift (`steps`, bf16, blocks without a mask): weights are 2^(logit - maximum), where the maximum is that
  of the blocks with a mask. bf16 has the range of float32, so nothing is rescaled. Should the sum of a row leave
  2^-48 ... 2^48, or be NaN, the warpgroup reports it, and the task is retried with the maximum of each block;
- in e4m3 (`steps_fp8`), whose wgmma rounds what it sums: P V of each block is a sum of its own, added in float32.
"""

from flashinfer._core.gluon_compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops.attention._device.logits import transform, vary, visible
from flashinfer.ops.attention.prefill.sm90_settings import ROWS, Ring, Settings, opaque_sum

# Partial sums of a row: one for each of 16 columns, see _fold.
FOLD = gl.constexpr(16)
# In FP8, where registers are few: one partial sum for each of the four lanes that have columns of a row.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
# Weights in e4m3 are multiplied by 2^SHIFT: from 2^8 to the smallest, 2^-9, they have 17 octaves.
SHIFT = gl.constexpr(8)


@aggregate
class RowView:
    """What the 64 rows of a warpgroup need for logits and masks of one task; per row, but for the scalars."""

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
    # Read by a user's variant alone.
    request: gl.tensor
    head: gl.tensor


@gluon.jit
def _fold(x, SUM: gl.constexpr):
    """Each row's maximum or sum over every FOLD-th column: [rows, FOLD]. Independent chains hide the latency of one."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLD, 16])
    x = x.reshape([x.shape[0], x.shape[1] // FOLD, FOLD])
    x = gl.sum(x, 1) if SUM else gl.max(x, 1)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def overflows(acc):
    """What makes the partial sums of a row NaN where its sums of values are not finite, and leaves them else: 0s.

    A sum of weights near 2^48 takes values above 2^79 past float32, where the result may be finite. 0 times what is not
    finite is NaN.
    """
    return _fold(acc * 0.0, True)


@gluon.jit
def _softmax(s, top, sums, factor, settings: Settings):
    """One block of the online softmax in base 2: weights, maxima, sums, and the factor of what was summed before.

    Without a softmax, the weights are `s`, and nothing is scaled.
    """
    if not settings.SOFTMAX:
        return s, top, sums, gl.full([s.shape[0]], 1.0, gl.float32, top.type.layout)
    new_top = gl.maximum(top, gl.convert_layout(gl.max(_fold(s, False), 1), top.type.layout))
    # Where all logits so far are -inf, top is -inf, and -inf - -inf would be NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shifted = base * factor
    if settings.FP8:
        shifted -= SHIFT
    p = gl.exp2(s * factor - shifted[:, None])
    keep = gl.exp2((top - base) * factor)
    added = _fold(p, True)
    if settings.FP8:
        added = gl.sum(gl.sum(added.reshape([added.shape[0], FOLD // 8, 4, 2]), 3), 1)
        added = gl.convert_layout(added, SUMS, assert_trivial=True)
    sums = sums * gl.convert_layout(keep, gl.SliceLayout(1, sums.type.layout))[:, None] + added
    return p, new_top, sums, keep


@gluon.jit
def _logits(s, view: RowView, params, kv_pos, MASKED: gl.constexpr, settings: Settings):
    if settings.VARIED:
        s, takes_part = vary(
            s, view.scale, view.soft_cap, view.slopes, view.request, view.position, kv_pos, view.kv_len, view.head,
            params, settings.SOFT_CAP, settings.ALIBI, settings.LOGITS, settings.MASK, settings.SOFTMAX,
        )  # fmt: skip
    elif settings.TRANSFORM:
        s = transform(
            s, view.scale, view.soft_cap, view.slopes, view.position, kv_pos, settings.SOFT_CAP, settings.ALIBI
        )
    if MASKED:
        ok = visible(
            view.token, view.position, kv_pos, view.kv_end, view.kv_len, view.bits, view.row_ok, view.window_left,
            settings.CAUSAL, settings.WINDOW, settings.CUSTOM,
        )  # fmt: skip
        if settings.MASK is not None:
            ok = ok & takes_part
        s = gl.where(ok, s, float("-inf") if settings.SOFTMAX else 0.0)
    return s


@gluon.jit
def _scores(WG, q, q_rest, k: Ring, step, zeros, settings: Settings):
    """Start S = Q K^T."""
    stage = k.channel.stage(step)
    at = WG
    if settings.D_VO_PAD == 256:
        # Plus an opaque 0: else 16 operand descriptors are computed before the loop, and kept.
        at += step >> 30
    s = warpgroup_mma(q.index(at), k.tiles.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if settings.TWO:
        s = warpgroup_mma(q_rest.index(at), k.rest.index(stage).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _as_operand(weights, q):
    """Weights as the left operand of P V, in registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=weights.type.layout, k_width=2)
    return gl.convert_layout(weights.to(q.dtype), LAYOUT)


@gluon.jit
def start_pv_fp8(p, v: Ring, stage, acc):
    """Start P V of one block in e4m3, from zero; its shape is that of `acc`."""
    values = v.tiles.index(stage)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=p.type.layout, k_width=4)
    O_LAYOUT: gl.constexpr = acc.type.layout
    # Lane c of four has columns 8 j + 2 c + b of each 16, and the operand wants 4 c ... 4 c + 3. Column 8 j + 2 c + b
    # is renamed 4 c + 2 j + b, so nothing moves: V has its keys in this order (sm90_values.py has an example).
    p = p.reshape([ROWS, p.shape[1] // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, p.shape[1]])
    p = gl.convert_layout(p.to(values.dtype), LAYOUT, assert_trivial=True)
    zeros = gl.zeros([ROWS, acc.shape[1]], gl.float32, O_LAYOUT)
    return warpgroup_mma(p, values.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def per_row(x, like):
    """A value per row, as a column that broadcasts over the tile `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _wait_turn(WG, turn, step):
    # The first warpgroup's first turn is free: its barrier's phase before the first counts as over.
    mbarrier.wait(turn.index(WG), (step & 1) ^ 1 ^ WG)


@gluon.jit
def wait_full(ring: Ring, step, settings: Settings):
    ring.channel.wait(step)
    if settings.GATHER:
        # Orders what cp.async wrote before wgmma's reads.
        fence_async_shared()


@gluon.jit
def steps(
    WG, count, acc, p, keep, top, sums, step, start, last, q, q_rest, k: Ring, v: Ring, turn, zeros,
    cols, factor, view: RowView, params, MASKED: gl.constexpr, FIXED: gl.constexpr, settings: Settings,
):  # fmt: skip
    """`count` blocks of keys below key `start`. For each: its scores, P V of the block before it, then its softmax.

    `step` counts the blocks of all tasks. `p` are the weights of the block before, and `keep` is the factor that `acc`
    still lacks. `last` is the task's last step. With FIXED, the blocks use `top` as their shift, and `keep` is 1.
    """
    shifted = top * factor
    for i in range(count):
        start -= zeros.shape[1]
        before = v.channel.stage(step - 1)
        _wait_turn(WG, turn, step)
        s = _scores(WG, q, q_rest, k, step, zeros, settings)
        if not FIXED:
            acc = acc * per_row(keep, acc)
        wait_full(v, step - 1, settings)
        pv = warpgroup_mma(p, v.tiles.index(before), acc, is_async=True)
        mbarrier.arrive(turn.index(1 - WG), count=1)
        s = warpgroup_mma_wait(1, [s])
        k.channel.release(step)
        s = _logits(s, view, params, opaque_sum(start, cols, 8), MASKED, settings)
        if FIXED:
            weights = gl.exp2(s * factor - shifted[:, None])
            sums += _fold(weights, True)
        else:
            weights, top, sums, keep = _softmax(s, top, sums, factor, settings)
        # The wait for the next keys is a branch, which ptxas does not move instructions across: else it moves the wait
        # for P V up, in front of the softmax that is to run beside it.
        if step < last:
            wait_full(k, step + 1, settings)
        if FIXED:
            acc, weights, sums = warpgroup_mma_wait(0, [pv, weights, sums])
        else:
            acc, weights, sums, keep = warpgroup_mma_wait(0, [pv, weights, sums, keep])
        v.channel.release(step - 1)
        # Converted here, so that they replace the last ones in their registers; a wait keeps pairs of them together.
        p = warpgroup_mma_wait(0, [_as_operand(weights, q)])
        step += 1
    return acc, p, keep, top, sums, step, start


@gluon.jit
def steps_fp8(
    WG, count, acc, p, keep, top, sums, step, start, last, q, q_rest, k: Ring, v: Ring, turn, zeros,
    cols, factor, view: RowView, params, MASKED: gl.constexpr, FIXED: gl.constexpr, settings: Settings,
):  # fmt: skip
    """The same in e4m3. P V of each block starts from zero, before the scores, and is added to `acc` while they run.

    So no registers hold it beside the softmax. `p` is float32, since a loop would carry each byte in a register.
    Warpgroups take no turns.
    """
    for i in range(count):
        start -= zeros.shape[1]
        before = v.channel.stage(step - 1)
        wait_full(v, step - 1, settings)
        pv = start_pv_fp8(p, v, before, acc)
        s = _scores(WG, q, q_rest, k, step, zeros, settings)
        pv = warpgroup_mma_wait(1, [pv])
        v.channel.release(step - 1)
        acc = acc * per_row(keep, acc) + pv
        # Keeps the wait for the scores where it is, as in `steps`.
        if step < last:
            wait_full(k, step + 1, settings)
        s, acc = warpgroup_mma_wait(0, [s, acc])
        k.channel.release(step)
        s = _logits(s, view, params, opaque_sum(start, cols, 8), MASKED, settings)
        p, top, sums, keep = _softmax(s, top, sums, factor, settings)
        step += 1
    return acc, p, keep, top, sums, step, start


@gluon.jit
def _clear_tail(v, start, kv_len):
    """Zero the rows of a V tile past the request's keys: their weight is 0, but 0 times NaN is NaN."""
    SLICE: gl.constexpr = 16
    # Eight threads have the 64 columns of a swizzle pattern: further columns are at constant offsets from them.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(v.shape[0] // SLICE):
        if start + (i + 1) * SLICE > kv_len:
            part = v.slice(i * SLICE, SLICE, dim=0)
            x = part.load(LAYOUT)
            part.store(gl.where((start + i * SLICE + row < kv_len)[:, None], x, 0.0).to(x.dtype))
    fence_async_shared()


@gluon.jit
def attend(
    WG, begin, blocks, plain_from, plain_to, seed, step, q, q_rest, k: Ring, v: Ring, turn, zeros, cols, factor,
    view: RowView, params, settings: Settings,
):  # fmt: skip
    """All blocks of a task, but for P V of the last weights: what `steps` returns."""
    BLOCK_N: gl.constexpr = zeros.shape[1]
    STEPS: gl.constexpr = steps_fp8 if settings.FP8 else steps
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, settings.D_VO_PAD, settings.MMA_K])
    acc = gl.zeros([ROWS, settings.D_VO_PAD], gl.float32, O_LAYOUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, zeros.type.layout))
    if settings.FP8:
        sums = gl.zeros([ROWS, 4], gl.float32, SUMS)
    else:
        sums = gl.zeros([ROWS, FOLD], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLD, 16]))
    start = begin + (blocks - 1) * BLOCK_N
    last = step + blocks - 1
    wait_full(k, step, settings)
    if not settings.FP8:
        _wait_turn(WG, turn, step)
    s = _scores(WG, q, q_rest, k, step, zeros, settings)
    if not settings.FP8:
        mbarrier.arrive(turn.index(1 - WG), count=1)
    s = warpgroup_mma_wait(0, [s])
    k.channel.release(step)
    s = _logits(s, view, params, opaque_sum(start, cols, 8), True, settings)
    p, top, sums, keep = _softmax(s, top, sums, factor, settings)
    # FP8 values past the end were cleared when they were transposed.
    if not settings.FP8:
        p = _as_operand(p, q)
        if start + BLOCK_N > view.kv_len:
            wait_full(v, step, settings)
            _clear_tail(v.tiles.index(v.channel.stage(step)), start, view.kv_len)
    step += 1
    if blocks > 1:
        wait_full(k, step, settings)
    acc, p, keep, top, sums, step, start = STEPS(
        WG, blocks - 1 - plain_to, acc, p, keep, top, sums, step, start, last, q, q_rest, k, v, turn, zeros, cols,
        factor, view, params, True, False, settings,
    )  # fmt: skip
    plain = gl.minimum(plain_to, blocks - 1) - plain_from
    if settings.SEEDED:
        if seed < blocks:
            acc, p, keep, top, sums, step, _ = STEPS(
                WG, 1, acc, p, keep, top, sums, step, begin + BLOCK_N, last, q, q_rest, k, v, turn, zeros, cols, factor,
                view, params, False, False, settings,
            )  # fmt: skip
            plain -= 1
    if settings.FIXED:
        acc = acc * per_row(keep, acc)
        keep = gl.full([ROWS], 1.0, gl.float32, keep.type.layout)
        # A row that has seen no key yet takes the shift 0: its sum decides in the end whether that served.
        top = gl.where((top == float("-inf")) & (plain > 0), 0.0, top)
    acc, p, keep, top, sums, step, start = STEPS(
        WG, plain, acc, p, keep, top, sums, step, start, last, q, q_rest, k, v, turn, zeros, cols, factor, view,
        params, False, settings.FIXED, settings,
    )  # fmt: skip
    if settings.WINDOW:
        acc, p, keep, top, sums, step, start = STEPS(
            WG, (start - begin) // BLOCK_N, acc, p, keep, top, sums, step, start, last, q, q_rest, k, v, turn, zeros,
            cols, factor, view, params, True, False, settings,
        )  # fmt: skip
    return acc, p, keep, top, sums, step

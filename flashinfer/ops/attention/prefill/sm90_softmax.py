"""Hopper prefill: scores, softmax and P V of one consumer warpgroup over the key blocks of a task.

A step issues S = Q K^T of one block together with O += P V of the block before it. The softmax of one warpgroup then
overlaps the products of the other; the two take turns in issuing them (FlashAttention-3, Shah et al., 2024). Blocks are
processed from the last to the first: those that need a mask come first, the rest run in a loop without one.

There are three loops:

- with the maximum of each block (`steps`, fp16, and blocks with a mask), the online softmax in base 2;
- with a fixed shift (`steps`, bf16, blocks without a mask, and those after them, which a window masks): weights are
  2^(logit - maximum), where the maximum is that of the blocks before, with a mask. bf16 has the range of float32, so
  nothing is rescaled. If the sum of a row leaves 2^-48 to 2^120, or is NaN, the warpgroup reports it, and the task is
  retried with the maximum of each block. So it is where a logit is too near a soft cap for the short form of tanh,
  which this loop has (`_capped`);
- in e4m3 (`steps_fp8`), whose wgmma accumulates with few bits: P V of each block has its own sum, which is added in
  float32.
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
from flashinfer.ops.attention._device.logits import LOG2E, NEAR, near_zero, transform, vary, visible
from flashinfer.ops.attention.prefill.sm90_exponentials import exponentials
from flashinfer.ops.attention.prefill.sm90_settings import ROWS, Ring, Settings, opaque_sum

# A row has 16 partial sums, of every 16th column each, see _fold.
FOLD = gl.constexpr(16)
# In FP8, to save registers: one partial sum for each of the four lanes that share a row.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
# Weights in e4m3 are multiplied by 2^SHIFT. From 2^8 down to e4m3's smallest value 2^-9 they cover 17 powers of two.
SHIFT = gl.constexpr(8)


@aggregate
class RowView:
    """Inputs of logits and masks for the 64 rows of a warpgroup and one task: tensors per row, and scalars."""

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
    """Zeros to be added to a row's partial sums, or NaN if the row's accumulator is not finite.

    With a sum of weights near 2^48, values above 2^79 overflow float32 in the accumulator although the result may be
    finite. NaN in the sums makes the task be retried. 0 times a non-finite number is NaN.
    """
    return _fold(acc * 0.0, True)


@gluon.jit
def _softmax(s, top, sums, factor, BY_ROW: gl.constexpr, settings: Settings):
    """One block of the online softmax in base 2: weights, maxima, sums, and the factor for earlier sums.

    Without SOFTMAX the weights are `s`, and the factor is 1.
    """
    if not settings.SOFTMAX:
        return s, top, sums, gl.full([s.shape[0]], 1.0, gl.float32, top.type.layout)
    new_top = gl.maximum(top, gl.convert_layout(gl.max(_fold(s, False), 1), top.type.layout))
    # A row whose logits are all -inf so far has top = -inf, and -inf - -inf would be NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shifted = base * factor
    if settings.FP8:
        shifted -= SHIFT
    p = gl.exp2(s * (factor[:, None] if BY_ROW else factor) - shifted[:, None])
    keep = gl.exp2((top - base) * factor)
    added = _fold(p, True)
    if settings.FP8:
        added = gl.sum(gl.sum(added.reshape([added.shape[0], FOLD // 8, 4, 2]), 3), 1)
        added = gl.convert_layout(added, SUMS, assert_trivial=True)
    sums = sums * gl.convert_layout(keep, gl.SliceLayout(1, sums.type.layout))[:, None] + added
    return p, new_top, sums, keep


@gluon.jit
def _visible(view: RowView, kv_pos, settings: Settings):
    """Which keys each row sees, for a tile of rows and columns.

    With a window they are a range, and one comparison serves both ends of it: as an unsigned number, key - first is
    less than the range's length for its keys alone. With first 5 and length 3, key 4 is 2^32 - 1. Without a window the
    comparison with one end, too, would spill at head_dim 192 (Triton 3.9, 16 bytes).
    """
    if settings.WINDOW and not settings.CUSTOM:
        first = gl.maximum(view.position - view.window_left, 0)
        end = gl.full([ROWS], 0, gl.int32, first.type.layout) + view.kv_end
        if settings.CAUSAL:
            end = gl.minimum(end, view.position + 1)
        length = gl.maximum(end - first, 0)
        ok = (kv_pos[None, :] - first[:, None]).to(gl.uint32) < length.to(gl.uint32)[:, None]
    else:
        ok = visible(
            view.token, view.position, kv_pos, view.kv_end, view.kv_len, view.bits, view.row_ok, view.window_left,
            settings.CAUSAL, settings.WINDOW, settings.CUSTOM,
        )  # fmt: skip
    return ok


@gluon.jit
def _logits(s, view: RowView, params, kv_pos, MASKED: gl.constexpr, BY_ROW: gl.constexpr, settings: Settings):
    """Logits of raw products; with MASKED those of invisible keys become -inf (without SOFTMAX 0)."""
    if settings.VARIED:
        s, takes_part = vary(
            s, view.scale, view.soft_cap, view.slopes, view.request, view.position, kv_pos, view.kv_len, view.head,
            params, settings.SOFT_CAP, settings.ALIBI, settings.LOGITS, settings.MASK, settings.SOFTMAX,
        )  # fmt: skip
    elif settings.TRANSFORM and not BY_ROW:
        s = transform(
            s, view.scale, view.soft_cap, view.slopes, view.position, kv_pos, settings.SOFT_CAP, settings.ALIBI
        )
    if MASKED:
        ok = _visible(view, kv_pos, settings)
        if settings.MASK is not None:
            ok = ok & takes_part
        s = gl.where(ok, s, float("-inf") if settings.SOFTMAX else 0.0)
    return s


@gluon.jit
def _capped(s, sums, view: RowView):
    """Logits in base 2 of raw products under a soft cap, by the short form of tanh. Returns the partial sums, too: NaN
    for rows with a logit that it does not take, so that the task is retried.

    A NaN product gives a NaN weight, and so a NaN sum.
    """
    ratio = view.scale / view.soft_cap
    farthest = gl.convert_layout(gl.max(_fold(gl.abs(s), False), 1), ratio.type.layout) * ratio
    lost = gl.where(gl.abs(farthest) <= NEAR, 0.0, float("nan"))
    sums += gl.convert_layout(lost, gl.SliceLayout(1, sums.type.layout))[:, None]
    return near_zero(s, ratio[:, None]) * (view.scale * LOG2E)[:, None], sums


@gluon.jit
def _scores(WG, q, q_rest, k: Ring, step, zeros, settings: Settings):
    """Issue S = Q K^T of one block."""
    stage = k.channel.stage(step)
    at = WG
    if settings.D_VO_PAD == 256:
        # step >> 30 is 0, which the compiler does not know. Otherwise it computes 16 operand descriptors before the
        # loop and keeps them in registers.
        at += step >> 30
    s = warpgroup_mma(q.index(at), k.tiles.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if settings.TWO:
        s = warpgroup_mma(q_rest.index(at), k.rest.index(stage).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def as_operand(weights, q):
    """Weights as the left operand of P V, in registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=weights.type.layout, k_width=2)
    return gl.convert_layout(weights.to(q.dtype), LAYOUT)


@gluon.jit
def start_pv_fp8(p, v: Ring, stage, acc):
    """Issue P V of one block in e4m3, from zero, in the shape of `acc`."""
    values = v.tiles.index(stage)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=p.type.layout, k_width=4)
    O_LAYOUT: gl.constexpr = acc.type.layout
    # Lane c of four has columns 8 j + 2 c + b of each 16, and the operand needs columns 4 c to 4 c + 3 there. Column
    # 8 j + 2 c + b is renumbered 4 c + 2 j + b, so no data moves; V has its keys in this order (example in
    # sm90_values.py).
    p = p.reshape([ROWS, p.shape[1] // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, p.shape[1]])
    p = gl.convert_layout(p.to(values.dtype), LAYOUT, assert_trivial=True)
    zeros = gl.zeros([ROWS, acc.shape[1]], gl.float32, O_LAYOUT)
    return warpgroup_mma(p, values.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def per_row(x, like):
    """A value per row, as a column that broadcasts over the tile `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _wait_turn(WG, turn, step, settings: Settings):
    """Wait for warpgroup WG's turn to issue the products of `step`."""
    if settings.TURNS:
        # The first warpgroup does not wait at first: the phase before an mbarrier's first counts as complete.
        mbarrier.wait(turn.index(WG), (step & 1) ^ 1 ^ WG)


@gluon.jit
def _end_turn(WG, turn, settings: Settings):
    """Warpgroup WG has issued its products: it is the other one's turn."""
    if settings.TURNS:
        mbarrier.arrive(turn.index(1 - WG), count=1)


@gluon.jit
def wait_full(ring: Ring, step, settings: Settings):
    """Wait until the stage of `step` can be read by wgmma."""
    ring.channel.wait(step)
    if settings.GATHER:
        # Orders cp.async's writes before wgmma's reads.
        fence_async_shared()


@gluon.jit
def steps(
    WG, count, acc, p, keep, top, sums, step, start, last, q, q_rest, k: Ring, v: Ring, turn, zeros,
    cols, factor, view: RowView, params, MASKED: gl.constexpr, FIXED: gl.constexpr, BY_ROW: gl.constexpr,
    settings: Settings,
):  # fmt: skip
    """Process `count` blocks of keys below key `start`: for each its scores, P V of the block before it, its softmax.

    `step` counts the blocks of all tasks; `last` is the task's last step. `p` are the weights of the block before, with
    LATE in float32, and `keep` is the factor by which `acc` has to be scaled first. With FIXED the shift is `top`, and
    `keep` is 1.
    """
    shifted = top * factor
    for i in range(count):
        start -= zeros.shape[1]
        before = v.channel.stage(step - 1)
        _wait_turn(WG, turn, step, settings)
        s = _scores(WG, q, q_rest, k, step, zeros, settings)
        if not FIXED:
            acc = acc * per_row(keep, acc)
        p = as_operand(p, q) if settings.LATE else p
        wait_full(v, step - 1, settings)
        pv = warpgroup_mma(p, v.tiles.index(before), acc, is_async=True)
        _end_turn(WG, turn, settings)
        s = warpgroup_mma_wait(1, [s])
        k.channel.release(step)
        if FIXED and settings.SOFT_CAP and not settings.ALIBI and not settings.VARIED:
            s, sums = _capped(s, sums, view)
        else:
            s = _logits(s, view, params, opaque_sum(start, cols, 8), MASKED, BY_ROW, settings)
        if FIXED:
            weights = exponentials(s * factor - shifted[:, None], settings.BY_FMA)
            sums += _fold(weights, True)
        else:
            weights, top, sums, keep = _softmax(s, top, sums, factor, BY_ROW, settings)
        # The wait for the next keys is a branch, across which ptxas does not move instructions. It would otherwise move
        # the wait for P V in front of the softmax, which is to overlap it.
        if step < last:
            wait_full(k, step + 1, settings)
        if FIXED:
            acc, weights, sums = warpgroup_mma_wait(0, [pv, weights, sums])
        else:
            acc, weights, sums, keep = warpgroup_mma_wait(0, [pv, weights, sums, keep])
        v.channel.release(step - 1)
        # Converted after the wait, so that the weights reuse the registers of the last ones. The wait on them keeps
        # each pair of 16-bit weights in one register.
        p = weights if settings.LATE else warpgroup_mma_wait(0, [as_operand(weights, q)])
        step += 1
    return acc, p, keep, top, sums, step, start


@gluon.jit
def steps_fp8(
    WG, count, acc, p, keep, top, sums, step, start, last, q, q_rest, k: Ring, v: Ring, turn, zeros,
    cols, factor, view: RowView, params, MASKED: gl.constexpr, FIXED: gl.constexpr, BY_ROW: gl.constexpr,
    settings: Settings,
):  # fmt: skip
    """`steps` in e4m3. P V of each block starts from zero, is issued before the scores, and is added to `acc` while
    they run, so that it takes no registers during the softmax.

    `p` is float32 between steps, because a loop would carry each e4m3 byte in a register of its own. Warpgroups do not
    take turns.
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
        # Keeps ptxas from moving the wait for the scores, as in `steps`.
        if step < last:
            wait_full(k, step + 1, settings)
        s, acc = warpgroup_mma_wait(0, [s, acc])
        k.channel.release(step)
        s = _logits(s, view, params, opaque_sum(start, cols, 8), MASKED, BY_ROW, settings)
        p, top, sums, keep = _softmax(s, top, sums, factor, BY_ROW, settings)
        step += 1
    return acc, p, keep, top, sums, step, start


@gluon.jit
def _clear_tail(v, start, kv_len):
    """Zero the rows of a V tile past the request's keys: their weight is 0, and 0 times NaN is NaN."""
    SLICE: gl.constexpr = 16
    # Eight threads have the 64 columns of one swizzle pattern; further columns are at constant offsets.
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
    WG, begin, blocks, plain_from, plain_to, step, q, q_rest, k: Ring, v: Ring, turn, zeros, cols, factor,
    view: RowView, params, BY_ROW: gl.constexpr, settings: Settings,
):  # fmt: skip
    """Process all blocks of a task, except P V of the last one. Returns the state of `steps`."""
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
    _wait_turn(WG, turn, step, settings)
    s = _scores(WG, q, q_rest, k, step, zeros, settings)
    _end_turn(WG, turn, settings)
    s = warpgroup_mma_wait(0, [s])
    k.channel.release(step)
    s = _logits(s, view, params, opaque_sum(start, cols, 8), True, BY_ROW, settings)
    p, top, sums, keep = _softmax(s, top, sums, factor, BY_ROW, settings)
    # In FP8 values past the end are zeroed when they are transposed.
    if not settings.FP8:
        p = p if settings.LATE else as_operand(p, q)
        if start + BLOCK_N > view.kv_len:
            wait_full(v, step, settings)
            _clear_tail(v.tiles.index(v.channel.stage(step)), start, view.kv_len)
    step += 1
    if blocks > 1:
        wait_full(k, step, settings)
    acc, p, keep, top, sums, step, start = STEPS(
        WG, blocks - 1 - plain_to, acc, p, keep, top, sums, step, start, last, q, q_rest, k, v, turn, zeros, cols,
        factor, view, params, True, False, BY_ROW, settings,
    )  # fmt: skip
    plain = gl.minimum(plain_to, blocks - 1) - plain_from
    if settings.FIXED:
        acc = acc * per_row(keep, acc)
        keep = gl.full([ROWS], 1.0, gl.float32, keep.type.layout)
        # A row that has seen no key yet gets the shift 0; the check of its sum decides whether that was adequate.
        top = gl.where((top == float("-inf")) & (plain > 0), 0.0, top)
    acc, p, keep, top, sums, step, start = STEPS(
        WG, plain, acc, p, keep, top, sums, step, start, last, q, q_rest, k, v, turn, zeros, cols, factor,
        view, params, False, settings.FIXED, BY_ROW, settings,
    )  # fmt: skip
    if settings.WINDOW or (settings.FIXED and settings.SOFT_CAP):
        acc, p, keep, top, sums, step, start = STEPS(
            WG, (start - begin) // BLOCK_N, acc, p, keep, top, sums, step, start, last, q, q_rest, k, v, turn, zeros,
            cols, factor, view, params, True, settings.FIXED and not settings.SOFT_CAP, BY_ROW, settings,
        )  # fmt: skip
    return acc, p, keep, top, sums, step

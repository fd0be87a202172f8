"""Hopper prefill: the epilogue. Accumulators become results, or the partial results of one split."""

from flashinfer._core.gluon_compat import block_barrier, gl, gluon
from flashinfer.ops._device.sm90.registers import opaque
from flashinfer.ops.attention._device.combine import combine_rows
from flashinfer.ops.attention._device.logits import LOG2E, with_sink
from flashinfer.ops.attention._device.schedule import (
    ITEM_FIRST_SLOT,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_SPLITS,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_REQUEST,
    ITEM_SLOT,
    ITEM_TILE_ROW,
)
from flashinfer.ops.attention.prefill.sm90_settings import (
    ROWS,
    Scalars,
    Settings,
    Tensors,
    opaque_sum,
    places_of_rows,
    token_of,
)
from flashinfer.ops.attention.prefill.sm90_softmax import RowView, per_row


@gluon.jit
def rows_of(WG, LAYOUT: gl.constexpr):
    """The rows of warpgroup WG in a tile."""
    return opaque_sum(opaque(WG * ROWS), gl.arange(0, ROWS, LAYOUT), 8)


@gluon.jit
def view_of(record, kv_head, rows, tensors: Tensors, scalars: Scalars, settings: Settings):
    """The RowView of `rows` of a task's tile."""
    q_len = gl.load(record + ITEM_Q_LEN)
    kv_len = gl.load(record + ITEM_KV_LEN)
    packed = gl.load(record + ITEM_TILE_ROW) + rows
    token = token_of(packed, settings.GROUP)
    row_ok = token < q_len
    head = (kv_head - token) * settings.GROUP + packed
    scale = gl.full([ROWS], 1.0, gl.float32, rows.type.layout) * scalars.sm_scale
    if settings.HEAD_SCALES:
        scale *= gl.load(tensors.qk_scale + head, mask=row_ok, other=1.0)
    slopes = scale
    if settings.ALIBI:
        slopes = gl.load(tensors.alibi_slopes + head, mask=row_ok, other=0.0)
    bits = tensors.mask
    if settings.CUSTOM:
        bits = tensors.mask + gl.load(tensors.mask_indptr + gl.load(record + ITEM_REQUEST)).to(gl.int64)
    request = kv_len
    if settings.VARIED:
        request = gl.load(record + ITEM_REQUEST)
    return RowView(
        scale, slopes, token, token + kv_len - q_len, row_ok, gl.load(record + ITEM_KV_END), kv_len, bits,
        scalars.soft_cap, scalars.window_left, request, head,
    )  # fmt: skip


@gluon.jit
def all_positive(tensors: Tensors, scalars: Scalars, kv_head, settings: Settings):
    """Whether the factors of all heads of the group are positive, and none is so small that it is 0. A loop over
    scalars takes none of the registers that a reduction over rows would keep for all tasks."""
    found = kv_head >= 0
    for i in range(settings.GROUP):
        scale = scalars.sm_scale * gl.load(tensors.qk_scale + kv_head * settings.GROUP + i)
        found = found & (scale * LOG2E > 0)
    return found


@gluon.jit
def rows_exist(WG, record, LAYOUT: gl.constexpr, settings: Settings):
    """Which rows of warpgroup WG are query rows of the request."""
    token = token_of(gl.load(record + ITEM_TILE_ROW) + rows_of(WG, LAYOUT), settings.GROUP)
    return token < gl.load(record + ITEM_Q_LEN)


@gluon.jit
def _in_order(acc, settings: Settings):
    """The accumulator with its columns in V's order. In FP8 sm90_values.py puts the even ones of each 16 first."""
    if settings.FP8:
        acc = acc.reshape([ROWS, settings.D_VO_PAD // 16, 2, 8]).permute([0, 1, 3, 2])
        acc = acc.reshape([ROWS, settings.D_VO_PAD])
    return acc


@gluon.jit
def _combine_if_last(
    WG, record, tile_row, q_row, q_len, kv_head, num_kv_heads, tensors: Tensors, scalars: Scalars, settings: Settings
):
    """Count this warpgroup's rows of a split as stored. The warpgroup that counts the last split combines these rows.

    Each warpgroup has its own counter, at slot first_slot + WG; a split tile has at least two slots.
    """
    STEP: gl.constexpr = 8
    D_PAD: gl.constexpr = settings.D_VO_PAD
    LANES: gl.constexpr = min(32, D_PAD // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0])
    first_slot = gl.load(record + ITEM_FIRST_SLOT)
    splits = gl.load(record + ITEM_SPLITS)
    # The barrier orders the stores of all threads before the atomic, which releases them and acquires other splits'.
    block_barrier()
    arrived = tensors.arrivals + (first_slot + WG) * num_kv_heads + kv_head
    if gl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
        gl.store(arrived, 0)
        first = tile_row + WG * ROWS
        for at in range(0, gl.minimum(q_len * settings.GROUP - first, ROWS), STEP):
            combine_rows(
                tensors.partial_out + WG * ROWS * settings.D_VO, tensors.partial_lse + WG * ROWS, tensors.out,
                tensors.lse, tensors.sinks, first_slot, splits,
                at + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :],
                gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None],
                gl.arange(0, D_PAD, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :],
                first, q_row, q_len, kv_head, num_kv_heads, scalars.o_stride_n, scalars.o_stride_h, settings.GROUP,
                settings.D_VO, settings.BLOCK_M, settings.SINKS, settings.LSE, settings.SOFTMAX,
            )  # fmt: skip


@gluon.jit
def _state(top, total):
    """LSE in base 2 of rows; -inf for those that saw no key."""
    seen = total != 0
    return gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))


@gluon.jit
def finish(
    WG, acc, top, total, record, kv_head, o_tiles, tensors: Tensors, scalars: Scalars, settings: Settings
):
    """Divide a warpgroup's sums of weighted values by the sums of weights, and store them as results or as a split's.

    acc [ROWS, D_VO_PAD]; top, the maximum in base 2, and total, the sum of weights [ROWS].
    """
    num_kv_heads = opaque(scalars.num_kv_heads)
    out = tensors.out
    D_PAD: gl.constexpr = settings.D_VO_PAD
    WHOLE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_PAD, D_PAD // 8], [4, 1], [1, 0])
    # Loaded here instead of kept: the loop over keys needs the registers.
    S_ROWS: gl.constexpr = top.type.layout
    rows = rows_of(WG, S_ROWS)
    view = view_of(record, kv_head, rows, tensors, scalars, settings)
    q_row = gl.load(record + ITEM_Q_ROW)
    q_len = gl.load(record + ITEM_Q_LEN)
    tile_row = gl.load(record + ITEM_TILE_ROW)
    slot = gl.load(record + ITEM_SLOT)
    if not settings.SOFTMAX:
        # Logits are weights: there is no maximum, and results are not divided by their sum.
        top = gl.full([ROWS], 0.0, gl.float32, rows.type.layout)
        total = top + 1.0
    if settings.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = gl.load(tensors.sinks + view.head, mask=view.row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * per_row(keep, acc)
    # Not `> 0`: NaN logits have to give NaN results.
    seen = total != 0
    inverse = gl.where(seen, scalars.out_scale / gl.where(seen, total, 1.0), 0.0)
    if settings.HEAD_SCALES:
        inverse *= gl.load(tensors.v_scale + view.head, mask=view.row_ok, other=0.0)
    # A row that saw no key is 0, even if its accumulator is NaN.
    acc = _in_order(gl.where(per_row(seen, acc), acc * per_row(inverse, acc), 0.0), settings)
    OWN: gl.constexpr = acc.type.layout
    # Once, or the values of both branches spill (40 bytes, Triton 3.9). Without LSE a split alone needs it.
    state = top
    if settings.LSE:
        state = _state(top, total)
    STORE: gl.constexpr = WHOLE_ROWS if settings.STAGED else OWN

    if slot >= 0:
        row = (slot.to(gl.int64) * num_kv_heads + kv_head) * settings.BLOCK_M + WG * ROWS
        o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, OWN))
        o_cols = gl.arange(0, D_PAD, gl.SliceLayout(0, OWN))
        in_tile = ((tile_row + WG * ROWS + o_rows) // settings.GROUP < q_len)[:, None]
        # Offsets within a split's tile fit 32 bits.
        to = opaque_sum((opaque(0) + o_rows * settings.D_VO)[:, None], o_cols[None, :], 16 if settings.FP8 else 8)
        pointers = tensors.partial_out + row * settings.D_VO + to
        # The opaque sum hides from the compiler that a thread's neighbouring columns are contiguous.
        NEIGHBOURS: gl.constexpr = 4 if settings.FP8 else 2
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 4 * NEIGHBOURS]), [1, NEIGHBOURS])
        gl.store(pointers, acc, mask=in_tile & (o_cols < settings.D_VO)[None, :])
        if not settings.LSE:
            state = _state(top, total)
        gl.store(tensors.partial_lse + row + rows - WG * ROWS, state, mask=view.row_ok)
        _combine_if_last(
            WG, record, tile_row, q_row, q_len, kv_head, num_kv_heads, tensors, scalars, settings
        )  # fmt: skip
    else:
        result = acc.to(out.dtype.element_ty)
        if settings.STAGED:
            # Through shared memory, so that whole rows are written.
            o_tiles.index(WG).store(result)
            result = o_tiles.index(WG).load(STORE)
        # By which a thread's rows differ: multiples of ROW_STEP, or in the accumulator's layout 8.
        ROW_STEP: gl.constexpr = min(1024 // D_PAD, ROWS) if settings.STAGED else 8
        CONSTANT: gl.constexpr = ROWS - ROW_STEP if settings.STAGED else 8
        index = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
        first = opaque_sum(tile_row + WG * ROWS, index & (ROWS - 1 - CONSTANT), ROWS)
        token, at = places_of_rows(
            first, index & CONSTANT, q_row, kv_head, scalars.o_stride_n, scalars.o_stride_h, ROW_STEP, settings.GROUP, 8
        )  # fmt: skip
        dv = gl.arange(0, D_PAD, gl.SliceLayout(0, STORE))
        o_ok = (token < q_len)[:, None] & (dv < settings.D_VO)[None, :]
        gl.store(out + at[:, None] + dv[None, :], result, mask=o_ok)
        if settings.LSE:
            lse_at = (q_row + view.token).to(gl.int64) * (num_kv_heads * settings.GROUP) + view.head
            gl.store(tensors.lse + lse_at, state, mask=view.row_ok)

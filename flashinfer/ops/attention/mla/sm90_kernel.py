"""Latent attention (MLA, absorbed projections) on Hopper: out = softmax(mask(scale Q K^T)) C, and its LSE.

A key is a latent row of 512 columns and a positional row of 64 columns or none; its value is the latent row again. So a
block of latent rows is in shared memory once, as keys and as values. The heads of a token are rows of one tile: row r
of a request is head r % HEADS of token r // HEADS.

Grid: as many persistent thread blocks as multiprocessors, or fewer. Each loops over work items of 64 query rows
(sm90_work.py).

Warps: two consumer warpgroups of 4 warps (sm90_softmax.py), and producers: one warp for each block of a pair, by TMA
(sm90_loads.produce); or four warps that copy row by row (sm90_loads.gather), or widen FP8 (sm90_widen.widen).

Shared memory: 64 query rows of 576 two-byte elements, 72 KiB; two blocks of 64 keys, 144 KiB. The softmax
weights of a block overwrite its positional keys. Also maxima, factors and sums of rows.

Inputs: q_nope [tokens, heads, 512], q_pe [tokens, heads, 64], ckv and kpe in pages, and work items of schedule.py.
Outputs: out [tokens, heads, 512], lse [tokens, heads] float32, in base 2 or e; for split items partial_out [slots, 64,
512] and partial_lse [slots, 64], float32, which sm90_combine.py merges in a launch of its own.

Method: MLA (DeepSeek-V2, 2024); the split of FlashMLA (DeepSeek, 2025). docs/rooms/mla.md derives the schedule.
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
)
from flashinfer.ops._device.sm90.publish import write_words
from flashinfer.ops._device.sm90.registers import opaque, prefetch, program
from flashinfer.ops.attention._device.logits import LOG2E, with_sink
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_SLOT,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention._device.sm90_fixed_shift import any_out_of_range
from flashinfer.ops.attention.mla.sm90_loads import fetch, gather, produce
from flashinfer.ops.attention.mla.sm90_settings import (
    HALF,
    KEYS,
    MOST_FAILED,
    REST,
    ROWS,
    STORED,
    Scalars,
    Settings,
    Shared,
    Tensors,
)
from flashinfer.ops.attention.mla.sm90_softmax import (
    first_plain_steps,
    first_steps,
    per_row,
    second_plain_steps,
    second_steps,
)
from flashinfer.ops.attention.mla.sm90_widen import widen
from flashinfer.ops.attention.mla.sm90_work import item_of, retries, span

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _barrier(shared: Shared, phase):
    """A barrier of both warpgroups, after which threads and wgmma can read what either wrote before."""
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(shared.met, count=1)
    mbarrier.wait(shared.met, phase)


@gluon.jit
def _rows(LAYOUT: gl.constexpr):
    """The rows of a tile, opaque. A thread's two rows are 8 apart, so it keeps one register."""
    index = gl.arange(0, ROWS, LAYOUT)
    return opaque(index & -9) + (index & 8)


@gluon.jit
def _failed(total, record, settings: Settings):
    """Whether the fixed shift failed: for some row of the request the sum of weights is out of range."""
    S_ROWS: gl.constexpr = total.type.layout
    token = (gl.load(record + ITEM_TILE_ROW) + _rows(S_ROWS)) // settings.HEADS
    return any_out_of_range(total, token < gl.load(record + ITEM_Q_LEN))


@gluon.jit
def _store(WG: gl.constexpr, x, base, stride_token, stride_head, tile_row, q_len, settings: Settings):
    """Store a warpgroup's columns of the rows that the request has; row tile_row + r is at token and head."""
    flat = tile_row + _rows(gl.SliceLayout(1, x.type.layout))
    cols = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, x.type.layout))
    token = flat // settings.HEADS
    at = token.to(gl.int64) * stride_token + (flat % settings.HEADS) * stride_head
    gl.store(base + at[:, None] + cols[None, :], x, mask=(token < q_len)[:, None])


@gluon.jit
def _finish(
    WG: gl.constexpr, acc, top, total, record, out_scale, tensors: Tensors, scalars: Scalars, settings: Settings
):
    """Divide a warpgroup's sums by the sums of weights, and store its columns as results or as a split's.

    acc [ROWS, HALF]; top, the maximum in base 2, and total, the sum of weights [ROWS].
    """
    out = tensors.out
    S_ROWS: gl.constexpr = top.type.layout
    q_row = gl.load(record + ITEM_Q_ROW)
    q_len = gl.load(record + ITEM_Q_LEN)
    tile_row = gl.load(record + ITEM_TILE_ROW)
    slot = gl.load(record + ITEM_SLOT)
    # Computed here instead of kept: the loop over keys needs the registers.
    rows = _rows(S_ROWS)
    packed = tile_row + rows
    token = packed // settings.HEADS
    head = packed % settings.HEADS
    row_ok = token < q_len
    if settings.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = gl.load(tensors.sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * per_row(keep, acc)
    # Not `> 0`: NaN logits have to give NaN results.
    seen = total != 0
    inverse = gl.where(seen, out_scale / gl.where(seen, total, 1.0), 0.0)
    # A row that saw no key is 0, even if its accumulator is NaN.
    acc = gl.where(per_row(seen, acc), acc * per_row(inverse, acc), 0.0)
    state = gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))

    if slot >= 0:
        row = slot.to(gl.int64) * ROWS
        # Row 0 of a split is row tile_row of the request.
        first = tensors.partial_out + (row - tile_row) * (2 * HALF)
        _store(WG, acc, first, settings.HEADS * 2 * HALF, 2 * HALF, tile_row, q_len, settings)
        if WG == 0:
            gl.store(tensors.partial_lse + row + rows, state, mask=row_ok)
    else:
        result = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
        request = out + q_row.to(gl.int64) * scalars.o_stride_n
        _store(WG, result, request, scalars.o_stride_n, scalars.o_stride_h, tile_row, q_len, settings)
        if settings.LSE and WG == 0:
            lse_at = (q_row + token).to(gl.int64) * settings.HEADS + head
            gl.store(tensors.lse + lse_at, state * LN2 if settings.BASE_E else state, mask=row_ok)


@gluon.jit
def _fetch_half(
    WG: gl.constexpr, record, shared: Shared, tensors: Tensors, scalars: Scalars, settings: Settings
):
    """Copy a warpgroup's half of a tile's queries, and wait for it."""
    # The other warpgroup has read the previous tile's queries: this one has waited for its last weights.
    by_n, by_h = scalars.q_nope_stride_n, scalars.q_nope_stride_h
    if WG == 0:
        fetch(shared.q_left.index(0), tensors.q_nope, record, by_n, by_h, settings)
        if settings.POSITIONAL:
            by_n, by_h = scalars.q_pe_stride_n, scalars.q_pe_stride_h
            fetch(shared.q_rest.index(0), tensors.q_pe, record, by_n, by_h, settings)
    else:
        q_right = tensors.q_nope + (HALF if settings.Q_FP8 == "" else HALF // 4)
        fetch(shared.q_right.index(0), q_right, record, by_n, by_h, settings)
    cp_async_commit()
    cp_async_wait(0)


@gluon.jit
def _consume(WG: gl.constexpr, shared: Shared, tensors: Tensors, scalars: Scalars, settings: Settings):
    """Consumer warpgroup WG: computes the scores of block WG of each pair, and half WG of the output's columns."""
    STEPS: gl.constexpr = first_steps if WG == 0 else second_steps
    PLAIN_STEPS: gl.constexpr = first_plain_steps if WG == 0 else second_plain_steps
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    scale = scalars.sm_scale * LOG2E
    out_scale = scalars.out_scale
    if settings.DEVICE_SCALES:
        scale *= gl.load(tensors.qk_scale)
        out_scale *= gl.load(tensors.v_scale)
    factor = 1.0 if settings.TRANSFORM else scale
    count = gl.load(tensors.counts)
    waves = gl.cdiv(count, gl.num_programs(0))
    last = waves
    step = 0
    wave = 0
    failures = 0
    # The parity of tiles so far.
    turn = 0
    # Without loop-invariant code motion: values that all items share are recomputed for each, because the loops over
    # keys need the registers.
    while tl.condition(wave < last, disable_licm=True):
        item = item_of(wave, waves, shared, settings)
        if item < count:
            record = tensors.items + item * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, settings)
            plain = 0
            if settings.FIXED:
                # The last pair always uses its maximum, which is the shift of the other pairs.
                if (wave < waves) & (failures < MOST_FAILED):
                    plain = gl.maximum(gl.minimum((plain_end - begin) // (2 * KEYS), pairs - 1), 0)
            packed = gl.load(record + ITEM_TILE_ROW) + _rows(S_ROWS)
            position = packed // settings.HEADS + (gl.load(record + ITEM_KV_LEN) - gl.load(record + ITEM_Q_LEN))
            acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
            top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
            total = gl.zeros([ROWS], gl.float32, S_ROWS)
            failed = pairs < 0
            if pairs > 0:
                if settings.Q_COPIED:
                    mbarrier.wait(shared.q_full, turn)
                    fence_async_shared()
                else:
                    _fetch_half(WG, record, shared, tensors, scalars, settings)
                    _barrier(shared, 0)
                start = begin + (pairs - 1) * 2 * KEYS
                acc, top, total, step = STEPS(
                    acc, top, total, step, pairs - plain, start, end, plain_end, position, zeros, shared, factor, scale,
                    scalars.pe_ratio, settings,
                )  # fmt: skip
                if settings.FIXED:
                    # A row that has seen no key yet gets the shift 0; the check of its sum decides whether that was
                    # adequate.
                    top = gl.where((top == float("-inf")) & (plain > 0), 0.0, top)
                    acc, total, step = PLAIN_STEPS(
                        acc, top, total, step, plain, zeros, shared, factor, scale, scalars.pe_ratio, settings
                    )
                if settings.Q_COPIED:
                    mbarrier.arrive(shared.q_read, count=1)
                shared.sums.index(WG).store(total)
                if settings.Q_COPIED:
                    _barrier(shared, turn)
                    turn ^= 1
                else:
                    _barrier(shared, 1)
                # Both sums from shared memory, so that both warpgroups have the same bits.
                total = shared.sums.index(0).load(total.type.layout) + shared.sums.index(1).load(total.type.layout)
                # Computed again instead of kept: the loop over keys needs the registers.
                record = tensors.items + opaque(item) * ITEM_WIDTH
                if settings.FIXED:
                    failed = (plain > 0) & _failed(total, record, settings)
            if settings.FIXED:
                # Both warpgroups find the same value.
                if failed:
                    if WG == 0:
                        write_words(shared.failed.index(failures), (item,))
                else:
                    _finish(WG, acc, top * factor, total, record, out_scale, tensors, scalars, settings)
                failures += failed.to(gl.int32)
            else:
                _finish(WG, acc, top * factor, total, record, out_scale, tensors, scalars, settings)
        wave += 1
        if settings.FIXED and WG == 0:
            if wave == waves:
                write_words(shared.failed.index(MOST_FAILED), (failures,))
                mbarrier.arrive(shared.reported, count=1)
        last += retries(wave, waves, shared, settings)


@gluon.jit
def attend_latent_sm90_kernel(
    q_nope, q_pe, ckv_map, kpe_map, out, lse, partial, work, kv_indices, call, q_nope_by, q_pe_by, ckv_by, kpe_by,
    out_by, numbers, keys,
    HEADS: gl.constexpr, POSITIONAL: gl.constexpr, Q_FP8: gl.constexpr, CAUSAL: gl.constexpr, TRANSFORM: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Latent rows have 2 * HALF columns, positional rows REST or none.

    Keys are the rows of matrices (kv_layout.Matrix), ckv_by.page rows from page to page. With GATHER the maps are
    pointers, and page and step are elements from page to page and row to row. FP8 is gathered as words of four
    elements, and steps are words.
    """
    # Where L2 is cold, the number of work items and the first one's record arrive together.
    prefetch(work.counts)
    prefetch(work.items + program() * ITEM_WIDTH)
    DTYPE: gl.constexpr = q_nope.dtype.element_ty if Q_FP8 == "" else gl.float16
    settings = Settings(
        HEADS=HEADS, PAGE_SIZE=keys.PAGE_SIZE, SPARSE=keys.SPARSE, GATHER=keys.GATHER,
        Q_COPIED=keys.GATHER and keys.FP8 == "", POSITIONAL=POSITIONAL,
        KV_FP8=keys.FP8, Q_FP8=Q_FP8, CAUSAL=CAUSAL, SINKS=call.SINKS, DEVICE_SCALES=call.SCALES, TRANSFORM=TRANSFORM,
        # With sparse FP8 keys and sinks a fixed shift has 48 bytes of stack on Triton 3.9.
        FIXED=DTYPE == gl.bfloat16 and (keys.FP8 == "" or not keys.SPARSE), LSE=call.LSE, BASE_E=call.BASE_E,
    )  # fmt: skip
    Q_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], DTYPE)
    Q_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], DTYPE)
    K_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], DTYPE)
    K_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, REST], DTYPE)
    A_ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        q_left=gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_HALF),
        q_right=gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_HALF),
        q_rest=gl.allocate_shared_memory(DTYPE, [1, ROWS, REST], Q_REST),
        q_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        q_read=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
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
        reported=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    # Arrivals that fill a part: with `gather` each of 128 threads arrives; with TMA one thread does, and bytes are
    # counted; `widen` arrives once for its four warps.
    WRITERS: gl.constexpr = 128 if keys.GATHER and keys.FP8 == "" else 1
    if settings.Q_COPIED:
        mbarrier.init(shared.q_full, count=WRITERS)
        mbarrier.init(shared.q_read, count=2)
    for part in gl.static_range(4):
        mbarrier.init(shared.left_full.index(part), count=WRITERS)
        mbarrier.init(shared.right_full.index(part), count=WRITERS)
    for block in gl.static_range(2):
        mbarrier.init(shared.left_empty.index(block), count=1)
        mbarrier.init(shared.right_empty.index(block), count=1)
        mbarrier.init(shared.ready.index(block), count=1)
        if keys.GATHER:
            # Only with GATHER: the compiler lets an unused mbarrier share memory with another buffer.
            mbarrier.init(shared.bias_full.index(block), count=1)
    mbarrier.init(shared.met, count=2)
    if settings.FIXED:
        mbarrier.init(shared.reported, count=1)
    tensors = Tensors(
        q_nope, q_pe, out, lse, partial.out, partial.lse, work.items, work.counts, call.sinks, call.qk_scale,
        call.v_scale,
    )  # fmt: skip
    scalars = Scalars(
        q_nope_by.token, q_nope_by.head, q_pe_by.token, q_pe_by.head, out_by.token, out_by.head, numbers.sm_scale,
        numbers.out_scale, numbers.pe_ratio,
    )  # fmt: skip
    if keys.GATHER:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), shared, tensors, scalars, settings)),
                (_consume, (gl.constexpr(1), shared, tensors, scalars, settings)),
                (gather if keys.FP8 == "" else widen, (
                    ckv_map, kpe_map, shared, tensors, scalars, kv_indices, ckv_by.page, ckv_by.step, kpe_by.page,
                    kpe_by.step, settings,
                )),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), shared, tensors, scalars, settings)),
                (_consume, (gl.constexpr(1), shared, tensors, scalars, settings)),
                (produce, (
                    gl.constexpr(0), ckv_map, kpe_map, shared, work.items, work.counts, kv_indices, ckv_by.page,
                    kpe_by.page, settings,
                )),
                (produce, (
                    gl.constexpr(1), ckv_map, kpe_map, shared, work.items, work.counts, kv_indices, ckv_by.page,
                    kpe_by.page, settings,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip

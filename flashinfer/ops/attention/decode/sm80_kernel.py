"""Decode attention from Ampere on: out = softmax(mask(scale Q K^T)) V, and its LSE, for tiles of 16 to 64 query rows.

Grid: one program for each pair of a work item and a KV head (`item_and_head`).

Warps: all copy and compute. Warps along keys are independent: each has its own keys in every block, with its own
maximum, sum and accumulator, which are merged once, at the end. A tile is [WARPS_N, rows, keys of a warp]. Above 128
columns of V, several warps have the same keys: each multiplies all of Q K^T, and P with 128 columns of V of its own.

Shared memory: a ring of STAGES blocks of keys and values, filled by cp.async; after the loop, each warp's accumulator.

The kernel is bound by memory, so enough bytes have to be in flight all the time. Page ids are loaded STAGES blocks
ahead, and the prologue fills the ring before the first wait.

Inputs: q [tokens, heads, D_QK], k and v in pages or ragged, as elements or as bytes of FP8; work items of schedule.py.
Outputs: out [tokens, heads, D_VO], lse [tokens, heads] float32 in base 2; for split items partial_out [slots, kv_heads,
BLOCK_M, D_VO] and partial_lse [slots, kv_heads, BLOCK_M], float32, which the last split of a tile combines.

Method: FlashAttention-2 (Dao, 2023), split over keys as in Flash-Decoding (Dao et al., 2023).
"""

from flashinfer._core.gluon_compat import (
    block_barrier,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    gl,
    gluon,
    mma_v2,
)
from flashinfer.ops._device.pdl import begin as begin_dependent
from flashinfer.ops.attention._device.combine import combine_if_last
from flashinfer.ops.attention._device.kv_source import fit_half, offsets_in, page_ids, widen
from flashinfer.ops.attention._device.logits import LOG2E, scaled_at, vary_at, visible_at, with_sink
from flashinfer.ops.attention._device.schedule import ITEM_REQUEST, ITEM_WIDTH, item_and_head
from flashinfer.ops.attention.decode.sm80_items import item_of_lengths, item_of_list


@gluon.constexpr_function
def _ring(columns: int, bits: int):
    """Layout of one stage: 16-byte units swizzled so that 8 rows of a matrix fragment are in different banks.

    Example: rows of 64 columns of 16 bits are 8 units, which fill 32 banks; unit u of row r is stored at u ^ (r % 8),
    so that unit 0 of rows 0 ... 7 is at 0 ... 7.
    """
    vec = 128 // bits
    per_phase = max(1, 8 * vec // columns)
    return gl.SwizzledSharedLayout(vec, per_phase, max(1, min(8, columns // vec)), [2, 1, 0])


@gluon.constexpr_function
def _products(keys: int, rows: int, columns: int):
    """Layout of a product, by warps along each dimension.

    With more rows than the tile has, warps repeat it: S is the same in all warps that share columns, without an
    exchange. Where the tile has more than 16 rows, a warp has other rows of S than of the output, and P goes through
    shared memory.
    """
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[keys, rows, columns], instr_shape=[1, 16, 8])


@gluon.jit
def _fill(smem, x, ids, first, row, d, end, kv_base, stride_page, stride_n, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
          ONE_PAGE: gl.constexpr):  # fmt: skip
    """Start copying keys `first + row` of each warp into a stage of the ring. Keys from `end` on become zeros."""
    if ONE_PAGE:
        # The part of the address that depends on the row is loop-invariant.
        at = offsets_in(ids, first, kv_base, stride_page, stride_n, PAGE_SIZE)
        source = (x + row.to(gl.int64) * stride_n + d) + at
    else:
        source = x + offsets_in(ids, first + row, kv_base, stride_page, stride_n, PAGE_SIZE) + d
    cp_async(smem, source, mask=(first + row < end) & (d < D))


@gluon.jit
def _ids(kv_indices, kv_base, first, row, end, PAGE_SIZE: gl.constexpr, ONE_PAGE: gl.constexpr):
    """Page ids of keys `first + row`; with ONE_PAGE one for each warp."""
    at = first if ONE_PAGE else first + row
    return page_ids(at, at < end, kv_base, kv_indices, PAGE_SIZE)


@gluon.jit
def _finish(
    acc, top, total, first, out, lse, partial, heads, slot, tile_row, q_row, q_len, kv_head, num_kv_heads, out_by,
    numbers, GROUP: gl.constexpr, D_VO: gl.constexpr, BLOCK_M: gl.constexpr, LSE: gl.constexpr, SOFTMAX: gl.constexpr,
    MERGE: gl.constexpr,
):  # fmt: skip
    """Merge the warps' results for some rows of a tile, from row `first` on, and store them: acc [warps, rows, D_VO
    padded], top and total [warps, rows]."""
    STORE: gl.constexpr = gl.SliceLayout(0, MERGE)
    ROWS: gl.constexpr = gl.SliceLayout(1, STORE)
    base = gl.max(top, 0, keep_dims=True)
    base = gl.where(base == float("-inf"), 0.0, base)
    part = gl.exp2(top - base)
    if not SOFTMAX:
        part = total + 1.0
    acc = gl.sum(acc * part[:, :, None], 0)
    total = gl.convert_layout(gl.sum(total * part, 0), ROWS)
    base = gl.convert_layout(gl.max(base, 0), ROWS)

    row = first + gl.arange(0, acc.shape[0], ROWS)
    token = (tile_row + row) // GROUP
    head = kv_head * GROUP + (tile_row + row) % GROUP
    row_ok = token < q_len
    dv = gl.arange(0, acc.shape[1], gl.SliceLayout(0, STORE))
    there = row_ok[:, None] & (dv < D_VO)[None, :]
    if heads.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = gl.load(heads.sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
            # Not `> 0`: NaN logits have to give NaN results.
            base, keep, total = with_sink(gl.where(total != 0, base, float("-inf")), total, sink)
            acc = acc * keep[:, None]
    if not SOFTMAX:
        # Logits are weights: there is no maximum, and results are not divided by their sum.
        base = gl.zeros([row.shape[0]], gl.float32, ROWS)
        total = base + 1.0
    # Not `> 0`: NaN logits have to give NaN results.
    seen = total != 0
    inverse = gl.where(seen, numbers.out_scale / gl.where(seen, total, 1.0), 0.0)
    if heads.SCALES:
        inverse *= gl.load(heads.v_scale + head, mask=row_ok, other=0.0)
    # A row that saw no key is 0, even if its accumulator is NaN.
    acc = gl.where(seen[:, None], acc * inverse[:, None], 0.0)
    state = gl.where(seen, base + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))
    if partial.SPLIT and slot >= 0:
        part_row = (slot.to(gl.int64) * num_kv_heads + kv_head) * BLOCK_M + row
        gl.store(partial.out + part_row[:, None] * D_VO + dv[None, :], acc, mask=there)
        gl.store(partial.lse + part_row, state, mask=row_ok)
    else:
        n = (q_row + token).to(gl.int64)
        o_at = n * out_by.token + head * out_by.head
        gl.store(out + o_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=there)
        if LSE:
            gl.store(lse + n * (num_kv_heads * GROUP) + head, state, mask=row_ok)


@gluon.jit
def _store_tile(
    acc, odd, top, total, out, lse, partial, work, heads, slot, first_slot, splits, tile_row, q_row, q_len, kv_head,
    num_kv_heads, out_by, numbers, dims, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, WARPS_N: gl.constexpr,
    FP8: gl.constexpr, LSE: gl.constexpr, SOFTMAX: gl.constexpr,
):  # fmt: skip
    """Merge the warps along keys through shared memory, with one barrier, and store the tile's rows. The last split of
    a tile combines them all.

    Tiles of 16 rows are merged in two halves; the second is skipped if it has no rows, as in a decode step with 8 heads
    in a group.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 if dims.D_VO_PAD >= 128 else dims.D_VO_PAD // 4
    MERGE: gl.constexpr = gl.BlockedLayout([WARPS_N, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    HALVES: gl.constexpr = 2 if BLOCK_M == 16 else 1
    AT_ONCE: gl.constexpr = BLOCK_M // HALVES
    UNITS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    ONES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = gl.allocate_shared_memory(gl.float32, [HALVES, WARPS_N, AT_ONCE, dims.D_VO_PAD], UNITS)
    tops = gl.allocate_shared_memory(gl.float32, [HALVES, WARPS_N, AT_ONCE], ONES)
    totals = gl.allocate_shared_memory(gl.float32, [HALVES, WARPS_N, AT_ONCE], ONES)
    row_count = gl.minimum(q_len * GROUP - tile_row, BLOCK_M)
    if FP8:
        acc = gl.join(acc, odd).reshape([WARPS_N, BLOCK_M, dims.D_VO_PAD])
    if HALVES == 2:
        acc, lower_acc = acc.reshape([WARPS_N, 2, 8, dims.D_VO_PAD]).permute([0, 2, 3, 1]).split()
        top, lower_top = top.reshape([WARPS_N, 2, 8]).permute([0, 2, 1]).split()
        total, lower_total = total.reshape([WARPS_N, 2, 8]).permute([0, 2, 1]).split()
        if row_count > 8:
            parts.index(1).store(lower_acc)
            tops.index(1).store(lower_top)
            totals.index(1).store(lower_total)
    parts.index(0).store(acc)
    tops.index(0).store(top)
    totals.index(0).store(total)
    for half in range(gl.cdiv(row_count, AT_ONCE)):
        _finish(
            parts.index(half).load(MERGE), tops.index(half).load(gl.SliceLayout(2, MERGE)),
            totals.index(half).load(gl.SliceLayout(2, MERGE)), half * AT_ONCE, out, lse, partial, heads, slot, tile_row,
            q_row, q_len, kv_head, num_kv_heads, out_by, numbers, GROUP, dims.D_VO, BLOCK_M, LSE, SOFTMAX, MERGE,
        )  # fmt: skip
    if partial.SPLIT:
        if slot >= 0:
            ABREAST: gl.constexpr = WARPS if WARPS < partial.ROWS else partial.ROWS
            COMBINE: gl.constexpr = gl.BlockedLayout(
                [1, 1, 4], [1, 32 // LANES, LANES], [WARPS // ABREAST, ABREAST, 1], [2, 1, 0]
            )
            combine_if_last(
                work.arrivals, partial.out, partial.lse, out, lse, heads.sinks, slot, first_slot, splits,
                gl.arange(0, partial.ROWS, gl.SliceLayout(0, gl.SliceLayout(2, COMBINE)))[None, :],
                gl.arange(0, partial.SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, COMBINE)))[:, None],
                gl.arange(0, dims.D_VO_PAD, gl.SliceLayout(0, gl.SliceLayout(1, COMBINE)))[None, None, :],
                tile_row, q_row, q_len, kv_head, num_kv_heads, out_by.token, out_by.head, partial.MANY, GROUP,
                dims.D_VO, BLOCK_M, heads.SINKS, LSE, SOFTMAX,
            )  # fmt: skip


@gluon.jit
def _keys_of_tile(
    kv_begin, kv_end, kv_len, q_len, tile_row, window_left, mask, OWN_MASK: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """The range of keys that a tile sees, begun at a multiple of STEP, and the range that all of its rows see."""
    first_pos = tile_row // GROUP + kv_len - q_len
    last_pos = gl.minimum((tile_row + BLOCK_M - 1) // GROUP, q_len - 1) + kv_len - q_len
    begin = kv_begin
    end = kv_end
    plain_begin = kv_begin
    plain_end = kv_end
    if mask.WINDOW:
        begin = gl.maximum(begin, first_pos - window_left)
        plain_begin = gl.maximum(plain_begin, last_pos - window_left)
    if mask.CAUSAL:
        end = gl.minimum(end, last_pos + 1)
        plain_end = gl.minimum(plain_end, first_pos + 1)
    if mask.CUSTOM or OWN_MASK:
        plain_end = begin
    begin = begin // STEP * STEP
    return begin, end, plain_begin, plain_end


@gluon.jit
def attend_sm80_kernel(
    q, k, v, out, lse, partial, work, kv_indices, mask, heads, num_kv_heads, q_by, k_by, v_by, out_by, numbers, params,
    dims, kinds,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS_N: gl.constexpr, STAGES: gl.constexpr,
    NEAR: gl.constexpr, LSE: gl.constexpr, LOGITS: gl.constexpr, MASK: gl.constexpr, SOFTMAX: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program per (work item, KV head).

    LOGITS and MASK are functions of a user's variant, or None; `params` is a named tuple for them. Without SOFTMAX,
    logits are weights.
    """
    VARIED: gl.constexpr = LOGITS is not None or MASK is not None
    WARPS: gl.constexpr = gl.num_warps()
    SHARING: gl.constexpr = WARPS // WARPS_N  # warps of the same keys
    STEP: gl.constexpr = BLOCK_N // WARPS_N
    dtype: gl.constexpr = k.dtype.element_ty
    FP8: gl.constexpr = dtype == gl.uint8
    VEC: gl.constexpr = 128 // dtype.primitive_bitwidth
    # Transposing reads of shared memory move 2 bytes, which are two columns of FP8 values.
    PER_COLUMN: gl.constexpr = 2 if FP8 else 1
    COLUMNS: gl.constexpr = dims.D_VO_PAD // PER_COLUMN
    TILE: gl.constexpr = _products(WARPS_N, SHARING, 1)
    OUT: gl.constexpr = _products(WARPS_N, BLOCK_M // 16, SHARING * 16 // BLOCK_M)
    # A lane reads 4 bytes of keys at a time, which are 4 FP8 elements along head_dim.
    QK_LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 4 if FP8 else 2)
    QK_RIGHT: gl.constexpr = gl.DotOperandLayout(1, TILE, 4 if FP8 else 2)
    PV_LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    PV_RIGHT: gl.constexpr = gl.DotOperandLayout(1, OUT, 2)
    K_RING: gl.constexpr = _ring(dims.D_QK_PAD, dtype.primitive_bitwidth)
    V_RING: gl.constexpr = _ring(COLUMNS, 16)
    K_LANES: gl.constexpr = min(32, dims.D_QK_PAD // VEC)
    V_LANES: gl.constexpr = min(32, COLUMNS // 8)
    K_COPY: gl.constexpr = gl.BlockedLayout([1, 1, VEC], [1, 32 // K_LANES, K_LANES], [WARPS_N, SHARING, 1], [2, 1, 0])
    V_COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // V_LANES, V_LANES], [WARPS_N, SHARING, 1], [2, 1, 0])

    begin_dependent(PDL)
    item, kv_head = item_and_head(num_kv_heads, NEAR)
    if work.LISTED:
        q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits, items = item_of_list(
            item, work
        )
    else:
        q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits, items = item_of_lengths(
            item, work, numbers.window_left, GROUP, BLOCK_M, BLOCK_N
        )
    if item >= items:
        return

    begin, end, plain_begin, plain_end = _keys_of_tile(
        kv_begin, kv_end, kv_len, q_len, tile_row, numbers.window_left, mask, MASK is not None, GROUP, BLOCK_M, STEP
    )

    v_page, v_token, v_head = v_by.page, v_by.token, v_by.head
    if FP8:
        v = v.to(gl.pointer_type(gl.int16), bitcast=True)
        v_page, v_token, v_head = v_page // 2, v_token // 2, v_head // 2
    k += kv_head.to(gl.int64) * k_by.head
    v += kv_head.to(gl.int64) * v_head
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS_N, STEP, dims.D_QK_PAD], K_RING)
    v_smem = gl.allocate_shared_memory(v.dtype.element_ty, [STAGES, WARPS_N, STEP, COLUMNS], V_RING)
    k_first = gl.arange(0, WARPS_N, gl.SliceLayout(1, gl.SliceLayout(2, K_COPY)))[:, None, None] * STEP + begin
    k_row = gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, K_COPY)))[None, :, None]
    k_d = gl.arange(0, dims.D_QK_PAD, gl.SliceLayout(0, gl.SliceLayout(1, K_COPY)))[None, None, :]
    v_first = gl.arange(0, WARPS_N, gl.SliceLayout(1, gl.SliceLayout(2, V_COPY)))[:, None, None] * STEP + begin
    v_row = gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, V_COPY)))[None, :, None]
    v_d = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, V_COPY)))[None, None, :]

    # A warp whose keys are all in one page needs one page id. Page ids of STAGES blocks are loaded before the first
    # wait.
    ONE_PAGE: gl.constexpr = dims.PAGE_SIZE == 0 or dims.PAGE_SIZE % STEP == 0
    k_ids = ()
    v_ids = ()
    for stage in gl.static_range(STAGES):
        k_ids += (_ids(kv_indices, kv_base, k_first + stage * BLOCK_N, k_row, end, dims.PAGE_SIZE, ONE_PAGE),)
        v_ids += (_ids(kv_indices, kv_base, v_first + stage * BLOCK_N, v_row, end, dims.PAGE_SIZE, ONE_PAGE),)

    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, QK_LEFT)))[None, :, None] + tile_row
    d = gl.arange(0, dims.D_QK_PAD, gl.SliceLayout(0, gl.SliceLayout(1, QK_LEFT)))[None, None, :]
    q_at = (q_row + row // GROUP).to(gl.int64) * q_by.token + (kv_head * GROUP + row % GROUP) * q_by.head
    q_tile = gl.load(q + q_at + d, mask=(row // GROUP < q_len) & (d < dims.D_QK), other=0)

    for stage in gl.static_range(STAGES - 1):
        _fill(k_smem.index(stage), k, k_ids[stage], k_first, k_row, k_d, end, kv_base, k_by.page, k_by.token, dims.D_QK,
              dims.PAGE_SIZE, ONE_PAGE)  # fmt: skip
        _fill(v_smem.index(stage), v, v_ids[stage], v_first, v_row, v_d, end, kv_base, v_page, v_token,
              dims.D_VO // PER_COLUMN, dims.PAGE_SIZE, ONE_PAGE)  # fmt: skip
        cp_async_commit()
        k_first += BLOCK_N
        v_first += BLOCK_N
    k_next = k_ids[STAGES - 1]
    v_next = v_ids[STAGES - 1]

    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, TILE)))[None, :, None] + tile_row
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = token < q_len
    q_pos = token + kv_len - q_len
    kv_pos = gl.arange(0, WARPS_N, gl.SliceLayout(1, gl.SliceLayout(2, TILE)))[:, None, None] * STEP
    kv_pos += gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, TILE)))[None, None, :] + begin
    scale = numbers.sm_scale
    if q.dtype.element_ty == gl.bfloat16 and kinds.COMPUTE == gl.float16:
        q_tile, unit = fit_half(q_tile, 2)
        scale *= gl.convert_layout(unit, TILE)
    if heads.SCALES:
        scale *= gl.load(heads.qk_scale + head, mask=row_ok, other=0.0)
    q_tile, _ = gl.broadcast(q_tile, gl.zeros([WARPS_N, BLOCK_M, dims.D_QK_PAD], kinds.COMPUTE, QK_LEFT))
    slopes = scale
    if heads.ALIBI:
        slopes = gl.load(heads.slopes + head, mask=row_ok, other=0.0)
    batch = slot
    if VARIED:
        batch = gl.load(work.items + item * ITEM_WIDTH + ITEM_REQUEST)
    bits = mask.bits
    if mask.CUSTOM:
        bits += gl.load(mask.indptr + gl.load(work.items + item * ITEM_WIDTH + ITEM_REQUEST)).to(gl.int64)

    PER_ROW: gl.constexpr = gl.SliceLayout(2, TILE)
    top = gl.full([WARPS_N, BLOCK_M], float("-inf"), gl.float32, PER_ROW)
    total = gl.zeros([WARPS_N, BLOCK_M], gl.float32, PER_ROW)
    # With FP8 values, `acc` has the even columns and `odd` the odd ones.
    acc = gl.zeros([WARPS_N, BLOCK_M, COLUMNS], gl.float32, OUT)
    odd = acc
    full = 0
    free = STAGES - 1
    for start in range(begin, end, BLOCK_N):
        cp_async_wait(STAGES - 2)
        # After the barrier the previous stage is free: all warps have read it.
        block_barrier()
        _fill(k_smem.index(free), k, k_next, k_first, k_row, k_d, end, kv_base, k_by.page, k_by.token, dims.D_QK,
              dims.PAGE_SIZE, ONE_PAGE)  # fmt: skip
        _fill(v_smem.index(free), v, v_next, v_first, v_row, v_d, end, kv_base, v_page, v_token,
              dims.D_VO // PER_COLUMN, dims.PAGE_SIZE, ONE_PAGE)  # fmt: skip
        cp_async_commit()
        k_first += BLOCK_N
        v_first += BLOCK_N
        k_next = _ids(kv_indices, kv_base, k_first, k_row, end, dims.PAGE_SIZE, ONE_PAGE)
        v_next = _ids(kv_indices, kv_base, v_first, v_row, end, dims.PAGE_SIZE, ONE_PAGE)

        keys = k_smem.index(full).permute([0, 2, 1]).load(QK_RIGHT)
        keys = widen(keys, kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE)
        s = mma_v2(q_tile, keys, gl.zeros([WARPS_N, BLOCK_M, STEP], gl.float32, TILE))
        if VARIED:
            s, takes_part = vary_at(
                s, scale, numbers.soft_cap, slopes, batch, q_pos, kv_pos, kv_len, head, params, numbers.SOFT_CAP,
                heads.ALIBI, LOGITS, MASK, SOFTMAX,
            )  # fmt: skip
        else:
            s = scaled_at(s, scale, numbers.soft_cap, slopes, kv_pos - q_pos, LOG2E, numbers.SOFT_CAP, heads.ALIBI)
        if (start < plain_begin) | (start + BLOCK_N > plain_end):
            ok = visible_at(
                token, q_pos, kv_pos, kv_end, kv_len, bits, row_ok, numbers.window_left, mask.CAUSAL, mask.WINDOW,
                mask.CUSTOM,
            ) & (kv_pos >= kv_begin)  # fmt: skip
            if MASK is not None:
                ok = ok & takes_part
            s = gl.where(ok, s, float("-inf") if SOFTMAX else 0.0)
        kv_pos += BLOCK_N
        if SOFTMAX:
            new_top = gl.maximum(top, gl.max(s, 2))
            # A row that has seen no key has top = -inf, and -inf - -inf is NaN.
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            p = gl.exp2(s - base[:, :, None])
            keep = gl.exp2(top - base)
            total = total * keep + gl.sum(p, 2)
            top = new_top
            keep = gl.convert_layout(keep, gl.SliceLayout(2, OUT))
            acc = acc * keep[:, :, None]
        else:
            p = s
            keep = gl.convert_layout(total + 1.0, gl.SliceLayout(2, OUT))
        p = gl.convert_layout(p.to(kinds.COMPUTE), PV_LEFT)
        values = v_smem.index(full).load(PV_RIGHT)
        if FP8:
            acc = mma_v2(p, widen(values.to(gl.uint8), kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE), acc)
            values = (values >> 8).to(gl.uint8)
            odd = mma_v2(p, widen(values, kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE), odd * keep[:, :, None])
        else:
            acc = mma_v2(p, values, acc)
        free = full
        full = gl.where(full == STAGES - 1, 0, full + 1)
    cp_async_wait(0)

    _store_tile(
        acc, odd, top, total, out, lse, partial, work, heads, slot, first_slot, splits, tile_row, q_row, q_len, kv_head,
        num_kv_heads, out_by, numbers, dims, GROUP, BLOCK_M, WARPS_N, FP8, LSE, SOFTMAX,
    )  # fmt: skip

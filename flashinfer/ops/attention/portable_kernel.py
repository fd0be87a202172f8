"""Attention on any architecture: out = softmax(mask(scale Q K^T)) V, and its LSE, over ragged or paged keys.

Grid: one program for each pair of a work item (a tile of query rows, a range of keys) and a KV head. The heads of a GQA
group share their keys, so they share a tile: row r of a request is head r % GROUP of token r // GROUP.
Warps: all share the tile. Shared memory: blocks of keys and values, in the pipeline of Triton's loop.

Inputs: q [tokens, heads, D_QK], k [.., kv_heads, D_QK] and v [.., kv_heads, D_VO] in pages or ragged, FP8 as bytes,
formats with factors as bytes; work items of schedule.py.
Outputs: out [tokens, heads, D_VO], lse [tokens, heads] float32 in base 2; for split items partial_out [slots, kv_heads,
BLOCK_M, D_VO] and partial_lse [slots, kv_heads, BLOCK_M], float32, which the last split of a tile combines.

Method: the softmax is online (Milakov and Gimelshein, 2018), in base 2, with float32 accumulation (FlashAttention-2,
Dao, 2023).
"""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.combine import combine_if_last
from flashinfer.ops.attention._device.kv_source import (
    factors_at, fit_half, load_packed, power_of_two, row_offsets, row_units, widen,
)  # fmt: skip
from flashinfer.ops.attention._device.logits import LOG2E, rotate, transform, vary, visible, with_sink
from flashinfer.ops.attention._device.schedule import ITEM_REQUEST, ITEM_WIDTH, item_and_head, read_item


@triton.jit
def _dot(a, b, acc):
    # Of float32 operands alone: three tensor-core products keep what one in tf32 would round away.
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _load_key_half(k, offsets, there, first, HALF: tl.constexpr, HALF_PAD: tl.constexpr, ROW_MASK: tl.constexpr):
    d = tl.arange(0, HALF_PAD)
    ok = (d < HALF)[None, :]
    if ROW_MASK:
        ok = ok & there[:, None]
    return tl.load(k + offsets[:, None] + (first + d)[None, :], mask=ok, other=0)


@triton.jit
def _load_rows(
    x, at, factors, factor_page, factor_n, units, positions, there, kv_base, kv_indices, first,
    D: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, ROW_MASK: tl.constexpr, NATIVE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """DIM elements from `first` of packed rows of D, widened, over their units."""
    at_factors = at
    if WIDTH:
        at_factors = factors_at(
            positions, there, kv_base, kv_indices, first, factor_page, factor_n, D, PAD, WIDTH, PAGE_SIZE, INTERLEAVED
        )
    return load_packed(
        x, factors, at, at_factors, units, there, first, DIM, PAD, ELEMENT, WIDTH, ROW_MASK, NATIVE_FP8, COMPUTE
    )


@triton.jit
def _load_keys(
    k, at, factors, kv_head, units, positions, there, kv_base, kv_indices, first,
    D: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, ROW_MASK: tl.constexpr, NATIVE_FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Elements first : first + DIM of keys as rows [BLOCK_N, PAD], widened, over their units."""
    if KV_DTYPE == "e2m1" or KV_DTYPE == "i4":
        return _load_rows(
            k, at, factors.k + kv_head.to(tl.int64) * factors.k_head, factors.k_page, factors.k_n, units, positions,
            there, kv_base, kv_indices, first, D, DIM, PAD, PAGE_SIZE, KV_DTYPE, WIDTH, False, ROW_MASK, NATIVE_FP8,
            COMPUTE,
        )  # fmt: skip
    return widen(_load_key_half(k, at, there, first, DIM, PAD, ROW_MASK), KV_DTYPE, NATIVE_FP8, COMPUTE)


@triton.jit
def _step(
    acc, top, total, unit, q_lo, q_hi, k, v, start, kv_end,
    kv_base, kv_len, kv_indices, k_stride_page, k_stride_n, v_stride_page, v_stride_n,
    scale, soft_cap, slopes, q_index, q_pos, row_ok, mask, window_left, rope_scale, rope_log2_theta,
    batch, head, kv_head, factors, params,
    PAGE_SIZE: tl.constexpr, D_QK: tl.constexpr, D_VO: tl.constexpr, D_QK_PAD: tl.constexpr, D_VO_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_DTYPE: tl.constexpr, WIDTH: tl.constexpr, FOLDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NATIVE_FP8: tl.constexpr, COMPUTE: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CUSTOM: tl.constexpr, SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr, ROPE: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys. With MASKED, range, diagonal, window, custom mask and a variant's mask are looked at.

    With FOLDED, keys and values are multiplied over the units of their rows, by which logits and weights are multiplied
    then: one element for a row. `unit` is the largest power of two among those of values, which `acc` is over.
    """
    kv_pos = start + tl.arange(0, BLOCK_N)
    there = kv_pos < kv_end
    at = row_offsets(kv_pos, there, kv_base, kv_indices, k_stride_page, k_stride_n, PAGE_SIZE)
    s = tl.zeros([q_lo.shape[0], BLOCK_N], tl.float32)
    k_units = s
    PACKED: tl.constexpr = KV_DTYPE == "e2m1" or KV_DTYPE == "i4"
    # Of several factors a row, products are summed block by block, so that keys are not rounded. Rotated ones are.
    BLOCKS: tl.constexpr = FOLDED and WIDTH > 0 and not ROPE
    if FOLDED and not BLOCKS:
        k_units = row_units(
            factors.k + kv_head.to(tl.int64) * factors.k_head, kv_pos, there, kv_base, kv_indices, factors.k_page,
            factors.k_n, D_QK, D_QK_PAD, WIDTH, PAGE_SIZE, MASKED,
        )  # fmt: skip
    if ROPE:
        HALF: tl.constexpr = D_QK // 2
        HALF_PAD: tl.constexpr = D_QK_PAD // 2
        k_lo = _load_keys(
            k, at, factors, kv_head, k_units, kv_pos, there, kv_base, kv_indices, 0, D_QK, HALF, HALF_PAD, PAGE_SIZE,
            KV_DTYPE, WIDTH, MASKED, NATIVE_FP8, COMPUTE,
        )  # fmt: skip
        k_hi = _load_keys(
            k, at, factors, kv_head, k_units, kv_pos, there, kv_base, kv_indices, HALF, D_QK, HALF, HALF_PAD, PAGE_SIZE,
            KV_DTYPE, WIDTH, MASKED, NATIVE_FP8, COMPUTE,
        )  # fmt: skip
        k_lo, k_hi = rotate(k_lo, k_hi, kv_pos, rope_scale, rope_log2_theta, HALF, HALF_PAD)
        s = _dot(q_lo, tl.trans(k_lo.to(COMPUTE)), s)
        s = _dot(q_hi, tl.trans(k_hi.to(COMPUTE)), s)
    elif BLOCKS:
        for block in tl.static_range(D_QK // WIDTH):
            k_units = row_units(
                factors.k + kv_head.to(tl.int64) * factors.k_head + block, kv_pos, there, kv_base, kv_indices,
                factors.k_page, factors.k_n, D_QK, D_QK_PAD, 0, PAGE_SIZE, MASKED,
            )  # fmt: skip
            keys = load_packed(
                k, k, at, at, k_units, there, block * WIDTH, WIDTH, WIDTH, KV_DTYPE, 0, MASKED, NATIVE_FP8, COMPUTE
            )
            s += _dot(q_hi[block], tl.trans(keys), tl.zeros_like(s)) * k_units[None, :]
    elif PACKED:
        keys = _load_keys(
            k, at, factors, kv_head, k_units, kv_pos, there, kv_base, kv_indices, 0, D_QK, D_QK, D_QK_PAD, PAGE_SIZE,
            KV_DTYPE, WIDTH, MASKED, NATIVE_FP8, COMPUTE,
        )  # fmt: skip
        s = _dot(q_lo, tl.trans(keys), s)
    else:
        d = tl.arange(0, D_QK_PAD)
        k_ok = (d < D_QK)[:, None]
        if MASKED:
            k_ok = k_ok & there[None, :]
        keys = tl.load(k + at[None, :] + d[:, None], mask=k_ok, other=0)
        s = _dot(q_lo, widen(keys, KV_DTYPE, NATIVE_FP8, COMPUTE), s)
    if FOLDED and not BLOCKS:
        s *= k_units[None, :]
    VARIED: tl.constexpr = LOGITS is not None or MASK is not None or not SOFTMAX
    if VARIED:
        s, takes_part = vary(
            s, scale, soft_cap, slopes, batch, q_pos, kv_pos, kv_len, head, params, SOFT_CAP, ALIBI, LOGITS, MASK,
            SOFTMAX,
        )  # fmt: skip
    else:
        s = transform(s, scale, soft_cap, slopes, q_pos, kv_pos, SOFT_CAP, ALIBI)
    if MASKED:
        ok = visible(
            q_index, q_pos, kv_pos, kv_end, kv_len, mask, row_ok, window_left, CAUSAL, WINDOW, CUSTOM
        )
        if MASK is not None:
            ok = ok & takes_part
        s = tl.where(ok, s, float("-inf") if SOFTMAX else 0.0)
    if SOFTMAX:
        new_top = tl.maximum(top, tl.max(s, 1))
        # A row that has seen no key, or logits of -inf alone, has top = -inf, and inf - inf is NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
    else:
        new_top = top
        p = s
        keep = tl.full([q_lo.shape[0]], 1.0, tl.float32)
    v_units = k_units
    if FOLDED:
        v_units = row_units(
            factors.v + kv_head.to(tl.int64) * factors.v_head, kv_pos, there, kv_base, kv_indices, factors.v_page,
            factors.v_n, D_VO, D_VO_PAD, WIDTH, PAGE_SIZE, MASKED,
        )  # fmt: skip
        new_unit = tl.maximum(unit, power_of_two(tl.max(v_units, 0)))
        keep *= unit / new_unit
        # Softmax weights are at most 1: so they and what is 2^-29 of it are normal in float16.
        p *= (v_units * ((16384.0 if SOFTMAX else 1.0) / new_unit))[None, :]
        unit = new_unit
    if SOFTMAX or FOLDED:
        acc = acc * keep[:, None]
    at_v = row_offsets(kv_pos, there, kv_base, kv_indices, v_stride_page, v_stride_n, PAGE_SIZE)
    if PACKED:
        values = _load_rows(
            v, at_v, factors.v + kv_head.to(tl.int64) * factors.v_head, factors.v_page, factors.v_n, v_units, kv_pos,
            there, kv_base, kv_indices, 0, D_VO, D_VO, D_VO_PAD, PAGE_SIZE, KV_DTYPE, WIDTH, INTERLEAVED, MASKED,
            NATIVE_FP8, COMPUTE,
        )  # fmt: skip
    else:
        dv = tl.arange(0, D_VO_PAD)
        v_ok = (dv < D_VO)[None, :]
        if MASKED:
            v_ok = v_ok & there[:, None]
        values = tl.load(v + at_v[:, None] + dv[None, :], mask=v_ok, other=0)
        values = widen(values, KV_DTYPE, NATIVE_FP8, COMPUTE)
    acc = _dot(p.to(COMPUTE), values, acc)
    return acc, new_top, total, unit


@triton.jit
def attend_kernel(
    q, k, v, out, lse, partial_out, partial_lse, items, counts, arrivals, kv_indices, mask, mask_indptr,
    sinks, qk_scale, v_scale, alibi_slopes, num_kv_heads,
    q_stride_n, q_stride_h, k_stride_page, k_stride_n, k_stride_h, v_stride_page, v_stride_n, v_stride_h,
    o_stride_n, o_stride_h, sm_scale, out_scale, soft_cap, window_left, rope_scale, rope_log2_theta, factors, params,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    D_QK: tl.constexpr, D_VO: tl.constexpr, D_QK_PAD: tl.constexpr, D_VO_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEAR: tl.constexpr,
    Q_DTYPE: tl.constexpr, KV_DTYPE: tl.constexpr, WIDTH: tl.constexpr, FOLDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NATIVE_FP8: tl.constexpr, COMPUTE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CUSTOM: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    ROPE: tl.constexpr, SINKS: tl.constexpr, HEAD_SCALES: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
    COMBINE_SPLITS: tl.constexpr, COMBINE_ROWS: tl.constexpr,
    LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """One program per (work item, KV head), as `item_and_head` deals them out.

    LOGITS and MASK are functions of a user's variant, or None; `params` is a named tuple for them. Without SOFTMAX,
    logits are weights. `factors` is a named tuple of the factors of keys and values, with their strides; WIDTH
    codes share one, 0 where a row has one, 1 without. FOLDED is of `_step`.
    """
    item, kv_head = item_and_head(num_kv_heads, NEAR)
    q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits = read_item(items, item)
    # After the record's loads, so that they do not wait for it.
    if item >= tl.load(counts):
        return

    packed = tile_row + tl.arange(0, BLOCK_M)
    token = packed // GROUP
    row_ok = token < q_len
    head = kv_head * GROUP + packed % GROUP
    q_pos = token + kv_len - q_len
    n = (q_row + token).to(tl.int64)

    q_at = n * q_stride_n + head * q_stride_h
    scale = tl.full([BLOCK_M], 1.0, tl.float32) * sm_scale
    if ROPE:
        HALF: tl.constexpr = D_QK // 2
        HALF_PAD: tl.constexpr = D_QK_PAD // 2
        q_lo = widen(_load_key_half(q, q_at, row_ok, 0, HALF, HALF_PAD, True), Q_DTYPE, NATIVE_FP8, COMPUTE)
        q_hi = widen(_load_key_half(q, q_at, row_ok, HALF, HALF, HALF_PAD, True), Q_DTYPE, NATIVE_FP8, COMPUTE)
        q_lo, q_hi = rotate(q_lo, q_hi, q_pos, rope_scale, rope_log2_theta, HALF, HALF_PAD)
        q_lo, q_hi = q_lo.to(COMPUTE), q_hi.to(COMPUTE)
    else:
        d = tl.arange(0, D_QK_PAD)
        rows = tl.load(q + q_at[:, None] + d[None, :], mask=row_ok[:, None] & (d < D_QK)[None, :], other=0)
        if Q_DTYPE == "bf16" and COMPUTE == tl.float16:
            q_lo, q_unit = fit_half(rows, 1)
            scale *= tl.sum(q_unit, 1)
        else:
            q_lo = widen(rows, Q_DTYPE, NATIVE_FP8, COMPUTE)
        q_hi = q_lo
        if FOLDED and WIDTH > 0:
            # Blocks of columns, for those of keys that have a factor each.
            q_hi = ()
            for block in tl.static_range(D_QK // WIDTH):
                columns = block * WIDTH + tl.arange(0, WIDTH)
                part = tl.load(q + q_at[:, None] + columns[None, :], mask=row_ok[:, None], other=0)
                if Q_DTYPE == "bf16" and COMPUTE == tl.float16:
                    part = (part.to(tl.float32) * (1.0 / q_unit)).to(tl.float16)
                else:
                    part = widen(part, Q_DTYPE, NATIVE_FP8, COMPUTE)
                q_hi = q_hi + (part,)
    if HEAD_SCALES:
        scale *= tl.load(qk_scale + head, mask=row_ok, other=0.0)
    slopes = scale
    if ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=row_ok, other=0.0)
    batch = slot
    if LOGITS is not None or MASK is not None:
        batch = tl.load(items + item * ITEM_WIDTH + ITEM_REQUEST)
    if CUSTOM:
        mask += tl.load(mask_indptr + tl.load(items + item * ITEM_WIDTH + ITEM_REQUEST)).to(tl.int64)

    k += kv_head.to(tl.int64) * k_stride_h
    v += kv_head.to(tl.int64) * v_stride_h
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_VO_PAD], tl.float32)
    unit = tl.full([], 1e-30, tl.float32)

    # Keys this tile sees, and among them the blocks that need no mask: those all of its rows see.
    first_pos = tile_row // GROUP + kv_len - q_len
    last_pos = tl.minimum((tile_row + BLOCK_M - 1) // GROUP, q_len - 1) + kv_len - q_len
    begin = kv_begin
    end = kv_end
    plain_begin = kv_begin
    plain_end = kv_end
    if WINDOW:
        begin += tl.maximum(first_pos - window_left - kv_begin, 0) // BLOCK_N * BLOCK_N
        plain_begin = begin + (tl.maximum(last_pos - window_left - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(end, last_pos + 1)
        plain_end = tl.minimum(plain_end, first_pos + 1)
    if CUSTOM or MASK is not None:
        plain_end = begin
    plain_begin = tl.minimum(tl.maximum(plain_begin, begin), begin + tl.maximum(end - begin, 0))
    if not WINDOW:
        plain_begin = begin
    plain_end = plain_begin + tl.maximum(plain_end - plain_begin, 0) // BLOCK_N * BLOCK_N

    if WINDOW:
        for start in range(begin, plain_begin, BLOCK_N):
            acc, top, total, unit = _step(
                acc, top, total, unit, q_lo, q_hi, k, v, start, kv_end, kv_base, kv_len, kv_indices,
                k_stride_page, k_stride_n, v_stride_page, v_stride_n, scale, soft_cap, slopes, token, q_pos, row_ok,
                mask, window_left, rope_scale, rope_log2_theta, batch, head, kv_head, factors, params, PAGE_SIZE, D_QK,
                D_VO, D_QK_PAD, D_VO_PAD, BLOCK_N, KV_DTYPE, WIDTH, FOLDED, INTERLEAVED, NATIVE_FP8, COMPUTE, CAUSAL,
                WINDOW, CUSTOM, SOFT_CAP, ALIBI, ROPE, LOGITS, MASK, SOFTMAX, True,
            )  # fmt: skip
    if not CUSTOM and MASK is None:
        for start in range(plain_begin, plain_end, BLOCK_N):
            acc, top, total, unit = _step(
                acc, top, total, unit, q_lo, q_hi, k, v, start, kv_end, kv_base, kv_len, kv_indices,
                k_stride_page, k_stride_n, v_stride_page, v_stride_n, scale, soft_cap, slopes, token, q_pos, row_ok,
                mask, window_left, rope_scale, rope_log2_theta, batch, head, kv_head, factors, params, PAGE_SIZE, D_QK,
                D_VO, D_QK_PAD, D_VO_PAD, BLOCK_N, KV_DTYPE, WIDTH, FOLDED, INTERLEAVED, NATIVE_FP8, COMPUTE, CAUSAL,
                WINDOW, CUSTOM, SOFT_CAP, ALIBI, ROPE, LOGITS, MASK, SOFTMAX, False,
            )  # fmt: skip
    for start in range(plain_end, end, BLOCK_N):
        acc, top, total, unit = _step(
            acc, top, total, unit, q_lo, q_hi, k, v, start, kv_end, kv_base, kv_len, kv_indices,
            k_stride_page, k_stride_n, v_stride_page, v_stride_n, scale, soft_cap, slopes, token, q_pos, row_ok,
            mask, window_left, rope_scale, rope_log2_theta, batch, head, kv_head, factors, params, PAGE_SIZE, D_QK,
            D_VO, D_QK_PAD, D_VO_PAD, BLOCK_N, KV_DTYPE, WIDTH, FOLDED, INTERLEAVED, NATIVE_FP8, COMPUTE, CAUSAL,
            WINDOW, CUSTOM, SOFT_CAP, ALIBI, ROPE, LOGITS, MASK, SOFTMAX, True,
        )  # fmt: skip

    if SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = tl.load(sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * keep[:, None]
    if not SOFTMAX:
        # The weights are what they are: no maximum was taken from their logits, and their sum divides nothing.
        top = tl.zeros([BLOCK_M], tl.float32)
        total = top + 1.0
    # Not `> 0`: a NaN among the logits has to come out.
    seen = total != 0
    inverse = tl.where(seen, out_scale / tl.where(seen, total, 1.0), 0.0)
    if HEAD_SCALES:
        inverse *= tl.load(v_scale + head, mask=row_ok, other=0.0)
    if FOLDED:
        inverse *= unit * (1.0 / 16384 if SOFTMAX else 1.0)
    # 0 * NaN is NaN: a row that saw no key must not show what the accumulator picked up.
    acc = tl.where(seen[:, None], acc * inverse[:, None], 0.0)
    s = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    dv = tl.arange(0, D_VO_PAD)
    if SPLIT:
        if slot >= 0:
            at = (slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(
                partial_out + at[:, None] * D_VO + dv[None, :], acc, mask=row_ok[:, None] & (dv < D_VO)[None, :]
            )
            tl.store(partial_lse + at, s, mask=row_ok)
            split = tl.arange(0, COMBINE_SPLITS)[:, None]
            combine_if_last(
                arrivals, partial_out, partial_lse, out, lse, sinks, first_slot, splits,
                tl.arange(0, COMBINE_ROWS)[None, :], split, dv[None, None, :], tile_row, q_row, q_len, kv_head,
                num_kv_heads, o_stride_n, o_stride_h, GROUP, D_VO, BLOCK_M, SINKS, LSE, SOFTMAX,
            )  # fmt: skip
            return
    o_at = n * o_stride_n + head * o_stride_h
    tl.store(
        out + o_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=row_ok[:, None] & (dv < D_VO)[None, :]
    )
    if LSE:
        tl.store(lse + n * (num_kv_heads * GROUP) + head, s, mask=row_ok)

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
    state, q, k, v, start, keys_of, rows, bits, batch, kv_head, k_by, v_by, mask, numbers, rope, factors, params, dims,
    kinds,
    BLOCK_N: tl.constexpr, ALIBI: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys. With MASKED, range, diagonal, window, custom mask and a variant's mask are looked at.

    With kinds.FOLDED, keys and values are multiplied over the units of their rows, by which logits and weights are
    multiplied then: one element for a row. `unit` is the largest power of two among those of values, which `acc` is
    over.

    state : (acc, top, total, unit). q : (q_lo, q_hi). keys_of : (kv_end, kv_base, kv_len, kv_indices).
    rows : (token, q_pos, row_ok, head, scale, slopes) of query rows. bits : of the custom mask.
    """
    acc, top, total, unit = state
    q_lo, q_hi = q
    kv_end, kv_base, kv_len, kv_indices = keys_of
    token, q_pos, row_ok, head, scale, slopes = rows
    kv_pos = start + tl.arange(0, BLOCK_N)
    there = kv_pos < kv_end
    at = row_offsets(kv_pos, there, kv_base, kv_indices, k_by.page, k_by.token, dims.PAGE_SIZE)
    s = tl.zeros([q_lo.shape[0], BLOCK_N], tl.float32)
    k_units = s
    PACKED: tl.constexpr = kinds.KV == "e2m1" or kinds.KV == "i4"
    # Of several factors a row, products are summed block by block, so that keys are not rounded. Rotated ones are.
    BLOCKS: tl.constexpr = kinds.FOLDED and kinds.WIDTH > 0 and not rope.ON
    if kinds.FOLDED and not BLOCKS:
        k_units = row_units(
            factors.k + kv_head.to(tl.int64) * factors.k_head, kv_pos, there, kv_base, kv_indices, factors.k_page,
            factors.k_n, dims.D_QK, dims.D_QK_PAD, kinds.WIDTH, dims.PAGE_SIZE, MASKED,
        )  # fmt: skip
    if rope.ON:
        HALF: tl.constexpr = dims.D_QK // 2
        HALF_PAD: tl.constexpr = dims.D_QK_PAD // 2
        k_lo = _load_keys(
            k, at, factors, kv_head, k_units, kv_pos, there, kv_base, kv_indices, 0, dims.D_QK, HALF, HALF_PAD,
            dims.PAGE_SIZE, kinds.KV, kinds.WIDTH, MASKED, kinds.NATIVE_FP8, kinds.COMPUTE,
        )  # fmt: skip
        k_hi = _load_keys(
            k, at, factors, kv_head, k_units, kv_pos, there, kv_base, kv_indices, HALF, dims.D_QK, HALF, HALF_PAD,
            dims.PAGE_SIZE, kinds.KV, kinds.WIDTH, MASKED, kinds.NATIVE_FP8, kinds.COMPUTE,
        )  # fmt: skip
        k_lo, k_hi = rotate(k_lo, k_hi, kv_pos, rope.scale, rope.log2_theta, HALF, HALF_PAD)
        s = _dot(q_lo, tl.trans(k_lo.to(kinds.COMPUTE)), s)
        s = _dot(q_hi, tl.trans(k_hi.to(kinds.COMPUTE)), s)
    elif BLOCKS:
        for block in tl.static_range(dims.D_QK // kinds.WIDTH):
            k_units = row_units(
                factors.k + kv_head.to(tl.int64) * factors.k_head + block, kv_pos, there, kv_base, kv_indices,
                factors.k_page, factors.k_n, dims.D_QK, dims.D_QK_PAD, 0, dims.PAGE_SIZE, MASKED,
            )  # fmt: skip
            keys = load_packed(
                k, k, at, at, k_units, there, block * kinds.WIDTH, kinds.WIDTH, kinds.WIDTH, kinds.KV, 0, MASKED,
                kinds.NATIVE_FP8, kinds.COMPUTE,
            )  # fmt: skip
            s += _dot(q_hi[block], tl.trans(keys), tl.zeros_like(s)) * k_units[None, :]
    elif PACKED:
        keys = _load_keys(
            k, at, factors, kv_head, k_units, kv_pos, there, kv_base, kv_indices, 0, dims.D_QK, dims.D_QK,
            dims.D_QK_PAD, dims.PAGE_SIZE, kinds.KV, kinds.WIDTH, MASKED, kinds.NATIVE_FP8, kinds.COMPUTE,
        )  # fmt: skip
        s = _dot(q_lo, tl.trans(keys), s)
    else:
        d = tl.arange(0, dims.D_QK_PAD)
        k_ok = (d < dims.D_QK)[:, None]
        if MASKED:
            k_ok = k_ok & there[None, :]
        keys = tl.load(k + at[None, :] + d[:, None], mask=k_ok, other=0)
        s = _dot(q_lo, widen(keys, kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE), s)
    if kinds.FOLDED and not BLOCKS:
        s *= k_units[None, :]
    VARIED: tl.constexpr = LOGITS is not None or MASK is not None or not SOFTMAX
    if VARIED:
        s, takes_part = vary(
            s, scale, numbers.soft_cap, slopes, batch, q_pos, kv_pos, kv_len, head, params, numbers.SOFT_CAP, ALIBI,
            LOGITS, MASK, SOFTMAX,
        )  # fmt: skip
    else:
        s = transform(s, scale, numbers.soft_cap, slopes, q_pos, kv_pos, numbers.SOFT_CAP, ALIBI)
    if MASKED:
        ok = visible(
            token, q_pos, kv_pos, kv_end, kv_len, bits, row_ok, numbers.window_left, mask.CAUSAL, mask.WINDOW,
            mask.CUSTOM,
        )  # fmt: skip
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
    if kinds.FOLDED:
        v_units = row_units(
            factors.v + kv_head.to(tl.int64) * factors.v_head, kv_pos, there, kv_base, kv_indices, factors.v_page,
            factors.v_n, dims.D_VO, dims.D_VO_PAD, kinds.WIDTH, dims.PAGE_SIZE, MASKED,
        )  # fmt: skip
        new_unit = tl.maximum(unit, power_of_two(tl.max(v_units, 0)))
        keep *= unit / new_unit
        # Softmax weights are at most 1: so they and what is 2^-29 of it are normal in float16.
        p *= (v_units * ((16384.0 if SOFTMAX else 1.0) / new_unit))[None, :]
        unit = new_unit
    if SOFTMAX or kinds.FOLDED:
        acc = acc * keep[:, None]
    at_v = row_offsets(kv_pos, there, kv_base, kv_indices, v_by.page, v_by.token, dims.PAGE_SIZE)
    if PACKED:
        values = _load_rows(
            v, at_v, factors.v + kv_head.to(tl.int64) * factors.v_head, factors.v_page, factors.v_n, v_units, kv_pos,
            there, kv_base, kv_indices, 0, dims.D_VO, dims.D_VO, dims.D_VO_PAD, dims.PAGE_SIZE, kinds.KV, kinds.WIDTH,
            kinds.INTERLEAVED, MASKED, kinds.NATIVE_FP8, kinds.COMPUTE,
        )  # fmt: skip
    else:
        dv = tl.arange(0, dims.D_VO_PAD)
        v_ok = (dv < dims.D_VO)[None, :]
        if MASKED:
            v_ok = v_ok & there[:, None]
        values = tl.load(v + at_v[:, None] + dv[None, :], mask=v_ok, other=0)
        values = widen(values, kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE)
    acc = _dot(p.to(kinds.COMPUTE), values, acc)
    return acc, new_top, total, unit


@triton.jit
def attend_kernel(
    q, k, v, out, lse, partial, work, kv_indices, mask, heads, num_kv_heads, q_by, k_by, v_by, out_by, numbers, rope,
    factors, params, dims, kinds,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEAR: tl.constexpr, LSE: tl.constexpr,
    LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """One program per (work item, KV head), as `item_and_head` deals them out.

    LOGITS and MASK are functions of a user's variant, or None; `params` is a named tuple for them. Without SOFTMAX,
    logits are weights. `factors` is a named tuple of the factors of keys and values, with their strides; kinds.WIDTH
    codes share one, 0 where a row has one, 1 without. kinds.FOLDED is of `_step`.
    """
    item, kv_head = item_and_head(num_kv_heads, NEAR)
    q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits = read_item(work.items, item)
    # After the record's loads, so that they do not wait for it.
    if item >= tl.load(work.counts):
        return

    packed = tile_row + tl.arange(0, BLOCK_M)
    token = packed // GROUP
    row_ok = token < q_len
    head = kv_head * GROUP + packed % GROUP
    q_pos = token + kv_len - q_len
    n = (q_row + token).to(tl.int64)

    q_at = n * q_by.token + head * q_by.head
    scale = tl.full([BLOCK_M], 1.0, tl.float32) * numbers.sm_scale
    if rope.ON:
        HALF: tl.constexpr = dims.D_QK // 2
        HALF_PAD: tl.constexpr = dims.D_QK_PAD // 2
        q_lo = widen(_load_key_half(q, q_at, row_ok, 0, HALF, HALF_PAD, True), kinds.Q, kinds.NATIVE_FP8, kinds.COMPUTE)
        q_hi = _load_key_half(q, q_at, row_ok, HALF, HALF, HALF_PAD, True)
        q_hi = widen(q_hi, kinds.Q, kinds.NATIVE_FP8, kinds.COMPUTE)
        q_lo, q_hi = rotate(q_lo, q_hi, q_pos, rope.scale, rope.log2_theta, HALF, HALF_PAD)
        q_lo, q_hi = q_lo.to(kinds.COMPUTE), q_hi.to(kinds.COMPUTE)
    else:
        d = tl.arange(0, dims.D_QK_PAD)
        rows = tl.load(q + q_at[:, None] + d[None, :], mask=row_ok[:, None] & (d < dims.D_QK)[None, :], other=0)
        if kinds.Q == "bf16" and kinds.COMPUTE == tl.float16:
            q_lo, q_unit = fit_half(rows, 1)
            scale *= tl.sum(q_unit, 1)
        else:
            q_lo = widen(rows, kinds.Q, kinds.NATIVE_FP8, kinds.COMPUTE)
        q_hi = q_lo
        if kinds.FOLDED and kinds.WIDTH > 0:
            # Blocks of columns, for those of keys that have a factor each.
            q_hi = ()
            for block in tl.static_range(dims.D_QK // kinds.WIDTH):
                columns = block * kinds.WIDTH + tl.arange(0, kinds.WIDTH)
                part = tl.load(q + q_at[:, None] + columns[None, :], mask=row_ok[:, None], other=0)
                if kinds.Q == "bf16" and kinds.COMPUTE == tl.float16:
                    part = (part.to(tl.float32) * (1.0 / q_unit)).to(tl.float16)
                else:
                    part = widen(part, kinds.Q, kinds.NATIVE_FP8, kinds.COMPUTE)
                q_hi = q_hi + (part,)
    if heads.SCALES:
        scale *= tl.load(heads.qk_scale + head, mask=row_ok, other=0.0)
    slopes = scale
    if heads.ALIBI:
        slopes = tl.load(heads.slopes + head, mask=row_ok, other=0.0)
    batch = slot
    if LOGITS is not None or MASK is not None:
        batch = tl.load(work.items + item * ITEM_WIDTH + ITEM_REQUEST)
    bits = mask.bits
    if mask.CUSTOM:
        bits += tl.load(mask.indptr + tl.load(work.items + item * ITEM_WIDTH + ITEM_REQUEST)).to(tl.int64)

    k += kv_head.to(tl.int64) * k_by.head
    v += kv_head.to(tl.int64) * v_by.head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, dims.D_VO_PAD], tl.float32)
    unit = tl.full([], 1e-30, tl.float32)

    # Keys this tile sees, and among them the blocks that need no mask: those all of its rows see.
    first_pos = tile_row // GROUP + kv_len - q_len
    last_pos = tl.minimum((tile_row + BLOCK_M - 1) // GROUP, q_len - 1) + kv_len - q_len
    begin = kv_begin
    end = kv_end
    plain_begin = kv_begin
    plain_end = kv_end
    if mask.WINDOW:
        begin += tl.maximum(first_pos - numbers.window_left - kv_begin, 0) // BLOCK_N * BLOCK_N
        plain_begin = begin + (tl.maximum(last_pos - numbers.window_left - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if mask.CAUSAL:
        end = tl.minimum(end, last_pos + 1)
        plain_end = tl.minimum(plain_end, first_pos + 1)
    if mask.CUSTOM or MASK is not None:
        plain_end = begin
    plain_begin = tl.minimum(tl.maximum(plain_begin, begin), begin + tl.maximum(end - begin, 0))
    if not mask.WINDOW:
        plain_begin = begin
    plain_end = plain_begin + tl.maximum(plain_end - plain_begin, 0) // BLOCK_N * BLOCK_N

    keys = kv_end, kv_base, kv_len, kv_indices
    rows = token, q_pos, row_ok, head, scale, slopes
    if mask.WINDOW:
        for start in range(begin, plain_begin, BLOCK_N):
            acc, top, total, unit = _step(
                (acc, top, total, unit), (q_lo, q_hi), k, v, start, keys, rows, bits, batch, kv_head, k_by, v_by, mask,
                numbers, rope, factors, params, dims, kinds, BLOCK_N, heads.ALIBI, LOGITS, MASK, SOFTMAX, True,
            )  # fmt: skip
    if not mask.CUSTOM and MASK is None:
        for start in range(plain_begin, plain_end, BLOCK_N):
            acc, top, total, unit = _step(
                (acc, top, total, unit), (q_lo, q_hi), k, v, start, keys, rows, bits, batch, kv_head, k_by, v_by, mask,
                numbers, rope, factors, params, dims, kinds, BLOCK_N, heads.ALIBI, LOGITS, MASK, SOFTMAX, False,
            )  # fmt: skip
    for start in range(plain_end, end, BLOCK_N):
        acc, top, total, unit = _step(
            (acc, top, total, unit), (q_lo, q_hi), k, v, start, keys, rows, bits, batch, kv_head, k_by, v_by, mask,
            numbers, rope, factors, params, dims, kinds, BLOCK_N, heads.ALIBI, LOGITS, MASK, SOFTMAX, True,
        )  # fmt: skip

    if heads.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = tl.load(heads.sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * keep[:, None]
    if not SOFTMAX:
        # The weights are what they are: no maximum was taken from their logits, and their sum divides nothing.
        top = tl.zeros([BLOCK_M], tl.float32)
        total = top + 1.0
    # Not `> 0`: a NaN among the logits has to come out.
    seen = total != 0
    inverse = tl.where(seen, numbers.out_scale / tl.where(seen, total, 1.0), 0.0)
    if heads.SCALES:
        inverse *= tl.load(heads.v_scale + head, mask=row_ok, other=0.0)
    if kinds.FOLDED:
        inverse *= unit * (1.0 / 16384 if SOFTMAX else 1.0)
    # 0 * NaN is NaN: a row that saw no key must not show what the accumulator picked up.
    acc = tl.where(seen[:, None], acc * inverse[:, None], 0.0)
    s = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    dv = tl.arange(0, dims.D_VO_PAD)
    if partial.SPLIT:
        if slot >= 0:
            at = (slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            in_out = row_ok[:, None] & (dv < dims.D_VO)[None, :]
            tl.store(partial.out + at[:, None] * dims.D_VO + dv[None, :], acc, mask=in_out)
            tl.store(partial.lse + at, s, mask=row_ok)
            split = tl.arange(0, partial.SPLITS)[:, None]
            combine_if_last(
                work.arrivals, partial.out, partial.lse, out, lse, heads.sinks, slot, first_slot, splits,
                tl.arange(0, partial.ROWS)[None, :], split, dv[None, None, :], tile_row, q_row, q_len, kv_head,
                num_kv_heads, out_by.token, out_by.head, partial.MANY, GROUP, dims.D_VO, BLOCK_M, heads.SINKS, LSE,
                SOFTMAX,
            )  # fmt: skip
            return
    o_at = n * out_by.token + head * out_by.head
    in_out = row_ok[:, None] & (dv < dims.D_VO)[None, :]
    tl.store(out + o_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=in_out)
    if LSE:
        tl.store(lse + n * (num_kv_heads * GROUP) + head, s, mask=row_ok)

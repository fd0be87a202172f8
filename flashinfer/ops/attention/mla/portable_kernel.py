"""Latent attention on any architecture: out = softmax(mask(scale Q K^T)) C, and its LSE, keys being their own values.

A key is a latent row and a positional row, its value is the latent row again, and all heads share them. So a block of
latent rows is loaded once and multiplied twice. The heads of a token are rows of one tile: row r of a request is head
r % HEADS of token r // HEADS.

Grid: one program for each work item, a tile of query rows and a range of keys.
Warps: all share the tile. Shared memory: blocks of keys in Triton's software pipeline, and operands of products.
Inputs: q_nope [tokens, heads, D], q_pe [tokens, heads, D_PE], ckv and kpe in pages; work items of schedule.py.
Outputs: out [tokens, heads, D], lse [tokens, heads] float32, in base 2 or e; for split items partial_out [slots,
BLOCK_M, D] and partial_lse [slots, BLOCK_M], float32, which the last split of a tile combines.
Method: MLA with absorbed projections (DeepSeek-V2, 2024); the online softmax of
`flashinfer/ops/attention/portable_kernel.py`.
"""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.combine import combine_if_last
from flashinfer.ops.attention._device.kv_source import fit_half, offsets_in, widen
from flashinfer.ops.attention._device.logits import LOG2E, vary, with_sink
from flashinfer.ops.attention._device.schedule import ITEM_REQUEST, ITEM_WIDTH, read_item

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _entries(
    start, end, kv_base, kv_indices, PAGE_SIZE: tl.constexpr, SPARSE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Entries of a request's table for the keys from `start` on; entries past the end are not used."""
    kv_pos = start + tl.arange(0, BLOCK_N)
    at = kv_pos if SPARSE else kv_pos // PAGE_SIZE
    return tl.load(kv_indices + (kv_base.to(tl.int64) + at), mask=kv_pos < end, other=0)


@triton.jit
def _offsets(entries, kv_pos, there, stride_page, stride_n, PAGE_SIZE: tl.constexpr, SPARSE: tl.constexpr):
    """Offsets of keys from their table entries, which are tokens (SPARSE) or pages."""
    if SPARSE:
        tokens = tl.where(there, entries, 0)
        return (tokens // PAGE_SIZE).to(tl.int64) * stride_page + (tokens % PAGE_SIZE).to(tl.int64) * stride_n
    return offsets_in(entries, kv_pos, 0, stride_page, stride_n, PAGE_SIZE)


@triton.jit
def _rows(x, offsets, there, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows [keys, D_PAD] of x at `offsets`, zeros where not `there` and past column D."""
    d = tl.arange(0, D_PAD)
    ok = there[:, None]
    if D < D_PAD:
        ok = ok & (d < D)[None, :]
    return tl.load(x + offsets[:, None] + d[None, :], mask=ok, other=0)


@triton.jit
def _operand(rows, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, COMPUTE: tl.constexpr):
    """Query rows in the dtype of the products, and the power of two by which each row was divided."""
    if DTYPE == "bf16" and COMPUTE == tl.float16:
        half, unit = fit_half(rows, 1)
        return half, tl.sum(unit, 1)
    return widen(rows, DTYPE, NATIVE_FP8, COMPUTE), tl.full([rows.shape[0]], 1.0, tl.float32)


@triton.jit
def attend_latent_kernel(
    q_nope, q_pe, ckv, kpe, out, lse, partial, work, pages, first_ckv, call,
    q_nope_by, q_pe_by, ckv_by, kpe_by, first_by, out_by, numbers, params, dims, kinds,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, ROW_UNIT: tl.constexpr,
    LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """One program per work item.

    With pages.SPARSE, page ids name tokens, in the order of their positions; -1 for none. The first pages.FIRST of them
    are tokens of `first_ckv`, in pages of FIRST_SIZE, the others of `ckv`.

    LOGITS and MASK are functions of a user's variant, or None; `params` is a named tuple for them. Without SOFTMAX,
    logits are weights.
    """
    item = tl.program_id(0)
    q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits = read_item(work.items, item)
    # After the record's loads, so that they do not wait for it.
    if item >= tl.load(work.counts):
        return

    packed = tile_row + tl.arange(0, BLOCK_M)
    token = packed // HEADS
    row_ok = token < q_len
    head = packed % HEADS
    q_pos = token + kv_len - q_len
    n = (q_row + token).to(tl.int64)
    latent = _rows(q_nope, n * q_nope_by.token + head * q_nope_by.head, row_ok, dims.D, dims.D_PAD)
    latent, unit = _operand(latent, kinds.Q, kinds.NATIVE_FP8, kinds.COMPUTE)
    VARIED: tl.constexpr = LOGITS is not None or MASK is not None
    # A variant's functions take logits in base e.
    scale = unit * (numbers.sm_scale if VARIED else numbers.sm_scale * LOG2E)
    request = slot
    if VARIED:
        request = tl.load(work.items + item * ITEM_WIDTH + ITEM_REQUEST)
    if dims.PE > 0:
        position = _rows(q_pe, n * q_pe_by.token + head * q_pe_by.head, row_ok, dims.PE, dims.PE_PAD)
        position, pe_unit = _operand(position, kinds.Q, kinds.NATIVE_FP8, kinds.COMPUTE)
        # What the positional products are multiplied by before the latent ones, whose scale they get, are added.
        ratio = pe_unit / unit * numbers.pe_ratio
    out_scale = numbers.out_scale
    if call.SCALES:
        scale *= tl.load(call.qk_scale)
        out_scale *= tl.load(call.v_scale)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, dims.D_PAD], tl.float32)
    end = kv_end
    if CAUSAL:
        end = tl.minimum(end, tl.minimum((tile_row + BLOCK_M - 1) // HEADS, q_len - 1) + kv_len - q_len + 1)
    if pages.FIRST > 0:
        # Both caches are read by one load, so the first one's rows are counted from where the other begins.
        first_cache = (first_ckv.to(tl.int64) - ckv.to(tl.int64)) // (ckv.dtype.element_ty.primitive_bitwidth // 8)
    # Entries of the table are loaded a block ahead: a load behind a load would not be copied asynchronously in time.
    entries = _entries(kv_begin, end, kv_base, pages.indices, pages.SIZE, pages.SPARSE, BLOCK_N)
    for start in range(kv_begin, end, BLOCK_N):
        kv_pos = start + tl.arange(0, BLOCK_N)
        there = kv_pos < end
        if pages.SPARSE:
            there = there & (entries >= 0)
        at = _offsets(entries, kv_pos, there, ckv_by.page, ckv_by.token, pages.SIZE, pages.SPARSE)
        if pages.FIRST > 0:
            first_at = _offsets(entries, kv_pos, there, first_by.page, first_by.token, pages.FIRST_SIZE, pages.SPARSE)
            at = tl.multiple_of(tl.where(kv_pos < pages.FIRST, first_at + first_cache, at), ROW_UNIT)
        keys = _rows(ckv, at, there, dims.D, dims.D_PAD)
        pe_at = _offsets(entries, kv_pos, there, kpe_by.page, kpe_by.token, pages.SIZE, pages.SPARSE)
        if dims.PE > 0:
            pe_keys = _rows(kpe, pe_at, there, dims.PE, dims.PE_PAD)
        entries = _entries(start + BLOCK_N, end, kv_base, pages.indices, pages.SIZE, pages.SPARSE, BLOCK_N)
        keys = widen(keys, kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if dims.PE > 0:
            pe_keys = widen(pe_keys, kinds.KV, kinds.NATIVE_FP8, kinds.COMPUTE)
            s = tl.dot(position, tl.trans(pe_keys), s) * ratio[:, None]
        s = tl.dot(latent, tl.trans(keys), s)
        ok = there[None, :]
        if VARIED:
            s, takes_part = vary(
                s, scale, 0.0, scale, request, q_pos, kv_pos, kv_len, head, params, False, False, LOGITS, MASK, SOFTMAX
            )
            if MASK is not None:
                ok = ok & takes_part
        else:
            s *= scale[:, None]
        if CAUSAL:
            ok = ok & (kv_pos[None, :] <= q_pos[:, None])
        if SOFTMAX:
            s = tl.where(ok, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            # A row that has seen no key yet has top = -inf, and inf - inf is NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s - base[:, None])
            keep = tl.exp2(top - base)
            total = total * keep + tl.sum(p, 1)
            acc *= keep[:, None]
            top = new_top
        else:
            p = tl.where(ok, s, 0.0)
        acc = tl.dot(p.to(kinds.COMPUTE), keys, acc)

    if call.SINKS:
        # The combination adds the sink of a split tile, once.
        if slot < 0:
            sink = tl.load(call.sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
            top, keep, total = with_sink(top, total, sink)
            acc = acc * keep[:, None]
    if not SOFTMAX:
        # The weights are what they are: no maximum was taken from their logits, and their sum divides nothing.
        top = tl.zeros([BLOCK_M], tl.float32)
        total = top + 1.0
    # Not `> 0`: a NaN among the logits has to come out.
    seen = total != 0
    inverse = tl.where(seen, out_scale / tl.where(seen, total, 1.0), 0.0)
    # 0 * NaN is NaN: a row that saw no key must not show what the accumulator picked up.
    acc = tl.where(seen[:, None], acc * inverse[:, None], 0.0)
    s = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    dv = tl.arange(0, dims.D_PAD)
    if partial.SPLIT:
        if slot >= 0:
            at = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            in_out = row_ok[:, None] & (dv < dims.D)[None, :]
            tl.store(partial.out + at[:, None] * dims.D + dv[None, :], acc, mask=in_out)
            tl.store(partial.lse + at, s, mask=row_ok)
            combine_if_last(
                work.arrivals, partial.out, partial.lse, out, lse, call.sinks, slot, first_slot, splits,
                tl.arange(0, partial.ROWS)[None, :], tl.arange(0, partial.SPLITS)[:, None], dv[None, None, :], tile_row,
                q_row, q_len, 0, 1, out_by.token, out_by.head, True, HEADS, dims.D, BLOCK_M, call.SINKS, call.LSE,
                SOFTMAX, LN2 if call.BASE_E else 1.0,
            )  # fmt: skip
            return
    o_at = n * out_by.token + head * out_by.head
    in_out = row_ok[:, None] & (dv < dims.D)[None, :]
    tl.store(out + o_at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=in_out)
    if call.LSE:
        tl.store(lse + n * HEADS + head, s * LN2 if call.BASE_E else s, mask=row_ok)

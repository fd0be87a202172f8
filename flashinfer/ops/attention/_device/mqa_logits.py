"""Scores of an indexer (DeepSeek-V3.2, 2025): every head's product with a key, rectified, weighted and summed."""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.kv_source import widen


@triton.jit
def _pages(tables, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    position = start + tl.arange(0, BLOCK_N)
    return tl.load(tables + position // PAGE_SIZE, mask=position < end, other=0).to(tl.int64)


@triton.jit
def mqa_logits_kernel(
    q, keys, scales, weights, lens, tables, logits, context, q_stride_b, q_stride_t, q_stride_h, keys_stride_page,
    scales_stride_page, tables_stride, logits_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, EACH: tl.constexpr, CLEAN: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per (query, share of its keys): every n-th block of keys, so that shares of a query are even.

    The queries of a request stand side by side in the launch, so that what one reads of the keys the next finds in L2.
    FP8 is multiplied in float16, which holds it exactly.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // TOKENS
    token = row % TOKENS
    end = tl.load(lens + (row if EACH else request))
    # The last query of a request stands at its last key, the one before it a key earlier.
    seen = end if EACH else end - (TOKENS - 1 - token)
    end = tl.minimum(end, context)
    upto = context if CLEAN else end
    tables += request * tables_stride
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, D_PAD)
    head_ok = head < HEADS
    query = q + request * q_stride_b + token * q_stride_t + head[None, :] * q_stride_h + d[:, None]
    query = tl.load(query, mask=head_ok[None, :] & (d < D)[:, None], other=0)
    query = widen(query, "fp8e4nv", NATIVE_FP8, tl.float16)
    weight = tl.load(weights + row * HEADS + head, mask=head_ok, other=0.0)
    logits += row * logits_stride
    begin = tl.program_id(1) * BLOCK_N
    step = tl.num_programs(1) * BLOCK_N
    # Loaded a block ahead: keys behind a load of their pages would get a single buffer.
    page = _pages(tables, begin, end, PAGE_SIZE, BLOCK_N)
    for start in range(begin, upto, step):
        position = start + tl.arange(0, BLOCK_N)
        there = position < end
        slot = position % PAGE_SIZE
        at = page * keys_stride_page + slot * D
        block = tl.load(keys + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
        scale = tl.load(scales + page * scales_stride_page + slot, mask=there, other=0.0)
        page = _pages(tables, start + step, end, PAGE_SIZE, BLOCK_N)
        products = tl.dot(widen(block, "fp8e4nv", NATIVE_FP8, tl.float16), query)
        # Not a maximum with 0, which may drop a NaN.
        products = tl.where(products < 0, 0.0, products)
        value = tl.sum(products * weight[None, :], 1) * scale
        if CLEAN:
            value = tl.where(there & (position < seen), value, float("-inf"))
            there = position < context
        tl.store(logits + position, value, mask=there)

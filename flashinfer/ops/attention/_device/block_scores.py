"""Scores of blocks of 128 keys (MiniMax-M3, 2026): the largest product of a query with any key of a block."""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.kv_source import widen


@triton.jit
def _operand(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, WIDE: tl.constexpr):
    """As what products are made of: WIDE for bf16, float16 for fp16, and for fp8, which both hold exactly."""
    if WIDE == "fp32":
        wide = widen(x, DTYPE, NATIVE_FP8, tl.float32)
    elif WIDE == "bf16":
        # By way of float32: Triton's own way from FP8 to bfloat16 is an instruction that sm_89 lacks.
        wide = widen(x, DTYPE, NATIVE_FP8, tl.float32).to(tl.bfloat16)
    else:
        wide = widen(x, DTYPE, NATIVE_FP8, tl.float16)
    return wide


@triton.jit
def block_scores_kernel(
    q, k, seen, base, tables, scores, blocks, q_stride_t, q_stride_h, k_stride_page, k_stride_h, k_stride_n,
    tables_stride, scores_stride_h, scores_stride_b, scores_stride_t, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, Q_DTYPE: tl.constexpr, KV_DTYPE: tl.constexpr,
    PAGED: tl.constexpr, REDUCE: tl.constexpr, NATIVE_FP8: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (query, share of its blocks): every n-th of them. Blocks that a query does not see are -inf."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + token)
    first = tl.load(base + token).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    slot = tl.arange(0, BLOCK)
    own = (head < GROUP)[None, :] & (d < D)[:, None]
    scores += token * scores_stride_t
    q += token * q_stride_t
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        there = block * BLOCK + slot < count
        if PAGED:
            page = tl.load(tables + first * tables_stride + block, mask=block * BLOCK < count, other=0).to(tl.int64)
            rows = k + page * k_stride_page + slot * k_stride_n
        else:
            rows = k + (first + block * BLOCK + slot) * k_stride_n
        whole = tl.full([1], float("-inf"), tl.float32)
        for kv_head in tl.static_range(KV_HEADS):
            most = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            if block * BLOCK < count:
                at = q + (kv_head * GROUP + head)[None, :] * q_stride_h + d[:, None]
                query = _operand(tl.load(at, mask=own, other=0), Q_DTYPE, NATIVE_FP8, WIDE)
                keys = rows[:, None] + kv_head * k_stride_h + d[None, :]
                keys = tl.load(keys, mask=there[:, None] & (d < D)[None, :], other=0)
                products = tl.dot(_operand(keys, KV_DTYPE, NATIVE_FP8, WIDE), query, input_precision="ieee")
                most = tl.max(tl.where(there[:, None], products, float("-inf")), 0)
            if REDUCE:
                whole = tl.maximum(whole, tl.max(tl.where(head < GROUP, most, float("-inf")), 0))
            else:
                to = scores + (kv_head * GROUP + head) * scores_stride_h + block * scores_stride_b
                tl.store(to, most, mask=head < GROUP)
        if REDUCE:
            tl.store(scores + block * scores_stride_b + tl.arange(0, 1), whole)

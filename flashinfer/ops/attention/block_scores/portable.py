"""Block scores on any architecture: the largest product of a query with any key of a block.

Grid: (query, share of its blocks of 128 keys); a program takes every n-th block.
Warps: all share a block. Shared memory: operands of the products.
Inputs: q [tokens, heads, dim], k [pages, kv_heads, 128, dim] or [keys, kv_heads, dim], seen and base [tokens], tables
[batch, pages]; `run` of reference.py has the dtypes.
Outputs: scores [heads or 1, blocks, tokens].
Method: the block selection of MiniMax-M3, 2026.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops.attention._device.kv_source import widen
from flashinfer.ops.attention.block_scores import BLOCK

# Programs that a multiprocessor runs at once, about: the blocks of a query are shared out until the chip is full. Not
# measured.
_PROGRAMS_PER_SM = 4


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


def build(p, c) -> Build:
    element = {"bf16": "*bf16:16", "fp16": "*fp16:16", "fp8e4nv": "*u8:16"}
    unit = lambda dtype: "i64:16" if dtype == "fp8e4nv" else "i64:8"
    types = dict(
        q=element[p.q_dtype], k=element[p.kv_dtype], seen="*i32", base="*i32", tables="*i32", scores="*fp32",
        blocks="i32", q_stride_t=unit(p.q_dtype), q_stride_h=unit(p.q_dtype), k_stride_page=unit(p.kv_dtype),
        k_stride_h=unit(p.kv_dtype), k_stride_n=unit(p.kv_dtype), tables_stride="i64", scores_stride_h="i64",
        scores_stride_b="i64", scores_stride_t="i64",
    )  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, KV_HEADS=p.num_kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(p.num_heads // p.num_kv_heads)), D=p.head_dim,
        D_PAD=triton.next_power_of_2(p.head_dim), Q_DTYPE=p.q_dtype, KV_DTYPE=p.kv_dtype, PAGED=p.paged,
        REDUCE=p.reduce, NATIVE_FP8=c.native_fp8, WIDE=c.wide if p.q_dtype == "bf16" else "fp16", BLOCK=BLOCK,
    )  # fmt: skip
    return Build(block_scores_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


launch = Launcher("block_scores", build)


def run(p, c, q, k, seen, base, tables, scores) -> None:
    """Parameters as of the reference's `run`."""
    tokens, blocks = q.shape[0], scores.shape[1]
    if not tokens or not blocks:
        return
    shares = min(blocks, triton.cdiv(target_of(q.device).sms * _PROGRAMS_PER_SM, tokens))
    page, head, row, _ = k.stride() if p.paged else (0, k.stride(1), k.stride(0), 1)
    bits = lambda t: t.view(torch.uint8) if t.element_size() == 1 else t
    launch(
        p, c, (tokens, shares, 1), bits(q), bits(k), seen, base, seen if tables is None else tables, scores, blocks,
        *q.stride()[:2], page, head, row, 0 if tables is None else tables.stride(0), *scores.stride(),
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))

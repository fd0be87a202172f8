"""Scores of an indexer on Hopper: one key for all heads, no softmax, no values.

Computes: logits[q, k] = scale_k * sum over heads h of weights[q, h] * relu(q_h . k).
Grid: (group of QUERIES queries, share of their keys); a program takes every n-th block of BLOCK_N keys that any of its
queries sees.
Warps: all share a block. Keys are the rows of one product, the heads of all QUERIES queries its columns, so that keys
are read once for them and a head's scores are summed inside a thread.
Shared memory: the queries; a ring of blocks of keys, filled by cp.async.
Inputs: q [batch, tokens, heads, dim], keys [pages, page_size, dim] or [keys, dim], scales, weights [query, heads],
lens, tables [batch, pages]; `run` of reference.py has the dtypes.
Outputs: logits [query, context].
Method: the lightning indexer of DeepSeek-V3.2, 2025.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops.attention.mqa_logits import Beside

# Keys of one store of -inf.
_FILL = tl.constexpr(1024)


@triton.jit
def _fill(logits, row_ok, begin, end, context, QUERIES: tl.constexpr):
    """-inf to all keys outside of `begin` to `end`, by all programs of the queries together."""
    for start in range(tl.program_id(1) * _FILL, context, tl.num_programs(1) * _FILL):
        if (start < begin) | (start + _FILL > end):
            position = (start + tl.arange(0, _FILL)).to(tl.int64)
            outside = ((position < begin) | (position >= end)) & (position < context)
            unseen = tl.full([_FILL, QUERIES], float("-inf"), tl.float32)
            tl.store(logits[None, :] + position[:, None], unseen, mask=outside[:, None] & row_ok[None, :])


@triton.jit
def _page_of(tables, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a block of keys, or of each of its keys where a block has several; page 0 past the end."""
    if PAGE_SIZE == 0:
        return 0
    elif PAGE_SIZE % BLOCK_N == 0:
        return tl.load(tables + start // PAGE_SIZE, mask=start < end, other=0).to(tl.int64)
    else:
        position = start + tl.arange(0, BLOCK_N)
        return tl.load(tables + position // PAGE_SIZE, mask=position < end, other=0).to(tl.int64)


@triton.jit
def _scales_of(scales, page, start, end, stride, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr):
    """The scales of a block of keys, 0 past the end."""
    if FORMAT != "fp8":
        return 0.0
    else:
        position = start + tl.arange(0, BLOCK_N)
        at = page * stride + position % PAGE_SIZE if PAGE_SIZE else position
        return tl.load(scales + at, mask=position < end, other=0.0)


@triton.jit
def mqa_logits_sm90_kernel(
    q, keys, scales, weights, lens, tables, logits, begins, rows, context, origin, q_stride, keys_stride_page,
    scales_stride_page, tables_stride, logits_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, EACH: tl.constexpr, CLEAN: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """One program per (group of queries, share of their keys).

    Over pages, a group is of one request, which may have fewer queries than QUERIES; side by side, it is of any
    neighbours. Groups of late queries, which see most keys, start first.
    """
    GROUPS: tl.constexpr = (TOKENS + QUERIES - 1) // QUERIES
    if PAGE_SIZE == 0:
        request = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * QUERIES
        index = tl.arange(0, QUERIES)
        row = request + index
        row_ok = row < rows
    else:
        request = tl.program_id(0).to(tl.int64) // GROUPS
        index = tl.program_id(0) % GROUPS * QUERIES + tl.arange(0, QUERIES)
        row = request * TOKENS + index
        row_ok = index < TOKENS
    end = tl.load(lens + (row if EACH else request + row * 0), mask=row_ok, other=0)
    first = tl.zeros([QUERIES], tl.int32)
    if PAGE_SIZE == 0:
        end -= origin
        first = tl.maximum(tl.load(begins + row, mask=row_ok, other=2147483647) - origin, 0)
    # The last query of a request stands at its last key, the one before it a key earlier.
    seen = end if EACH else end - (TOKENS - 1 - index)
    end = tl.minimum(end, context)
    written = tl.minimum(seen, end) if CLEAN else end
    last = tl.maximum(tl.max(end, 0), 0)
    begin = tl.minimum(tl.min(first, 0), last) // BLOCK_N * BLOCK_N
    tables += request * tables_stride
    column = tl.arange(0, QUERIES * HEADS_PAD)
    d = tl.arange(0, D_PAD)
    d_ok = d < D
    of, head = column // HEADS_PAD, column % HEADS_PAD
    if PAGE_SIZE == 0:
        column_ok = (head < HEADS) & (request + of < rows)
        query = q + (request + of) * q_stride.batch + head * q_stride.head
        weight = weights + (request + of) * HEADS + head
    else:
        token = tl.program_id(0) % GROUPS * QUERIES + of
        column_ok = (head < HEADS) & (token < TOKENS)
        query = q + request * q_stride.batch + token * q_stride.token + head * q_stride.head
        weight = weights + (request * TOKENS + token) * HEADS + head
    query = tl.load(query[:, None] + d[None, :], mask=column_ok[:, None] & d_ok[None, :], other=0.0)
    weight = tl.load(weight, mask=column_ok, other=0.0)
    out = logits + row * logits_stride
    block = tl.program_id(1) * BLOCK_N
    step = tl.num_programs(1) * BLOCK_N
    # This share's first block from `begin` on.
    block += tl.maximum(begin - block + step - BLOCK_N, 0) // step * step
    # Pages and scales are loaded a block ahead: keys behind a load of their pages would get a single buffer.
    page = _page_of(tables, block, last, PAGE_SIZE, BLOCK_N)
    scale = _scales_of(scales, page, block, last, scales_stride_page, PAGE_SIZE, BLOCK_N, FORMAT)
    for start in range(block, last, step):
        position = start + tl.arange(0, BLOCK_N)
        there = position < last
        if PAGE_SIZE:
            at = page * keys_stride_page + position % PAGE_SIZE * D
        else:
            at = position.to(tl.int64) * keys_stride_page
        if D == D_PAD:
            x = tl.load(keys + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
        else:
            x = tl.load(keys + at[:, None] + d[None, :], mask=there[:, None] & d_ok[None, :], other=0.0)
        page = _page_of(tables, start + step, last, PAGE_SIZE, BLOCK_N)
        products = tl.dot(x, tl.trans(query))
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        if HEADS != HEADS_PAD and FORMAT != "fp8":
            # An infinite key times a head that is not there.
            products = tl.where(column_ok[None, :], products, 0.0)
        value = tl.sum(tl.reshape(products, [BLOCK_N, QUERIES, HEADS_PAD]), 2)
        if FORMAT == "fp8":
            value *= scale[:, None]
            scale = _scales_of(scales, page, start + step, last, scales_stride_page, PAGE_SIZE, BLOCK_N, FORMAT)
        visible = (position[:, None] < written[None, :]) & (position[:, None] >= first[None, :])
        if CLEAN:
            value = tl.where(visible, value, float("-inf"))
            visible = (position < context)[:, None] & row_ok[None, :]
        tl.store(out[None, :] + position.to(tl.int64)[:, None], value, mask=visible)
    if CLEAN:
        _fill(out, row_ok, begin, tl.cdiv(last, BLOCK_N) * BLOCK_N, context, QUERIES)


def build(p, c) -> Build:
    fp8 = p.qk_format == "fp8"
    # Rows start on 16 bytes: so many elements apart.
    element, apart = ("*fp8e4nv:16", "i64:16") if fp8 else (f"*{p.qk_format}:16", "i64:8")
    types = dict(
        q=element, keys=element, scales="*fp32", weights="*fp32", lens="*i32", tables="*i32", logits=f"*{p.out}",
        begins="*i32", rows="i32", context="i32", origin="i32",
        **{f"q_stride.{axis}": apart for axis in ("batch", "token", "head")},
        keys_stride_page=apart, scales_stride_page="i64", tables_stride="i64", logits_stride="i64",
    )  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, HEADS_PAD=c.heads, D=p.head_dim, D_PAD=max(32, triton.next_power_of_2(p.head_dim)),
        PAGE_SIZE=p.page_size, TOKENS=p.tokens, EACH=p.each, CLEAN=p.clean, QUERIES=c.queries, BLOCK_N=c.block_n,
        FORMAT=p.qk_format,
    )  # fmt: skip
    return Build(mqa_logits_sm90_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


launch = Launcher("mqa_logits_sm90", build)


def run(p, c, q, keys, scales, weights, lens, tables, logits, context: int, beside=Beside()) -> None:
    """Parameters as of the reference's `run`."""
    rows = q.shape[0] * p.tokens
    if not rows or not context:
        return
    groups = triton.cdiv(rows, c.queries) if not p.page_size else q.shape[0] * triton.cdiv(p.tokens, c.queries)
    slots = target_of(q.device).sms * c.programs
    # One wave, for a little more is half of the chip idle: 64 requests with 13 shares took 251 us, with 9 206 (H100).
    # Groups that cannot fill one evenly have three waves or more.
    shares = slots // groups if groups <= slots // 4 else triton.cdiv(3 * slots, groups)
    shares = min(triton.cdiv(context, c.block_n), shares)
    # A tensor that the problem lacks is not read: any tensor stands for it.
    scales_stride = 0 if scales is None else scales.stride(0)
    tables_stride = 0 if tables is None else tables.stride(0)
    launch(
        p, c, (groups, shares, 1), q, keys.view(q.dtype), weights if scales is None else scales, weights, lens,
        lens if tables is None else tables, logits, lens if beside.begins is None else beside.begins, rows, context,
        beside.origin, *q.stride()[:3], keys.stride(0), scales_stride, tables_stride, logits.stride(0),
    )  # fmt: skip


# Bytes, with 256 columns on Triton 3.9; Triton 3.6 needs none.
STACK_BUDGET = 160
IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

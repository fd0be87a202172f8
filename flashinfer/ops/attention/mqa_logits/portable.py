"""Scores of an indexer on any architecture: one key for all heads, no softmax, no values.

Computes: logits[q, k] = scale_k * sum over heads h of weights[q, h] * relu(q_h . k).
Grid: (query, share of its keys); a program takes every n-th block of BLOCK_N keys, so shares of a query are even.
Warps: all share a block. Shared memory: operands of the products.
Inputs: q [batch, tokens, heads, dim], keys [pages, page_size, dim] or [keys, dim], scales, weights [query, heads],
lens, tables [batch, pages]; `run` of reference.py has the dtypes.
Outputs: logits [query, context].
Method: the lightning indexer of DeepSeek-V3.2, 2025.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops._device.formats import from_ue8m0
from flashinfer.ops.attention._device.kv_source import widen
from flashinfer.ops.attention.mqa_logits import Beside

# Programs that a multiprocessor runs at once, about: the keys of a query are shared out until the chip is full. Not
# measured.
_PROGRAMS_PER_SM = 4


@triton.jit
def _pages(tables, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    position = start + tl.arange(0, BLOCK_N)
    return tl.load(tables + position // PAGE_SIZE, mask=position < end, other=0).to(tl.int64)


@triton.jit
def _halves(codes, factor, WIDE: tl.constexpr):
    """The low and the high e2m1 of bytes times a factor, as bfloat16 or float32, which hold both exactly."""
    bits = codes.to(tl.uint16)
    low = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    bits = bits >> 4
    high = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    to: tl.constexpr = tl.bfloat16 if WIDE == "bf16" else tl.float32
    return (low * factor).to(to), (high * factor).to(to)


@triton.jit
def mqa_logits_kernel(
    q, keys, scales, weights, lens, tables, logits, q_scales, begins, context, origin, q_stride, keys_stride_page,
    scales_stride_page, tables_stride, logits_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, EACH: tl.constexpr, CLEAN: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program per (query, share of its keys): every n-th block of keys, so that shares of a query are even.

    The queries of a request stand side by side in the launch, so that what one reads of the keys the next finds in L2.
    FP8 is multiplied in float16, mxfp4 and bfloat16 in WIDE, which hold them exactly. D counts what a key is
    stored in: bytes of two elements for mxfp4.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // TOKENS
    token = row % TOKENS
    end = tl.load(lens + (row if EACH else request))
    first = 0
    if PAGE_SIZE == 0:
        end -= origin
        first = tl.load(begins + row) - origin
    # The last query of a request stands at its last key, the one before it a key earlier.
    seen = end if EACH else end - (TOKENS - 1 - token)
    end = tl.minimum(end, context)
    upto = context if CLEAN else end
    tables += request * tables_stride
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, D_PAD)
    head_ok = head < HEADS
    query = q + request * q_stride.batch + token * q_stride.token + head[None, :] * q_stride.head + d[:, None]
    query = tl.load(query, mask=head_ok[None, :] & (d < D)[:, None], other=0)
    if FORMAT == "mxfp4":
        factor = q_scales + (row * HEADS + head)[None, :] * (D // 16) + d[:, None] // 16
        factor = from_ue8m0(tl.load(factor, mask=head_ok[None, :] & (d < D)[:, None], other=127))
        query, query_high = _halves(query, factor, WIDE)
    elif FORMAT == "fp8":
        query = widen(query, "fp8e4nv", NATIVE_FP8, tl.float16)
    weight = tl.load(weights + row * HEADS + head, mask=head_ok, other=0.0)
    logits += row * logits_stride
    begin = tl.program_id(1) * BLOCK_N
    step = tl.num_programs(1) * BLOCK_N
    # Loaded a block ahead: keys behind a load of their pages would get a single buffer.
    if PAGE_SIZE:
        page = _pages(tables, begin, end, PAGE_SIZE, BLOCK_N)
    for start in range(begin, upto, step):
        position = start + tl.arange(0, BLOCK_N)
        there = (position < end) & (position >= first)
        if PAGE_SIZE:
            slot = position % PAGE_SIZE
            at = page * keys_stride_page + slot * D
            at_scale = page * scales_stride_page
        else:
            slot = position
            at = position.to(tl.int64) * keys_stride_page
            at_scale = tl.zeros([BLOCK_N], tl.int64)
        block = tl.load(keys + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
        if FORMAT == "mxfp4":
            place = slot
            if INTERLEAVED:
                place = slot % (PAGE_SIZE // 4) * 4 + slot // (PAGE_SIZE // 4)
            block_factor = scales + (at_scale + place * (D // 16))[:, None] + d[None, :] // 16
            block_factor = from_ue8m0(tl.load(block_factor, mask=there[:, None] & (d < D)[None, :], other=127))
            low, high = _halves(block, block_factor, WIDE)
            products = tl.dot(low, query, input_precision="ieee")
            products = tl.dot(high, query_high, products, input_precision="ieee")
        elif FORMAT == "fp8":
            scale = tl.load(scales + at_scale + slot, mask=there, other=0.0)
            products = tl.dot(widen(block, "fp8e4nv", NATIVE_FP8, tl.float16), query)
        elif FORMAT == "bf16" and WIDE == "fp32":
            products = tl.dot(block.to(tl.float32), query.to(tl.float32), input_precision="ieee")
        else:
            products = tl.dot(block, query)
        if PAGE_SIZE:
            page = _pages(tables, start + step, end, PAGE_SIZE, BLOCK_N)
        # Not a maximum with 0, which may drop a NaN.
        products = tl.where(products < 0, 0.0, products)
        products *= weight[None, :]
        if HEADS != HEADS_PAD and (FORMAT == "bf16" or FORMAT == "fp16"):
            # An infinite key times a head that is not there.
            products = tl.where(head_ok[None, :], products, 0.0)
        value = tl.sum(products, 1)
        if FORMAT == "fp8":
            value *= scale
        if CLEAN:
            value = tl.where(there & (position < seen), value, float("-inf"))
            there = position < context
        tl.store(logits + position, value, mask=there)


def build(p, c) -> Build:
    narrow = p.qk_format in ("fp8", "mxfp4")
    # Rows start on 16 bytes: so many elements apart.
    element, apart = ("*u8:16", "i64:16") if narrow else (f"*{p.qk_format}:16", "i64:8")
    stored = p.head_dim // (2 if p.qk_format == "mxfp4" else 1)
    types = dict(
        q=element, keys=element, scales="*u8" if p.qk_format == "mxfp4" else "*fp32", weights="*fp32", lens="*i32",
        tables="*i32", logits=f"*{p.out}", q_scales="*u8", begins="*i32", context="i32", origin="i32",
        **{f"q_stride.{axis}": apart for axis in ("batch", "token", "head")},
        keys_stride_page=apart if p.aligned else "i64:4", scales_stride_page="i64", tables_stride="i64",
        logits_stride="i64",
    )  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, HEADS_PAD=max(16, triton.next_power_of_2(p.num_heads)), D=stored,
        D_PAD=triton.next_power_of_2(stored), PAGE_SIZE=p.page_size, TOKENS=p.tokens, EACH=p.each, CLEAN=p.clean,
        NATIVE_FP8=c.native_fp8, BLOCK_N=c.block_n, FORMAT=p.qk_format, INTERLEAVED=p.interleaved, WIDE=c.wide,
    )  # fmt: skip
    return Build(mqa_logits_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


launch = Launcher("mqa_logits", build)


def run(p, c, q, keys, scales, weights, lens, tables, logits, context: int, beside=Beside()) -> None:
    """Parameters as of the reference's `run`."""
    q_scales, begins, origin = beside
    rows = q.shape[0] * p.tokens
    if not rows or not context:
        return
    programs = target_of(q.device).sms * _PROGRAMS_PER_SM
    shares = min(triton.cdiv(context, c.block_n), triton.cdiv(programs, rows))
    # A tensor that the problem lacks is not read: any tensor stands for it.
    scales_stride = 0 if scales is None else scales.stride(0)
    scales, tables_stride = weights if scales is None else scales, 0 if tables is None else tables.stride(0)
    launch(
        p, c, (rows, shares, 1), q.view(keys.dtype), keys, scales, weights, lens, lens if tables is None else tables,
        logits, q.view(torch.uint8) if q_scales is None else q_scales, lens if begins is None else begins, context,
        origin, *q.stride()[:3], keys.stride(0), scales_stride, tables_stride, logits.stride(0),
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))

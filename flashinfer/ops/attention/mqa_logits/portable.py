"""An indexer's scores on any architecture: the launch of `mqa_logits_kernel`."""

from __future__ import annotations

import torch
import triton

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops.attention._device.mqa_logits import mqa_logits_kernel
from flashinfer.ops.attention.mqa_logits import Beside

# Programs that a multiprocessor runs at once, about: the keys of a query are shared out until the chip is full. Not
# measured.
_PROGRAMS_PER_SM = 4


def build(p, c) -> Build:
    narrow = p.form in ("fp8", "mxfp4")
    # Rows start on 16 bytes: so many elements apart.
    element, apart = ("*u8:16", "i64:16") if narrow else (f"*{p.form}:16", "i64:8")
    stored = p.head_dim // (2 if p.form == "mxfp4" else 1)
    types = dict(
        q=element, keys=element, scales="*u8" if p.form == "mxfp4" else "*fp32", weights="*fp32", lens="*i32",
        tables="*i32", logits=f"*{p.out}", q_scales="*u8", begins="*i32", context="i32", origin="i32",
        q_stride_b=apart, q_stride_t=apart, q_stride_h=apart,
        keys_stride_page=apart if p.aligned else "i64:4", scales_stride_page="i64", tables_stride="i64",
        logits_stride="i64",
    )  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, HEADS_PAD=max(16, triton.next_power_of_2(p.num_heads)), D=stored,
        D_PAD=triton.next_power_of_2(stored), PAGE_SIZE=p.page_size, TOKENS=p.tokens, EACH=p.each, CLEAN=p.clean,
        NATIVE_FP8=c.native_fp8, BLOCK_N=c.block_n, FORM=p.form, INTERLEAVED=p.interleaved, WIDE=c.wide,
    )  # fmt: skip
    return Build(mqa_logits_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


launch = Launcher("mqa_logits", build)
LAUNCHERS = (launch,)


def run(p, c, q, keys, scales, weights, lens, tables, logits, context: int, beside=Beside()) -> None:
    """Parameters as of the reference's `run`."""
    q_scales, begins, origin = beside
    rows = q.shape[0] * p.tokens
    if not rows or not context:
        return
    programs = target_of(q.device).sms * _PROGRAMS_PER_SM
    shares = min(triton.cdiv(context, c.block_n), triton.cdiv(programs, rows))
    # What a problem has none of is not read.
    scales_stride = 0 if scales is None else scales.stride(0)
    scales, tables_stride = weights if scales is None else scales, 0 if tables is None else tables.stride(0)
    launch(
        p, c, (rows, shares, 1), q.view(keys.dtype), keys, scales, weights, lens, lens if tables is None else tables,
        logits, q.view(torch.uint8) if q_scales is None else q_scales, lens if begins is None else begins, context,
        origin, *q.stride()[:3], keys.stride(0), scales_stride, tables_stride, logits.stride(0),
    )  # fmt: skip

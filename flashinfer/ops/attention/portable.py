"""Attention on any architecture: one kernel for decode and prefill, and the one that combines split tiles."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.attention._device.attend import attend_kernel
from flashinfer.ops.attention._device.combine import combine_kernel
from flashinfer.ops.attention.problem import Inputs, Problem

_TL = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _compute_dtype(p: Problem) -> str:
    """The type of both dot operands: q's, or float16 for fp8 q, which float16 holds exactly."""
    return "fp16" if p.q_dtype.startswith("fp8") else p.q_dtype


def _pointer(dtype: str, aligned: bool = True) -> str:
    name = "u8" if dtype.startswith("fp8") else dtype
    return f"*{name}:16" if aligned else f"*{name}"


def build_attend(p: Problem, c) -> Build:
    # 16 bytes of the narrowest type involved, in elements: what lets rows be read 16 bytes at a time.
    stride = "i64:8" if p.aligned else "i64"
    types = dict(
        q=_pointer(p.q_dtype, p.aligned), k=_pointer(p.kv_dtype, p.aligned), v=_pointer(p.kv_dtype, p.aligned),
        out=_pointer(p.o_dtype, p.aligned), lse="*fp32", partial_out="*fp32:16", partial_lse="*fp32:16",
        items="*i32:16", counts="*i32", kv_indices="*i32", mask="*u8", mask_indptr="*i32",
        sinks="*fp32", qk_scale="*fp32", v_scale="*fp32", alibi_slopes="*fp32", num_kv_heads="i32",
    )  # fmt: skip
    strides = ("q_stride_n", "q_stride_h", "k_stride_page", "k_stride_n", "k_stride_h")
    strides += ("v_stride_page", "v_stride_n", "v_stride_h", "o_stride_n", "o_stride_h")
    types.update((name, stride) for name in strides)
    types.update(sm_scale="fp32", out_scale="fp32", soft_cap="fp32", window_left="i32", rope_scale="fp32",
                 rope_log2_theta="fp32")  # fmt: skip
    constants = dict(
        GROUP=p.group, PAGE_SIZE=p.page_size, D_QK=p.head_dim_qk, D_VO=p.head_dim_vo, D_QK_PAD=_padded(p.head_dim_qk),
        D_VO_PAD=_padded(p.head_dim_vo), BLOCK_M=c.block_m, BLOCK_N=c.block_n, Q_DTYPE=p.q_dtype, KV_DTYPE=p.kv_dtype,
        NATIVE_FP8=c.native_fp8, COMPUTE=_TL[_compute_dtype(p)], CAUSAL=p.mask == "causal", WINDOW=p.window,
        CUSTOM=p.mask == "custom", SOFT_CAP=p.soft_cap, ALIBI=p.pos_encoding == "ALIBI",
        ROPE=p.pos_encoding == "ROPE_LLAMA", SINKS=p.sinks, HEAD_SCALES=p.head_scales, LSE=p.lse, SPLIT=p.split,
    )  # fmt: skip
    return Build(attend_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


def build_combine(p: Problem, c) -> Build:
    types = dict(
        partial_out="*fp32:16", partial_lse="*fp32:16", out=_pointer(p.o_dtype, p.aligned), lse="*fp32",
        splits="*i32:16", counts="*i32", sinks="*fp32", num_kv_heads="i32",
        o_stride_n="i64:8" if p.aligned else "i64", o_stride_h="i64:8" if p.aligned else "i64",
    )  # fmt: skip
    constants = dict(
        GROUP=p.group, D_VO=p.head_dim_vo, D_VO_PAD=_padded(p.head_dim_vo), BLOCK_M=c.block_m, SINKS=p.sinks,
        LSE=p.lse, PIECES=c.combine_pieces,
        ROWS=c.combine_rows,
    )  # fmt: skip
    return Build(combine_kernel, types, constants, num_warps=4)


attend = Launcher("attend", build_attend)
combine = Launcher("combine", build_combine)
LAUNCHERS = (attend, combine)


def _raw(x: torch.Tensor) -> torch.Tensor:
    """FP8 travels to the kernel as bytes, so that chips without FP8 conversions take it too."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else x


def run(p: Problem, c, x: Inputs) -> None:
    schedule, table, scalars = x.schedule, x.table, x.scalars
    kv_heads = x.k.shape[-2]
    page_stride = (lambda t: t.stride(0)) if p.page_size else (lambda t: 0)
    attend(
        p, c, (schedule.max_items * kv_heads, 1, 1),
        _raw(x.q), _raw(x.k), _raw(x.v), x.out, x.lse, schedule.partial_out, schedule.partial_lse,
        schedule.items, schedule.counts, table.kv_indices, table.mask, table.mask_indptr,
        x.sinks, x.qk_scale, x.v_scale, x.alibi_slopes, kv_heads,
        x.q.stride(0), x.q.stride(1), page_stride(x.k), x.k.stride(-3), x.k.stride(-2),
        page_stride(x.v), x.v.stride(-3), x.v.stride(-2), x.out.stride(0), x.out.stride(1),
        scalars.sm_scale, scalars.out_scale, scalars.soft_cap, scalars.window_left, scalars.rope_scale,
        math.log2(scalars.rope_theta),
    )  # fmt: skip
    if p.split:
        combine(
            p, c, (schedule.max_splits * kv_heads, c.block_m // c.combine_rows, 1),
            schedule.partial_out, schedule.partial_lse, x.out, x.lse, schedule.splits, schedule.counts, x.sinks,
            kv_heads, x.out.stride(0), x.out.stride(1),
        )  # fmt: skip

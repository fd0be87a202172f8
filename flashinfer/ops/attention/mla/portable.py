"""Latent attention on any architecture: the launch of `attend_latent_kernel`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.attention._device.attend_latent import attend_latent_kernel
from flashinfer.ops.attention.config import SIZE
from flashinfer.ops.attention.mla import Problem
from flashinfer.ops.attention.mla.config import padded
from flashinfer.ops.attention.mla.inputs import Inputs
from flashinfer.ops.attention.planner import ScheduleConfig, ScheduleProblem, schedule_launch

STACK_BUDGET = 0

_TL = {"bf16": tl.bfloat16, "fp16": tl.float16}


def _compute_dtype(p: Problem) -> str:
    """The type of both dot operands: q's, or float16, which holds fp8 exactly and is what chips convert it to."""
    return "fp16" if p.q_dtype.startswith("fp8") or p.kv_dtype.startswith("fp8") else p.q_dtype


def _pointer(dtype: str, aligned: bool) -> str:
    name = "u8" if dtype.startswith("fp8") else dtype
    return f"*{name}:16" if aligned else f"*{name}"


def build(p: Problem, c) -> Build:
    def stride(dtype: str) -> str:
        return f"i64:{16 // SIZE[dtype]}" if p.aligned else "i64"

    q, kv, out = (_pointer(dtype, p.aligned) for dtype in (p.q_dtype, p.kv_dtype, p.o_dtype))
    types = dict(
        q_nope=q, q_pe=q, ckv=kv, kpe=kv, out=out, lse="*fp32", partial_out="*fp32:16", partial_lse="*fp32:16",
        items="*i32:16", counts="*i32", arrivals="*i32", kv_indices="*i32", first_ckv=kv, sinks="*fp32",
        qk_scale="*fp32", v_scale="*fp32",
    )  # fmt: skip
    types.update((f"{tensor}_stride_{axis}", stride(p.q_dtype)) for tensor in ("q_nope", "q_pe") for axis in "nh")
    types.update(
        (f"{tensor}_stride_{axis}", stride(p.kv_dtype)) for tensor in ("ckv", "kpe", "first") for axis in ("page", "n")
    )
    types.update(o_stride_n=stride(p.o_dtype), o_stride_h=stride(p.o_dtype), sm_scale="fp32", out_scale="fp32",
                 pe_ratio="fp32")  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, PAGE_SIZE=p.page_size, SPARSE=p.sparse, FIRST=p.first, FIRST_PAGE=max(p.first_page, 1),
        D=p.head_dim_ckv, D_PE=p.head_dim_kpe, D_PAD=padded(p.head_dim_ckv), PE_PAD=padded(max(p.head_dim_kpe, 1)),
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, Q_DTYPE=p.q_dtype, KV_DTYPE=p.kv_dtype, NATIVE_FP8=c.native_fp8,
        COMPUTE=_TL[_compute_dtype(p)], CAUSAL=p.mask == "causal", SINKS=p.sinks, DEVICE_SCALES=p.scales, LSE=p.lse,
        BASE_E=p.base_e, SPLIT=p.split, PIECES=c.combine_pieces, COMBINE_ROWS=c.combine_rows,
    )  # fmt: skip
    return Build(attend_latent_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


attend_latent = Launcher("attend_latent", build)
LAUNCHERS = (attend_latent, schedule_launch)

"""Latent attention on any architecture: the launch of `attend_latent_kernel`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.attention.config import SIZE
from flashinfer.ops.attention.mla.config import padded
from flashinfer.ops.attention.mla.portable_kernel import attend_latent_kernel
from flashinfer.ops.attention.mla.problem import Inputs, Problem
from flashinfer.ops.attention.portable import varied
from flashinfer.ops.attention.worklist import ScheduleConfig, ScheduleProblem, schedule_launch

# Bytes of stack a thread may use: addresses and factors of rows wait there, from before the loop until after it, while
# 128 registers hold the accumulator. In the loop nothing is spilled. Triton 3.6 takes up to 88, 3.9 up to 256.
STACK_BUDGET = 256

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

    q, kv = (_pointer(dtype, p.aligned) for dtype in (p.q_dtype, p.kv_dtype))
    out = f"*{p.o_dtype}:16" if p.aligned else f"*{p.o_dtype}"
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
    functions, params = varied(p)
    types.update(params)
    constants = dict(
        HEADS=p.num_heads, PAGE_SIZE=p.page_size, SPARSE=p.sparse, FIRST=p.first, FIRST_PAGE=max(p.first_page, 1),
        D=p.head_dim_ckv, D_PE=p.head_dim_kpe, D_PAD=padded(p.head_dim_ckv), PE_PAD=padded(max(p.head_dim_kpe, 1)),
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, Q_DTYPE=p.q_dtype, KV_DTYPE=p.kv_dtype, NATIVE_FP8=c.native_fp8,
        COMPUTE=_TL[_compute_dtype(p)], CAUSAL=p.mask == "causal", SINKS=p.sinks, DEVICE_SCALES=p.scales, LSE=p.lse,
        BASE_E=p.base_e, SPLIT=p.split, COMBINE_SPLITS=c.combine_splits,
        COMBINE_ROWS=c.combine_rows, ROW_UNIT=16 // SIZE[p.kv_dtype] if p.aligned else 1,
        **functions,
    )  # fmt: skip
    return Build(attend_latent_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


attend_latent = Launcher("attend_latent", build)


def kernels(p: Problem, c):
    """What runs for a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    yield attend_latent, p, c
    for encoding in (("uniform", "padded"),) if p.sparse else (("indptr", "lens"), ("uniform", "padded")):
        yield schedule_launch, ScheduleProblem(*encoding, False), ScheduleConfig()


class Bound:
    """The kernel of a problem on one device, looked up once."""

    def __init__(self, p: Problem, c, device: torch.device):
        self._parameters = tuple(attend_latent.build(p, c).types)
        self._params = tuple(varied(p)[1])
        self._kernel = attend_latent.prepare(p, c, device)

    def hold(self, x: Inputs) -> Callable[..., None]:
        """The launch of `x`, kept ready for other tensors in the places of Inputs.addresses(): it takes theirs.

        Those keep their shapes, strides and dtypes; everything else is as in `x`.
        """
        schedule = x.schedule
        arguments = dict(
            q_nope=_raw(x.q_nope), q_pe=_raw(x.q_pe), ckv=_raw(x.ckv), kpe=_raw(x.kpe), out=x.out, lse=x.lse,
            partial_out=schedule.partial_out, partial_lse=schedule.partial_lse, items=schedule.items,
            counts=schedule.counts, arrivals=schedule.arrivals, kv_indices=x.table.kv_indices,
            first_ckv=_raw(x.first_ckv), sinks=x.sinks, qk_scale=x.qk_scale, v_scale=x.v_scale,
            o_stride_n=x.out.stride(0), o_stride_h=x.out.stride(1), sm_scale=x.sm_scale, out_scale=x.out_scale,
            pe_ratio=x.pe_ratio, **dict(zip(self._params, x.params, strict=True)),
        )  # fmt: skip
        for name, tensor in (("q_nope", x.q_nope), ("q_pe", x.q_pe)):
            arguments[f"{name}_stride_n"], arguments[f"{name}_stride_h"] = _outer_strides(tensor)
        for name, tensor in (("ckv", x.ckv), ("kpe", x.kpe), ("first", x.first_ckv)):
            arguments[f"{name}_stride_page"], arguments[f"{name}_stride_n"] = _outer_strides(tensor)
        values = tuple(arguments[name] for name in self._parameters)
        moving = ("q_nope", "q_pe", "ckv", "kpe", "out", "lse", "kv_indices")
        return self._kernel.hold((schedule.max_items, 1, 1), values, moving)


def bind(p: Problem, c, device: torch.device) -> Bound:
    """An object whose `hold(x)` gives a launch ready to be repeated."""
    return Bound(p, c, device)


def run(p: Problem, c, x: Inputs) -> None:
    bind(p, c, x.q_nope.device).hold(x)(*x.addresses())


def _outer_strides(t: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if t is None else t.stride()[:2]


def _raw(t: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 travels to the kernel as bytes, so that chips without FP8 conversions take it too."""
    return t.view(torch.uint8) if t is not None and t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else t


IMPLEMENTATION = Implementation(
    run,
    (attend_latent, schedule_launch),
    kernels=kernels,
    bind=bind,
    stack_budget=STACK_BUDGET,
)

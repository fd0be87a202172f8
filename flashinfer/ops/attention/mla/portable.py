"""Latent attention on any architecture: the launch of `attend_latent_kernel`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.attention.config import SIZE
from flashinfer.ops.attention.mla.portable_kernel import attend_latent_kernel
from flashinfer.ops.attention.mla.problem import Inputs, Problem
from flashinfer.ops.attention.portable import varied
from flashinfer.ops.attention.worklist import implementation, latent_schedules

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
    types = {"q_nope": q, "q_pe": q, "ckv": kv, "kpe": kv, "out": out, "lse": "*fp32"}
    types |= {"partial.out": "*fp32:16", "partial.lse": "*fp32:16", "work.items": "*i32:16", "work.counts": "*i32"}
    types |= {"work.arrivals": "*i32", "pages.indices": "*i32", "first_ckv": kv}
    types |= dict.fromkeys(("call.sinks", "call.qk_scale", "call.v_scale"), "*fp32")
    types |= dict.fromkeys(("q_nope_by.token", "q_nope_by.head", "q_pe_by.token", "q_pe_by.head"), stride(p.q_dtype))
    types |= {f"{x}_by.{axis}": stride(p.kv_dtype) for x in ("ckv", "kpe", "first") for axis in ("page", "token")}
    types |= dict.fromkeys(("out_by.token", "out_by.head"), stride(p.o_dtype))
    types |= dict.fromkeys(("numbers.sm_scale", "numbers.out_scale", "numbers.pe_ratio"), "fp32")
    functions, params = varied(p)
    types.update(params)
    constants = {
        "partial.SPLIT": p.split, "partial.SPLITS": c.combine_splits, "partial.ROWS": c.combine_rows,
        "pages.SIZE": p.page_size, "pages.SPARSE": p.sparse, "pages.FIRST": p.first,
        "pages.FIRST_SIZE": max(p.first_page, 1), "call.SINKS": p.sinks, "call.SCALES": p.scales, "call.LSE": p.lse,
        "call.BASE_E": p.base_e, "dims.D": p.head_dim_ckv, "dims.PE": p.head_dim_kpe,
        "dims.D_PAD": power_of_two(p.head_dim_ckv, 16), "dims.PE_PAD": power_of_two(p.head_dim_kpe, 16),
        "kinds.Q": p.q_dtype, "kinds.KV": p.kv_dtype, "kinds.NATIVE_FP8": c.native_fp8,
        "kinds.COMPUTE": _TL[_compute_dtype(p)],
        "HEADS": p.num_heads, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "CAUSAL": p.mask == "causal",
        "ROW_UNIT": 16 // SIZE[p.kv_dtype] if p.aligned else 1, **functions,
    }  # fmt: skip
    return Build(attend_latent_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


attend_latent = Launcher("attend_latent", build)


def kernels(p: Problem, c):
    """What runs for a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    yield attend_latent, p, c
    yield from latent_schedules(p)


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
        arguments = {
            "q_nope": _raw(x.q_nope), "q_pe": _raw(x.q_pe), "ckv": _raw(x.ckv), "kpe": _raw(x.kpe), "out": x.out,
            "lse": x.lse, "partial.out": schedule.partial_out, "partial.lse": schedule.partial_lse,
            "work.items": schedule.items, "work.counts": schedule.counts, "work.arrivals": schedule.arrivals,
            "pages.indices": x.table.kv_indices, "first_ckv": _raw(x.first_ckv), "call.sinks": x.sinks,
            "call.qk_scale": x.qk_scale, "call.v_scale": x.v_scale, "out_by.token": x.out.stride(0),
            "out_by.head": x.out.stride(1), "numbers.sm_scale": x.sm_scale, "numbers.out_scale": x.out_scale,
            "numbers.pe_ratio": x.pe_ratio, **dict(zip(self._params, x.params, strict=True)),
        }  # fmt: skip
        for name, tensor in (("q_nope_by", x.q_nope), ("q_pe_by", x.q_pe)):
            arguments[f"{name}.token"], arguments[f"{name}.head"] = _outer_strides(tensor)
        for name, tensor in (("ckv_by", x.ckv), ("kpe_by", x.kpe), ("first_by", x.first_ckv)):
            arguments[f"{name}.page"], arguments[f"{name}.token"] = _outer_strides(tensor)
        values = tuple(arguments[name] for name in self._parameters)
        moving = ("q_nope", "q_pe", "ckv", "kpe", "out", "lse", "pages.indices")
        return self._kernel.hold((schedule.max_items, 1, 1), values, moving)


def _outer_strides(t: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if t is None else t.stride()[:2]


def _raw(t: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 travels to the kernel as bytes, so that chips without FP8 conversions take it too."""
    return t.view(torch.uint8) if t is not None and t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else t


IMPLEMENTATION = implementation(Bound, attend_latent, kernels=kernels, stack_budget=STACK_BUDGET)

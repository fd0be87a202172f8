"""The launch of `portable_kernel.py`, one kernel for decode and prefill on any architecture: parameters and grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.attention.config import SIZE, factor_alignment
from flashinfer.ops.attention.worklist import schedule_launch, schedules
from flashinfer.ops.attention.problem import NARROW, Inputs, Problem
from flashinfer.ops.attention.variants import find
from flashinfer.ops.formats import KV_FORMATS

# Bytes of stack a thread may use: what the compiler spills where three copies of the loop meet 255 registers. Triton
# 3.6 takes up to 80, 3.9 up to 96.
STACK_BUDGET = 96

# Least bytes of a token's neighbouring heads that programs with neighbouring numbers read (`near_heads`).
_NEAR_BYTES = 1024
# A token's heads all go side by side where they are at most so many bytes and the programs at most so many: then all
# programs run at a time, and requests that share a prefix read it together in any order.
_ALL_BYTES, _AT_A_TIME = 2048, 640

_TL = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def _padded(head_dim: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(head_dim))


def _compute_dtype(p: Problem) -> str:
    """The type of both dot operands: q's, or float16, which holds codes and nvfp4 exactly; chips convert FP8 to it."""
    if p.q_dtype.startswith("fp8"):
        return "fp16"
    # A rotated q is rounded to bfloat16 in any case.
    fits = p.q_dtype == "bf16" and p.kv_dtype in NARROW and p.pos_encoding != "ROPE_LLAMA"
    return "fp16" if fits else p.q_dtype


def _pointer(dtype: str, aligned: bool = True) -> str:
    name = "u8" if dtype in NARROW else dtype
    return f"*{name}:16" if aligned else f"*{name}"


def _stride(dtype: str, aligned: bool) -> str:
    """Of an aligned tensor, a multiple of 16 bytes, in elements: what lets rows be read 16 bytes at a time."""
    return f"i64:{16 // SIZE[dtype]}" if aligned else "i64"


def varied(p: Problem) -> tuple[dict, dict]:
    """Of a user's variant: the kernel's constants, and the types of what its functions are given."""
    variant = find(p.variant)
    constants = dict(
        LOGITS=variant and variant.logits, MASK=variant and variant.mask, SOFTMAX=p.softmax
    )  # fmt: skip
    params = {f"params.{name}": kind for name, kind in variant.params.items()} if variant else {}
    return constants if params else constants | {"params": None}, params


def _factor_types(p: Problem) -> dict:
    """Of factors and their strides. With aligned rows, as wide loads as a row of nvfp4 factors has."""
    types, wide = {}, KV_FORMATS[p.kv_dtype].factor == "fp32"
    for name, dim in (("k", p.head_dim_qk), ("v", p.head_dim_vo)):
        promise = f":{factor_alignment(dim)}" if p.aligned and not wide else ""
        types[f"factors.{name}"] = "*fp32" if wide else f"*u8{promise}"
        types.update((f"factors.{name}_{stride}", f"i64{promise}") for stride in ("page", "n", "head"))
    return types


def near_heads(p: Problem) -> int:
    """How many of a token's KV heads, neighbours in memory, programs with neighbouring numbers take.

    With all heads of a token, requests that share a prefix read it 2.7 times as slowly, since few of them are at a
    place at a time (256 requests, 32 heads, an H100); with one, rows of 128 bytes are read 1.4 times as slowly.
    """
    return 1 << max(0, (_NEAR_BYTES // (p.head_dim_qk * SIZE[p.kv_dtype])).bit_length() - 1)


def grid(p: Problem, items: int, kv_heads: int) -> tuple[int, int, int]:
    """A program for each pair of work item and KV head, as `item_and_head` reads it."""
    near = near_heads(p)
    if kv_heads * p.head_dim_qk * SIZE[p.kv_dtype] <= _ALL_BYTES and items * kv_heads <= _AT_A_TIME:
        # Programs without an item come last, so that no multiprocessor has two with one while another has none.
        return items * kv_heads, 1, 1
    return (items * near, kv_heads // near, 1) if kv_heads % near == 0 else (items * kv_heads, 1, 1)


def parameters(p: Problem, c) -> tuple[dict, dict]:
    """Types and constants of `attend_kernel`, of which kernels for one chip have most."""
    types = dict(
        q=_pointer(p.q_dtype, p.aligned), k=_pointer(p.kv_dtype, p.aligned), v=_pointer(p.kv_dtype, p.aligned),
        out=f"*{p.o_dtype}:16" if p.aligned else f"*{p.o_dtype}", lse="*fp32", partial_out="*fp32:16",
        partial_lse="*fp32:16", items="*i32:16", counts="*i32", arrivals="*i32", kv_indices="*i32", mask="*u8",
        mask_indptr="*i32", sinks="*fp32", qk_scale="*fp32", v_scale="*fp32", alibi_slopes="*fp32", num_kv_heads="i32",
    )  # fmt: skip
    for tensor, dtype, names in (("q", p.q_dtype, "nh"), ("k", p.kv_dtype, ("page", "n", "h")),
                                 ("v", p.kv_dtype, ("page", "n", "h")), ("o", p.o_dtype, "nh")):  # fmt: skip
        types.update((f"{tensor}_stride_{name}", _stride(dtype, p.aligned)) for name in names)
    types.update(sm_scale="fp32", out_scale="fp32", soft_cap="fp32", window_left="i32", rope_scale="fp32",
                 rope_log2_theta="fp32")  # fmt: skip
    functions, params = varied(p)
    known = KV_FORMATS.get(p.kv_dtype)
    if known:
        types.update(_factor_types(p))
    else:
        functions["factors"] = None
    types.update(params)
    rope = p.pos_encoding == "ROPE_LLAMA"
    constants = dict(
        # RoPE multiplies halves of a head, and a product sums 16 elements at least.
        GROUP=p.group, PAGE_SIZE=p.page_size, D_QK=p.head_dim_qk, D_QK_PAD=_padded(p.head_dim_qk, 32 if rope else 16),
        D_VO=p.head_dim_vo, D_VO_PAD=_padded(p.head_dim_vo), BLOCK_M=c.block_m, BLOCK_N=c.block_n, NEAR=near_heads(p),
        Q_DTYPE=p.q_dtype, KV_DTYPE=known.element if known else p.kv_dtype, WIDTH=known.width if known else 1,
        FOLDED=known is not None and known.factor == "fp32", INTERLEAVED=p.interleaved, NATIVE_FP8=c.native_fp8,
        COMPUTE=_TL[_compute_dtype(p)],
        CAUSAL=p.mask == "causal", WINDOW=p.window,
        CUSTOM=p.mask == "custom", SOFT_CAP=p.soft_cap, ALIBI=p.pos_encoding == "ALIBI",
        ROPE=rope, SINKS=p.sinks, HEAD_SCALES=p.head_scales, LSE=p.lse, SPLIT=p.split,
        COMBINE_SPLITS=c.combine_splits, COMBINE_ROWS=c.combine_rows, **functions,
    )  # fmt: skip
    return types, constants


def build_attend(p: Problem, c) -> Build:
    # Here, since Triton parses what is imported: a twentieth of the first decode, which has a kernel of its own.
    from flashinfer.ops.attention.portable_kernel import attend_kernel

    return Build(attend_kernel, *parameters(p, c), num_warps=c.num_warps, num_stages=c.num_stages)


# In the order of Inputs.addresses().
MOVING = ("q", "k", "v", "out", "lse", "kv_indices")

attend = Launcher("attend", build_attend)


def kernels(p: Problem, c):
    """What runs for a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    yield attend, p, c
    yield from schedules(p)


def _raw(x: torch.Tensor) -> torch.Tensor:
    """FP8 travels to the kernel as bytes, so that chips without FP8 conversions take it too."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else x


class Bound:
    """A kernel with the parameters of `attend_kernel`, or some of them, on one device, looked up once."""

    def __init__(self, launcher: Launcher, p: Problem, c, device: torch.device):
        self._paged = bool(p.page_size)
        self._grid = partial(grid, p)
        self._has_fp8 = "fp8" in p.q_dtype + p.kv_dtype
        self._parameters = tuple(launcher.build(p, c).types)
        self._params = tuple(varied(p)[1])
        self._kernel = launcher.prepare(p, c, device)

    def hold(self, x: Inputs) -> Callable[..., None]:
        """The launch of `x`, kept ready for other tensors in the places of Inputs.addresses(): it takes theirs.

        Those keep their shapes, strides and dtypes; everything else is as in `x`.
        """
        schedule, table, scalars, q, k, v, out = x.schedule, x.table, x.scalars, x.q, x.k, x.v, x.out
        if self._has_fp8:
            q, k, v = _raw(q), _raw(k), _raw(v)
        kv_heads = k.shape[-2]
        k_page, k_row, k_head = k.stride()[:3] if self._paged else (0, *k.stride()[:2])
        v_page, v_row, v_head = v.stride()[:3] if self._paged else (0, *v.stride()[:2])
        arguments = dict(
            q=q, k=k, v=v, out=out, lse=x.lse, partial_out=schedule.partial_out,
            partial_lse=schedule.partial_lse, items=schedule.items, counts=schedule.counts,
            arrivals=schedule.arrivals, kv_indices=table.kv_indices, mask=table.mask, mask_indptr=table.mask_indptr,
            sinks=x.sinks, qk_scale=x.qk_scale, v_scale=x.v_scale, alibi_slopes=x.alibi_slopes, num_kv_heads=kv_heads,
            q_stride_n=q.stride(0), q_stride_h=q.stride(1), k_stride_page=k_page, k_stride_n=k_row, k_stride_h=k_head,
            v_stride_page=v_page, v_stride_n=v_row, v_stride_h=v_head, o_stride_n=out.stride(0),
            o_stride_h=out.stride(1), sm_scale=scalars.sm_scale, out_scale=scalars.out_scale,
            soft_cap=scalars.soft_cap, window_left=scalars.window_left, rope_scale=scalars.rope_scale,
            rope_log2_theta=math.log2(scalars.rope_theta),
        )  # fmt: skip
        for name, factors in (("k", x.k_factors), ("v", x.v_factors)):
            if factors is not None:
                strides = zip(("page", "n", "head"), factors.stride())
                arguments[f"factors.{name}"] = _raw(factors)
                arguments.update((f"factors.{name}_{stride}", n) for stride, n in strides)
        arguments.update(zip(self._params, x.params, strict=True))
        values = tuple(arguments[name] for name in self._parameters)
        return self._kernel.hold(self._grid(schedule.max_items, kv_heads), values, MOVING)


def bind(p: Problem, c, device: torch.device) -> Bound:
    """What every GPU variant of attention offers: an object whose `hold(x)` gives a launch ready to be repeated."""
    return Bound(attend, p, c, device)


def run(p: Problem, c, x: Inputs) -> None:
    bind(p, c, x.q.device).hold(x)(*x.addresses())


IMPLEMENTATION = Implementation(run, (attend, schedule_launch), kernels=kernels, bind=bind, stack_budget=STACK_BUDGET)

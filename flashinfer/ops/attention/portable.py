"""The launch of `portable_kernel.py`, one kernel for decode and prefill on any architecture: parameters and grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.attention.config import SIZE, factor_alignment
from flashinfer.ops.attention.worklist import implementation
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
    types = {"q": _pointer(p.q_dtype, p.aligned)} | dict.fromkeys("kv", _pointer(p.kv_dtype, p.aligned))
    types |= {"out": f"*{p.o_dtype}:16" if p.aligned else f"*{p.o_dtype}", "lse": "*fp32", "partial.out": "*fp32:16"}
    types |= {"partial.lse": "*fp32:16", "work.items": "*i32:16", "work.counts": "*i32", "work.arrivals": "*i32"}
    types |= {"kv_indices": "*i32", "mask.bits": "*u8", "mask.indptr": "*i32"}
    types |= {f"heads.{name}": "*fp32" for name in ("sinks", "qk_scale", "v_scale", "slopes")} | {"num_kv_heads": "i32"}
    for tensor, dtype, axes in (("q", p.q_dtype, ()), ("k", p.kv_dtype, ("page",)), ("v", p.kv_dtype, ("page",)),
                                ("out", p.o_dtype, ())):  # fmt: skip
        types |= {f"{tensor}_by.{axis}": _stride(dtype, p.aligned) for axis in (*axes, "token", "head")}
    types |= dict.fromkeys(("numbers.sm_scale", "numbers.out_scale", "numbers.soft_cap"), "fp32")
    types |= {"numbers.window_left": "i32", "rope.scale": "fp32", "rope.log2_theta": "fp32"}
    functions, params = varied(p)
    known = KV_FORMATS.get(p.kv_dtype)
    if known:
        types.update(_factor_types(p))
    else:
        functions["factors"] = None
    types.update(params)
    rope = p.pos_encoding == "ROPE_LLAMA"
    constants = {
        "partial.SPLIT": p.split, "partial.MANY": p.many_splits, "partial.SPLITS": c.combine_splits,
        "partial.ROWS": c.combine_rows,
        "mask.CAUSAL": p.mask == "causal", "mask.WINDOW": p.window, "mask.CUSTOM": p.mask == "custom",
        "heads.SINKS": p.sinks, "heads.SCALES": p.head_scales, "heads.ALIBI": p.pos_encoding == "ALIBI",
        "numbers.SOFT_CAP": p.soft_cap, "rope.ON": rope, "dims.PAGE_SIZE": p.page_size, "dims.D_QK": p.head_dim_qk,
        # RoPE multiplies halves of a head, and a product sums 16 elements at least.
        "dims.D_QK_PAD": power_of_two(p.head_dim_qk, 32 if rope else 16), "dims.D_VO": p.head_dim_vo,
        "dims.D_VO_PAD": power_of_two(p.head_dim_vo, 16), "kinds.Q": p.q_dtype,
        "kinds.KV": known.element if known else p.kv_dtype, "kinds.WIDTH": known.width if known else 1,
        "kinds.FOLDED": known is not None and known.factor == "fp32", "kinds.INTERLEAVED": p.interleaved,
        "kinds.NATIVE_FP8": c.native_fp8, "kinds.COMPUTE": _TL[_compute_dtype(p)], "GROUP": p.group,
        "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "NEAR": near_heads(p), "LSE": p.lse, **functions,
    }  # fmt: skip
    return types, constants


def build_attend(p: Problem, c) -> Build:
    # Here, since Triton parses what is imported: a twentieth of the first decode, which has a kernel of its own.
    from flashinfer.ops.attention.portable_kernel import attend_kernel

    return Build(attend_kernel, *parameters(p, c), num_warps=c.num_warps, num_stages=c.num_stages)


# In the order of Inputs.addresses(), less what only kernels without a work list read.
MOVING = ("q", "k", "v", "out", "lse", "kv_indices")

attend = Launcher("attend", build_attend)


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
        arguments = {
            "q": q, "k": k, "v": v, "out": out, "lse": x.lse, "partial.out": schedule.partial_out,
            "partial.lse": schedule.partial_lse, **schedule.arguments(table), "kv_indices": table.kv_indices,
            "mask.bits": table.mask,
            "mask.indptr": table.mask_indptr, "heads.sinks": x.sinks, "heads.qk_scale": x.qk_scale,
            "heads.v_scale": x.v_scale, "heads.slopes": x.alibi_slopes, "num_kv_heads": kv_heads,
            "q_by.token": q.stride(0), "q_by.head": q.stride(1), "k_by.page": k_page, "k_by.token": k_row,
            "k_by.head": k_head, "v_by.page": v_page, "v_by.token": v_row, "v_by.head": v_head,
            "out_by.token": out.stride(0), "out_by.head": out.stride(1), "numbers.sm_scale": scalars.sm_scale,
            "numbers.out_scale": scalars.out_scale, "numbers.soft_cap": scalars.soft_cap,
            "numbers.window_left": scalars.window_left, "rope.scale": scalars.rope_scale,
            "rope.log2_theta": math.log2(scalars.rope_theta),
        }  # fmt: skip
        for name, factors in (("k", x.k_factors), ("v", x.v_factors)):
            if factors is not None:
                strides = zip(("page", "n", "head"), factors.stride())
                arguments[f"factors.{name}"] = _raw(factors)
                arguments.update((f"factors.{name}_{stride}", n) for stride, n in strides)
        arguments.update(zip(self._params, x.params, strict=True))
        values = tuple(arguments[name] for name in self._parameters)
        moving = (*MOVING, "work.kv_lens") if schedule.requests else MOVING
        return self._kernel.hold(self._grid(schedule.max_items, kv_heads), values, moving)


IMPLEMENTATION = implementation(partial(Bound, attend), attend, stack_budget=STACK_BUDGET)

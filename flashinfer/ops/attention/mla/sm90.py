"""Latent attention on Hopper, in Gluon: what the kernel is compiled for, and how tensors reach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.attention._device.sm90_widen import FORMATS
from flashinfer.ops.attention.mla.config import Sm90Config
from flashinfer.ops.attention.mla.problem import Inputs, Problem, matrix_of
from flashinfer.ops.attention.mla.sm90_combine import combine_latent_kernel
from flashinfer.ops.attention.mla.sm90_kernel import attend_latent_sm90_kernel
from flashinfer.ops.attention.mla.sm90_settings import KEYS, PART, REST
from flashinfer.ops.attention.problem import folds
from flashinfer.ops.attention.worklist import implementation, latent_schedules


def _boxes(p: Problem) -> dict[str, tuple[int, int]]:
    """What one copy brings, for each tensor map: rows of a page, and a part of a latent row, or a positional row."""
    rows = min(p.page_size, KEYS.value)
    boxes = {"ckv_map": (rows, PART.value)}
    if p.head_dim_kpe:
        boxes["kpe_map"] = (rows, REST.value)
    return boxes


def build(p: Problem, c: Sm90Config) -> Build:
    # Pointers where rows are gathered. Without positional rows their parameter is a pointer that no load uses. FP8
    # queries and rows are words of four elements.
    q, keys = (f"*{'i32' if dtype in FORMATS else dtype}:16" for dtype in (p.q_dtype, p.kv_dtype))
    maps = dict(ckv_map=keys, kpe_map=keys)
    if not c.gather:
        maps.update((name, tensordesc(p.kv_dtype, box)) for name, box in _boxes(p).items())
    step = ("i64:4" if p.kv_dtype in FORMATS else "i64:8") if c.gather else "i32"
    q_step = "i64:4" if p.q_dtype in FORMATS else "i64:8"
    types = {"q_nope": q, "q_pe": q, **maps, "out": f"*{p.o_dtype}:16", "lse": "*fp32", "partial.out": "*fp32:16"}
    types |= {"partial.lse": "*fp32:16", "work.items": "*i32:16", "work.counts": "*i32", "kv_indices": "*i32"}
    types |= dict.fromkeys(("call.sinks", "call.qk_scale", "call.v_scale"), "*fp32")
    types |= dict.fromkeys(("q_nope_by.token", "q_nope_by.head", "q_pe_by.token", "q_pe_by.head"), q_step)
    types |= dict.fromkeys(("ckv_by.page", "ckv_by.step", "kpe_by.page", "kpe_by.step"), step)
    types |= dict.fromkeys(("out_by.token", "out_by.head"), "i64:8")
    types |= dict.fromkeys(("numbers.sm_scale", "numbers.out_scale", "numbers.pe_ratio"), "fp32")
    constants = {
        "call.SINKS": p.sinks, "call.SCALES": p.scales, "call.LSE": p.lse, "call.BASE_E": p.base_e,
        "keys.PAGE_SIZE": p.page_size, "keys.SPARSE": p.sparse, "keys.GATHER": c.gather,
        "keys.FP8": FORMATS.get(p.kv_dtype, ""), "HEADS": p.num_heads, "POSITIONAL": p.head_dim_kpe > 0,
        "Q_FP8": FORMATS.get(p.q_dtype, ""), "CAUSAL": p.mask == "causal", "TRANSFORM": c.transform,
        "REGISTERS": c.registers, "COPY_REGISTERS": c.copy_registers,
    }  # fmt: skip
    return Build(attend_latent_sm90_kernel, types, constants, num_warps=4)


def build_combine(p: Problem, c: Sm90Config) -> Build:
    types = dict(
        out=f"*{p.o_dtype}:16", lse="*fp32", partial_out="*fp32:16", partial_lse="*fp32:16", items="*i32:16",
        counts="*i32", sinks="*fp32", o_stride_n="i64:8", o_stride_h="i64:8",
    )  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, D=p.head_dim_ckv, BLOCK_M=c.block_m, SPLITS=c.combine_splits,
        ROWS=c.combine_rows, PARTS=c.combine_parts, SINKS=p.sinks, LSE=p.lse, BASE_E=p.base_e,
    )  # fmt: skip
    # With more registers fewer programs have room on a multiprocessor than `combine_programs`.
    return Build(combine_latent_kernel, types, constants, num_warps=2, maxnreg=65536 // (64 * c.combine_programs))


attend_latent_sm90 = Launcher("attend_latent_sm90", build)
combine_latent = Launcher("combine_latent", build_combine)


def kernels(p: Problem, c: Sm90Config):
    """What runs for a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    yield attend_latent_sm90, p, c
    if p.split:
        yield combine_latent, p, c
    yield from latent_schedules(p)


class Bound:
    """The kernel of a problem on one device, looked up once."""

    def __init__(self, p: Problem, c: Sm90Config, device: torch.device):
        self._p, self._c, self._device = p, c, device
        self._sms = target_of(device).sms
        attend_latent_sm90.prepare(p, c, device)
        if p.split:
            combine_latent.prepare(p, c, device)

    def hold(self, x: Inputs) -> Callable[..., None]:
        """The launch of `x`, kept ready for other tensors in the places of Inputs.addresses(): it takes theirs.

        Those keep their shapes, strides and dtypes; everything else is as in `x`.
        """
        p, c, s = self._p, self._c, x.schedule
        x = replace(x, q_nope=_raw(x.q_nope), q_pe=_raw(x.q_pe), ckv=_raw(x.ckv), kpe=_raw(x.kpe))
        if not folds(x.sm_scale) or x.pe_ratio != 1:
            c = replace(c, transform=True)
        maps, steps = _where(p, c, x)
        values = (
            x.q_nope, x.q_pe, maps["ckv_map"], maps.get("kpe_map"), x.out, x.lse, s.partial_out, s.partial_lse,
            s.items, s.counts, x.table.kv_indices, x.sinks, x.qk_scale, x.v_scale,
            *x.q_nope.stride()[:2], *((0, 0) if x.q_pe is None else x.q_pe.stride()[:2]), *steps,
            *x.out.stride()[:2], x.sm_scale, x.out_scale, x.pe_ratio,
        )  # fmt: skip
        kernel = attend_latent_sm90.prepare(p, c, self._device)
        grid = (min(self._sms * c.programs_per_sm, s.max_items), 1, 1)
        attend = kernel.hold(grid, values, ("q_nope", "q_pe", "ckv_map", "kpe_map", "out", "lse", "kv_indices"))
        if not p.split or not s.max_slots:
            return attend
        values = (
            x.out, x.lse, s.partial_out, s.partial_lse, s.items, s.counts, x.sinks, *x.out.stride()[:2],
        )  # fmt: skip
        grid = (min(s.max_slots * c.block_m, self._sms * c.combine_programs), 1, 1)
        combine = combine_latent.prepare(p, self._c, self._device).hold(grid, values, ("out", "lse"))

        def launch(q_nope, q_pe, ckv, kpe, out, lse, kv_indices):
            attend(q_nope, q_pe, ckv, kpe, out, lse, kv_indices)
            combine(out, lse)

        launch.kept = [*attend.kept, *combine.kept]
        return launch


def _where(p: Problem, c: Sm90Config, x: Inputs) -> tuple[dict, list[int]]:
    """What finds keys: the caches or their maps, by parameter, and the steps of latent, then of positional rows."""
    caches = {"ckv_map": x.ckv, "kpe_map": x.kpe}
    if c.gather:
        return caches, [step for t in caches.values() for step in ((0, 0) if t is None else t.stride()[:2])]
    matrices = {name: matrix_of(t) for name, t in caches.items() if t is not None}
    maps = {name: TensorMap(matrices[name].rows, box) for name, box in _boxes(p).items()}
    return maps, [s for name in caches for s in ((matrices[name].page_rows, 0) if name in matrices else (0, 0))]


def _raw(t: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 as words of four elements, anything else as it is."""
    return t.view(torch.int32) if t is not None and t.itemsize == 1 else t


IMPLEMENTATION = implementation(Bound, attend_latent_sm90, combine_latent, kernels=kernels)

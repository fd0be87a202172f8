"""Prefill on Hopper, in Gluon: what the kernel is compiled for, and how tensors reach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.sizes import power_of_two
from flashinfer._core.target import target_of
from flashinfer.ops.attention._device.sm90_widen import FORMATS
from flashinfer.ops.attention.config import SIZE
from flashinfer.ops.attention.portable import varied
from flashinfer.ops.attention.prefill.config import Sm90Config
from flashinfer.ops.attention.prefill.sm90_kernel import attend_sm90_kernel
from flashinfer.ops.attention.problem import Inputs, Problem, folds
from flashinfer.ops.attention.worklist import implementation
from flashinfer.ops.kv_layout import Matrix, as_matrix


def _parts(p: Problem) -> tuple[int, int]:
    """head_dim_qk as a power of two and the rest, since a tile's sides are powers of two."""
    low = 1 << (p.head_dim_qk.bit_length() - 1)
    return low, p.head_dim_qk - low


def _padded(columns: int) -> int:
    """Columns of the tile for so many: wgmma multiplies 16 at least."""
    return power_of_two(columns, 16) if columns else 0


def _boxes(p: Problem, c: Sm90Config) -> dict[str, tuple[int, ...]]:
    """What one copy brings, for each tensor map: rows of a page, or of a whole tile."""
    lead = (1,) if c.by_head else ()
    rows = min(p.page_size or c.block_n, c.block_n)
    low, rest = _parts(p)
    columns = {"k_map": low, "k_rest_map": _padded(rest), "v_map": _padded(p.head_dim_vo)}
    return {name: (*lead, rows, count) for name, count in columns.items() if count}


def build(p: Problem, c: Sm90Config) -> Build:
    # Pointers where rows are gathered. Without a second part of K its parameter is a pointer that no load uses.
    maps = dict(k_map=f"*{p.kv_dtype}:16", k_rest_map="*u8", v_map=f"*{p.kv_dtype}:16")
    if not c.gather:
        maps.update((name, tensordesc(p.kv_dtype, box)) for name, box in _boxes(p, c).items())
    step, head = ("i64:16" if c.wide else "i32:16", "i64:8") if c.gather else ("i32", "i32")
    q_step = f"i64:{16 // SIZE[p.q_dtype]}"
    types = {"q": f"*{p.q_dtype}:16", **maps, "out": f"*{p.o_dtype}:16", "lse": "*fp32", "partial.out": "*fp32:16"}
    types |= {"partial.lse": "*fp32:16", "work.items": "*i32:16", "work.counts": "*i32", "work.arrivals": "*i32"}
    types |= {"kv_indices": "*i32", "mask.bits": "*u8", "mask.indptr": "*i32"}
    types |= {f"heads.{name}": "*fp32" for name in ("sinks", "qk_scale", "v_scale", "slopes")} | {"num_kv_heads": "i32"}
    types |= {"q_by.token": q_step, "q_by.head": q_step, "out_by.token": "i64:8", "out_by.head": "i64:8"}
    types |= {f"{x}_by.{name}": kind for x in "kv" for name, kind in (("page", step), ("head", head), ("step", step))}
    types |= dict.fromkeys(("numbers.sm_scale", "numbers.out_scale", "numbers.soft_cap"), "fp32")
    types |= {"numbers.window_left": "i32"}
    functions, params = varied(p)
    types.update(params)
    low, rest = _parts(p)
    constants = {
        "mask.CAUSAL": p.mask == "causal", "mask.WINDOW": p.window, "mask.CUSTOM": p.mask == "custom",
        "heads.SINKS": p.sinks, "heads.SCALES": p.head_scales, "heads.ALIBI": p.pos_encoding == "ALIBI",
        "numbers.SOFT_CAP": p.soft_cap, "dims.PAGE_SIZE": p.page_size, "dims.D": low, "dims.REST": rest,
        "dims.REST_PAD": _padded(rest), "dims.VO": p.head_dim_vo, "dims.VO_PAD": _padded(p.head_dim_vo),
        "tiles.M": c.block_m, "tiles.N": c.block_n, "tiles.STAGES": c.stages, "tiles.STAGED": c.staged,
        "tiles.TURNS": c.turns, "tiles.LATE": c.late, "tiles.BY_FMA": c.by_fma,
        "warps.REGISTERS": c.registers, "warps.COPY_REGISTERS": c.copy_registers, "warps.TRANSPOSE": c.transpose_warps,
        "warps.COPIERS": c.copiers,
        "warps.WIDEN": FORMATS[p.kv_dtype] if c.lead else "", "warps.LEAD": c.lead, "GROUP": p.group,
        "SCALE_FIRST": c.transform, "LSE": p.lse, "GATHER": c.gather, "BY_HEAD": c.by_head, **functions,
    }  # fmt: skip
    return Build(attend_sm90_kernel, types, constants, num_warps=4, maxnreg=c.maxnreg or None)


attend_sm90 = Launcher("attend_sm90", build)


class Bound:
    """The kernel on one device, looked up once."""

    def __init__(self, p: Problem, c: Sm90Config, device: torch.device):
        self._p, self._c, self._device = p, c, device
        self._blocks = target_of(device).sms * c.programs_per_sm
        attend_sm90.prepare(p, c, device)

    def hold(self, x: Inputs) -> Callable[..., None]:
        """The launch of `x`, kept ready for other tensors in the places of Inputs.addresses(): it takes theirs."""
        p, c, s, table, scalars = self._p, self._c, x.schedule, x.table, x.scalars
        if not folds(scalars.sm_scale):
            c = replace(c, transform=True)
        maps, steps = _where(p, c, x)
        c = replace(c, wide=c.gather and max(steps[0], steps[2], steps[3], steps[5]) >= 1 << 31)
        kv_heads = x.k.shape[-2]
        values = (
            x.q, maps["k_map"], maps.get("k_rest_map"), maps["v_map"], x.out, x.lse, s.partial_out, s.partial_lse,
            s.items, s.counts, s.arrivals, table.kv_indices, table.mask, table.mask_indptr, x.sinks, x.qk_scale,
            x.v_scale, x.alibi_slopes, kv_heads, *x.q.stride()[:2], *x.out.stride()[:2], *steps,
            scalars.sm_scale, scalars.out_scale, scalars.soft_cap, scalars.window_left, *x.params,
        )  # fmt: skip
        kernel = attend_sm90.prepare(p, c, self._device)
        grid = (min(self._blocks, s.max_items * kv_heads), 1, 1)
        launch = kernel.hold(grid, values, ("q", *maps, "out", "lse", "kv_indices"))
        if "k_rest_map" not in maps:
            return launch

        def launch_both(q, k, *others):
            launch(q, k, k, *others)

        launch_both.kept = launch.kept
        return launch_both


def _where(p: Problem, c: Sm90Config, x: Inputs) -> tuple[dict, list[int]]:
    """What finds keys and values: the tensors or their maps, by parameter, and the steps of K, then of V."""
    if c.gather:
        steps = []
        for t in (x.k, x.v):
            *page, row, head, _ = t.stride()
            steps += [page[0] * t.element_size() if page else 0, head, row * t.element_size()]
        return {"k_map": x.k, "v_map": x.v}, steps
    matrices = [as_matrix(t, bool(p.page_size)) for t in (x.k, x.v)]
    if c.by_head:
        matrices = [_by_head(m, p.head_dim_qk) for m in matrices]
    k, v = matrices
    maps = {name: TensorMap((v if name == "v_map" else k).rows, box) for name, box in _boxes(p, c).items()}
    return maps, [step for m in matrices for step in (m.page_rows, m.head_rows, m.head_cols)]


def _by_head(m: Matrix, head_dim: int) -> Matrix:
    """The matrix with an axis of heads, [heads, rows, head_dim]; of 1 where heads are rows."""
    count, columns = m.rows.shape
    pitch = m.rows.stride(0)
    step = m.head_cols or pitch
    heads = 1 + (columns - head_dim) // step
    return replace(m, rows=m.rows.as_strided((heads, count, head_dim), (step, pitch, 1)), head_cols=int(heads > 1))


IMPLEMENTATION = implementation(Bound, attend_sm90)

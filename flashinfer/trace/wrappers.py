"""Templates of the `run` of attention's wrappers. The tables that their plan has read are no arguments of it."""

from __future__ import annotations

from typing import Any

from flashinfer.trace.attached import attach
from flashinfer.trace.template import Const, Scalar, Tensor, TraceTemplate, Var

_HEADS = {"num_qo_heads": Const(abbrev="h"), "num_kv_heads": Const(abbrev="kv"), "head_dim": Const(abbrev="d")}
_PAGES = {"num_pages": Var(), "page_size": Const(abbrev="ps")}
_INDPTR = {"len_indptr": Var("batch_size + 1")}
_INDICES = {"num_kv_indices": Var("pages of all requests")}
_SCALE = {"sm_scale": Scalar(description="1 / sqrt(head_dim) by default.")}


def _table(*names: str) -> dict[str, Tensor]:
    axes = {"kv_indices": "num_kv_indices"}
    return {
        name: Tensor([axes.get(name, "len_indptr")], dtype="int32", optional=True, description="Of the plan.")
        for name in names
    }


def _results(*axes: str) -> dict[str, Tensor | Scalar]:
    q = "q_nope" if "head_dim_ckv" in axes else "q"
    return {"output": Tensor([*axes], dtype_from=q), "lse": Tensor([*axes[:2]], dtype="float32", description="Base 2.")}


# Axes of a page by layout; a page of one token may have no axis of its own.
_ORDER = {"NHD": ("page_size", "num_kv_heads"), "HND": ("num_kv_heads", "page_size"), "": ("num_kv_heads",)}


def _paged(layout: str, stage: str, tokens: str, *tables: str) -> TraceTemplate:
    cache = ["num_pages", *_ORDER[layout], "head_dim"]
    pages = _PAGES if layout else {**_PAGES, "page_size": Const(abbrev="ps", value=1)}
    caches = {
        name: Tensor(cache, param="paged_kv_cache", tuple_idx=i) for i, name in enumerate(("k_cache", "v_cache"))
    }
    rows = tokens, "num_qo_heads", "head_dim"
    return TraceTemplate(
        "gqa_paged", {tokens: Var(), **_HEADS, **pages, **_INDPTR, **_INDICES},
        {"q": Tensor([*rows]), **caches, **_table(*tables), **_SCALE}, _results(*rows),
        name_prefix=f"gqa_paged_{stage}", tags=[f"stage:{stage}"],
        description=f"Grouped-query attention over a paged KV cache, {stage}.",
    )  # fmt: skip


def _ragged(layout: str) -> TraceTemplate:
    rows = "total_q", "num_qo_heads", "head_dim"
    keys = ["num_kv_heads", "total_kv"] if layout == "HND" else ["total_kv", "num_kv_heads"]
    given = {"q": Tensor([*rows]), **{name: Tensor([*keys, "head_dim"]) for name in ("k", "v")}}
    return TraceTemplate(
        "gqa_ragged", {**_HEADS, **_INDPTR, "total_q": Var(), "total_kv": Var()},
        given | _table("qo_indptr", "kv_indptr") | _SCALE, _results(*rows), tags=["stage:prefill"],
        description="Grouped-query attention over ragged keys and values.",
    )  # fmt: skip


def _latent(pairs: bool) -> TraceTemplate:
    """pairs : queries, and the cache, are one argument of two tensors each."""
    rows, pages = ["batch_size", "num_qo_heads"], ["num_pages", "page_size"]
    given = {}
    for name, axes, pair in (("q_nope q_pe", rows, "query"), ("ckv_cache kpe_cache", pages, "kv_cache")):
        for i, (each, width) in enumerate(zip(name.split(), ("head_dim_ckv", "head_dim_kpe"), strict=True)):
            where: dict[str, Any] = {"param": pair, "tuple_idx": i} if pairs else {}
            given[each] = Tensor([*axes, width], **where)
    widths = {"head_dim_ckv": Const(abbrev="ckv"), "head_dim_kpe": Const(abbrev="kpe")}
    axes = {"batch_size": Var(), "num_qo_heads": Const(abbrev="h"), **widths}
    return TraceTemplate(
        "mla_paged", {**axes, "page_size": Const(abbrev="ps"), "num_pages": Var(), **_INDPTR, **_INDICES},
        given | _table("kv_indptr", "kv_indices") | _SCALE, _results(*rows, "head_dim_ckv"),
        name_prefix="mla_paged_decode", tags=["stage:decode"],
        description="Multi-head latent attention over a paged cache, with absorbed projections.",
    )  # fmt: skip


RUNS: dict[str, dict[Any, TraceTemplate]] = {
    "BatchDecodeWithPagedKVCacheWrapper": {
        layout: _paged(layout, "decode", "batch_size", "kv_indptr", "kv_indices") for layout in _ORDER
    },
    "BatchPrefillWithPagedKVCacheWrapper": {
        layout: _paged(layout, "prefill", "total_q", "qo_indptr", "kv_indptr", "kv_indices") for layout in _ORDER
    },
    "BatchPrefillWithRaggedKVCacheWrapper": {layout: _ragged(layout) for layout in ("NHD", "HND")},
    "BatchMLAPagedAttentionWrapper": {pairs: _latent(pairs) for pairs in (False, True)},
}


def describe_run(module: str, wrapper: Any) -> None:
    """Give the `run` of a wrapper its `fi_trace`. The layout is that of the object, and NHD without one."""
    templates = RUNS[wrapper.__name__]

    def of_call(self=None, query=None, paged_kv_cache=None, **_):
        if True in templates:
            return templates[query is not None]
        pair = isinstance(paged_kv_cache, (tuple, list))
        axes = 0 if paged_kv_cache is None else paged_kv_cache[0].dim() if pair else paged_kv_cache.dim() - 1
        return templates["" if axes == 3 else getattr(self, "_kv_layout", "NHD")]

    attach(wrapper.run, of_call, f"{module}.{wrapper.__name__}.run")

"""Latent attention of a batch: plan() once per step, run() once per layer."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flashinfer._core.checks import NoPlan, dtype_name, present, require, require_fit, require_tensor
from flashinfer._core.literals import Backend
from flashinfer._core.tracing import is_traced
from flashinfer._direct.given import as_rows, flag, pair, real, whole
from flashinfer.compat.wrappers import LatentNames
from flashinfer.ops.attention import traced
from flashinfer.ops.attention.direct import run_latent
from flashinfer.ops.attention.mla.operands import Factors, attend
from flashinfer.ops.attention.mla.wrapper import LatentWrapper, latent_blocks
from flashinfer.ops.attention.options import PlanOptions, default_o_dtype, latent_options, plan_options
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.attention.variants import AttentionVariant

# Arguments of plan() that state properties of later calls, and what each may be.
_ANNOUNCED = (
    ("query_layout", (None, "packed", "split")),
    ("kv_cache_layout", (None, "NHD", "HND", "packed", "split")),
    ("lse_mode", ("none", "base2", "basee")),
    ("output_scale", ("none", "per-tensor")),
    ("scale_mode", ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")),
)
# What is absorbed into the latent queries of DeepSeek's models: 128 elements a head, which sm_scale counts.
_UNABSORBED = 128


class BatchMLAPagedAttentionWrapper(LatentNames, LatentWrapper):
    """Latent attention (DeepSeek-V2, 2024) of a batch over a paged cache: plan() once per step, run() once per layer.

    Queries have absorbed the up-projection of keys, outputs are latent: out = softmax(sm_scale (q_nope ckv^T +
    q_pe kpe^T)) ckv, with one ckv and kpe row per token for all heads.

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph, variant
        As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    qo_indptr, kv_indptr : int32 Tensor [max_batch + 1], optional
    kv_indices : int32 Tensor [max pages], optional
    kv_len_arr : int32 Tensor [max_batch], optional
        The buffers, with use_cuda_graph.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> qo_indptr, kv_indptr, lens = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 5]), torch.tensor([20, 48])
    >>> wrapper.plan(qo_indptr, kv_indptr, torch.arange(5), lens, 16, 512, 64, 16, False, 192**-0.5, torch.float16)
    >>> ckv, kpe = torch.randn(5, 16, 512).half(), torch.randn(5, 16, 64).half()
    >>> wrapper.run(torch.randn(2, 16, 512).half(), torch.randn(2, 16, 64).half(), ckv, kpe).shape
    torch.Size([2, 16, 512])
    """

    _renames = {"num_qo_heads": "num_heads", "head_dim_vo": "head_dim_ckv", "head_dim_qk": "head_dim_kpe",
                "o_data_type": "output_dtype"}  # fmt: skip

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: Backend = "auto",
        *,
        variant: AttentionVariant | None = None,
    ):
        fixed = (qo_indptr, kv_indptr, kv_len_arr, kv_indices) if flag("use_cuda_graph", use_cuda_graph) else None
        super().__init__(float_workspace_buffer, backend, fixed, variant)
        self._lse_base_e = False

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata=None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Describe a batch; every later run() uses it.

        The tables are either the first four arguments, or `block_tables` and `seq_lens`.

        Parameters
        ----------
        qo_indptr : int Tensor [batch_size + 1]
            Query rows of each request; on the host or the device, as are the next three.
        kv_indptr : int Tensor [batch_size + 1]
            Where each request's entries begin in `kv_indices`.
        kv_indices : int Tensor [pages used]
            Page ids. Contiguous int32 on the device, they are kept by reference, and run() reads them there.
        kv_len_arr : int Tensor [batch_size]
            Tokens of each request.
        num_heads : int
            Query heads, 1 to 128.
        head_dim_ckv : int
            Elements of a latent, 16 to 512.
        head_dim_kpe : int
            Elements of a positional key, 8 to 128; 0 for none.
        page_size : int
            Tokens per page, from 1 up.
        causal : bool
            Whether the queries of a request, which stand at its last positions, see no later key. Default False.
        sm_scale : float
            Factor of the logits: that of the model before absorption. May be left to run()'s bmm1_scale.
        q_data_type, kv_data_type : dtype or its name
            Default float16, and q's. kv may be float8 under any q.
        use_profiler : bool
            Refused if True: there is no profiler.
        metadata : optional
            Refused: give its tables by name.
        cum_seq_lens_q : int32 Tensor [batch_size + 1], optional
            Query rows of each request, with block_tables; without it, every request has max_q_len (1) queries.
        block_tables : int32 Tensor [batch_size, max_pages], optional
            Page ids of each request, on the device; read there at every run.
        seq_lens : int32 Tensor [batch_size], optional
            Tokens of each request, on the device, kept by reference: they may change only with a new plan().
        max_q_len : int, optional
            The longest query, where the caller knows it: with query offsets on a GPU it lets the tile fit.
        query_layout : str, optional
            "packed" or "split"; run() takes both with each.
        kv_cache_layout : str, optional
            "NHD" or "HND": where a kv_cache of four axes has its axis of 1. By default, with "packed" and with "split"
            its shape shows it.
        lse_mode : str
            "none", "base2" or "basee": the base in which run() gives log-sum-exps, base 2 for "none".
        output_dtype : dtype, optional
            Default q's; bfloat16 for float8 queries. float8_e4m3fn needs compute capability 8.9.
        output_scale : str
            "none" or "per-tensor", which announces o_scale; run() takes it with both.
        scale_mode : str
            "default", "kv-per-tensor", "bmm-scalar" or "bmm-tensor", which announce the scales that run() takes.
        skip_softmax : bool
            Upstream's permission to skip small probabilities; the result here is exact with and without it.
        enable_pdl : bool, optional
            Programmatic dependent launch: no effect on results.
        use_sinks : bool
            Announces sinks; run() takes them with and without it.

        Raises
        ------
        ValueError
            An argument out of its range, by name; in CUDA-graph mode, more than the buffers hold.
        """
        require(not use_profiler, "use_profiler", use_profiler, "False: there is no profiler")
        require(metadata is None, "metadata", type(metadata).__name__, "None: give block_tables and seq_lens by name")
        stated = query_layout, kv_cache_layout, lse_mode, output_scale, scale_mode
        for (name, known), value in zip(_ANNOUNCED, stated, strict=True):
            if value not in known:
                require(False, name, repr(value), ", ".join(map(repr, known)))
        flag("use_sinks", use_sinks), flag("skip_softmax", skip_softmax)
        longest_q = 1 if max_q_len is None else max(whole("max_q_len", max_q_len, 0), 1)
        num_heads, page_size = whole("num_heads", num_heads), whole("page_size", page_size)
        head_dim_ckv, head_dim_kpe = whole("head_dim_ckv", head_dim_ckv), whole("head_dim_kpe", head_dim_kpe)
        asked = plan_options(
            source="latent", num_qo_heads=num_heads, num_kv_heads=1, head_dim_qk=head_dim_ckv + head_dim_kpe,
            head_dim_vo=head_dim_ckv, page_size=page_size, q_dtype=q_data_type, kv_dtype=kv_data_type,
            o_dtype=output_dtype, causal=flag("causal", causal or False), sm_scale=sm_scale,
        )  # fmt: skip
        tables = (qo_indptr, kv_indptr, kv_len_arr, kv_indices)
        names = "qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices"
        if block_tables is None and seq_lens is None:
            require(cum_seq_lens_q is None, "cum_seq_lens_q", "a tensor", "None without block_tables and seq_lens")
            for i, t in enumerate(tables):
                if t is None:
                    require(False, names[i], None, "a tensor")
            # Where only the device knows how long queries are, they are likely one token each.
            self._plan(asked, tables, likely_q=longest_q)
        else:
            for name, t in zip(names, tables, strict=True):
                require(t is None, name, "a tensor", "None with block_tables, seq_lens and cum_seq_lens_q")
            self._plan_blocks(self._checked(asked), block_tables, seq_lens, cum_seq_lens_q, longest_q)
        self._lse_base_e, self._kv_cache_layout = lse_mode == "basee", kv_cache_layout

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
        params: dict | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Latent attention of the planned batch.

        Any strides, as long as elements of a row are side by side: a cache of ckv and kpe in one tensor may be given as
        its two slices, or as `kv_cache`.

        Parameters
        ----------
        q_nope : Tensor [rows, num_heads, head_dim_ckv]
        q_pe : Tensor [rows, num_heads, head_dim_kpe]
            May be None if head_dim_kpe is 0, as kpe_cache.
        ckv_cache : Tensor [pages, page_size, head_dim_ckv]
        kpe_cache : Tensor [pages, page_size, head_dim_kpe]
        out : Tensor [rows, num_heads, head_dim_ckv], optional
            Where to write. Of another dtype than planned as well.
        lse : float32 Tensor [rows, num_heads], optional
            Where to write the log-sum-exp, return_lse or not.
        return_lse : bool
        profiler_buffer : optional
            Refused unless None.
        kv_len : int32 Tensor [batch_size], optional
        page_table : int32 Tensor [batch_size, max_pages], optional
            Lengths and page ids on the device, for this call alone, in place of the planned ones; both or none. Without
            a plan they serve one query per request, with an sm_scale of (128 + head_dim_kpe) ** -0.5, as DeepSeek's.
        return_lse_base_on_e : bool
            Give the log-sum-exp in base e instead of base 2.
        o_scale : float, optional
            The output is divided by it: the scale of a float8 output (plan's output_dtype), which saturates.
        query : Tensor [rows, num_heads, head_dim_ckv + head_dim_kpe], optional
            q_nope and q_pe in one tensor; [batch_size, q_len, num_heads, ...] as well, which out and lse then are like.
            Or the pair of both.
        kv_cache : Tensor [pages, page_size, head_dim_ckv + head_dim_kpe], optional
            ckv_cache and kpe_cache in one tensor; with a further axis of 1 before or after page_size as well. Or the
            pair of both.
        ckv_scale, kpe_scale : float, optional
            Scales of quantised caches.
        ckv_scale_arr : float32 Tensor [pages, page_size, head_dim_ckv / 128], optional
            Scales of the latents of each token, one for 128 elements, beside ckv_scale. The pages of the table are
            widened to q's dtype first (bf16 for fp8 queries), as many as it has entries.
        sinks : float Tensor [num_heads], optional
            A logit per head that takes part in the softmax without a value.
        skip_softmax_threshold_scale_factor : float, optional
            Upstream's permission to skip small probabilities; the result here is exact with and without it.
        bmm1_scale : float or float32 Tensor [1], optional
            Factor of the logits in place of sm_scale (so with it in it).
        bmm2_scale : float or float32 Tensor [1], optional
            Factor of the outputs.
        params : dict, optional
            What the variant's functions are given, by name.

        Returns
        -------
        out : Tensor [rows, num_heads, head_dim_ckv]
        lse : float32 Tensor [rows, num_heads], with return_lse
            -inf for a row that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            Before plan(), unless page_table and kv_len are given; an operand whose shape, dtype, device or strides are
            not as planned, by name; `out` that has part of an operand's memory. Nothing is written then.
        """
        if profiler_buffer is not None:
            require(False, "profiler_buffer", "a tensor", "None: there is no profiler")
        if is_traced():
            return self._traced(out, lse, return_lse, dict(
                q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache, kv_len=kv_len,
                page_table=page_table, return_lse_base_on_e=return_lse_base_on_e, o_scale=o_scale, query=query,
                kv_cache=kv_cache, ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale, sinks=sinks,
                bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, params=params,
            ))  # fmt: skip
        plan = None if self._base is None else self._planned()
        if plan is None and (page_table is None or kv_len is None):
            raise NoPlan("run: got no plan; allowed: after plan(), or with page_table and kv_len")
        shape = None
        if query is not None:
            require(q_nope is None and q_pe is None, "query", "a tensor", "None with q_nope and q_pe")
            if not isinstance(query, torch.Tensor):
                q_nope, q_pe = pair("query", query)
            elif plan is None:
                raise ValueError("query: got a tensor; allowed: None without a plan, which has head_dim_ckv")
            else:
                require(query.dim() > 2, "query", tuple(query.shape), "[rows, num_heads, dim], or one axis more")
                shape = query.shape[:-1]
                q_nope, q_pe = split(query.flatten(0, -3), plan.options, "query")
        if kv_cache is not None:
            alone = ckv_cache is None and kpe_cache is None
            require(alone, "kv_cache", "a tensor", "None with ckv_cache and kpe_cache")
            if not isinstance(kv_cache, torch.Tensor):
                ckv_cache, kpe_cache = pair("kv_cache", kv_cache)
            elif plan is None:
                raise ValueError("kv_cache: got a tensor; allowed: None without a plan, which has head_dim_ckv")
            else:
                kv_cache = without_heads(kv_cache, self._kv_cache_layout)
                ckv_cache, kpe_cache = split(kv_cache, plan.options, "kv_cache")
        q_nope, ckv_cache = present("q_nope", q_nope), present("ckv_cache", ckv_cache)
        given = (out, lse)
        if shape is not None:
            out, lse = as_rows("out", out, q_nope.shape), as_rows("lse", lse, q_nope.shape[:2])
        for name, t in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache),
                        ("out", out), ("lse", lse), ("sinks", sinks)):  # fmt: skip
            if t is not None:
                require_tensor(name, t)
        call: dict[str, Any] = dict(
            out=out, lse=lse, return_lse=flag("return_lse", return_lse) or lse is not None, sinks=sinks, params=params,
            base_e=flag("return_lse_base_on_e", return_lse_base_on_e) or self._lse_base_e,
        )  # fmt: skip
        asked = plan.options if plan is not None else _unplanned(q_nope, q_pe, ckv_cache, out, self._variant)
        factors = _factors(asked.sm_scale, ckv_scale, kpe_scale, bmm1_scale, bmm2_scale, o_scale)
        of_call = page_table is not None or kv_len is not None
        dtype = asked.o_dtype if out is None else out.dtype
        if plan is not None and not of_call and ckv_scale_arr is None and dtype == asked.o_dtype:
            result = attend(plan, q_nope, q_pe, ckv_cache, kpe_cache, factors, **call)
        else:
            require(q_nope.dim() == 3, "q_nope", tuple(q_nope.shape), "[rows, num_heads, head_dim_ckv]")
            table = self._call_table(page_table, kv_len) if of_call or plan is None else plan.table
            if dtype != asked.o_dtype:
                dtype_name(present("out", out).dtype, "out")
                asked = asked.changed(o_dtype=dtype)
            if ckv_scale_arr is not None:
                asked, table, q_nope, q_pe, ckv_cache, kpe_cache = widened(
                    asked, table, (q_nope, q_pe), (ckv_cache, kpe_cache), ckv_scale_arr
                )
            result = run_latent(
                asked, table, q_nope, q_pe, ckv_cache, kpe_cache, factors, longest_q=table.q_len or 1,
                given=self._float_workspace_buffer, backend=self._backend, **call,
            )  # fmt: skip
        return _returned(result, given, shape, return_lse)

    def _traced(self, out, lse, return_lse: bool, given: dict):
        """run() as a trace sees it."""
        query, latent = given["query"], given["q_nope"]
        if isinstance(query, (tuple, list)):
            query, latent = None, query[0]
        rows = present("q_nope", latent if query is None else query)
        if self._base is None:
            dim, dtype = present("q_nope", latent).shape[-1], default_o_dtype(rows.dtype, None)
        else:
            options = self._planned().options
            dim = latent.shape[-1] if query is None else options.head_dim_vo
            dtype = default_o_dtype(rows.dtype, options.o_dtype)
        shape = *rows.shape[:-1], dim
        return traced.run(self, "run", out, lse, return_lse, shape, dtype, given)

    def _call_table(self, page_table, kv_len):
        """The table of a call with lengths and pages of its own."""
        for name, t in (("page_table", page_table), ("kv_len", kv_len)):
            require(t is not None, name, None, "a tensor: both page_table and kv_len, or none")
        planned = None if self._base is None else self._base.table
        indptr = None if planned is None or planned.q_len else planned.qo_indptr
        return latent_blocks(page_table, kv_len, indptr, planned.q_len if planned else 1, self.device)


def _factors(sm_scale, ckv_scale, kpe_scale, bmm1_scale, bmm2_scale, o_scale) -> Factors:
    """What logits and outputs are multiplied by. Of numbers it is looked up: layers share them."""
    scales = sm_scale, ckv_scale, kpe_scale, bmm1_scale, bmm2_scale, o_scale
    tensors = any([isinstance(scale, torch.Tensor) for scale in scales])
    return _checked_factors(*scales) if tensors else _known_factors(*scales)


def _checked_factors(sm_scale, ckv_scale, kpe_scale, bmm1_scale, bmm2_scale, o_scale) -> Factors:
    o_scale = None if o_scale is None else real("o_scale", o_scale)
    require(o_scale is None or o_scale > 0, "o_scale", o_scale, "None, or a positive number")
    for name, value in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)):
        if value is not None and not isinstance(value, torch.Tensor):
            real(name, value)
    logits = present("sm_scale", sm_scale if bmm1_scale is None else bmm1_scale, "a number, or bmm1_scale at run()")
    latent = 1.0 if ckv_scale is None else real("ckv_scale", ckv_scale)
    position = 1.0 if kpe_scale is None else real("kpe_scale", kpe_scale)
    require(latent > 0, "ckv_scale", ckv_scale, "a positive number")
    return factors_of(
        logits, 1.0 if bmm2_scale is None else bmm2_scale, latent, position, 1.0 if o_scale is None else o_scale,
    )  # fmt: skip


_known_factors = lru_cache(maxsize=1024)(_checked_factors)


def _returned(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], given: tuple, shape: tuple | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The caller's own tensors, where it gave some, else those of `result` in the axes of its query."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    if shape is not None and len(shape) != 2:
        out, lse = out.view(*shape, out.shape[2]), None if lse is None else lse.view(shape)
    out, lse = out if given[0] is None else given[0], lse if given[1] is None else given[1]
    return out if lse is None or not return_lse else (out, lse)


def widened(asked: PlanOptions, table: Table, queries: tuple, caches: tuple, scales: torch.Tensor):
    """What attends in the place of caches whose latents have scales of their own: the pages of the table, widened.

    Parameters
    ----------
    queries : tuple
        q_nope and q_pe, which may be None.
    caches : tuple
        ckv and kpe [pages, page_size, dim]; kpe may be None.
    scales : float32 Tensor [pages, page_size, groups]
        Of equal groups of each latent.

    Returns
    -------
    asked, table, q_nope, q_pe, ckv, kpe
    """
    ckv, _ = caches
    name, groups = "ckv_scale_arr", scales.shape[-1] if scales.dim() else 0
    fits = scales.shape[:-1] == ckv.shape[:-1] and groups > 0 and ckv.shape[-1] % groups == 0
    require_fit(name, scales, fits, f"{(*ckv.shape[:-1], max(ckv.shape[-1] // 128, 1))}", torch.float32)
    require(scales.device == ckv.device, name, f"a tensor on {scales.device}", str(ckv.device))
    pages = present("page_table", table.kv_indices).long().clamp(0, max(ckv.shape[0] - 1, 0))
    dtype = torch.float16 if asked.q_dtype == torch.float16 else torch.bfloat16
    latent = _chosen(ckv, pages).float().unflatten(-1, (groups, -1)) * scales[pages][..., None]
    wide = [latent.flatten(-2).to(dtype), *[None if t is None else _chosen(t, pages).to(dtype) for t in caches[1:]]]
    ids = torch.arange(pages.shape[0], dtype=torch.int32, device=ckv.device)
    asked = asked.changed(q_dtype=dtype, kv_dtype=dtype)
    return asked, replace(table, kv_indices=ids), *[None if t is None else t.to(dtype) for t in queries], *wide


def _chosen(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[pages].view(cache.dtype)
    return cache[pages]


def factors_of(
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, latent: float = 1.0, position: float = 1.0,
    o_scale: float = 1.0,
) -> Factors:  # fmt: skip
    """Factors of logits and outputs, each a number or one float32 on the device, and scales of caches and output."""
    first, on_device = (1.0, bmm1_scale) if isinstance(bmm1_scale, torch.Tensor) else (float(bmm1_scale), None)
    second, then = (1.0, bmm2_scale) if isinstance(bmm2_scale, torch.Tensor) else (float(bmm2_scale), None)
    return Factors(latent * first, latent * second / o_scale, position / latent, on_device, then)


def split(joined: torch.Tensor, options: PlanOptions, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the positional part of rows that hold both."""
    require(joined.shape[-1] == options.head_dim_qk, name, tuple(joined.shape),
            f"rows of {options.head_dim_vo} + {options.head_dim_kpe} elements")  # fmt: skip
    return joined[..., : options.head_dim_vo], joined[..., options.head_dim_vo :]


def without_heads(kv_cache: torch.Tensor, kv_layout: str | None = None) -> torch.Tensor:
    """A cache [pages, page_size, dim], which may have a further axis of 1 before (HND) or after (NHD) page_size."""
    if kv_cache.dim() == 4:
        axis = {"HND": 1, "NHD": 2}.get(kv_layout or "", 1 if kv_cache.shape[1] == 1 else 2)
        require(kv_cache.shape[axis] == 1, "kv_cache", tuple(kv_cache.shape), f"1 in axis {axis}, one KV head")
        return kv_cache.squeeze(axis)
    require(kv_cache.dim() == 3, "kv_cache", tuple(kv_cache.shape), "[pages, page_size, dim], or an axis of 1 more")
    return kv_cache


def _unplanned(q_nope, q_pe, ckv_cache, out, variant: AttentionVariant | None) -> PlanOptions:
    """Options that follow from shapes."""
    require(q_nope.dim() == 3, "q_nope", tuple(q_nope.shape), "[batch_size, num_heads, head_dim_ckv]")
    require(ckv_cache.dim() == 3, "ckv_cache", tuple(ckv_cache.shape), "[pages, page_size, head_dim_ckv]")
    kpe = 0 if q_pe is None else q_pe.shape[-1]
    return latent_options(
        q_nope.shape[1], q_nope.shape[2], kpe, ckv_cache.shape[1], q_nope.dtype, ckv_cache.dtype,
        None if out is None else out.dtype, sm_scale=(_UNABSORBED + kpe) ** -0.5, variant=variant,
    )  # fmt: skip

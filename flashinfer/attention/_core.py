"""Attention of mixed batches over a paged KV cache, and attention with sinks."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import UnsupportedConfig, as_dtype, require
from flashinfer._core.literals import Backend, KvLayout, LseBase, PosEncodingMode
from flashinfer._core.signatures import like, returning_lse
from flashinfer.ops.attention.agree import as_count
from flashinfer.ops.attention.operands import is_plain
from flashinfer.ops.attention.options import plan_options
from flashinfer.ops.attention.wrapper import AttentionWrapper
from flashinfer.prefill.paged import BatchPrefillWithPagedKVCacheWrapper


class BatchAttention(AttentionWrapper):
    """Attention of a batch that mixes prefill, append and decode, in one launch over a paged KV cache.

    One work list holds the tiles of all requests. They are cut for the longest query: see docs/rooms/attention.md for
    what that costs the short ones. It runs best with prefills first in the batch and decodes last, whose tiles then
    take turns; any other order is as right.

    Parameters
    ----------
    kv_layout : str
        "NHD": pages of [page_size, num_kv_heads, head_dim]; "HND": [num_kv_heads, page_size, head_dim].
    device : str or torch.device
        Where batches are computed.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchAttention(device="cpu")
    >>> qo_indptr, kv_indptr, kv_lens = torch.tensor([0, 5, 6]), torch.tensor([0, 1, 3]), torch.tensor([5, 20])
    >>> wrapper.plan(qo_indptr, kv_indptr, torch.arange(3), kv_lens, 8, 2, 64, 64, 16, causal=True,
    ...              q_data_type=torch.float32, kv_data_type=torch.float32)
    >>> out, lse = wrapper.run(torch.randn(6, 8, 64), torch.randn(3, 2, 16, 2, 64))
    >>> out.shape, lse.shape
    (torch.Size([6, 8, 64]), torch.Size([6, 8]))
    """

    _mixed = _in_tokens = _returns_lse = True
    _names = "qo_indptr", "kv_indptr", "kv_len_arr", "kv_indices"

    def __init__(self, kv_layout: KvLayout = "NHD", device: str | torch.device = "cuda"):
        super().__init__(torch.empty(0, dtype=torch.uint8, device=device), kv_layout, "auto", None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype | None = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Describe a batch; every later run() uses it.

        Parameters
        ----------
        qo_indptr : int Tensor [batch + 1]
            Query rows of each request; on the host or the device. On the host, it shows the longest query.
        kv_indptr : int Tensor [batch + 1]
            Where each request's entries begin in `kv_indices`.
        kv_indices : int Tensor [pages used]
            Page ids.
        kv_len_arr : int Tensor [batch]
            Keys of each request, in the first of its pages.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size : int
            num_qo_heads is a multiple of num_kv_heads; any page_size from 1 up. Without
            head_dim_vo it is head_dim_qk.
        causal : bool
            A query sees keys at its position and before; its request's last query stands at the last key.
        sm_scale : float, optional
            Default 1 / sqrt(head_dim_qk).
        logits_soft_cap : float, optional
            Logits become cap * tanh(logits / cap).
        q_data_type, kv_data_type : dtype or its name
            Without kv_data_type it is q_data_type.
        use_profiler : bool
            Refused.

        Raises
        ------
        ValueError
            An argument out of its range, by name.

        Notes
        -----
        Offsets and numbers of keys are read here, in the order of the stream: their tensors may be filled again once
        plan() has returned. Page ids that are contiguous int32 on the wrapper's device are kept by reference, and run()
        reads them there; ids on the host, or of int64, are copied.
        """
        if use_profiler:
            raise UnsupportedConfig("use_profiler: got True; allowed: False, as kernels here have no profiler")
        asked = plan_options(
            source="paged", num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo, page_size=page_size, q_dtype=q_data_type, kv_dtype=kv_data_type, causal=causal,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
        )  # fmt: skip
        self._plan(asked, (qo_indptr, kv_indptr, kv_len_arr, kv_indices))
        self._soft_cap = logits_soft_cap

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides are arguments of kernels here, and no variant of them needs warming.

        Parameters
        ----------
        variant : str
            Not read.
        """

    @named(paged_kv_cache="kv_cache", k="kv_cache", v="kv_cache", kv_block_scales="kv_cache_sf")
    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        logits_soft_cap: float | None = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf=None,
        lse_base: LseBase = "log2",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Parameters
        ----------
        q : Tensor [qo_indptr[-1], num_qo_heads, head_dim_qk]
        kv_cache : Tensor or (Tensor, Tensor)
            As of `BatchPrefillWithPagedKVCacheWrapper.run`.
        out : Tensor [rows, num_qo_heads, head_dim_vo], optional
        lse : float32 Tensor [rows, num_qo_heads], optional
        k_scale, v_scale : float or Tensor, optional
            Scales of quantised k and v; a tensor has 1, num_kv_heads or num_qo_heads elements.
        logits_soft_cap : float, optional
            In the place of the planned one; 0 and None leave that.
        profiler_buffer : optional
            Refused.
        kv_cache_sf : (Tensor, Tensor) or Tensor, optional
            The factors of a cache in a format that has them, which kv_data_type names; as kv_block_scales of
            `BatchDecodeWithPagedKVCacheWrapper.run`.
        lse_base : str
            Base of the log-sum-exp: "log2" or "ln".

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads]
            Base 2, unless lse_base says otherwise; -inf for a row that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            Before plan(); an operand whose shape, dtype, device or strides are not as planned, by name;
            profiler_buffer; `out` that has part of an operand's memory. Nothing is written then.
        """
        if profiler_buffer is not None:
            raise UnsupportedConfig("profiler_buffer: got a tensor; allowed: None, as kernels here have no profiler")
        plan = self._planned()
        cap = logits_soft_cap or self._soft_cap
        if (cap or 0.0) != (plan.options.logits_soft_cap or 0.0):
            self._change_plan(logits_soft_cap=cap)
        call = q, kv_cache, out, lse, True, None, k_scale, v_scale
        factors = self._factors(None, kv_cache_sf)
        plain = is_plain(lse_base)
        result = self._run(*call, **factors) if plain else self._run_with_lse(lse_base, "NH", *call, **factors)
        return result[0], result[1]


_PLAN = tuple(inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan).parameters)[1:]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` for models with attention sinks.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
    paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend
        As there.
    pos_encoding_mode, q_data_type, kv_data_type, window_left
        What plan() has for these by default.
    head_dim_qk, head_dim_vo : int
        What plan() is given must be the same.
    use_fp16_qk_reduction : bool
        Upstream's permission to sum q . k in float16; sums here are float32 with and without it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> workspace = torch.empty(0, dtype=torch.uint8)
    >>> wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace, head_dim_qk=64, head_dim_vo=64)
    >>> qo_indptr, indptr = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 2, 3]).int()
    >>> pages, last = torch.tensor([4, 0, 2]).int(), torch.tensor([4, 5]).int()
    >>> wrapper.plan(qo_indptr, indptr, pages, last, 8, 2, 64, 16, causal=True)
    >>> q, cache = torch.randn(5, 8, 64).bfloat16(), torch.randn(5, 2, 16, 2, 64).bfloat16()
    >>> wrapper.run(q, cache, torch.zeros(8)).shape
    torch.Size([5, 8, 64])
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: Backend = "auto",
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ):
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip
        self._head_dims = as_count("head_dim_qk", head_dim_qk), as_count("head_dim_vo", head_dim_vo)
        self._defaults: dict[str, Any] = dict(
            pos_encoding_mode=pos_encoding_mode, q_data_type=as_dtype(q_data_type),
            kv_data_type=as_dtype(kv_data_type), window_left=window_left, head_dim_vo=head_dim_vo,
        )  # fmt: skip

    @like(BatchPrefillWithPagedKVCacheWrapper.plan)
    def plan(self, *args, **kwargs) -> None:
        """Describe a batch; every later run() uses it.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            The tables of the batch, as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, page_size : int
            As there.
        head_dim_qk, head_dim_vo : int
            The constructor's, which head_dim_vo is by default.
        pos_encoding_mode, window_left, q_data_type, kv_data_type
            By default the constructor's.
        custom_mask, packed_custom_mask, causal, use_fp16_qk_reduction, sm_scale, logits_soft_cap, rope_scale,
        rope_theta
            As there.
        o_data_type, non_blocking, fixed_split_size, disable_split_kv, uniform_q_len
            As there.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
            As there.
        seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv
            As there.

        Raises
        ------
        ValueError
            Head sizes other than the constructor's; as `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        given = self._defaults | dict(zip(_PLAN, args)) | kwargs
        dims = given.get("head_dim_qk"), given["head_dim_vo"] or given.get("head_dim_qk")
        require(dims == self._head_dims, "head_dim_qk, head_dim_vo", dims, f"{self._head_dims}, the constructor's")
        super().plan(**given)

    begin_forward = plan

    def _probe(self) -> BatchAttentionWithAttentionSinkWrapper:
        dims = dict(zip(("head_dim_qk", "head_dim_vo"), self._head_dims))
        given = {name: value for name, value in self._defaults.items() if name != "head_dim_vo"}
        workspace, layout = self._float_workspace_buffer, self._kv_layout
        return BatchAttentionWithAttentionSinkWrapper(workspace, layout, backend=self._backend, **given, **dims)

    @like(BatchPrefillWithPagedKVCacheWrapper.run)
    def run(self, q: torch.Tensor, paged_kv_cache, *args, **kwargs):
        """Attention of the planned batch, with the sinks by position or by name.

        Parameters
        ----------
        q : Tensor [rows, num_qo_heads, head_dim_qk]
        paged_kv_cache : Tensor or (Tensor, Tensor)
            Pages of keys and values, as in `BatchPrefillWithPagedKVCacheWrapper.run`.
        *args
            The sinks, float Tensor [num_qo_heads], and after them, optionally, a float sm_scale in the place of the
            planned one, for this call and later ones.
        sinks : float Tensor [num_qo_heads], optional
            The sinks by name; None of both is attention without sinks.
        q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, kv_cache_sf, kv_block_scales, params
            As there.
        lse_base, lse_layout : str
            Of the log-sum-exp: "log2" or "ln"; "NH" [rows, num_qo_heads] or "HN" [num_qo_heads, rows].
        skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : optional
            Upstream's permissions to be inexact; the result here is exact with and without them.

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2, unless lse_base says otherwise; the sink takes part in it.

        Raises
        ------
        ValueError
            More than two positional arguments after the cache; sinks twice; as
            `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        require(len(args) <= 2, "*args", f"{len(args)} arguments", "sinks and sm_scale")
        if args:
            require(kwargs.get("sinks") is None, "sinks", "a tensor", "one, by position or by name")
            kwargs["sinks"] = args[0]
        planned = self._planned().kernels.scalars.sm_scale
        if len(args) == 2 and args[1] is not None and float(args[1]) != planned:
            self._change_plan(sm_scale=float(args[1]))
        return super().run(q, paged_kv_cache, **kwargs)

    run_return_lse = returning_lse(run)

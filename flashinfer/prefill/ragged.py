"""Prefill attention of a batch over ragged keys and values."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
import torch

from flashinfer._core.checks import renamed, require, require_tensor
from flashinfer._core.literals import Backend, KvLayout, LseBase, LseLayout, PosEncodingMode
from flashinfer._core.signatures import returning_lse
from flashinfer.compat.wrappers import RaggedNames
from flashinfer.ops.attention.agree import check_agrees, check_buffers, in_rows
from flashinfer.ops.attention.masks import any_items, multi_item_mask
from flashinfer.ops.attention.operands import (
    as_slots, by_name, check_number, is_plain, slot_factors, slot_views,
)  # fmt: skip
from flashinfer.ops.attention.options import check_flag, plan_options
from flashinfer.ops.attention.tables import MASK_BUFFERS
from flashinfer.ops.attention.variants import AttentionVariant, chosen
from flashinfer.ops.attention.wrapper import device_of, ragged_pair
from flashinfer.ops.formats import KV_NAMES

_BUFFERS = dict(qo_indptr="qo_indptr_buf", kv_indptr="kv_indptr_buf")


class BatchPrefillWithRaggedKVCacheWrapper(RaggedNames):
    """Prefill attention of a batch whose keys and values are ragged rows, not pages.

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph, custom_mask_buf, variant
        As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : str
        "NHD": k and v of [rows, num_kv_heads, head_dim]; "HND": [num_kv_heads, rows, head_dim].
    qo_indptr_buf, kv_indptr_buf : int32 Tensor [max_batch + 1], optional
    mask_indptr_buf : int32 Tensor [max_batch + 1], optional
        The buffers, with use_cuda_graph; contiguous and on the compute device.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).
    jit_args, jit_kwargs, variant_owns_mask : optional
        As of `BatchPrefillWithPagedKVCacheWrapper`.

    Raises
    ------
    ValueError
        An unknown layout or backend; a buffer that is missing, or of another dtype or device, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> indptr = torch.tensor([0, 3, 5]).int()
    >>> wrapper.plan(indptr, indptr, 8, 2, 64, causal=True, q_data_type="float32")
    >>> wrapper.run(torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)).shape
    torch.Size([5, 8, 64])
    """

    _paged = False
    _operands = "q", "k", "v"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: Backend = "auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask: bool = False,
        variant: AttentionVariant | None = None,
    ):
        check_flag("use_cuda_graph", use_cuda_graph)
        buffers = None
        if use_cuda_graph:
            needed = _BUFFERS | ({} if custom_mask_buf is None else MASK_BUFFERS)
            buffers = check_buffers(
                device_of(float_workspace_buffer), needed, qo_indptr=qo_indptr_buf, kv_indptr=kv_indptr_buf,
                mask=custom_mask_buf, mask_indptr=mask_indptr_buf,
            )  # fmt: skip
        variant = chosen(variant, jit_args, jit_kwargs, variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers, variant)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Describe a batch; every later run() uses it.

        Parameters
        ----------
        qo_indptr, kv_indptr : int Tensor [batch_size + 1]
            Query rows, and rows of k and v, of each request; on the host or the device. The first may be any: rows
            before it are of no request. With backend "cudnn" they may count elements, heads * head_dim in each row:
            seq_lens_q and seq_lens (or max_token_per_sequence and max_sequence_kv) tell which it is.
        num_qo_heads, num_kv_heads, head_dim_qk : int
            num_qo_heads is a multiple of num_kv_heads.
        head_dim_vo, custom_mask, non_blocking, fixed_split_size, disable_split_kv, uniform_q_len
            As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.
        packed_custom_mask : uint8 Tensor, optional
            The same in bits, low bit first, each request starting on a byte; takes precedence.
        causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As in `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type : dtype or its name
            kv defaults to q's, out to q's (bfloat16 for fp8 q). kv may be a format with factors, whose names
            `BatchDecodeWithPagedKVCacheWrapper.run` explains; not in CUDA-graph mode.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
            Multi-item scoring, as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        seq_lens, seq_lens_q : Tensor [batch_size], optional
            Keys and queries of each request. The indptrs are enough; what is on the host has to agree with them.
        max_token_per_sequence, max_sequence_kv : int, optional
            The longest query, and the most keys of a request. With qo_indptr on a GPU the first lets the tile fit short
            queries.
        v_indptr, o_indptr : int Tensor [batch_size + 1], optional
            Rows of v and of out. They are those of k and q; any other layout is refused.

        Raises
        ------
        ValueError
            An argument out of its range, by name; in CUDA-graph mode, more than the buffers hold.

        Notes
        -----
        Offsets are read here, in the order of the stream: their tensors may be filled again once plan() has returned.
        In CUDA-graph mode they are copied into the wrapper's buffers. A custom_mask is packed into new bits; a
        packed_custom_mask on the wrapper's device is kept by reference, unless a buffer holds it.
        """
        if self._backend == "cudnn":
            head_dims = head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo
            of_q, of_kv = (seq_lens_q, max_token_per_sequence), (seq_lens, max_sequence_kv)
            qo_indptr, o_indptr = (
                in_rows(t, (num_qo_heads, dim), *of_q) for t, dim in zip((qo_indptr, o_indptr), head_dims)
            )
            kv_indptr, v_indptr = (
                in_rows(t, (num_kv_heads, dim), *of_kv) for t, dim in zip((kv_indptr, v_indptr), head_dims)
            )
        for name, given, same in (("v_indptr", v_indptr, kv_indptr), ("o_indptr", o_indptr, qo_indptr)):
            require_tensor(name, given, optional=True)
            is_same = given is None or given is same
            if given is not None and not is_same:
                require_tensor("kv_indptr" if name == "v_indptr" else "qo_indptr", same)
                is_same = given.data_ptr() == same.data_ptr() or torch.equal(given.to(same.device, same.dtype), same)
            require(is_same, name, "other offsets", "None, or the same offsets as of k (v_indptr) and q (o_indptr)")
        check_flag("use_fp16_qk_reduction", use_fp16_qk_reduction)
        check_flag("non_blocking", non_blocking)
        asked = plan_options(
            source="ragged", num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo, page_size=0, q_dtype=q_data_type, kv_dtype=kv_data_type, o_dtype=o_data_type,
            causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
            fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        )  # fmt: skip
        tables = qo_indptr, kv_indptr, None, None
        views = partial(ragged_pair, kv_layout=self._kv_layout)
        if kv_data_type in KV_NAMES:
            named = KV_NAMES[kv_data_type]
            require(not self._use_cuda_graph, "kv_data_type", named, "another with use_cuda_graph=True")
            asked, tables = as_slots(asked, tables)
            views = partial(slot_views, kv_layout=self._kv_layout)
        items = prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        if any_items(*items, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask):
            custom_mask = multi_item_mask(asked, tables, self._names, *items[:3])
        longest_q = check_agrees(
            tables, self._names, asked.page_size, seq_lens=seq_lens, seq_lens_q=seq_lens_q,
            max_q=max_token_per_sequence, max_kv=max_sequence_kv, uniform_q_len=uniform_q_len,
        )  # fmt: skip
        self._plan(
            asked, tables, longest_q=longest_q, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask
        )
        # Only now: what is refused leaves the plan before it as it was.
        self._views = views

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: LseBase = "log2",
        lse_layout: LseLayout = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf=None,
        params: dict | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Parameters
        ----------
        q : Tensor [qo_indptr[-1], num_qo_heads, head_dim_qk]
        k, v : Tensor
            [kv_indptr[-1], num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_indptr[-1], head_dim] (HND); any strides,
            head_dim contiguous.
        *args, params, lse_base, lse_layout
            As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.
        o_scale : float or Tensor, optional
            Positive: the output is divided by it (the scale of a quantised output).
        q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl
            As in `BatchDecodeWithPagedKVCacheWrapper.run`.
        kv_cache_sf : (Tensor, Tensor) or Tensor, optional
            Of k and v in a format with factors, which kv_data_type names: the factors, laid out as k and v, as
            kv_block_scales of `BatchDecodeWithPagedKVCacheWrapper.run`, row by row; in one tensor with 2 as its second
            axis, too.

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2; -inf for a row that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if args:
            scales = q_scale, k_scale, v_scale
            params, (q_scale, k_scale, v_scale) = by_name(args, self._variant, q, params, scales)
        if o_scale is not None:
            positive = isinstance(o_scale, Real) and 0 < o_scale < math.inf
            allowed = "None, a tensor, or a positive number"
            require(positive or isinstance(o_scale, torch.Tensor), "o_scale", repr(o_scale), allowed)
            check_number("v_scale", v_scale)
            v_scale = (1.0 if v_scale is None else v_scale) / o_scale
        call = q, (k, v), out, lse, return_lse, q_scale, k_scale, v_scale
        given = dict(params=params)
        if kv_cache_sf is not None:
            given.update(slot_factors(kv_cache_sf, self._kv_layout))
        try:
            if is_plain(lse_base, lse_layout):
                return self._run(*call, **given)
            return self._run_with_lse(lse_base, lse_layout, *call, **given)
        except ValueError as error:
            raise renamed(error, dict(kv_block_scales="kv_cache_sf")) from None

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Older name of `run`; these options replace the planned ones, for this call and later ones.

        An option that is left out takes its default here, not what plan() was given.

        Parameters
        ----------
        q : Tensor [qo_indptr[-1], num_qo_heads, head_dim_qk]
        k, v : Tensor
            Rows of keys and values, as in `run`.
        causal : bool
            A query sees keys at its position and before.
        use_fp16_qk_reduction : bool
            Not read: sums are float32.
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As in `plan`.
        return_lse : bool

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2; -inf for a row that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            As `run`; an option out of its range, by name.
        """
        self._change_plan(
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = returning_lse(forward)

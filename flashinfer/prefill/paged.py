"""Prefill and append attention of a batch over a paged KV cache."""

from __future__ import annotations

from functools import partial
import torch

from flashinfer._core.literals import Backend, KvLayout, LseBase, LseLayout, PosEncodingMode
from flashinfer._core.signatures import returning_lse, sized_by
from flashinfer.compat.wrappers import PagedNames
from flashinfer.ops.attention.agree import check_agrees, check_buffers, in_rows
from flashinfer.ops.attention.masks import any_items, multi_item_mask
from flashinfer.ops.attention.operands import by_name, is_plain
from flashinfer.ops.attention.options import check_flag, plan_options
from flashinfer.ops.attention.tables import MASK_BUFFERS
from flashinfer.ops.attention.variants import AttentionVariant, chosen
from flashinfer.ops.attention.wrapper import device_of
from flashinfer.ops.kv_layout import cudnn_views, paged_views

_BUFFERS = dict(
    qo_indptr="qo_indptr_buf", kv_indptr="paged_kv_indptr_buf", kv_indices="paged_kv_indices_buf",
    last_page_len="paged_kv_last_page_len_buf",
)  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(PagedNames):
    """Prefill and append attention of a batch over a paged KV cache: plan() once per step, run() once per layer.

    Parameters
    ----------
    float_workspace_buffer : uint8 Tensor
        Scratch on the compute device, for partial results; any size (a small one is replaced by our own). Its device is
        the wrapper's.
    kv_layout : str
        "NHD": pages of [page_size, num_kv_heads, head_dim]; "HND": [num_kv_heads, page_size, head_dim].
    use_cuda_graph : bool
        Keep the tables in the buffers below, so that a captured run() serves later plans.
    qo_indptr_buf, paged_kv_indptr_buf : int32 Tensor [max_batch + 1], optional
    paged_kv_indices_buf : int32 Tensor [max pages], optional
    paged_kv_last_page_len_buf : int32 Tensor [max_batch], optional
    custom_mask_buf : uint8 Tensor, optional
        For packed masks; needed where a captured graph has a custom mask.
    mask_indptr_buf : int32 Tensor [max_batch + 1], optional
        The buffers, with use_cuda_graph.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py). With "cudnn", pages are [num_kv_heads,
        page_size, head_dim] in both layouts, as cuDNN takes them; with "NHD" they may be [page_size, num_kv_heads,
        head_dim] too, where these two differ.
    jit_args, jit_kwargs, variant_owns_mask : optional
        Upstream's way to a variant: an AttentionVariant, or upstream's list with one for its declaration; CUDA C++ is
        refused. Options that follow from plan() are read over. Whether the variant's mask stands for causal too.
    variant : AttentionVariant, optional
        Functions that change logits or hide keys (docs/variants.md).

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> qo_indptr, indptr = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 2, 3]).int()
    >>> pages, last = torch.tensor([4, 0, 2]).int(), torch.tensor([4, 5]).int()
    >>> wrapper.plan(qo_indptr, indptr, pages, last, 8, 2, 64, 16, causal=True, q_data_type="float32")
    >>> wrapper.run(torch.randn(5, 8, 64), torch.randn(5, 2, 16, 2, 64)).shape
    torch.Size([5, 8, 64])
    """

    _names = "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_indices"

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
                device_of(float_workspace_buffer), needed, qo_indptr=qo_indptr_buf, kv_indptr=paged_kv_indptr_buf,
                kv_indices=paged_kv_indices_buf, last_page_len=paged_kv_last_page_len_buf, mask=custom_mask_buf,
                mask_indptr=mask_indptr_buf,
            )  # fmt: skip
        variant = chosen(variant, jit_args, jit_kwargs, variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers, variant)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Describe a batch; every later run() uses it.

        Parameters
        ----------
        qo_indptr : int Tensor [batch_size + 1]
            Query rows of each request; on the host or the device, as are the next three. The first may be any: offsets
            count rows of q as run() gets it, and rows before the first are of no request. With backend "cudnn" they may
            count elements, num_qo_heads * head_dim_qk in each row; seq_lens_q (without it
            max_token_per_sequence, or seq_lens) tells which it is.
        paged_kv_indptr : int Tensor [batch_size + 1]
            Where each request's entries begin in `paged_kv_indices`. It may be a slice of a larger batch's, whose first
            is not 0, beside all of that batch's page ids.
        paged_kv_indices : int Tensor [pages used]
            Page ids.
        paged_kv_last_page_len : int Tensor [batch_size]
            Tokens in each request's last page, 1 ... page_size (0 for a request without pages).
        num_qo_heads, num_kv_heads, head_dim_qk, page_size : int
            num_qo_heads is a multiple of num_kv_heads; any page_size from 1 up.
        head_dim_vo : int, optional
            Default head_dim_qk.
        custom_mask : bool Tensor [sum(q_len * kv_len)], optional
            Requests one after another, each row-major [q_len, kv_len], in any axes; stands in the place of `causal`.
        packed_custom_mask : uint8 Tensor, optional
            The same in bits, low bit first, each request starting on a byte; takes precedence.
        causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta
            As in `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type : dtype or its name
            kv defaults to q's, out to q's (bfloat16 for fp8 q).
        non_blocking : bool
            Copies to the device never wait here; False changes nothing else.
        prefix_len_ptr : int Tensor [batch_size], or int, optional
            Multi-item scoring: how many keys of each request are the shared prefix. Needs the next two, which need it,
            and no mask beside it. Queries of items see the prefix and their own item up to themselves.
        token_pos_in_items_ptr : int Tensor [batch_size * token_pos_in_items_len], optional
            For each token after the prefix its position within its item, from 1; 0 is a delimiter, one before each item
            and one behind the last. No token sees a delimiter, so that an item is scored as if it stood alone.
        token_pos_in_items_len : int
            Entries per request in token_pos_in_items_ptr, at least as many as it has keys after the prefix.
        max_item_len_ptr : int Tensor [batch_size], optional
            Longest item of each request; it follows from the positions and is not read.
        seq_lens, seq_lens_q, block_tables, max_sequence_kv : optional
            The same tables as other libraries have them. The indptrs are enough; what is on the host has to agree.
        max_token_per_sequence : int, optional
            The longest query, where the caller knows it: with qo_indptr on a GPU it lets the tile fit short queries.
        fixed_split_size : int, optional
            Cut every request's keys at multiples of this, so that a result does not depend on the rest of the batch.
        disable_split_kv : bool
            Leave every request whole.
        uniform_q_len : int, optional
            Every request has this many queries.

        Raises
        ------
        ValueError
            An argument out of its range, by name; in CUDA-graph mode, more than the buffers hold.

        Notes
        -----
        Offsets and last page lengths are read here, in the order of the stream: their tensors may be filled again once
        plan() has returned. Page ids that are contiguous int32 on the wrapper's device are kept by reference, and run()
        reads them there; ids on the host, or of int64, are copied. In CUDA-graph mode every table is copied into the
        wrapper's buffers, which run() reads. A custom_mask is packed into new bits; a packed_custom_mask on
        the wrapper's device is kept by reference, unless a buffer holds it.
        """
        check_flag("use_fp16_qk_reduction", use_fp16_qk_reduction)
        check_flag("non_blocking", non_blocking)
        asked = plan_options(
            source="paged", num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo, page_size=page_size, q_dtype=q_data_type, kv_dtype=kv_data_type,
            o_dtype=o_data_type, causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
            fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        )  # fmt: skip
        if self._backend == "cudnn":
            lens = seq_lens if seq_lens_q is None and max_token_per_sequence is None else seq_lens_q
            qo_indptr = in_rows(qo_indptr, (num_qo_heads, head_dim_qk), lens, max_token_per_sequence)
        tables = qo_indptr, paged_kv_indptr, paged_kv_last_page_len, paged_kv_indices
        items = prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        if any_items(*items, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask):
            custom_mask = multi_item_mask(asked, tables, self._names, *items[:3])
        longest_q = check_agrees(
            tables, self._names, page_size, seq_lens=seq_lens, seq_lens_q=seq_lens_q, block_tables=block_tables,
            max_q=max_token_per_sequence, max_kv=max_sequence_kv, uniform_q_len=uniform_q_len,
        )  # fmt: skip
        self._plan(
            asked, tables, longest_q=longest_q, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask
        )
        # Only now: what is refused leaves the plan before it as it was.
        self._views = self._views_of(page_size, num_kv_heads)

    begin_forward = plan

    workspace_size = sized_by(plan, "non_blocking")

    def _views_of(self, page_size: int, num_kv_heads: int):
        """What makes views of the cache that run() gets."""
        if self._backend != "cudnn":
            return partial(paged_views, kv_layout=self._kv_layout)
        return partial(cudnn_views, kv_layout=self._kv_layout, page_size=page_size, num_kv_heads=num_kv_heads)

    def _probe(self) -> BatchPrefillWithPagedKVCacheWrapper:
        """A wrapper as this one, to plan and throw away."""
        workspace, layout = self._float_workspace_buffer, self._kv_layout
        return BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=self._backend, variant=self._variant)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides are arguments of kernels here, and no variant of them needs warming.

        Parameters
        ----------
        variant : str
            Not read.
        """

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: LseBase = "log2",
        lse_layout: LseLayout = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
        kv_block_scales=None,
        params: dict | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Parameters
        ----------
        q : Tensor [qo_indptr[-1], num_qo_heads, head_dim_qk]
        paged_kv_cache : Tensor or (Tensor, Tensor)
            NHD [pages, 2, page_size, num_kv_heads, head_dim] or HND [pages, 2, num_kv_heads, page_size, head_dim], or
            (k, v) without the second axis. Any strides, head_dim contiguous. With pages of one token the page axis may
            be left out: [slots, 2, num_kv_heads, head_dim] or (k, v) [slots, num_kv_heads, head_dim], in both layouts.
        *args
            The variant's parameters, in its order; or by name in `params`. Without a variant, of FP8 queries: the
            scales of q, k and v, each a number, or a tensor with one for all heads or one a head.
        q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks, kv_block_scales
            As in `BatchDecodeWithPagedKVCacheWrapper.run`.
        skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : optional
            Upstream's permissions to skip small probabilities, to sum in float16, and to compress sparse ones; the
            result here is exact with and without them.
        params : dict, optional
            What the variant's functions are given.
        kv_cache_sf : optional
            Another name of kv_block_scales.
        lse_base, lse_layout : str
            Of the log-sum-exp, one that is given too: "log2" or "ln"; "NH" [rows, num_qo_heads] or "HN"
            [num_qo_heads, rows].

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2, unless lse_base says otherwise; -inf for a row that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            Before plan(); an operand whose shape, dtype, device or strides are not as planned, by name; `out` that
            has part of an operand's memory. Nothing is written then.
        """
        if args:
            scales = q_scale, k_scale, v_scale
            params, (q_scale, k_scale, v_scale) = by_name(args, self._variant, q, params, scales)
        call = q, paged_kv_cache, out, lse, return_lse, q_scale, k_scale, v_scale, window_left
        plain = is_plain(lse_base, lse_layout)
        if plain and sinks is None and params is None and kv_block_scales is None and kv_cache_sf is None:
            return self._run(*call)
        given = dict(sinks=sinks, params=params, **self._factors(kv_block_scales, kv_cache_sf))
        return self._run(*call, **given) if plain else self._run_with_lse(lse_base, lse_layout, *call, **given)

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        paged_kv_cache : Tensor or (Tensor, Tensor)
            Pages of keys and values, as in `run`.
        causal : bool
            A query sees keys at its position and before.
        use_fp16_qk_reduction : bool
            Not read: sums are float32.
        k_scale, v_scale : float, optional
            Scales of quantised k and v.
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = returning_lse(forward)

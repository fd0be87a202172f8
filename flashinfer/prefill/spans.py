"""Prefill over a paged KV cache, causal but for spans of tokens that see one another in both directions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import UnsupportedConfig, as_dtype, present, require, require_tensor
from flashinfer._core.literals import KvLayout, PosEncodingMode
from flashinfer._core.signatures import returning_lse, sized_by
from flashinfer.ops.attention.options import MOST_KEYS, default_o_dtype
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.prefill.paged import BatchPrefillWithPagedKVCacheWrapper

_PARAMS = {
    "ranges": "*i32", "qo_indptr": "*i32", "kv_indptr": "*i32", "last_page_len": "*i32", "page_size": "i32",
    "causal_window": "i32", "range_window": "i32",
}  # fmt: skip


def _as_int32(window: int) -> int:
    """A window as kernels take it: no request has more keys, and any below 0 is none."""
    return max(-1, min(int(window), MOST_KEYS))


@lru_cache(maxsize=1)
def _variant() -> AttentionVariant:
    # Imported at first use, since it loads Triton.
    from flashinfer.ops.attention._device.masks import causal_or_in_span

    return AttentionVariant(mask=causal_or_in_span, params=_PARAMS, owns_mask=True)


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill of prompts with spans (images, say) whose tokens see one another, before and behind; the rest is causal.

    Query q sees key k, both positions in their request, if k <= q (within `causal_window_left`), or if k is in the
    span of q (within `range_window_left`). No mask is made: kernels look into the spans, two numbers a query.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
    paged_kv_last_page_len_buf
        As in `BatchPrefillWithPagedKVCacheWrapper`.
    pos_encoding_mode : str
        "NONE", and no other.
    q_data_type, kv_data_type, o_data_type : torch.dtype or its name
        What plan() takes these for; out defaults to q's, or to bfloat16 for FP8.
    head_dim_qk, head_dim_vo : int
        What plan() is given has to be the same.

    Raises
    ------
    ValueError
        pos_encoding_mode is another one.

    Examples
    --------
    Tokens 1 to 3 of a prompt of 5 are an image:

    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(
    ...     torch.empty(1 << 20, dtype=torch.uint8), q_data_type=torch.float16, kv_data_type=torch.float16)
    >>> wrapper.plan(torch.tensor([0, 5]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([5]), 4, 2, 128, 16)
    >>> q, cache = torch.randn(5, 4, 128).half(), torch.randn(1, 2, 16, 2, 128).half()
    >>> none, image = [-1, -1], [1, 3]
    >>> wrapper.run(q, cache, torch.tensor([none, image, image, image, none], dtype=torch.int32)).shape
    torch.Size([5, 4, 128])
    """

    @checked
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: PosEncodingMode = "NONE",
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        o_data_type: str | torch.dtype | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ):
        if pos_encoding_mode != "NONE":
            raise UnsupportedConfig(f"pos_encoding_mode: got {pos_encoding_mode!r}; allowed: 'NONE' beside spans")
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, variant=_variant(),
        )  # fmt: skip
        q_dtype = present("q_data_type", as_dtype(q_data_type), "a torch.dtype or the name of one")
        self._fixed: dict[str, Any] = dict(
            q_data_type=q_dtype, kv_data_type=as_dtype(kv_data_type), o_data_type=default_o_dtype(q_dtype, o_data_type),
            head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
        )  # fmt: skip

    @checked
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
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Describe a batch; every later run() uses it.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, page_size,
        sm_scale, non_blocking, max_token_per_sequence, fixed_split_size, disable_split_kv
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type
            None, or as the constructor has it.
        causal, window_left, logits_soft_cap, pos_encoding_mode, custom_mask, packed_custom_mask, prefix_len_ptr,
        token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, use_fp16_qk_reduction, max_sequence_kv
            Their defaults: spans are the whole mask, and windows are run()'s.

        Raises
        ------
        ValueError
            An argument is none of these, by name.
        """
        self._check(
            dict(
                head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo, q_data_type=as_dtype(q_data_type),
                kv_data_type=as_dtype(kv_data_type), o_data_type=as_dtype(o_data_type),
            ),
            dict(
                custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr,
                token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
                max_sequence_kv=max_sequence_kv, causal=causal or None, logits_soft_cap=logits_soft_cap or None,
                token_pos_in_items_len=token_pos_in_items_len or None,
                use_fp16_qk_reduction=use_fp16_qk_reduction or None,
                window_left=None if window_left == -1 else window_left,
                pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode,
            ),
        )  # fmt: skip
        super().plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            page_size=page_size, sm_scale=sm_scale, non_blocking=non_blocking,
            max_token_per_sequence=max_token_per_sequence, fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv, **self._fixed,
        )  # fmt: skip

    begin_forward = plan

    def _check(self, fixed: dict, absent: dict) -> None:
        for name, value in fixed.items():
            same = value is None or value == self._fixed[name]
            require(same, name, value, f"{self._fixed[name]}, the constructor's")
        for name, value in absent.items():
            require(value is None, name, value, "its default: bidirectional_ranges and run()'s windows are the mask")

    workspace_size = sized_by(plan, "non_blocking")

    def _probe(self) -> BatchPrefillWithCausalBidirectionalRangesWrapper:
        return type(self)(self._float_workspace_buffer, self._kv_layout, **self._fixed)

    @checked
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf=None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Parameters
        ----------
        q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, kv_cache_sf
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        bidirectional_ranges : int32 Tensor [rows of q, 2]
            For each query the first and the last key of its span, positions in its request; (-1, -1) for none.
            Contiguous, on q's device: a captured run() reads it again at each replay.
        causal_window_left : int
            A query sees itself and this many keys before it; below 0 all.
        range_window_left : int
            Of its span a query sees the keys before it that are nearer than this, and all behind it; 0 or less for all.

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2.

        Raises
        ------
        ValueError
            bidirectional_ranges has another shape, dtype or device, or is not contiguous; as the parent's.
        """
        require_tensor("bidirectional_ranges", bidirectional_ranges)
        require(q.dim() == 3, "q", tuple(q.shape), "[rows, num_qo_heads, head_dim_qk]")
        ranges, rows = bidirectional_ranges, q.shape[0]
        require(ranges.dtype == torch.int32, "bidirectional_ranges", ranges.dtype, "int32")
        require(tuple(ranges.shape) == (rows, 2), "bidirectional_ranges", tuple(ranges.shape), f"({rows}, 2), as q")
        require(ranges.device == q.device, "bidirectional_ranges", ranges.device, f"{q.device}, as q")
        require(ranges.is_contiguous(), "bidirectional_ranges", f"strides {ranges.stride()}", "contiguous")
        table = self._planned().table
        params = dict(
            ranges=ranges, qo_indptr=table.qo_indptr, kv_indptr=table.kv_indptr, last_page_len=table.last_page_len,
            page_size=self._planned().options.page_size, causal_window=_as_int32(causal_window_left),
            range_window=_as_int32(range_window_left),
        )  # fmt: skip
        return super().run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, enable_pdl=enable_pdl, params=params, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    run_return_lse = returning_lse(run)

    def forward(
        self, q, paged_kv_cache, bidirectional_ranges, causal_window_left: int = -1, range_window_left: int = -1,
        q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None, *, return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Older name of `run`, without out and lse.

        Parameters
        ----------
        q, paged_kv_cache, bidirectional_ranges, causal_window_left, range_window_left, q_scale, k_scale, v_scale
            As in `run`.
        return_lse, enable_pdl, kv_cache_sf
            As in `run`.

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim_vo]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            As of `run`.

        Raises
        ------
        ValueError
            As `run`.
        """
        return self.run(
            q, paged_kv_cache, bidirectional_ranges, causal_window_left, range_window_left, q_scale, k_scale, v_scale,
            return_lse=return_lse, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    forward_return_lse = returning_lse(forward)

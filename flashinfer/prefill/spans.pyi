"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import KvLayout, PosEncodingMode
from flashinfer.prefill.paged import BatchPrefillWithPagedKVCacheWrapper

class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout='NHD', use_cuda_graph: bool=False, qo_indptr_buf: torch.Tensor | None=None, paged_kv_indptr_buf: torch.Tensor | None=None, paged_kv_indices_buf: torch.Tensor | None=None, paged_kv_last_page_len_buf: torch.Tensor | None=None, pos_encoding_mode: PosEncodingMode='NONE', q_data_type: str | torch.dtype=torch.bfloat16, kv_data_type: str | torch.dtype=torch.bfloat16, o_data_type: str | torch.dtype | None=None, head_dim_qk: int=128, head_dim_vo: int=128):
        ...

    def plan(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, q_data_type: str | torch.dtype | None=None, kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, non_blocking: bool=True, prefix_len_ptr: torch.Tensor | None=None, token_pos_in_items_ptr: torch.Tensor | None=None, token_pos_in_items_len: int=0, max_item_len_ptr: torch.Tensor | None=None, max_token_per_sequence: int | None=None, max_sequence_kv: int | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False) -> None:
        ...
    begin_forward = plan

    def workspace_size(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, q_data_type: str | torch.dtype | None=None, kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, prefix_len_ptr: torch.Tensor | None=None, token_pos_in_items_ptr: torch.Tensor | None=None, token_pos_in_items_len: int=0, max_item_len_ptr: torch.Tensor | None=None, max_token_per_sequence: int | None=None, max_sequence_kv: int | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False) -> tuple[int, int]:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, enable_pdl: bool | None=None, kv_cache_sf=None) -> torch.Tensor:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *, return_lse: Literal[True], enable_pdl: bool | None=None, kv_cache_sf=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, enable_pdl: bool | None=None, kv_cache_sf=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], bidirectional_ranges: torch.Tensor, causal_window_left: int=-1, range_window_left: int=-1, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *, enable_pdl: bool | None=None, kv_cache_sf=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left: int=-1, range_window_left: int=-1, q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None, *, return_lse: Literal[False]=False) -> torch.Tensor:
        ...

    @overload
    def forward(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left: int=-1, range_window_left: int=-1, q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None, *, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left: int=-1, range_window_left: int=-1, q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None, *, return_lse: bool=False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def forward_return_lse(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left: int=-1, range_window_left: int=-1, q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...
    _fixed: Any

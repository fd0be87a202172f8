"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import Backend, KvLayout, LseBase, LseLayout, PosEncodingMode
from flashinfer.compat.wrappers import PagedNames
from flashinfer.ops.attention.variants import AttentionVariant

class BatchPrefillWithPagedKVCacheWrapper(PagedNames):

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout='NHD', use_cuda_graph: bool=False, qo_indptr_buf: torch.Tensor | None=None, paged_kv_indptr_buf: torch.Tensor | None=None, paged_kv_indices_buf: torch.Tensor | None=None, paged_kv_last_page_len_buf: torch.Tensor | None=None, custom_mask_buf: torch.Tensor | None=None, mask_indptr_buf: torch.Tensor | None=None, backend: Backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask: bool=False, variant: AttentionVariant | None=None):
        ...

    def plan(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, q_data_type: str | torch.dtype='float16', kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, non_blocking: bool=True, prefix_len_ptr: torch.Tensor | None=None, token_pos_in_items_ptr: torch.Tensor | None=None, token_pos_in_items_len: int=0, max_item_len_ptr: torch.Tensor | None=None, seq_lens: torch.Tensor | None=None, seq_lens_q: torch.Tensor | None=None, block_tables: torch.Tensor | None=None, max_token_per_sequence: int | None=None, max_sequence_kv: int | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False, uniform_q_len: int | None=None) -> None:
        ...
    begin_forward = plan

    def workspace_size(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, q_data_type: str | torch.dtype='float16', kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, prefix_len_ptr: torch.Tensor | None=None, token_pos_in_items_ptr: torch.Tensor | None=None, token_pos_in_items_len: int=0, max_item_len_ptr: torch.Tensor | None=None, seq_lens: torch.Tensor | None=None, seq_lens_q: torch.Tensor | None=None, block_tables: torch.Tensor | None=None, max_token_per_sequence: int | None=None, max_sequence_kv: int | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False, uniform_q_len: int | None=None) -> tuple[int, int]:
        ...

    def prewarm_paged_kv_stride_variant(self, variant: str='independent') -> None:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, kv_block_scales=None, params: dict | None=None) -> torch.Tensor:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[True], lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, kv_block_scales=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, kv_block_scales=None, params: dict | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor: float | None=None, use_fp16_softmax: bool | None=None, uses_spcompress: bool | None=None, kv_block_scales=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[False]=False) -> torch.Tensor:
        ...

    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: bool=False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def forward_return_lse(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...
    _views: Any

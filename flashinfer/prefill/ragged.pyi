"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import Backend, KvLayout, LseBase, LseLayout, PosEncodingMode
from flashinfer.compat.wrappers import RaggedNames
from flashinfer.ops.attention.variants import AttentionVariant

class BatchPrefillWithRaggedKVCacheWrapper(RaggedNames):

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout='NHD', use_cuda_graph: bool=False, qo_indptr_buf: torch.Tensor | None=None, kv_indptr_buf: torch.Tensor | None=None, custom_mask_buf: torch.Tensor | None=None, mask_indptr_buf: torch.Tensor | None=None, backend: Backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask: bool=False, variant: AttentionVariant | None=None):
        ...

    def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, q_data_type: str | torch.dtype='float16', kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, non_blocking: bool=True, prefix_len_ptr: torch.Tensor | None=None, token_pos_in_items_ptr: torch.Tensor | None=None, token_pos_in_items_len: int=0, max_item_len_ptr: torch.Tensor | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False, seq_lens: torch.Tensor | None=None, seq_lens_q: torch.Tensor | None=None, max_token_per_sequence: int | None=None, max_sequence_kv: int | None=None, v_indptr: torch.Tensor | None=None, o_indptr: torch.Tensor | None=None, uniform_q_len: int | None=None) -> None:
        ...
    begin_forward = plan

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, kv_cache_sf=None, params: dict | None=None) -> torch.Tensor:
        ...

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[True], lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, kv_cache_sf=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, kv_cache_sf=None, params: dict | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def run_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, o_scale: float | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, lse_base: LseBase='log2', lse_layout: LseLayout='NH', enable_pdl: bool | None=None, kv_cache_sf=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[False]=False) -> torch.Tensor:
        ...

    @overload
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: bool=False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def forward_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...
    _views: Any

"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import Backend, KvLayout, LseBase, PosEncodingMode
from flashinfer.compat.wrappers import PagedNames
from flashinfer.ops.attention.variants import AttentionVariant

class BatchDecodeWithPagedKVCacheWrapper(PagedNames):

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout='NHD', use_cuda_graph: bool=False, use_tensor_cores: bool=False, paged_kv_indptr_buffer: torch.Tensor | None=None, paged_kv_indices_buffer: torch.Tensor | None=None, paged_kv_last_page_len_buffer: torch.Tensor | None=None, backend: Backend='auto', jit_args=None, variant: AttentionVariant | None=None):
        ...

    @property
    def use_tensor_cores(self) -> bool:
        ...

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: PosEncodingMode='NONE', window_left: int=-1, logits_soft_cap: float | None=None, q_data_type: str | torch.dtype | None='float16', kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, data_type: str | torch.dtype | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, non_blocking: bool=True, block_tables: torch.Tensor | None=None, seq_lens: torch.Tensor | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False, q_len_per_req: int=1, *, window_right: int=0, is_causal: bool | None=None) -> None:
        ...
    begin_forward = plan

    def workspace_size(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: PosEncodingMode='NONE', window_left: int=-1, logits_soft_cap: float | None=None, q_data_type: str | torch.dtype | None='float16', kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype | None=None, data_type: str | torch.dtype | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, block_tables: torch.Tensor | None=None, seq_lens: torch.Tensor | None=None, fixed_split_size: int | None=None, disable_split_kv: bool=False, q_len_per_req: int=1) -> tuple[int, int]:
        ...

    def prewarm_paged_kv_stride_variant(self, variant: str='independent') -> None:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, q_len_per_req: int | None=None, skip_softmax_threshold_scale_factor: float | None=None, kv_cache_sf=None, kv_block_scales=None, params: dict | None=None, lse_base: LseBase='log2') -> torch.Tensor:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[True], enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, q_len_per_req: int | None=None, skip_softmax_threshold_scale_factor: float | None=None, kv_cache_sf=None, kv_block_scales=None, params: dict | None=None, lse_base: LseBase='log2') -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, q_len_per_req: int | None=None, skip_softmax_threshold_scale_factor: float | None=None, kv_cache_sf=None, kv_block_scales=None, params: dict | None=None, lse_base: LseBase='log2') -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *args, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, enable_pdl: bool | None=None, window_left: int | None=None, sinks: torch.Tensor | None=None, q_len_per_req: int | None=None, skip_softmax_threshold_scale_factor: float | None=None, kv_cache_sf=None, kv_block_scales=None, params: dict | None=None, lse_base: LseBase='log2') -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], pos_encoding_mode: PosEncodingMode='NONE', q_scale: float | None=None, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[False]=False) -> torch.Tensor:
        ...

    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], pos_encoding_mode: PosEncodingMode='NONE', q_scale: float | None=None, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def forward(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], pos_encoding_mode: PosEncodingMode='NONE', q_scale: float | None=None, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: bool=False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def forward_return_lse(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], pos_encoding_mode: PosEncodingMode='NONE', q_scale: float | None=None, k_scale: float | None=None, v_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...
    _drafts_causal: Any
    _use_tensor_cores: Any
class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):

    def __init__(self, workspace_buffer: torch.Tensor, indptr_buffer: torch.Tensor, indices_buffer: torch.Tensor, last_page_len_buffer: torch.Tensor, kv_layout: KvLayout='NHD', use_tensor_cores: bool=False):
        ...

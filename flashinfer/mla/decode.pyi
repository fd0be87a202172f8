"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import Backend
from flashinfer.ops.attention.tables import Table

@overload
def trtllm_batch_decode_with_kv_cache_mla(query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int, kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor | None, max_seq_len: int, sparse_mla_top_k: int=0, out: torch.Tensor | None=None, bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, sinks: torch.Tensor | list[torch.Tensor] | None=None, skip_softmax_threshold_scale_factor: float | None=None, enable_pdl: bool | None=None, backend: Backend='auto', is_var_seq: bool=True, uses_shared_paged_kv_idx: bool=True, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, cute_dsl_impl: str='auto', kv_scale_format: str='auto', cum_seq_lens_q: torch.Tensor | None=None, max_q_len: int | None=None, multi_ctas_kv_counter_buffer: torch.Tensor | None=None, sparse_mla_top_k_lens: torch.Tensor | None=None, enable_dcp: bool=False, cp_world: int=1, cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, use_fp16_softmax: bool | None=None, return_lse_base: str | None=None) -> torch.Tensor:
    ...
@overload
def trtllm_batch_decode_with_kv_cache_mla(query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int, kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor | None, max_seq_len: int, sparse_mla_top_k: int=0, out: torch.Tensor | None=None, bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, sinks: torch.Tensor | list[torch.Tensor] | None=None, skip_softmax_threshold_scale_factor: float | None=None, enable_pdl: bool | None=None, backend: Backend='auto', is_var_seq: bool=True, uses_shared_paged_kv_idx: bool=True, lse: torch.Tensor | None=None, *, return_lse: Literal[True], cute_dsl_impl: str='auto', kv_scale_format: str='auto', cum_seq_lens_q: torch.Tensor | None=None, max_q_len: int | None=None, multi_ctas_kv_counter_buffer: torch.Tensor | None=None, sparse_mla_top_k_lens: torch.Tensor | None=None, enable_dcp: bool=False, cp_world: int=1, cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, use_fp16_softmax: bool | None=None, return_lse_base: str | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def trtllm_batch_decode_with_kv_cache_mla(query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int, kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor | None, max_seq_len: int, sparse_mla_top_k: int=0, out: torch.Tensor | None=None, bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, sinks: torch.Tensor | list[torch.Tensor] | None=None, skip_softmax_threshold_scale_factor: float | None=None, enable_pdl: bool | None=None, backend: Backend='auto', is_var_seq: bool=True, uses_shared_paged_kv_idx: bool=True, lse: torch.Tensor | None=None, return_lse: bool=False, cute_dsl_impl: str='auto', kv_scale_format: str='auto', cum_seq_lens_q: torch.Tensor | None=None, max_q_len: int | None=None, multi_ctas_kv_counter_buffer: torch.Tensor | None=None, sparse_mla_top_k_lens: torch.Tensor | None=None, enable_dcp: bool=False, cp_world: int=1, cp_rank: int=0, causal_seqlens_kv_global: torch.Tensor | None=None, use_fp16_softmax: bool | None=None, return_lse_base: str | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def attend(query, rows, kv_cache, asked, table, factors, *, out, lse, return_lse: Literal[False], sinks, **call) -> torch.Tensor:
    ...
@overload
def attend(query, rows, kv_cache, asked, table, factors, *, out, lse, return_lse: Literal[True], sinks, **call) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def attend(query, rows, kv_cache, asked, table, factors, *, out, lse, return_lse, sinks, **call) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...
def token_table(tokens: torch.Tensor, top_k: int, lens: torch.Tensor | None, rows: torch.Tensor, named: str='block_tables', lens_named: str='sparse_mla_top_k_lens') -> Table:
    ...
def xqa_batch_decode_with_kv_cache_mla(query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor, qk_nope_head_dim: int, kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int, out: torch.Tensor | None=None, bmm1_scale: float | torch.Tensor=1.0, bmm2_scale: float | torch.Tensor=1.0, sinks: torch.Tensor | list[torch.Tensor] | None=None, enable_pdl: bool | None=None) -> torch.Tensor:
    ...
def xqa_mla(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, output: torch.Tensor, workspace_buffer: torch.Tensor, semaphores: torch.Tensor, page_size: int, q_scale: float | torch.Tensor=1.0, kv_scale: float | torch.Tensor=1.0, sm_count: int | None=None, enable_pdl: bool | None=None) -> None:
    ...

"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import Backend
from flashinfer.compat.wrappers import LatentNames
from flashinfer.ops.attention.mla.operands import Factors
from flashinfer.ops.attention.mla.wrapper import LatentWrapper
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.attention.variants import AttentionVariant

class BatchMLAPagedAttentionWrapper(LatentNames, LatentWrapper):

    def __init__(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool=False, qo_indptr: torch.Tensor | None=None, kv_indptr: torch.Tensor | None=None, kv_indices: torch.Tensor | None=None, kv_len_arr: torch.Tensor | None=None, backend: Backend='auto', *, variant: AttentionVariant | None=None):
        ...

    def plan(self, qo_indptr: torch.Tensor | None=None, kv_indptr: torch.Tensor | None=None, kv_indices: torch.Tensor | None=None, kv_len_arr: torch.Tensor | None=None, num_heads: int | None=None, head_dim_ckv: int | None=None, head_dim_kpe: int | None=None, page_size: int | None=None, causal: bool | None=None, sm_scale: float | None=None, q_data_type: torch.dtype | None=None, kv_data_type: torch.dtype | None=None, use_profiler: bool=False, *, metadata=None, cum_seq_lens_q: torch.Tensor | None=None, block_tables: torch.Tensor | None=None, seq_lens: torch.Tensor | None=None, max_q_len: int | None=None, query_layout: str | None=None, kv_cache_layout: str | None=None, lse_mode: str='none', output_dtype: torch.dtype | None=None, output_scale: str='none', scale_mode: str='default', skip_softmax: bool=False, enable_pdl: bool | None=None, use_sinks: bool=False) -> None:
        ...

    @overload
    def run(self, q_nope: torch.Tensor | None=None, q_pe: torch.Tensor | None=None, ckv_cache: torch.Tensor | None=None, kpe_cache: torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None, page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None, *, query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None, kpe_scale: float | None=None, sinks: torch.Tensor | None=None, skip_softmax_threshold_scale_factor: float | None=None, bmm1_scale: float | torch.Tensor | None=None, bmm2_scale: float | torch.Tensor | None=None, params: dict | None=None) -> torch.Tensor:
        ...

    @overload
    def run(self, q_nope: torch.Tensor | None=None, q_pe: torch.Tensor | None=None, ckv_cache: torch.Tensor | None=None, kpe_cache: torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *, return_lse: Literal[True], profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None, page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None, query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None, kpe_scale: float | None=None, sinks: torch.Tensor | None=None, skip_softmax_threshold_scale_factor: float | None=None, bmm1_scale: float | torch.Tensor | None=None, bmm2_scale: float | torch.Tensor | None=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q_nope: torch.Tensor | None=None, q_pe: torch.Tensor | None=None, ckv_cache: torch.Tensor | None=None, kpe_cache: torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, profiler_buffer: torch.Tensor | None=None, kv_len: torch.Tensor | None=None, page_table: torch.Tensor | None=None, return_lse_base_on_e: bool=False, o_scale: float | None=None, *, query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None=None, ckv_scale: float | None=None, ckv_scale_arr: torch.Tensor | None=None, kpe_scale: float | None=None, sinks: torch.Tensor | None=None, skip_softmax_threshold_scale_factor: float | None=None, bmm1_scale: float | torch.Tensor | None=None, bmm2_scale: float | torch.Tensor | None=None, params: dict | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...
    _kv_cache_layout: Any
    _lse_base_e: Any
def widened(asked: PlanOptions, table: Table, queries: tuple, caches: tuple, scales: torch.Tensor):
    ...
def factors_of(bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, latent: float=1.0, position: float=1.0, o_scale: float=1.0) -> Factors:
    ...
def split(joined: torch.Tensor, options: PlanOptions, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    ...
def without_heads(kv_cache: torch.Tensor, kv_layout: str | None=None) -> torch.Tensor:
    ...

"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import LseBase, PosEncodingMode
from flashinfer.ops.attention.sparse import convert_bsr_mask_layout
from flashinfer.ops.attention.sparse_wrapper import BlockSparseWrapper

__all__ = ['BlockSparseAttentionWrapper', 'VariableBlockSparseAttentionWrapper', 'convert_bsr_mask_layout']
class BlockSparseAttentionWrapper(BlockSparseWrapper):
    M: int | None = None
    N: int | None = None
    R: int | None = None
    C: int | None = None

    def plan(self, indptr: torch.Tensor | None, indices: torch.Tensor | None, M: int, N: int, R: int, C: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, mask: torch.Tensor | None=None, packed_mask: torch.Tensor | None=None, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, q_data_type: str | torch.dtype='float16', kv_data_type: str | torch.dtype | None=None, o_data_type: str | torch.dtype='float16', non_blocking: bool=True, block_mask: torch.Tensor | None=None, kv_block_lens: torch.Tensor | None=None, q2k_indices: torch.Tensor | None=None, q2k_num: torch.Tensor | None=None, kv_splits: int | str | None=None, use_clc: bool | None=None, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None) -> None:
        ...
    begin_forward = plan

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: float | torch.Tensor | None=None, scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, enable_pdl: bool | None=None, lse_base: LseBase='log2') -> torch.Tensor:
        ...

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: float | torch.Tensor | None=None, scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *, return_lse: Literal[True], enable_pdl: bool | None=None, lse_base: LseBase='log2') -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: float | torch.Tensor | None=None, scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, enable_pdl: bool | None=None, lse_base: LseBase='log2') -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: float | torch.Tensor | None=None, scale_k: float | torch.Tensor | None=None, scale_v: float | torch.Tensor | None=None, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None) -> torch.Tensor:
        ...
    _kv_heads: Any
    _per_head: Any
    _scales: Any
    _shape: Any
class VariableBlockSparseAttentionWrapper(BlockSparseWrapper):

    def plan(self, block_mask_map: torch.Tensor, block_row_sz: torch.Tensor, block_col_sz: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, causal: bool=False, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, non_blocking: bool=True, q_data_type: str | torch.dtype='float16', kv_data_type: str | torch.dtype | None=None) -> None:
        ...
    begin_forward = plan

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: Literal[False]=False, enable_pdl: bool | None=None, lse_base: LseBase='log2') -> torch.Tensor:
        ...

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, *, return_lse: Literal[True], enable_pdl: bool | None=None, lse_base: LseBase='log2') -> tuple[torch.Tensor, torch.Tensor]:
        ...

    @overload
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None=None, lse: torch.Tensor | None=None, return_lse: bool=False, enable_pdl: bool | None=None, lse_base: LseBase='log2') -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None) -> torch.Tensor:
        ...
    _kv_heads: Any
    _shape: Any

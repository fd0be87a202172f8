"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch

__all__ = ['dsa_sparse_attention', 'dsa_sparse_attention_varlen']
@overload
def dsa_sparse_attention(q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor, indices: torch.Tensor, *, topk_length: torch.Tensor | None=None, softmax_scale: float | None=None, return_lse: Literal[False]=False, key_passes: int | None=None, backend: str='cake', dkv_acc: torch.Tensor | None=None, dkv_dst_map: torch.Tensor | None=None) -> torch.Tensor:
    ...
@overload
def dsa_sparse_attention(q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor, indices: torch.Tensor, *, topk_length: torch.Tensor | None=None, softmax_scale: float | None=None, return_lse: Literal[True], key_passes: int | None=None, backend: str='cake', dkv_acc: torch.Tensor | None=None, dkv_dst_map: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def dsa_sparse_attention(q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor, indices: torch.Tensor, *, topk_length: torch.Tensor | None=None, softmax_scale: float | None=None, return_lse: bool=False, key_passes: int | None=None, backend: str='cake', dkv_acc: torch.Tensor | None=None, dkv_dst_map: torch.Tensor | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def dsa_sparse_attention_varlen(q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor, gather_kv_indices: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int | None=None, max_seqlen_k: int | None=None, *, causal: bool=False, topk_length: torch.Tensor | None=None, softmax_scale: float | None=None, return_lse: Literal[False]=False, key_passes: int | None=None, backend: str='cake', dkv_acc: torch.Tensor | None=None, dkv_dst_map: torch.Tensor | None=None) -> torch.Tensor:
    ...
@overload
def dsa_sparse_attention_varlen(q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor, gather_kv_indices: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int | None=None, max_seqlen_k: int | None=None, *, causal: bool=False, topk_length: torch.Tensor | None=None, softmax_scale: float | None=None, return_lse: Literal[True], key_passes: int | None=None, backend: str='cake', dkv_acc: torch.Tensor | None=None, dkv_dst_map: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def dsa_sparse_attention_varlen(q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor, gather_kv_indices: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int | None=None, max_seqlen_k: int | None=None, *, causal: bool=False, topk_length: torch.Tensor | None=None, softmax_scale: float | None=None, return_lse: bool=False, key_passes: int | None=None, backend: str='cake', dkv_acc: torch.Tensor | None=None, dkv_dst_map: torch.Tensor | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...

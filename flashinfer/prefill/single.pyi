"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import Backend, KvLayout, PosEncodingMode
from flashinfer.ops.attention.variants import AttentionVariant

@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None=None, scale_k: torch.Tensor | None=None, scale_v: torch.Tensor | None=None, o_dtype: torch.dtype | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, backend: Backend='auto', return_lse: Literal[False]=False, kv_cache_sf=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, variant: AttentionVariant | None=None, params: dict | None=None) -> torch.Tensor:
    ...
@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None=None, scale_k: torch.Tensor | None=None, scale_v: torch.Tensor | None=None, o_dtype: torch.dtype | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, backend: Backend='auto', *, return_lse: Literal[True], kv_cache_sf=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, variant: AttentionVariant | None=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None=None, scale_k: torch.Tensor | None=None, scale_v: torch.Tensor | None=None, o_dtype: torch.dtype | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, backend: Backend='auto', return_lse: bool=False, kv_cache_sf=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, variant: AttentionVariant | None=None, params: dict | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...
def single_prefill_with_kv_cache_return_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None=None, scale_k: torch.Tensor | None=None, scale_v: torch.Tensor | None=None, o_dtype: torch.dtype | None=None, custom_mask: torch.Tensor | None=None, packed_custom_mask: torch.Tensor | None=None, causal: bool=False, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_fp16_qk_reduction: bool=False, sm_scale: float | None=None, window_left: int=-1, logits_soft_cap: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, backend: Backend='auto', *, kv_cache_sf=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, variant: AttentionVariant | None=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def single_prefill_with_kv_cache_with_jit_module(jit_module: AttentionVariant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: KvLayout='NHD', mask_mode: int=0, window_left: int=-1, return_lse: Literal[False]=False) -> torch.Tensor:
    ...
@overload
def single_prefill_with_kv_cache_with_jit_module(jit_module: AttentionVariant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: KvLayout='NHD', mask_mode: int=0, window_left: int=-1, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def single_prefill_with_kv_cache_with_jit_module(jit_module: AttentionVariant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: KvLayout='NHD', mask_mode: int=0, window_left: int=-1, return_lse: bool=False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...

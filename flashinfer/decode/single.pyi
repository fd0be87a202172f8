"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import KvLayout, PosEncodingMode
from flashinfer.ops.attention.variants import AttentionVariant

@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_tensor_cores: bool=False, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, return_lse: Literal[False]=False, variant: AttentionVariant | None=None, params: dict | None=None) -> torch.Tensor:
    ...
@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_tensor_cores: bool=False, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, *, return_lse: Literal[True], variant: AttentionVariant | None=None, params: dict | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: KvLayout='NHD', pos_encoding_mode: PosEncodingMode='NONE', use_tensor_cores: bool=False, q_scale: float | torch.Tensor | None=None, k_scale: float | torch.Tensor | None=None, v_scale: float | torch.Tensor | None=None, window_left: int=-1, logits_soft_cap: float | None=None, sm_scale: float | None=None, rope_scale: float | None=None, rope_theta: float | None=None, return_lse: bool=False, variant: AttentionVariant | None=None, params: dict | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def single_decode_with_kv_cache_with_jit_module(jit_module: AttentionVariant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: KvLayout='NHD', window_left: int=-1, return_lse: Literal[False]=False) -> torch.Tensor:
    ...
@overload
def single_decode_with_kv_cache_with_jit_module(jit_module: AttentionVariant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: KvLayout='NHD', window_left: int=-1, return_lse: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def single_decode_with_kv_cache_with_jit_module(jit_module: AttentionVariant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, kv_layout: KvLayout='NHD', window_left: int=-1, return_lse: bool=False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...

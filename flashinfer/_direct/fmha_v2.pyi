"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch

def trtllm_fmha_v2_prefill(qkv: torch.Tensor | tuple[torch.Tensor, ...], input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, block_tables: torch.Tensor | None=None, out: torch.Tensor | None=None, out_dtype: torch.dtype | str | None=None, sinks: torch.Tensor | list[torch.Tensor] | None=None, pos_encoding_mode: str | None=None, logits_soft_cap_scale: float | None=None, mask_mode: str='causal', window_left: int=-1, chunked_attention_size: int=0, save_softmax_stats: bool=False, skip_softmax_threshold_scale_factor: float=0) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def fmha_v2_prefill_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, num_heads: int, head_dim: int, seq_len: int, scale_softmax: float, scale_bmm1: float | None=None, scale_bmm2: float | None=None, return_lse: Literal[False]=False, lse: torch.Tensor | None=None, scale_bmm1_d: torch.Tensor | None=None, scale_bmm2_d: torch.Tensor | None=None) -> torch.Tensor:
    ...
@overload
def fmha_v2_prefill_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, num_heads: int, head_dim: int, seq_len: int, scale_softmax: float, scale_bmm1: float | None=None, scale_bmm2: float | None=None, *, return_lse: Literal[True], lse: torch.Tensor | None=None, scale_bmm1_d: torch.Tensor | None=None, scale_bmm2_d: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def fmha_v2_prefill_deepseek(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, num_heads: int, head_dim: int, seq_len: int, scale_softmax: float, scale_bmm1: float | None=None, scale_bmm2: float | None=None, return_lse: bool=False, lse: torch.Tensor | None=None, scale_bmm1_d: torch.Tensor | None=None, scale_bmm2_d: torch.Tensor | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...

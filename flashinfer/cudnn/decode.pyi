"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch

@overload
def cudnn_batch_decode_with_kv_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, workspace_buffer: torch.Tensor, *, max_sequence_kv: int, actual_seq_lens_kv: torch.Tensor | None=None, block_tables: torch.Tensor | None=None, is_cuda_graph_compatible: bool=False, batch_offsets_q: torch.Tensor | None=None, batch_offsets_o: torch.Tensor | None=None, batch_offsets_k: torch.Tensor | None=None, batch_offsets_v: torch.Tensor | None=None, out: torch.Tensor | None=None, return_lse: Literal[False]=False, lse: torch.Tensor | None=None, q_len_per_req: int=1, window_left: int=-1, sinks: torch.Tensor | None=None) -> torch.Tensor:
    ...
@overload
def cudnn_batch_decode_with_kv_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, workspace_buffer: torch.Tensor, *, max_sequence_kv: int, actual_seq_lens_kv: torch.Tensor | None=None, block_tables: torch.Tensor | None=None, is_cuda_graph_compatible: bool=False, batch_offsets_q: torch.Tensor | None=None, batch_offsets_o: torch.Tensor | None=None, batch_offsets_k: torch.Tensor | None=None, batch_offsets_v: torch.Tensor | None=None, out: torch.Tensor | None=None, return_lse: Literal[True], lse: torch.Tensor | None=None, q_len_per_req: int=1, window_left: int=-1, sinks: torch.Tensor | None=None) -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def cudnn_batch_decode_with_kv_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, workspace_buffer: torch.Tensor, *, max_sequence_kv: int, actual_seq_lens_kv: torch.Tensor | None=None, block_tables: torch.Tensor | None=None, is_cuda_graph_compatible: bool=False, batch_offsets_q: torch.Tensor | None=None, batch_offsets_o: torch.Tensor | None=None, batch_offsets_k: torch.Tensor | None=None, batch_offsets_v: torch.Tensor | None=None, out: torch.Tensor | None=None, return_lse: bool=False, lse: torch.Tensor | None=None, q_len_per_req: int=1, window_left: int=-1, sinks: torch.Tensor | None=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...

"""Signatures, for type checkers; written by `python -m flashinfer.cli.support`, do not edit by hand."""

from typing import Any, Literal, overload

import torch
from flashinfer._core.literals import OwnBackend

__all__ = ['chunk_gated_delta_rule2']
@overload
def chunk_gated_delta_rule2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None=None, beta: torch.Tensor | None=None, w: torch.Tensor | None=None, scale: float | None=None, initial_state: torch.Tensor | None=None, output_final_state: Literal[False]=False, cu_seqlens: torch.Tensor | None=None, use_qk_l2norm_in_kernel: bool=False, output: torch.Tensor | None=None, output_state: torch.Tensor | None=None, *, backend: OwnBackend | Literal['cudnn']='auto') -> torch.Tensor:
    ...
@overload
def chunk_gated_delta_rule2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None=None, beta: torch.Tensor | None=None, w: torch.Tensor | None=None, scale: float | None=None, initial_state: torch.Tensor | None=None, *, output_final_state: Literal[True], cu_seqlens: torch.Tensor | None=None, use_qk_l2norm_in_kernel: bool=False, output: torch.Tensor | None=None, output_state: torch.Tensor | None=None, backend: OwnBackend | Literal['cudnn']='auto') -> tuple[torch.Tensor, torch.Tensor]:
    ...
@overload
def chunk_gated_delta_rule2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None=None, beta: torch.Tensor | None=None, w: torch.Tensor | None=None, scale: float | None=None, initial_state: torch.Tensor | None=None, output_final_state: bool=False, cu_seqlens: torch.Tensor | None=None, use_qk_l2norm_in_kernel: bool=False, output: torch.Tensor | None=None, output_state: torch.Tensor | None=None, *, backend: OwnBackend | Literal['cudnn']='auto') -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    ...

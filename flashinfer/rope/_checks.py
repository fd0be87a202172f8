"""Checks that rotating and quantising have in common."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.checks import require, require_fit, same_device

INDEX_DTYPES = (torch.int32, torch.int64)


def check_rotary_dim(name: str, rotary_dim: int, head_dim: int) -> None:
    fits = 0 < rotary_dim <= head_dim and rotary_dim % 2 == 0
    require(fits, name, f"rotary_dim {rotary_dim}", f"an even number from 2 to {head_dim}, the head dimension")


def check_positions(name: str, positions: torch.Tensor, q: torch.Tensor) -> None:
    require(positions.shape == q.shape[:1], name, tuple(positions.shape), f"{tuple(q.shape[:1])}, one for each token")
    require(positions.dtype in INDEX_DTYPES, name, positions.dtype, "int32, int64")
    same_device(**{"q": q, name: positions})


def check_cache(cos_sin_cache: torch.Tensor, q: torch.Tensor) -> int:
    """The rotary_dim of a table of cosines and sines."""
    require_fit("cos_sin_cache", cos_sin_cache, cos_sin_cache.dim() == 2, "[max_position, rotary_dim]", torch.float32)
    same_device(query=q, cos_sin_cache=cos_sin_cache)
    check_rotary_dim("cos_sin_cache", cos_sin_cache.shape[1], q.shape[-1])
    return cos_sin_cache.shape[1]


def check_within_cache(name: str, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Values of positions; on a GPU only if FLASHINFER_DEBUG=1, for it waits for the device."""
    if positions.numel() and (not positions.is_cuda or env.DEBUG.is_on()):
        low, high = (int(x) for x in positions.aminmax())
        most = cos_sin_cache.shape[0] - 1
        require(low >= 0 and high <= most, name, f"{low} to {high}", f"0 to {most}, the rows of cos_sin_cache")

"""Scales of a whole tensor, which multiply what is read and what is written."""

from __future__ import annotations

import torch

from flashinfer._core.scalars import scales


def widened(name: str, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x in float32, times its scale."""
    return x.float() if scale is None else x.float() * scales(name, scale, x.device)


def narrowed(name: str, y: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """y times its scale in a dtype, to whose largest value it is cut where it has one."""
    if scale is None:
        return y.to(dtype)
    most = torch.finfo(dtype).max
    return (y * scales(name, scale, y.device)).clamp(-most, most).to(dtype)

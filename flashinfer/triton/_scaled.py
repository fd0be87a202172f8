"""Scales of a whole tensor, which multiply what is read and what is written."""

from __future__ import annotations

import torch

from flashinfer._core.scalars import scales


def scale_of(name: str, scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """A scale as float32 [1] on the device of x."""
    return None if scale is None else scales(name, scale, x.device)


def widened(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x in float32, times its scale."""
    return x.float() if scale is None else x.float() * scale


def narrowed(y: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """y times its scale in a dtype, cut to the largest value of that; without a scale it is only rounded."""
    if scale is None:
        return y.to(dtype)
    most = torch.finfo(dtype).max
    return (y * scale).clamp(-most, most).to(dtype)

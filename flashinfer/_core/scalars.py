"""Scales that a caller may pass as a number or as a tensor, for kernels that read them from memory."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require

_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def scales(name: str, value, device: torch.device, entries: int = 1) -> torch.Tensor:
    """One scale, or one for each of `entries`, as float32 [1] or [entries] on `device`.

    A float32 tensor on `device` is not copied. A tensor of one element may be on any device; one of `entries` elements
    has to be on `device`.
    """
    allowed = "a number, or a tensor of one element" + ("" if entries == 1 else f" or of {entries}")
    if not isinstance(value, torch.Tensor):
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(known, name, repr(value), allowed)
        return torch.full((1,), float(value), dtype=torch.float32, device=device)
    require(value.dtype in _SCALES, name, value.dtype, "float32, float16, bfloat16, float64")
    require(value.numel() in (1, entries), name, tuple(value.shape), allowed)
    near = value.device == device or (value.numel() == 1 and not value.is_meta)
    require(near, name, f"a tensor on {value.device}", f"{device}, where the rows are")
    # Kernels read one scale after another.
    return value.reshape(-1).to(device=device, dtype=torch.float32).contiguous()

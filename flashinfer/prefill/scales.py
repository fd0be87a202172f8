"""Scales of FP8 queries, keys and values without names, as FlashInfer's FA3 backend takes them."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def by_position(args: tuple, *named: float | torch.Tensor | None) -> list[float | torch.Tensor]:
    """The scales of q, k and v that follow the keys and values in run(), times those given by name."""
    require(len(args) == 3, "*args", f"{len(args)} extra arguments", "3 of FP8 queries: the scales of q, k and v")
    return [one if other is None else one * other for one, other in zip(args, named, strict=True)]

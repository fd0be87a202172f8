"""What callers of a wrapper's run() give after the keys and values, without names."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.variants import AttentionVariant

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def by_name(
    args: tuple, variant: AttentionVariant | None, q: torch.Tensor, params: dict | None, scales: tuple
) -> tuple[dict | None, tuple]:
    """The variant's parameters and the scales of q, k and v; either may have been given by name, too.

    Further arguments are a variant's. Without one they are the scales of FP8 queries, keys and values, as FlashInfer's
    FA3 backend takes them, times those that have names.
    """
    if variant is not None:
        return variant.named(args, params), scales
    fp8 = q.dtype in _FP8
    allowed = "3 of FP8 queries: the scales of q, k and v" if fp8 else "none without a variant (docs/variants.md)"
    require(fp8 and len(args) == 3, "*args", f"{len(args)} extra arguments", allowed)
    return params, tuple(one if named is None else one * named for one, named in zip(args, scales, strict=True))

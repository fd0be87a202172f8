"""The paged KV cache as callers lay it out, and as kernels index it. The one statement of both layouts."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require

LAYOUTS = ("NHD", "HND")


def check_layout(kv_layout: str) -> None:
    require(kv_layout in LAYOUTS, "kv_layout", repr(kv_layout), "'NHD' (token, head, dim) or 'HND' (head, token, dim)")


def paged_views(paged_kv_cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a paged cache as [pages, page_size, kv_heads, head_dim] views, nothing copied.

    Parameters
    ----------
    paged_kv_cache : Tensor or (Tensor, Tensor)
        One tensor [pages, 2, page_size, kv_heads, head_dim] (NHD) or [pages, 2, kv_heads, page_size, head_dim] (HND),
        or K and V, each without the second axis.
    kv_layout : str
        "NHD" or "HND".

    Raises
    ------
    ValueError
        Another number of axes or another layout name.
    """
    if isinstance(paged_kv_cache, (tuple, list)):
        require(len(paged_kv_cache) == 2, "paged_kv_cache", f"{len(paged_kv_cache)} tensors", "a pair (k, v)")
        k, v = paged_kv_cache
    else:
        shape = tuple(paged_kv_cache.shape)
        require(len(shape) == 5 and shape[1] == 2, "paged_kv_cache", shape, "5 axes with 2 (k and v) second, or a pair")
        k, v = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    for name, tensor in (("k cache", k), ("v cache", v)):
        require(tensor.dim() == 4, name, tuple(tensor.shape), "4 axes: pages, page_size and kv_heads, head_dim")
    if kv_layout == "HND":
        return k.transpose(1, 2), v.transpose(1, 2)
    return k, v


def ragged_views(k: torch.Tensor, v: torch.Tensor, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows as [rows, kv_heads, head_dim] views of [rows, heads, dim] (NHD) or [heads, rows, dim] (HND)."""
    for name, tensor in (("k", k), ("v", v)):
        require(tensor.dim() == 3, name, tuple(tensor.shape), "3 axes: rows, kv_heads, head_dim")
    if kv_layout == "HND":
        return k.transpose(0, 1), v.transpose(0, 1)
    return k, v

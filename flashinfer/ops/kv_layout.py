"""The paged KV cache as callers lay it out, and as kernels index it. The one statement of both layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from flashinfer._core.checks import require, require_tensor
from flashinfer._core.literals import KvLayout

LAYOUTS = get_args(KvLayout)


def check_layout(kv_layout: str) -> None:
    require(kv_layout in LAYOUTS, "kv_layout", repr(kv_layout), "'NHD' (token, head, dim) or 'HND' (head, token, dim)")


def paged_views(paged_kv_cache, kv_layout: str, name: str = "paged_kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a paged cache as [pages, page_size, kv_heads, head_dim] views, nothing copied.

    Parameters
    ----------
    paged_kv_cache : Tensor or (Tensor, Tensor)
        One tensor [pages, 2, page_size, kv_heads, head_dim] (NHD) or [pages, 2, kv_heads, page_size, head_dim] (HND),
        or K and V, each without the second axis. A pool of pages of one token may leave the page axis out:
        [slots, 2, kv_heads, head_dim], or K and V [slots, kv_heads, head_dim], which both layouts share.
    kv_layout : str
        "NHD" or "HND".
    name : str
        What errors call the cache.

    Raises
    ------
    ValueError
        Another number of axes or another layout name.
    """
    if isinstance(paged_kv_cache, torch.Tensor):
        shape = tuple(paged_kv_cache.shape)
        fits = len(shape) in (4, 5) and shape[1] == 2
        require(fits, name, shape, "5 axes, 4 with pages of one token, with 2 (k and v) second; or a pair (k, v)")
        given = paged_kv_cache.unbind(1)
    else:
        if not isinstance(paged_kv_cache, (tuple, list)):
            given = None if paged_kv_cache is None else f"a {type(paged_kv_cache).__name__}"
            require(False, name, given, "a tensor, or a pair of tensors (k, v)")
        require(len(paged_kv_cache) == 2, name, f"{len(paged_kv_cache)} tensors", "a pair (k, v)")
        given = paged_kv_cache
    k, v = (_pages(tensor, f"{name}[{i}]", kv_layout) for i, tensor in enumerate(given))
    return k, v


def cudnn_views(paged_kv_cache, kv_layout: str, page_size: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_views` of pages as cuDNN takes them: heads, then tokens, whatever `kv_layout` says.

    Pages that can only be NHD are taken as such, where `kv_layout` says so too.
    """
    k, v = paged_views(paged_kv_cache, "HND")
    swapped = tuple(k.shape[1:3]) == (num_kv_heads, page_size) != (page_size, num_kv_heads)
    return paged_views(paged_kv_cache, "NHD") if kv_layout == "NHD" and swapped else (k, v)


def _pages(tensor: torch.Tensor, name: str, kv_layout: str) -> torch.Tensor:
    """K or V as [pages, page_size, kv_heads, head_dim]."""
    require_tensor(name, tensor)
    if tensor.dim() == 3:
        return tensor.unsqueeze(1)
    fits = tensor.dim() == 4
    allowed = "4 axes: pages, page_size and kv_heads, head_dim; 3 with pages of one token"
    require(fits, name, tuple(tensor.shape), allowed)
    return tensor.transpose(1, 2) if kv_layout == "HND" else tensor


def ragged_views(k: torch.Tensor, v: torch.Tensor, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows as [rows, kv_heads, head_dim] views of [rows, heads, dim] (NHD) or [heads, rows, dim] (HND)."""
    for name, tensor in (("k", k), ("v", v)):
        require_tensor(name, tensor)
        require(tensor.dim() == 3, name, tuple(tensor.shape), "3 axes: rows, kv_heads, head_dim")
    if kv_layout == "HND":
        return k.transpose(0, 1), v.transpose(0, 1)
    return k, v


@dataclass(frozen=True)
class Matrix:
    """Keys or values as the rows of one matrix, which the copy engine reads in boxes of rows.

    Attributes
    ----------
    rows : Tensor [rows, columns]
        A view; its rows are as far apart as those of two tokens.
    page_rows, head_rows, head_cols : int
        Rows from one page to the next, and rows or columns from one head to the next.
    """

    rows: torch.Tensor
    page_rows: int
    head_rows: int
    head_cols: int


def as_matrix(t: torch.Tensor, paged: bool) -> Matrix | None:
    """The matrix of [pages, page_size, kv_heads, head_dim] or [rows, kv_heads, head_dim]; None where strides make none.

    Pages and heads have to be whole rows apart, or heads side by side in a row: so are NHD and HND, K and V in one
    tensor, and their slices by layer, page or head.
    """
    *pages, tokens, heads, dim = t.shape
    *page_stride, pitch, head_stride, _ = t.stride()
    if not t.numel():
        return None
    if tokens == 1:
        # Any pitch will do, and a stride of an axis of 1 may be anything.
        pitch = max(heads * dim, page_stride[0] if paged else 0)
    if pitch < max(dim, 1):
        return None
    page_rows = head_rows = head_cols = 0
    if heads > 1:
        if (heads - 1) * head_stride + dim <= pitch:
            head_cols = head_stride
        elif head_stride % pitch == 0:
            head_rows = head_stride // pitch
        else:
            return None
    if paged and pages[0] > 1:
        if page_stride[0] % pitch:
            return None
        page_rows = page_stride[0] // pitch
    count = (pages[0] - 1 if paged else 0) * page_rows + tokens + (heads - 1) * head_rows
    if count >= 1 << 31:
        return None
    return Matrix(t.as_strided((count, (heads - 1) * head_cols + dim), (pitch, 1)), page_rows, head_rows, head_cols)

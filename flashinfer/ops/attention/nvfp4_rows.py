"""Ragged keys and values in nvfp4: kernels read such ones in pages, so a row is a page of one token."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._core.kv_layout import ragged_views
from flashinfer.ops.attention.options import PlanOptions

def as_slots(asked: PlanOptions, tables: tuple) -> tuple[PlanOptions, tuple]:
    """Options, and tables in the order of `tables.NAMES`, of a ragged batch as those of a paged one.

    Waits for a kv_indptr on a device, since its last offset is the length of the page table.
    """
    qo_indptr, kv_indptr, *_ = tables
    count = int(kv_indptr[-1]) if kv_indptr.numel() else 0
    last = torch.ones(max(kv_indptr.numel() - 1, 0), dtype=torch.int32, device=kv_indptr.device)
    slots = torch.arange(count, dtype=torch.int32, device=kv_indptr.device)
    return asked._replace(source="paged", page_size=1), (qo_indptr, kv_indptr, last, slots)


def slot_views(kv: tuple[torch.Tensor, torch.Tensor], kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows as pages of one token."""
    k, v = ragged_views(*kv, kv_layout)
    return k.unsqueeze(1), v.unsqueeze(1)


def slot_factors(kv_cache_sf, kv_layout: str) -> dict:
    """Their factors, laid out as those, as Batch.run takes them."""
    pair = isinstance(kv_cache_sf, (tuple, list)) and len(kv_cache_sf) == 2
    require(pair, "kv_cache_sf", f"a {type(kv_cache_sf).__name__}", "a pair of tensors: the factors of k and of v")
    k_factors, v_factors = slot_views(kv_cache_sf, kv_layout)
    for factors in (k_factors, v_factors):
        stored = factors.dtype in (torch.float8_e4m3fn, torch.uint8)
        require(stored, "kv_cache_sf", factors.dtype, "float8_e4m3fn, uint8: factors of nvfp4 k and v")
    return dict(k_factors=k_factors, v_factors=v_factors)

"""Page tables that kernels do not read as they come: K and V in pages of their own, or in types of their own."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.engine import engine_views, integers

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALVES = (torch.bfloat16, torch.float16)


def pair_of(kv_cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each [pages, ...] in the axes of `kv_layout`, of a cache in any layout."""
    k, v = engine_views(kv_cache, kv_layout)
    return (k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else (k, v)


def as_one_type(kv_cache):
    """A cache whose K is bf16 or fp16 and whose V is fp8, with V widened; other caches as they are.

    Kernels read K and V in one type. Every fp8 value is one of bf16 and of fp16, so nothing is rounded; V is copied.
    """
    if isinstance(kv_cache, torch.Tensor):
        return kv_cache
    k, v = kv_cache
    if k.dtype == v.dtype:
        return kv_cache
    require(k.dtype in _HALVES and v.dtype in _FP8, "kv_cache", f"{k.dtype} and {v.dtype}",
            "one dtype, or K in bfloat16 or float16 with V in float8")  # fmt: skip
    # e5m2 reaches 57344, which fp16 holds.
    return k, v.to(k.dtype)


def gathered(
    kv_cache, kv_layout: str, tables: torch.Tensor, factors: dict
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, dict]:
    """A cache and a table [batch, pages] of it, where K and V have tables [batch, 2, pages] of their own.

    The pages that the tables name are copied side by side. Entries past a request's keys may name anything.

    Returns
    -------
    (k, v), tables, factors
        factors are those of nvfp4, k_factors and v_factors [pages, page_size, heads, dim], gathered alike.
    """
    fits = tables.dim() == 3 and tables.shape[1] == 2
    require(fits, "block_tables", tuple(tables.shape), "[batch, 2, pages], K and V, with tables of their own")
    k, v = pair_of(kv_cache, kv_layout)
    batch, _, width = tables.shape
    tables = integers(tables, "block_tables", k.device, (batch, 2, width))
    one = torch.arange(batch * width, dtype=torch.int32, device=k.device).view(batch, width)
    pair = _pages(k, tables[:, 0]), _pages(v, tables[:, 1])
    factors = dict(factors)
    for i, name in enumerate(("k_factors", "v_factors")):
        if factors.get(name) is not None:
            factors[name] = _pages(factors[name], tables[:, i])
    return pair, one, factors


def _pages(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    if not pool.shape[0]:
        return torch.zeros((table.numel(), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    chosen = table.reshape(-1).long().clamp_(0, pool.shape[0] - 1)
    return pool.view(torch.uint8)[chosen].view(pool.dtype) if pool.dtype in _FP8 else pool[chosen]


def in_blocks(k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Tables [batch, 2, pages] of page ids, of such that count blocks from the first of `k`, for K and for V.

    A block has the bytes of one page of K. K and V are [pages, ...] in memory that may be one allocation.
    """
    fits = tables.dim() == 3 and tables.shape[1] == 2
    require(fits, "block_tables", tuple(tables.shape), "[batch, 2, pages] block offsets")
    block = k[:1].numel() * k.element_size()
    ids = []
    for i, (name, pool) in enumerate((("k", k), ("v", v))):
        begin, pitch = pool.data_ptr() - k.data_ptr(), pool.stride(0) * pool.element_size()
        whole = block > 0 and begin % block == 0 and pitch % block == 0
        require(whole, name, f"{begin} bytes from k, pages {pitch} bytes apart", f"multiples of {block}, a page of k")
        ids.append(torch.div(tables[:, i] - begin // block, pitch // block, rounding_mode="floor"))
    return torch.stack(ids, 1)

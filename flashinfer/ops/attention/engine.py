"""What calls of engines share: block tables and lengths on the device, fused scales, outputs in types of their own."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, overload

import torch

from flashinfer._core.checks import (
    UnsupportedConfig, as_dtype, check_values, dtype_name, require, require_tensor, rows_of,
)  # fmt: skip
from flashinfer._core.target import target_of
from flashinfer.ops.attention.direct import run_direct
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.tables import Table, block_table
from flashinfer.ops.kv_layout import check_layout, paged_views

# What errors call the tables of block tables, in the order of `tables.NAMES`.
_NAMES = "cum_seq_lens_q", "kv_indptr", "seq_lens", "block_tables"
# And queries, keys and values.
_OPERANDS = "query", "kv_cache[0]", "kv_cache[1]"


def refuse(name: str, value, allowed: str) -> None:
    """Refuse an argument by name, unless it is None, False or an empty container."""
    if value is not None and value is not False and value != () and value != []:
        shown = f"a {type(value).__name__}" if isinstance(value, (torch.Tensor, tuple, list)) else repr(value)
        raise UnsupportedConfig(f"{name}: got {shown}; allowed: {allowed}")


def integers(x: torch.Tensor, name: str, device: torch.device, shape: tuple[int | None, ...]) -> torch.Tensor:
    """An integer table as int32 on `device`; uint32 is taken as it is. None in `shape` for any size.

    Nothing is copied if it is int32 or uint32, there already, and contiguous along its last axis.
    """
    fits = x.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape))
    if not fits:
        require(False, name, tuple(x.shape), "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]")
    if x.dtype == torch.uint32:
        x = x.view(torch.int32)
    if x.dtype != torch.int32 or x.device != device:
        require(x.dtype in (torch.int32, torch.int64), name, x.dtype, "int32, uint32 or int64")
        x = x.to(device, torch.int32, non_blocking=True)
    return rows_of(x)


def check_pages(tables: dict[str, torch.Tensor], page_size: int, pages: int, most: int) -> None:
    """Refuse, on the host, a block table without the pages that lengths say, or with one that the cache has not got.

    Parameters
    ----------
    tables : dict
        By their names the table [batch, max_pages], then numbers of keys, as many for each request.
    page_size, pages : int
        Of the cache.
    most : int
        Keys of a request that are read.
    """
    (name, table), (lens_name, lens) = tables.items()
    if table.device.type != "cpu" or not lens.numel():
        return
    longest = lens.long().view(len(table), -1).amax(1)
    used = -(-longest.clamp(0, most) // page_size)
    fits = int(used.max()) <= table.shape[1]
    require(fits, lens_name, f"{int(longest.max())} keys", f"at most {table.shape[1] * page_size}, those of {name}")
    column = torch.arange(table.shape[1], dtype=torch.int64, device=table.device)
    check_values(name, table[column < used[:, None]], 0, pages - 1)


@overload
def flat_integers(x: torch.Tensor, name: str, device: torch.device, count: int) -> torch.Tensor: ...


@overload
def flat_integers(x: None, name: str, device: torch.device, count: int) -> None: ...


@overload
def flat_integers(x: torch.Tensor | None, name: str, device: torch.device, count: int) -> torch.Tensor | None: ...


def flat_integers(x: torch.Tensor | None, name: str, device: torch.device, count: int) -> torch.Tensor | None:
    """Lengths or offsets of any shape with `count` elements, such as [batch, 1, 1, 1], as int32 [count]."""
    if x is None:
        return None
    require(x.numel() == count, name, tuple(x.shape), f"{count} elements")
    return integers(x.reshape(-1), name, device, (count,))


def scales_of(bmm1_scale, bmm2_scale, *, o_scale=None, bmm1_scale_log2=None) -> dict[str, Any]:
    """Factors of logits and of outputs, as Plan.run takes them, of the scales that are fused for two products.

    Parameters
    ----------
    bmm1_scale : float or float32 Tensor [1]
        Factor of q . k: sm_scale and the scales of q and k.
    bmm2_scale : float or float32 Tensor [1]
        Factor of the output.
    o_scale : float, optional
        The scale of a quantised output. Its reciprocal is part of bmm2_scale.
    bmm1_scale_log2 : float32 Tensor [1], optional
        bmm1_scale times log2(e), in its place.
    """
    if bmm1_scale_log2 is not None:
        require_tensor("bmm1_scale_log2", bmm1_scale_log2)
        bmm1_scale = bmm1_scale_log2 * math.log(2.0)
    of_logits = "bmm1_scale" if bmm1_scale_log2 is None else "bmm1_scale_log2"
    for name, scale in ((of_logits, bmm1_scale), ("bmm2_scale", bmm2_scale)):
        if isinstance(scale, torch.Tensor):
            require(scale.numel() == 1, name, tuple(scale.shape), "a float, or a tensor of one element")
    require(o_scale is None or o_scale > 0, "o_scale", o_scale, "a positive number")
    return dict(q_scale=bmm1_scale, v_scale=bmm2_scale)


def sinks_of(sinks) -> torch.Tensor | None:
    """Attention sinks as one tensor; upstream's annotation says a list of them."""
    if isinstance(sinks, (list, tuple)):
        require(len(sinks) == 1, "sinks", f"{len(sinks)} tensors", "one tensor [num_qo_heads]")
        return sinks[0]
    return sinks


def output_of(q: torch.Tensor, shape: tuple[int, ...], out, out_dtype, o_sf_scale=None, o_sf_vec_size=None):
    """The output to write, or None for a new one, and its dtype: out's, else `out_dtype`, else q's.

    Raises
    ------
    UnsupportedConfig
        An nvfp4 output, or the scales of one.
    """
    fp4 = out_dtype == "nvfp4" or out is not None and not isinstance(out, torch.Tensor)
    if fp4:
        raise UnsupportedConfig("out_dtype: got nvfp4; allowed: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2")
    refuse("o_sf_scale", o_sf_scale, "None: outputs have no block scales")
    refuse("o_sf_vec_size", o_sf_vec_size, "None: outputs have no block scales")
    dtype = as_dtype(out_dtype, q.dtype if out is None else out.dtype, "out_dtype")
    if out is not None or out_dtype is not None:
        dtype_name(dtype, "out_dtype" if out is None else "out")
    if out is not None:
        require(out.dtype == dtype, "out", out.dtype, f"{dtype}, the out_dtype")
        # The caller's may have axes for batch and beam; its rows are a view, or refused.
        require(out.numel() == math.prod(shape), "out", tuple(out.shape), str(shape))
        if out.shape != shape:
            rows = out.reshape(shape)
            require(rows.data_ptr() == out.data_ptr(), "out", f"strides {out.stride()}", f"{shape}, or a view of it")
            out = rows
    return out, dtype


def engine_views(kv_cache, kv_layout: str, name: str = "kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [pages, page_size, kv_heads, head_dim] views; a cache with 1 for its second axis is both."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = (kv_cache[:, 0], kv_cache[:, 0])
    return paged_views(kv_cache, kv_layout, name)


def cache_shape(kv_cache, kv_layout: str) -> tuple[torch.dtype, int, int, int, int]:
    """dtype, page_size, kv_heads, head_dim of K, and head_dim of V of a paged cache."""
    check_layout(kv_layout)
    in_one = not isinstance(kv_cache, (tuple, list))
    k, v = (kv_cache, kv_cache) if in_one else kv_cache
    require(k.dim() >= 3 + in_one, "kv_cache", tuple(k.shape), "pages, (2,) and the axes of kv_layout")
    page_size, heads, dim = k.shape[-3:]
    if k.dim() == 3 + in_one:
        # Pages of one token, without an axis for it.
        page_size = 1
    elif kv_layout == "HND":
        page_size, heads = heads, page_size
    packed = 2 if k.dtype == torch.uint8 else 1
    return k.dtype, page_size, heads, dim * packed, v.shape[-1] * packed


def value_dim(kv_cache) -> int:
    """head_dim of V."""
    v = kv_cache[1] if isinstance(kv_cache, (tuple, list)) else kv_cache
    require(v.dim() > 2, "kv_cache", tuple(v.shape), "pages, (2,) and the axes of kv_layout")
    return v.shape[-1] * (2 if v.dtype == torch.uint8 else 1)


def factors_of(kv_cache_sf, kv_block_scales, kv_layout: str, backend: str, device: torch.device) -> dict[str, Any]:
    """Block scales of an nvfp4 cache, as `attend_pages` takes them, of either name that they have upstream.

    V's are interleaved for the generated kernels of TensorRT-LLM: what upstream's "auto" is, except on compute
    capability 12, where it is XQA.
    """
    given = kv_cache_sf if kv_block_scales is None else kv_block_scales
    if given is None:
        return {}
    require(kv_cache_sf is None or kv_block_scales is None, "kv_cache_sf", "kv_block_scales too", "one of the two")
    generated = backend == "trtllm-gen" or backend == "auto" and target_of(device).capability // 10 != 12
    name = "kv_cache_sf" if kv_block_scales is None else "kv_block_scales"
    k_factors, v_factors = engine_views(given, kv_layout, name)
    for factors in (k_factors, v_factors):
        stored = factors.dtype in (torch.float8_e4m3fn, torch.uint8)
        require(stored, name, factors.dtype, "float8_e4m3fn, uint8")
    return dict(k_factors=k_factors, v_factors=v_factors, interleaved=generated)


def attend_pages(q: torch.Tensor, kv_cache, kv_layout: str, block_tables: torch.Tensor, seq_lens: torch.Tensor,
                 queries: dict, *, longest_q: int = 0, causal: bool = True, window_left: int = -1, o_dtype=None,
                 soft_cap: float | None = None, alibi: bool = False, masked=(None, None), backend: str = "auto",
                 interleaved: bool = False, operands=_OPERANDS, **call
                 ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of `q` over a paged cache that a rectangular block table describes.

    Parameters
    ----------
    q : Tensor [rows, num_qo_heads, head_dim]
    kv_cache, kv_layout
        As `engine_views` takes them.
    block_tables : int Tensor [batch, max_pages]
    seq_lens : int Tensor [batch]
    queries : dict
        qo_indptr, q_lens or q_len of `Table`, on q's device.
    masked : (AttentionVariant, dict) or (None, None)
        A mask of masks.py.
    interleaved : bool
        Of `PlanOptions`.
    operands : tuple of str
        What the caller calls queries, keys and values.
    call
        The other arguments of Plan.run.
    """
    kv_dtype, page_size, kv_heads, dim, dim_vo = cache_shape(kv_cache, kv_layout)
    require(block_tables.dim() == 2, "block_tables", tuple(block_tables.shape), "[batch, max_pages]")
    batch, pages = block_tables.shape
    tables = integers(block_tables, "block_tables", q.device, (batch, None))
    table = block_table(tables, flat_integers(seq_lens, "seq_lens", q.device, batch), names=_NAMES, operands=operands,
                        **queries)  # fmt: skip
    asked = PlanOptions(
        source="paged", num_qo_heads=q.shape[-2], num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim_vo,
        page_size=page_size, q_dtype=q.dtype, kv_dtype=kv_dtype, o_dtype=o_dtype or q.dtype, causal=causal,
        window_left=window_left, logits_soft_cap=soft_cap, sm_scale=1.0,
        pos_encoding_mode="ALIBI" if alibi else "NONE", variant=masked[0], interleaved=interleaved,
    ).checked()  # fmt: skip
    return run_direct(
        asked, table, q, kv_cache, _views(kv_layout), kv_tokens=batch * pages * page_size, longest_q=longest_q,
        backend=backend, params=masked[1], **call,
    )  # fmt: skip


@lru_cache(maxsize=2)
def _views(kv_layout: str):
    return partial(engine_views, kv_layout=kv_layout)


def attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Table, *, longest_q: int = 0,
                causal: bool = True, window_left: int = -1, o_dtype=None, soft_cap: float | None = None,
                alibi: bool = False, masked=(None, None), backend: str = "auto", **call
                ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same over contiguous k and v [rows, kv_heads, head_dim]."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        require(x.dim() == 3, name, tuple(x.shape), "[tokens, heads, head_dim]")
    table.operands = "query", "key", "value"
    asked = PlanOptions(
        source="ragged", num_qo_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim_qk=k.shape[2],
        head_dim_vo=v.shape[2], page_size=0, q_dtype=q.dtype, kv_dtype=k.dtype, o_dtype=o_dtype or q.dtype,
        causal=causal, window_left=window_left, logits_soft_cap=soft_cap, sm_scale=1.0,
        pos_encoding_mode="ALIBI" if alibi else "NONE", variant=masked[0],
    ).checked()  # fmt: skip
    return run_direct(
        asked, table, q, (k, v), lambda kv: kv, kv_tokens=k.shape[0], longest_q=longest_q, backend=backend,
        params=masked[1], **call,
    )  # fmt: skip

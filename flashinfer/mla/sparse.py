"""Sparse latent attention as DeepSeek V4 has it: a sliding window and chosen compressed tokens, in two caches."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import renamed, require
from flashinfer._core.literals import Backend, KvLayout
from flashinfer._direct.given import head_sinks, scale, whole
from flashinfer._direct.outputs import attention_op
from flashinfer.mla.batch import factors_of, without_heads
from flashinfer.mla.decode import attend, token_table
from flashinfer.ops.attention.engine import flat_integers, integers, refuse
from flashinfer.ops.attention.options import default_o_dtype, latent_options

# Keys of a row of sparse_indices that are tokens of the sliding window's cache.
_WINDOW = 128


def _like_query(its: dict) -> tuple:
    query = its["query"]
    return query.shape, default_o_dtype(query.dtype, None), query.device


@attention_op(_like_query, ("out",))
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="swa_kv_cache",
       num_kv_heads="swa_kv_cache", head_dim_vo="swa_kv_cache", page_size="swa_kv_cache",
       v_scale="bmm2_scale", q_scale="bmm1_scale", kv_cache="swa_kv_cache",
       qo_indptr="cum_seq_lens_q", kv_indptr="seq_lens", num_heads="query", q_nope="query")  # fmt: skip
def trtllm_batch_decode_sparse_mla_dsv4(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    sparse_indices: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    sparse_topk_lens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    kv_layout: KvLayout = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: torch.Tensor | None = None,
    extra_sparse_indices: torch.Tensor | None = None,
    extra_sparse_topk_lens: torch.Tensor | None = None,
    backend: Backend | Literal["sparse"] = "auto",
    hca_swa_indices: torch.Tensor | None = None,
    hca_compressed_block_tables: torch.Tensor | None = None,
    hca_seq_lens: torch.Tensor | None = None,
    hca_is_causal: bool = True,
    hca_use_persistent: bool = False,
    hca_sparse_indices_format: str | None = None,
    remapped_sparse_indices_buffer: torch.Tensor | None = None,
    sparse_indices_are_storage_offsets: bool | None = None,
    dsv4_inv_rope_cos_sin_cache: torch.Tensor | None = None,
    dsv4_output_scale: torch.Tensor | None = None,
    sparse_topk_lens_offset: int = 0,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    *,
    kv_cache_format: str = "fp8",
) -> torch.Tensor:
    """Attention of each query over the tokens that its row of `sparse_indices` names, out of two caches.

    A key is its own value, positional part included. Caches are bf16, fp16, or fp8 under one scale, which is part of
    bmm1_scale and bmm2_scale. Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    query : Tensor [batch, q_len, num_heads, head_dim] or [tokens, num_heads, head_dim]
        bf16, fp16 or fp8; head_dim 16 to 512 (512 in DeepSeek V4); 1 to 128 heads.
    swa_kv_cache : Tensor [pages, 1, page_size, head_dim] (HND) or [pages, page_size, 1, head_dim] (NHD)
        Of the sliding window; without the axis of 1 as well. query's dtype, or fp8. Any page size, any strides of the
        outer axes. Caches of bytes, which carry their scales, are refused.
    workspace_buffer, out, sinks
        As in `flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla`.
    sparse_indices : int32 Tensor [tokens, width] or [batch, q_len, width]
        The keys of each query, as tokens of a cache (page * page_size + place in it): the first 128 columns of
        swa_kv_cache, the others of compressed_kv_cache. Negative ones are none, wherever they stand.
    compressed_kv_cache : Tensor, optional
        As swa_kv_cache, with a page size of its own. Needed where sparse_indices is wider than 128.
    sparse_topk_lens : int32 Tensor [tokens], optional
        How many columns of each row count, from the first on, the window's 128 among them; default all.
    seq_lens : int32 Tensor [batch], optional
        Keys of each request before compression. Of the window's columns so many count as its queries see keys: a query
        that is the last but i of its request, those before seq_lens - i. Not read with extra_sparse_indices or
        swa_topk_lens.
    bmm1_scale, bmm2_scale : float or float32 Tensor [1]
        Factors of logits and outputs.
    kv_layout : str
        "HND" or "NHD".
    cum_seq_lens_q : int32 Tensor [batch + 1], optional
        First query of each request, which seq_lens needs where requests have different numbers of queries.
    max_q_len : optional
        Not read.
    enable_pdl, hca_is_causal, hca_use_persistent, remapped_sparse_indices_buffer, multi_ctas_kv_counter_buffer
        Hints and scratch that change no result here.
    swa_topk_lens : int32 Tensor [tokens], optional
        How many of the window's columns count, from the first on.
    extra_sparse_indices : int32 Tensor [tokens, width], optional
        Tokens of compressed_kv_cache in a table of their own; sparse_indices then has the window's, up to 128 columns.
    extra_sparse_topk_lens : int32 Tensor [tokens], optional
        How many of its columns count, from the first on.
    backend : str
        "auto" or "sparse", or one of upstream's names (see flashinfer/_core/backends.py).
    hca_swa_indices, hca_compressed_block_tables, hca_seq_lens, hca_sparse_indices_format,
    sparse_indices_are_storage_offsets, dsv4_inv_rope_cos_sin_cache, dsv4_output_scale : optional
        Refused: other tables, and a fused rotation and quantisation of the output.
    sparse_topk_lens_offset : int
        Added to sparse_topk_lens, or extra_sparse_topk_lens.
    kv_cache_format : str
        Of caches of bytes, which are refused; of others not read.

    Returns
    -------
    out : Tensor, as query

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, cache = torch.randn(2, 1, 16, 512).bfloat16(), torch.randn(4, 1, 64, 512).bfloat16()
    >>> keys = torch.arange(128).int().expand(2, 128).contiguous()  # of the window, for each query
    >>> flashinfer.decode.trtllm_batch_decode_sparse_mla_dsv4(
    ...     q, cache, torch.empty(0, dtype=torch.uint8), keys, bmm1_scale=0.04).shape
    torch.Size([2, 1, 16, 512])
    """
    refused = dict(
        hca_swa_indices=hca_swa_indices,
        hca_compressed_block_tables=hca_compressed_block_tables, hca_seq_lens=hca_seq_lens,
        hca_sparse_indices_format=hca_sparse_indices_format,
        sparse_indices_are_storage_offsets=sparse_indices_are_storage_offsets or None,
        dsv4_inv_rope_cos_sin_cache=dsv4_inv_rope_cos_sin_cache, dsv4_output_scale=dsv4_output_scale,
    )  # fmt: skip
    for name, value in refused.items():
        refuse(name, value, "None: sparse_indices and sparse_topk_lens name all keys")
    require(kv_layout in ("HND", "NHD"), "kv_layout", repr(kv_layout), "'HND', 'NHD'")
    require(sparse_indices is not None, "sparse_indices", None, "a tensor")
    require(query.dim() in (3, 4), "query", tuple(query.shape), "batch and q_len, or tokens; heads; head_dim")
    window = without_heads(swa_kv_cache, kv_layout)
    if window.dtype == torch.uint8:
        refuse("swa_kv_cache", window, "bf16, fp16 or fp8: caches of bytes, which carry their scales, are not read")
    rows = query.flatten(0, -3)
    q_len = query.shape[1] if query.dim() == 4 else 0
    lens = swa_topk_lens, sparse_topk_lens, extra_sparse_topk_lens
    offset = whole("sparse_topk_lens_offset", sparse_topk_lens_offset)
    sparse_indices, sparse_topk_lens = _named(
        rows, q_len, sparse_indices, extra_sparse_indices, lens, offset, seq_lens, cum_seq_lens_q
    )
    width = sparse_indices.shape[-1]
    if compressed_kv_cache is None:
        require(width <= _WINDOW, "sparse_indices", f"{width} columns", f"{_WINDOW}, without compressed_kv_cache")
        cache, first = window, 0
    else:
        cache, first = without_heads(compressed_kv_cache, kv_layout), _WINDOW
    asked = latent_options(
        query.shape[-2], query.shape[-1], 0, cache.shape[1], query.dtype, cache.dtype,
        None if out is None else out.dtype, sparse=True, first=first, first_page=window.shape[1] if first else 0,
    )  # fmt: skip
    factors = factors_of(scale("bmm1_scale", bmm1_scale, rows.device), scale("bmm2_scale", bmm2_scale, rows.device))
    table = token_table(sparse_indices, width, sparse_topk_lens, rows, "sparse_indices", "sparse_topk_lens")
    try:
        result = attend(
            query, rows, cache, asked, table, factors, longest_q=1, given=workspace_buffer,
            backend="auto" if backend == "sparse" else backend, out=out, lse=None, return_lse=False,
            sinks=head_sinks(sinks, query.shape[-2]), first_ckv=window if first else None,
        )  # fmt: skip
    except ValueError as error:
        raise renamed(error, dict(ckv_cache="compressed_kv_cache" if first else "swa_kv_cache")) from None
    return result[0] if isinstance(result, tuple) else result


def _named(rows, q_len: int, tokens, extra, lens: tuple, offset: int, seq_lens, indptr):
    """One table [tokens, width] of the window's columns and the others, and how many of each row count, or None.

    What counts less than a table's first columns is -1 in it.
    """
    count, device = rows.shape[0], rows.device
    tokens = _rows("sparse_indices", tokens, count, device)
    names = "swa_topk_lens", "sparse_topk_lens", "extra_sparse_topk_lens"
    of_window, total, of_extra = (flat_integers(t, name, device, count) for name, t in zip(names, lens, strict=True))
    if extra is not None:
        require(tokens.shape[1] <= _WINDOW, "sparse_indices", f"{tokens.shape[1]} columns",
                f"at most {_WINDOW}, with extra_sparse_indices")  # fmt: skip
        extra = _rows("extra_sparse_indices", extra, count, device)
        if of_extra is not None:
            extra = _first(extra, of_extra + offset)
        elif total is not None:
            extra = _first(extra, total + offset - _WINDOW)
        tokens = torch.cat((torch.nn.functional.pad(tokens, (0, _WINDOW - tokens.shape[1]), value=-1), extra), 1)
        total = None
    else:
        require(of_extra is None, "extra_sparse_topk_lens", "a tensor", "None without extra_sparse_indices")
        total = None if total is None else (total + offset).clamp(0, tokens.shape[1])
    if of_window is None and extra is None and seq_lens is not None:
        batch = seq_lens.numel()
        ends = flat_integers(seq_lens, "seq_lens", device, batch)
        row = torch.arange(count, dtype=torch.int64, device=device)
        if indptr is not None:
            of_q = flat_integers(indptr, "cum_seq_lens_q", device, batch + 1).long()
            request = torch.searchsorted(of_q, row, right=True).sub_(1).clamp_(0, max(batch - 1, 0))
            back = of_q[request + 1] - 1 - row
        else:
            each = q_len or (count // batch if batch else 0)
            require(batch * each == count, "seq_lens", f"{batch} requests", f"a divisor of {count}, or cum_seq_lens_q")
            request = torch.div(row, max(each, 1), rounding_mode="floor")
            back = each - 1 - row % max(each, 1)
        of_window = ends[request] - back if batch else row
    if of_window is not None:
        window = _first(tokens[:, :_WINDOW], of_window)
        tokens = torch.cat((window, tokens[:, _WINDOW:]), 1) if tokens.shape[1] > _WINDOW else window
    return tokens, total


def _rows(name: str, indices: torch.Tensor, count: int, device) -> torch.Tensor:
    """Indices [..., columns] of `count` rows as int32 [count, columns]."""
    fits = indices.dim() > 0 and indices.numel() == count * indices.shape[-1]
    require(fits, name, tuple(indices.shape), f"{count} rows")
    return integers(indices.reshape(count, indices.shape[-1]), name, device, (count, None))


def _first(tokens: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The first `count` columns of each row; -1 for the others."""
    column = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
    return torch.where(column < count[:, None], tokens, -1)

"""Sparse latent attention in the form of DeepSeek V4: a sliding window and chosen compressed tokens, in two caches."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._forms.given import head_sinks
from flashinfer.mla.batch import factors_of, latent_options, without_heads
from flashinfer.mla.decode import attend, token_table
from flashinfer.ops.attention.engine import refuse

# Keys of a row of sparse_indices that are tokens of the sliding window's cache.
_WINDOW = 128


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
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: torch.Tensor | None = None,
    extra_sparse_indices: torch.Tensor | None = None,
    extra_sparse_topk_lens: torch.Tensor | None = None,
    backend: str = "auto",
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
    workspace_buffer : Tensor
        For partial results, where it is large enough; its contents are not preserved.
    sparse_indices : int32 Tensor [tokens, width] or [batch, q_len, width]
        The keys of each query, as tokens of a cache (page * page_size + place in it): the first 128 columns of
        swa_kv_cache, the others of compressed_kv_cache. Negative ones are none, wherever they stand.
    compressed_kv_cache : Tensor, optional
        As swa_kv_cache, with a page size of its own. Needed where sparse_indices is wider than 128.
    sparse_topk_lens : int32 Tensor [tokens], optional
        How many columns of each row count, from the first on, the window's 128 among them; default all.
    seq_lens : optional
        Not read: the rows say it all.
    out : Tensor, as query, optional
        bf16, fp16, fp32 or fp8, which saturates; as query otherwise (bfloat16 for fp8).
    bmm1_scale, bmm2_scale : float or float32 Tensor [1]
        Factors of logits and outputs.
    sinks : float32 Tensor [num_heads], optional
        A logit per head that takes part in the softmax without a value.
    kv_layout : str
        "HND" or "NHD".
    cum_seq_lens_q, max_q_len : optional
        Not read: each query has a row of its own.
    swa_topk_lens, extra_sparse_indices, extra_sparse_topk_lens, hca_swa_indices, hca_compressed_block_tables,
    hca_seq_lens, hca_sparse_indices_format, sparse_indices_are_storage_offsets, dsv4_inv_rope_cos_sin_cache,
    dsv4_output_scale, sparse_topk_lens_offset : optional
        Refused: tables in other forms, and a fused rotation and quantisation of the output.
    kv_cache_format : str
        Of caches of bytes, which are refused; of others not read.
    backend : str
        "auto" or "sparse", or one of upstream's names (see flashinfer/_core/backends.py).
    enable_pdl, hca_is_causal, hca_use_persistent, remapped_sparse_indices_buffer, multi_ctas_kv_counter_buffer
        Hints and scratch that change no result here.

    Returns
    -------
    out : Tensor, as query

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.
    """
    refused = dict(
        swa_topk_lens=swa_topk_lens, extra_sparse_indices=extra_sparse_indices,
        extra_sparse_topk_lens=extra_sparse_topk_lens, hca_swa_indices=hca_swa_indices,
        hca_compressed_block_tables=hca_compressed_block_tables, hca_seq_lens=hca_seq_lens,
        hca_sparse_indices_format=hca_sparse_indices_format,
        sparse_indices_are_storage_offsets=sparse_indices_are_storage_offsets,
        dsv4_inv_rope_cos_sin_cache=dsv4_inv_rope_cos_sin_cache, dsv4_output_scale=dsv4_output_scale,
        sparse_topk_lens_offset=sparse_topk_lens_offset or None,
    )  # fmt: skip
    for name, value in refused.items():
        refuse(name, value, "None: sparse_indices and sparse_topk_lens tell all keys")
    require(kv_layout in ("HND", "NHD"), "kv_layout", repr(kv_layout), "'HND', 'NHD'")
    require(sparse_indices is not None, "sparse_indices", None, "a tensor")
    require(query.dim() in (3, 4), "query", tuple(query.shape), "batch and q_len, or tokens; heads; head_dim")
    window = without_heads(swa_kv_cache, kv_layout)
    if window.dtype == torch.uint8:
        refuse("swa_kv_cache", window, "bf16, fp16 or fp8: caches of bytes, which carry their scales, are not read")
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
    rows = query.flatten(0, -3)
    table = token_table(sparse_indices, width, sparse_topk_lens, rows, "sparse_indices", "sparse_topk_lens")
    return attend(
        query, rows, cache, asked, table, factors_of(bmm1_scale, bmm2_scale), longest_q=1, given=workspace_buffer,
        backend="auto" if backend == "sparse" else backend, out=out, lse=None, return_lse=False,
        sinks=head_sinks(sinks, query.shape[-2]), first_ckv=window if first else None,
    )  # fmt: skip

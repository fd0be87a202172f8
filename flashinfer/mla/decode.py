"""Latent attention without a plan, in the forms of other libraries that engines call through upstream."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.mla.batch import factors_of, latent_options, split, without_heads
from flashinfer.ops.attention.direct import block_table
from flashinfer.ops.attention.engine import flat_integers, integers, refuse, sinks_of
from flashinfer.ops.attention.mla.direct import ones_times, run_latent
from flashinfer.ops.attention.mla.wrapper import check_entries, latent_blocks
from flashinfer.ops.attention.problem import Table

# xqa_mla's logits are divided by the root of DeepSeek's head_dim before absorption: 128 + 64.
_XQA_HEAD_DIM = 192


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of a batch that only the device knows; over all keys, or over those that the caller names.

    Nothing waits for the device: one launch makes the work list, another computes. A CUDA graph that captured the call
    follows `block_tables`, lengths and scales in tensors as they change in place.

    Parameters
    ----------
    query : Tensor [batch, q_len, num_heads, kv_lora_rank + qk_rope_head_dim]
        Absorbed and positional parts side by side. With cum_seq_lens_q [tokens, num_heads, ...]. The queries of a
        request are its last tokens, and causal among themselves. 1 to 128 heads; bf16, fp16 or fp8.
    kv_cache : Tensor [pages, page_size, kv_lora_rank + qk_rope_head_dim]
        With a further axis of 1 before or after page_size as well. query's dtype, or fp8. Any page size, any strides of
        the outer axes.
    workspace_buffer : Tensor
        For partial results, where it is large enough; its contents are not preserved.
    qk_nope_head_dim : int
        Of the model before absorption; not read.
    kv_lora_rank, qk_rope_head_dim : int
        16 to 512, and 8 to 128 or 0.
    block_tables : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything. With sparse_mla_top_k, [batch, q_len, sparse_mla_top_k] (or
        [tokens, sparse_mla_top_k]): the keys of each query, as tokens of the cache (page * page_size + place in it), in
        any order; negative ones are none, and one that is named twice counts twice.
    seq_lens : int32 or uint32 Tensor [batch]
        Keys of each request, those of its queries among them. Not read with sparse_mla_top_k.
    max_seq_len : int
        Not read: `block_tables` bounds the lengths.
    sparse_mla_top_k : int
        Keys that block_tables names for each query; 0 for attention over all.
    out : Tensor [batch, q_len, num_heads, kv_lora_rank], optional
        bf16, fp16, fp32 or fp8, which saturates; as query otherwise (bfloat16 for fp8).
    bmm1_scale : float or float32 Tensor [1]
        Factor of the logits: sm_scale before absorption, and the scales of q and k, fused.
    bmm2_scale : float or float32 Tensor [1]
        Factor of the output: the scale of the latents.
    sinks : float32 Tensor [num_heads], optional
        A logit per head that takes part in the softmax without a value.
    uses_shared_paged_kv_idx : bool
        False, separate tables of K and V, is refused.
    lse : float32 Tensor [tokens, num_heads], optional
    return_lse : bool
        Whether to return the log-sum-exp too.
    kv_scale_format : str
        Refused unless "auto": caches that carry scales.
    cum_seq_lens_q : int32 Tensor [batch + 1], optional
        First token of each request, for requests of different numbers of queries.
    max_q_len : int, optional
        The most queries of a request, with cum_seq_lens_q; tiles are chosen by it.
    sparse_mla_top_k_lens : int32 Tensor [tokens], optional
        How many of the keys of each query count, from the first on.
    enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global
        Context parallelism: of one query per request, whose rank's keys are all seen, they change nothing. Refused
        with several queries.
    return_lse_base : str, optional
        "base2" (also None) or "basee".
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).
    skip_softmax_threshold_scale_factor, use_fp16_softmax, enable_pdl, is_var_seq, cute_dsl_impl,
    multi_ctas_kv_counter_buffer
        Permissions and hints that change no result: the softmax is exact, in float32.

    Returns
    -------
    out : Tensor, as query with kv_lora_rank elements
    lse : float32 Tensor [tokens, num_heads], with return_lse
        -inf for a query that sees no key, whose out is 0.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.
    """
    if not uses_shared_paged_kv_idx:
        refuse("uses_shared_paged_kv_idx", "False", "True: K and V are the same latents")
    refuse("kv_scale_format", None if kv_scale_format == "auto" else kv_scale_format, "'auto'")
    require(return_lse_base in (None, "base2", "basee"), "return_lse_base", repr(return_lse_base), "'base2', 'basee'")
    axes = 4 if cum_seq_lens_q is None else 3
    require(query.dim() == axes, "query", tuple(query.shape), f"{axes} axes: batch and q_len, or tokens; heads; dim")
    q_len = query.shape[1] if axes == 4 else 0
    if q_len != 1:
        allowed = "none with several queries of a request"
        refuse("enable_dcp", enable_dcp, allowed)
        refuse("cp_world", None if cp_world == 1 else cp_world, allowed)
        refuse("causal_seqlens_kv_global", causal_seqlens_kv_global, allowed)
    kv_cache = without_heads(kv_cache)
    rows = query.flatten(0, -3)
    asked = latent_options(
        query.shape[-2], kv_lora_rank, qk_rope_head_dim, kv_cache.shape[1], query.dtype, kv_cache.dtype,
        None if out is None else out.dtype, causal=q_len != 1 and not sparse_mla_top_k, sparse=sparse_mla_top_k > 0,
    )  # fmt: skip
    if sparse_mla_top_k:
        table, longest = token_table(block_tables, sparse_mla_top_k, sparse_mla_top_k_lens, rows), 1
    else:
        refuse("sparse_mla_top_k_lens", sparse_mla_top_k_lens, "None without sparse_mla_top_k")
        table, longest = latent_blocks(block_tables, seq_lens, cum_seq_lens_q, q_len, query.device), q_len or max_q_len
        require(axes == 3 or table.batch_size == query.shape[0], "seq_lens", f"{table.batch_size} requests",
                f"{query.shape[0]}, as query")  # fmt: skip
    return attend(
        query, rows, kv_cache, asked, table, factors_of(bmm1_scale, bmm2_scale), longest_q=longest or 1,
        given=workspace_buffer, backend=backend, out=out, lse=lse, return_lse=return_lse,
        base_e=return_lse_base == "basee", sinks=sinks_of(sinks),
    )  # fmt: skip


def attend(query, rows, kv_cache, asked, table, factors, *, out, lse, **call):
    """`run_latent` of query, whose rows are `rows`, over a cache of latents and positions side by side."""
    q_nope, q_pe = split(rows, asked, "query")
    ckv, kpe = split(kv_cache, asked, "kv_cache")
    shape = (*query.shape[:-1], asked.head_dim_vo)
    if out is not None:
        require(out.shape == shape, "out", tuple(out.shape), str(shape))
        out = out.view(*rows.shape[:2], asked.head_dim_vo)
    if lse is not None:
        require(lse.numel() == rows.shape[0] * rows.shape[1], "lse", tuple(lse.shape), str(tuple(rows.shape[:2])))
        lse = lse.view(rows.shape[:2])
    result = run_latent(asked, table, q_nope, q_pe, ckv, kpe, factors, out=out, lse=lse, **call)
    if call["return_lse"]:
        return result[0].view(shape), result[1]
    return result.view(shape)


def token_table(
    tokens: torch.Tensor, top_k: int, lens: torch.Tensor | None, rows: torch.Tensor, named: str = "block_tables",
    lens_named: str = "sparse_mla_top_k_lens",
) -> Table:  # fmt: skip
    """The Table of queries with keys of their own: tokens [..., top_k] of the cache, the first `lens` of them."""
    count, device = rows.shape[0], rows.device
    require(tokens.shape[-1] == top_k and tokens.numel() == count * top_k, named, tuple(tokens.shape),
            f"{count} queries x {top_k} tokens")  # fmt: skip
    tokens = integers(tokens.reshape(count, top_k), named, device, (count, top_k))
    check_entries(named, tokens)
    lens = ones_times(top_k, count, device) if lens is None else flat_integers(lens, lens_named, device, count)
    return block_table(tokens, lens, q_len=1)


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """`trtllm_batch_decode_with_kv_cache_mla` under the name of another kernel of upstream; parameters as there."""
    return trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, 0, out, bmm1_scale, bmm2_scale, sinks, enable_pdl=enable_pdl,
    )  # fmt: skip


def xqa_mla(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    page_size: int,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """Latent decode of one query per request, into `output`.

    Logits are q . k * q_scale * kv_scale / sqrt(192), 192 being DeepSeek's head_dim before absorption, and the output
    is scaled by kv_scale.

    Parameters
    ----------
    q : Tensor [batch, 1, num_heads, head_dim]
        The second axis is the beam, of width 1. Absorbed and positional parts side by side, the latter 64 elements.
    k_cache : Tensor [tokens, head_dim] or [pages, page_size, head_dim]
        With a further axis of 1 for the head as well. q's dtype, or fp8.
    v_cache : Tensor
        The same memory as k_cache: values are the latents of the keys.
    page_table : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything.
    seq_lens : uint32 or int32 Tensor [batch, 1] or [batch]
    output : Tensor [batch, 1, num_heads, head_dim - 64]
        Written.
    page_size : int
        Tokens per page, from 1 up.
    q_scale, kv_scale : float or float32 Tensor [1]
    workspace_buffer, semaphores, sm_count, enable_pdl
        Scratch and hints that change no result.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        A problem that no variant takes.
    """
    require(page_size >= 1, "page_size", page_size, "at least 1")
    require(q.dim() == 4 and q.shape[1] == 1, "q", tuple(q.shape), "[batch, 1, num_heads, head_dim]")
    same = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    require(same, "v_cache", "other memory than k_cache", "the memory of k_cache: values are the latents of the keys")
    if k_cache.dim() == 2:
        require(k_cache.shape[0] % page_size == 0, "k_cache", tuple(k_cache.shape), f"whole pages of {page_size} rows")
        k_cache = k_cache.unflatten(0, (-1, page_size))
    cache = without_heads(k_cache)
    require(cache.shape[1] == page_size, "k_cache", tuple(k_cache.shape), f"pages of page_size = {page_size} tokens")
    trtllm_batch_decode_with_kv_cache_mla(
        q, cache, workspace_buffer, 128, q.shape[-1] - 64, 64, page_table, seq_lens, 0, 0, output,
        q_scale * kv_scale * _XQA_HEAD_DIM**-0.5, kv_scale,
    )  # fmt: skip

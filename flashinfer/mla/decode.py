"""Latent attention without a plan, as other libraries have it that engines call through upstream."""

from __future__ import annotations

import math
from typing import cast

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import check_apart, check_values, present, require
from flashinfer._core.custom_op import one_op
from flashinfer._core.direct_replay import direct
from flashinfer._core.literals import Backend
from flashinfer._direct.given import check_bound, flag, head_sinks, scale, whole
from flashinfer._direct.outputs import attention_op
from flashinfer.mla.batch import factors_of, split, without_heads
from flashinfer.ops.attention.direct import ones_times, run_latent
from flashinfer.ops.attention.engine import flat_integers, integers, refuse
from flashinfer.ops.attention.masks import shard_mask
from flashinfer.ops.attention.mla.wrapper import check_entries, latent_blocks
from flashinfer.ops.attention.options import default_o_dtype, latent_options
from flashinfer.ops.attention.tables import Table, block_table

# xqa_mla's logits are divided by the root of DeepSeek's head_dim before absorption: 128 + 64.
_XQA_HEAD_DIM = 192
# Heads of one problem (PlanOptions).
_MOST_HEADS = 128


def _like_latents(its: dict) -> tuple:
    query = its["query"]
    return (*query.shape[:-1], its["kv_lora_rank"]), default_o_dtype(query.dtype, None), query.device


@direct(bounds=("max_seq_len",))
@attention_op(_like_latents)
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="kv_cache",
       num_kv_heads="kv_cache", head_dim_vo="kv_lora_rank", head_dim_kpe="qk_rope_head_dim", page_size="kv_cache",
       v_scale="bmm2_scale", q_scale="bmm1_scale", qo_indptr="cum_seq_lens_q", kv_indptr="seq_lens",
       num_heads="query", q_nope="query", q_pe="query", ckv_cache="kv_cache", kpe_cache="kv_cache")  # fmt: skip
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: Backend = "auto",
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
        request are its last tokens, and causal among themselves. bf16, fp16 or fp8; more than 128 heads are computed
        in parts.
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
        At least 0; `block_tables` bounds the lengths.
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
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).
    uses_shared_paged_kv_idx : bool
        False: block_tables is [batch, 2, max_pages], of K and of V, which name the same latents; K's are read.
    lse : float32 Tensor [tokens, num_heads] or [batch, q_len, num_heads], optional
        Written, return_lse or not.
    return_lse : bool
        Whether to return the log-sum-exp too.
    kv_scale_format : str
        "auto", "pow2_fp32" or "arbitrary_fp32": of caches that carry scales, which are not taken here.
    cum_seq_lens_q : int32 Tensor [batch + 1], optional
        First token of each request, for requests of different numbers of queries.
    max_q_len : int, optional
        The most queries of a request, with cum_seq_lens_q; tiles are chosen by it.
    skip_softmax_threshold_scale_factor, use_fp16_softmax, enable_pdl, is_var_seq, cute_dsl_impl
    multi_ctas_kv_counter_buffer
        Permissions and hints that change no result: the softmax is exact, in float32.
    sparse_mla_top_k_lens : int32 Tensor [tokens], optional
        How many of the keys of each query count, from the first on.
    enable_dcp : bool
        Announces the next three, which say what is seen with and without it.
    cp_world, cp_rank : int
        Context parallelism: this cache holds the keys at positions c * cp_world + cp_rank of each request, and
        `seq_lens` counts those. Outputs and LSE of all ranks merge to those of the whole (`flashinfer.merge_states`).
    causal_seqlens_kv_global : int32 Tensor [batch], optional
        Keys of each request on all ranks, those of its queries among them. Needed where a request has several queries.
    return_lse_base : str, optional
        "base2" (also None) or "basee".

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

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(4, 16, 576).bfloat16()
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([20, 5]).int()
    >>> flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
    ...     q, cache, torch.empty(0, dtype=torch.uint8), 128, 512, 64, pages, lens, 20, bmm1_scale=0.07).shape
    torch.Size([2, 1, 16, 512])
    """
    known = kv_scale_format in ("auto", "pow2_fp32", "arbitrary_fp32")
    require(known, "kv_scale_format", repr(kv_scale_format), "'auto', 'pow2_fp32', 'arbitrary_fp32'")
    require(return_lse_base in (None, "base2", "basee"), "return_lse_base", repr(return_lse_base), "'base2', 'basee'")
    axes = 4 if cum_seq_lens_q is None else 3
    require(query.dim() == axes, "query", tuple(query.shape), f"{axes} axes: batch and q_len, or tokens; heads; dim")
    q_len, top_k = query.shape[1] if axes == 4 else 0, whole("sparse_mla_top_k", sparse_mla_top_k, 0)
    check_bound("max_seq_len", max_seq_len)
    longest = q_len or (1 if max_q_len is None else whole("max_q_len", max_q_len, 1))
    kv_cache, rows, device = without_heads(kv_cache), query.flatten(0, -3), query.device
    if not flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        require(top_k == 0, "uses_shared_paged_kv_idx", False, "True with sparse_mla_top_k")
        fits = block_tables.dim() == 3 and block_tables.shape[1] == 2
        require(fits, "block_tables", tuple(block_tables.shape), "[batch, 2, pages], of K and of V")
        # K and V are the same latents, so that both tables name the same pages.
        block_tables = block_tables[:, 0]
    masked, causal = (None, None), q_len != 1 and not top_k
    if top_k:
        table, longest = token_table(block_tables, top_k, sparse_mla_top_k_lens, rows), 1
    else:
        refuse("sparse_mla_top_k_lens", sparse_mla_top_k_lens, "None without sparse_mla_top_k")
        table = latent_blocks(block_tables, seq_lens, cum_seq_lens_q, q_len, device)
        require(axes == 3 or table.batch_size == query.shape[0], "seq_lens", f"{table.batch_size} requests",
                f"{query.shape[0]}, as query")  # fmt: skip
        if causal and (enable_dcp or cp_world != 1):
            ranks = whole("cp_world", cp_world, 1), whole("cp_rank", cp_rank, 0)
            masked, causal = _shard_of(table, causal_seqlens_kv_global, *ranks), False
    asked = latent_options(
        min(query.shape[-2], _MOST_HEADS), kv_lora_rank, qk_rope_head_dim, kv_cache.shape[1], query.dtype,
        kv_cache.dtype, None if out is None else out.dtype, causal=causal, sparse=top_k > 0, variant=masked[0],
    )  # fmt: skip
    factors = factors_of(scale("bmm1_scale", bmm1_scale, device), scale("bmm2_scale", bmm2_scale, device))
    return attend(
        query, rows, kv_cache, asked, table, factors, longest_q=longest, given=workspace_buffer,
        backend=backend, out=out, lse=lse, return_lse=flag("return_lse", return_lse),
        base_e=return_lse_base == "basee", sinks=head_sinks(sinks, query.shape[-2]), params=masked[1],
    )  # fmt: skip


def _shard_of(table: Table, total, world: int, rank: int):
    """The mask of a rank of context parallelism, whose requests have several queries, the last of `total` keys."""
    require(rank < world, "cp_rank", rank, f"0 ... {world - 1}, below cp_world")
    total = present("causal_seqlens_kv_global", total, "a tensor, with several queries and cp_world")
    lens = present("seq_lens", table.kv_lens)
    total = flat_integers(total, "causal_seqlens_kv_global", lens.device, table.batch_size)
    queries = dict(q_len=table.q_len) if table.q_len else dict(qo_indptr=table.qo_indptr)
    return shard_mask(queries, lens, total, world, rank, -1)


def attend(
    query, rows, kv_cache, asked, table, factors, *, out, lse, return_lse, sinks, **call
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`run_latent` of query, whose rows are `rows`, over a cache of latents and positions side by side.

    More heads than a problem takes are those of several. Returns the caller's own tensors, where it gave some.
    """
    ckv, kpe = split(kv_cache, asked, "kv_cache")
    heads, shape = query.shape[-2], (*query.shape[:-1], asked.head_dim_vo)
    mine, flat = out, None if out is None else _rows_of("out", out, (*rows.shape[:2], asked.head_dim_vo))
    flat_lse = None if lse is None else _rows_of("lse", lse, rows.shape[:2])
    call |= dict(return_lse=return_lse or lse is not None)
    if heads <= _MOST_HEADS:
        result = run_latent(asked, table, *split(rows, asked, "query"), ckv, kpe, factors, out=flat, lse=flat_lse,
                            sinks=sinks, **call)  # fmt: skip
    else:
        result = _in_parts(asked, table, rows, ckv, kpe, factors, flat, flat_lse, sinks, call)
    result, result_lse = result if isinstance(result, tuple) else (result, None)
    # Where the strides of requests and of their queries do not make one, rows are a copy.
    for given, written in ((out, flat), (lse, flat_lse)):
        if given is not None and written is not None and given.data_ptr() != written.data_ptr():
            given.copy_(written.view(given.shape))
    out = result.view(shape) if mine is None else mine
    lse = result_lse if lse is None else lse
    return out if lse is None or not return_lse else (out, lse)


def _rows_of(name: str, given: torch.Tensor, shape) -> torch.Tensor:
    """A caller's output as rows; its axes may be those of the query, or the rows'."""
    require(given.numel() == math.prod(shape) and given.shape[-1] == shape[-1], name, tuple(given.shape),
            f"{tuple(shape)}, or the axes of query")  # fmt: skip
    check_apart([(name, given)])
    return given if given.shape == tuple(shape) else given.reshape(shape)


def _in_parts(asked, table, rows, ckv, kpe, factors, out, lse, sinks, call):
    """Attention of more than 128 heads: of two halves, each with the same keys."""
    heads = rows.shape[1]
    if out is None:
        shape = *rows.shape[:2], asked.head_dim_vo
        out = torch.empty(shape, dtype=asked.o_dtype, device=rows.device)
    if call["return_lse"] and lse is None:
        lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
    most = -(-heads // -(-heads // _MOST_HEADS))
    for begin in range(0, heads, most):
        part = slice(begin, min(begin + most, heads))
        count = part.stop - part.start
        some = asked.changed(num_qo_heads=count)
        of_part = run_latent(
            some, table, *split(rows[:, part], some, "query"), ckv, kpe, factors, out=out[:, part], lse=None,
            sinks=None if sinks is None else sinks[part], **call,
        )  # fmt: skip
        if lse is not None:
            lse[:, part] = of_part[1]
    return (out, lse) if lse is not None else out


def token_table(
    tokens: torch.Tensor, top_k: int, lens: torch.Tensor | None, rows: torch.Tensor, named: str = "block_tables",
    lens_named: str = "sparse_mla_top_k_lens",
) -> Table:  # fmt: skip
    """The Table of queries with keys of their own: tokens [..., top_k] of the cache, the first `lens` of them."""
    count, device = rows.shape[0], rows.device
    require(tokens.shape[-1:] == (top_k,) and tokens.numel() == count * top_k, named, tuple(tokens.shape),
            f"{count} queries x {top_k} tokens")  # fmt: skip
    tokens = integers(tokens.reshape(count, top_k), named, device, (count, top_k))
    check_entries(named, tokens)
    each = 0
    if lens is None:
        lens, each = ones_times(top_k, count, device), top_k
    else:
        lens = flat_integers(lens, lens_named, device, count)
        check_values(lens_named, lens, 0, top_k)
    return block_table(tokens, lens, q_len=1, each_kv=each, names=("qo_indptr", "kv_indptr", lens_named, named))


@direct(bounds=("max_seq_len",))
@attention_op(_like_latents, ("out",))
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="kv_cache",
       num_kv_heads="kv_cache", head_dim_vo="kv_cache", page_size="kv_cache", v_scale="bmm2_scale",
       q_scale="bmm1_scale", kv_indptr="seq_lens", num_heads="query")  # fmt: skip
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
    """`trtllm_batch_decode_with_kv_cache_mla` under the name of another kernel of upstream.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens
        As in `trtllm_batch_decode_with_kv_cache_mla`.
    max_seq_len, out, bmm1_scale, bmm2_scale, sinks, enable_pdl
        As in `trtllm_batch_decode_with_kv_cache_mla`.

    Returns
    -------
    torch.Tensor
        As of `trtllm_batch_decode_with_kv_cache_mla`.

    Raises
    ------
    ValueError
        As `trtllm_batch_decode_with_kv_cache_mla` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(4, 16, 576).bfloat16()
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([20, 5]).int()
    >>> flashinfer.mla.xqa_batch_decode_with_kv_cache_mla(
    ...     q, cache, torch.empty(0, dtype=torch.uint8), 128, 512, 64, pages, lens, 20, bmm1_scale=0.07).shape
    torch.Size([2, 1, 16, 512])
    """
    result = trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, 0, out, bmm1_scale, bmm2_scale, sinks, enable_pdl=enable_pdl,
    )  # fmt: skip
    return cast(torch.Tensor, result)


@direct(writes=("output",))
@one_op(("output",), {}, lambda its: None, between=True)
@named(q_data_type="q", num_qo_heads="q", head_dim_qk="q", kv_data_type="k_cache",
       num_kv_heads="k_cache", head_dim_vo="v_cache", kv_cache="k_cache", out="output",
       kv_indptr="seq_lens", num_heads="q")  # fmt: skip
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, cache = torch.randn(2, 1, 16, 576).half(), torch.randn(4, 32, 576).half()
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([[40], [5]]).int()
    >>> out, scratch = torch.empty(2, 1, 16, 512).half(), torch.empty(0, dtype=torch.uint8)
    >>> flashinfer.xqa_mla(q, cache, cache, pages, lens, out, scratch, scratch, 32)
    >>> bool(out.isfinite().all())
    True
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
        scale("q_scale", q_scale, q.device) * scale("kv_scale", kv_scale, q.device) * _XQA_HEAD_DIM**-0.5, kv_scale,
    )  # fmt: skip

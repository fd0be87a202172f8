"""Decode over block tables and lengths on the device, without a plan."""

from __future__ import annotations

from typing import cast

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import check_values, require
from flashinfer._core.direct_replay import direct
from flashinfer._core.literals import Backend, KvLayout
from flashinfer._direct.given import check_bound, flag, head_sinks, scale, whole, with_pages
from flashinfer._direct.outputs import Output, attention_op, like_query
from flashinfer._direct.pages import as_one_type, gathered, pair_of
from flashinfer.ops.attention.engine import attend_pages, factors_of, flat_integers, refuse, scales_of, value_dim
from flashinfer.ops.attention.masks import draft_mask, shard_mask
from flashinfer.ops.kv_layout import LAYOUTS, check_layout
from flashinfer.utils import FP4Tensor


# No op takes hints of any type, and they change nothing.
_HINTS = dict.fromkeys(("request_order", "request_order_plan"), lambda its: None)


@direct(bounds=("max_seq_len",))
@attention_op(like_query, given=_HINTS)
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="kv_cache",
       num_kv_heads="kv_cache", head_dim_vo="kv_cache", page_size="kv_cache", v_scale="bmm2_scale",
       q_scale="bmm1_scale", qo_indptr="cum_seq_lens_q", kv_indptr="seq_lens", num_heads="query")  # fmt: skip
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: KvLayout = "HND",
    enable_pdl: bool | None = None,
    backend: Backend = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf=None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode=None,
    request_order=None,
    request_order_plan=None,
    *,
    kv_block_scales=None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of a batch that only the device knows.

    Nothing waits for the device: one launch makes the work list, another computes. A CUDA graph that captured the call
    follows `block_tables`, `seq_lens`, `cum_seq_lens_q` and scales in tensors as they change in place.

    Parameters
    ----------
    query : Tensor [tokens, num_qo_heads, head_dim]
        bf16, fp16 or fp8. The queries of a request follow one another, and are its last tokens.
    kv_cache : Tensor or (Tensor, Tensor)
        HND [pages, 2, num_kv_heads, page_size, head_dim] or NHD [pages, 2, page_size, num_kv_heads, head_dim], or
        (k, v) without the second axis; with 1 for the second axis, K is V. query's dtype, or fp8. Any page size, any
        strides, head_dim contiguous. Pools of single tokens may come without their page axis. K in bf16 or fp16 with V
        in fp8 is taken, at the price of a widened copy of V.
    workspace_buffer : Tensor
        Not read: the work list and partial results are in buffers of our own, kept for the stream.
    block_tables : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything. [batch, 2, max_pages], of K and of V, without
        uses_shared_paged_kv_idx. [num_kv_heads, batch, max_pages] with enable_block_sparse_attention: the pages that
        each KV head chose, the last of them the only one that may be partly filled.
    seq_lens : int32 or uint32 Tensor [batch]
        Keys of each request, those of its queries among them. [num_kv_heads, batch] with enable_block_sparse_attention:
        the keys in the chosen pages.
    max_seq_len : int
        At least 0; `block_tables` bounds the lengths.
    bmm1_scale : float or float32 Tensor [1]
        Factor of q . k: 1 / sqrt(head_dim) and the scales of q and k, fused.
    bmm2_scale : float or float32 Tensor [1]
        Factor of the output: the scale of v, and the reciprocal of that of the output, fused.
    window_left : int
        A query sees itself and this many keys before it; -1 for all.
    out : Tensor [tokens, num_qo_heads, head_dim], optional
    out_dtype : dtype or its name, optional
        Default out's, else query's. fp8 saturates; float8_e4m3fn needs compute capability 8.9. "nvfp4" gives an
        FP4Tensor, and so does an `out` that is one: codes [tokens, num_qo_heads, head_dim / 2], factors of 16 elements
        in the 128x4 layout, a row of them for each token.
    o_sf_scale : float or float32 Tensor [1], optional
        Of nvfp4 outputs: a value is code * factor / o_sf_scale. Default 1.
    o_sf_vec_size : int, optional
        16.
    sinks : float32 Tensor [num_qo_heads] or [num_kv_heads, num_qo_heads / num_kv_heads], optional
        A logit per head that takes part in the softmax without a value.
    kv_layout : str
        "HND" or "NHD".
    enable_pdl, skip_softmax_threshold_scale_factor, multi_ctas_kv_counter_buffer, request_order, request_order_plan
        Permissions and hints that change no result.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).
    q_len_per_req : int, optional
        Queries of every request, causal among themselves; None for tokens / batch. Not read with cum_seq_lens_q.
    o_scale : float, optional
        The scale of an FP8 output. bmm2_scale has its reciprocal already, so that it changes no result.
    mask : Tensor [batch, q_len_per_req, width] or [tokens, width], optional
        What each draft token sees of its request's draft, the request's last keys: bool, or packed bits (low bit first)
        as uint8, uint16 or uint32. All keys before the draft are seen. It stands in the place of the causal mask.
    max_q_len : int, optional
        The most queries of a request, with cum_seq_lens_q; tiles are chosen by it.
    cum_seq_lens_q : int32 Tensor [batch + 1], optional
        First token of each request, for requests of different numbers of queries. Rows in front of the first element
        and from the last one on are of no request, as in a graph of more rows than a step has. They are not written,
        and in a new output hold what its memory held, as upstream's do.
    kv_cache_sf, kv_block_scales : (Tensor, Tensor) or Tensor, optional
        One of the two, of an nvfp4 kv_cache: uint8 with head_dim / 2 last, two e2m1 a byte, the first in the low half.
        Its factors, float8_e4m3fn or uint8, laid out as kv_cache with head_dim / 16 last; a value is code * factor, and
        the scales of the whole are part of bmm1_scale and bmm2_scale. The backend says how the factors of V lie: with
        "trtllm-gen", and with "auto" but on compute capability 12, four tokens interleaved, as
        `nvfp4_quantize_paged_kv_cache` writes them; else row by row.
    uses_shared_paged_kv_idx : bool
        False: K and V have tables of their own. The pages that they name are copied side by side first.
    lse : float32 Tensor [tokens, num_qo_heads], optional
        Written, whether it is returned or not.
    return_lse : bool
        Whether to return the log-sum-exp too, base 2.
    bmm1_scale_log2 : float32 Tensor [1], optional
        bmm1_scale times log2(e), in its place.
    enable_block_sparse_attention : bool
        Each KV head attends to pages of its own. Without a window, a mask, or context parallelism.
    cp_world, cp_rank : int
        Context parallelism: this cache holds the keys at positions c * cp_world + cp_rank of each request, and
        `seq_lens` counts those. Outputs and LSE of all ranks merge to those of the whole (`flashinfer.merge_states`).
    causal_seqlens_kv_global : int32 Tensor [batch], optional
        Keys of each request on all ranks before those of its queries: query j sees positions up to this + j. Needed
        where a request has several queries, or with a window.
    bf16q_fp8kv_transform_mode : str, optional
        None, "k_only" or "separate_kv"; FP8 keys and values are widened exactly with each.

    Returns
    -------
    out : Tensor [tokens, num_qo_heads, head_dim]
    lse : float32 Tensor [tokens, num_qo_heads], with return_lse
        Base 2; -inf for a query that sees no key, whose out is 0.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, kv = torch.randn(2, 8, 64).half(), torch.randn(4, 2, 2, 16, 64).half()
    >>> scratch = torch.empty(0, dtype=torch.uint8)
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([20, 5]).int()
    >>> flashinfer.decode.trtllm_batch_decode_with_kv_cache(q, kv, scratch, pages, lens, 20, bmm1_scale=0.125).shape
    torch.Size([2, 8, 64])
    """
    if kv_layout not in LAYOUTS:
        check_layout(kv_layout)
    if bf16q_fp8kv_transform_mode not in (None, "k_only", "separate_kv"):
        mode = repr(bf16q_fp8kv_transform_mode)
        require(False, "bf16q_fp8kv_transform_mode", mode, "None, 'k_only', 'separate_kv'")
    window_left = whole("window_left", window_left)
    check_bound("max_seq_len", max_seq_len)
    _check_rows(query)
    kv_cache = as_one_type(with_pages(kv_cache, kv_layout))
    device, by_head = query.device, flag("enable_block_sparse_attention", enable_block_sparse_attention)
    output = Output(query, (*query.shape[:2], value_dim(kv_cache)), out, out_dtype, o_sf_scale, o_sf_vec_size, lse,
                    return_lse)  # fmt: skip
    factors = factors_of(kv_cache_sf, kv_block_scales, kv_layout, backend, device)
    if not flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        refuse("enable_block_sparse_attention", by_head, "False, without uses_shared_paged_kv_idx")
        kv_cache, block_tables, factors = gathered(kv_cache, kv_layout, block_tables, factors)
    call = dict(
        o_dtype=output.dtype, backend=backend, sinks=head_sinks(sinks, query.shape[1]), **factors,
        **scales_of(scale("bmm1_scale", bmm1_scale, device), scale("bmm2_scale", bmm2_scale, device), o_scale=o_scale,
                    bmm1_scale_log2=bmm1_scale_log2),
    )  # fmt: skip
    require(not by_head or seq_lens.dim() > 0, "seq_lens", (), "[batch], or [num_kv_heads, batch] of chosen blocks")
    batch = seq_lens.shape[-1] if by_head else seq_lens.numel()
    queries, longest = queries_of(query, batch, q_len_per_req, cum_seq_lens_q, max_q_len)
    if by_head:
        refuse("mask", mask, "None, with enable_block_sparse_attention")
        refuse("cp_world", None if cp_world == 1 else cp_world, "1, with enable_block_sparse_attention")
        require(window_left < 0, "window_left", window_left, "-1, with enable_block_sparse_attention")
        call |= dict(longest_q=longest, causal=longest != 1)
        return _by_head(query, kv_cache, kv_layout, block_tables, seq_lens, queries, output, call)
    lens = flat_integers(seq_lens, "seq_lens", device, batch)
    call |= dict(longest_q=longest, causal=longest != 1, window_left=window_left)
    if mask is not None or cp_world != 1 or cp_rank != 0:
        ranks = whole("cp_world", cp_world), whole("cp_rank", cp_rank), causal_seqlens_kv_global
        call |= _mask_of(query, queries, lens, longest, window_left, mask, ranks)
    return output.finish(
        attend_pages(query, kv_cache, kv_layout, block_tables, lens, queries, **call, **output.call)
    )


def _mask_of(query, queries: dict, lens, longest: int, window_left: int, mask, ranks: tuple) -> dict:
    """The arguments of `attend_pages` that say what is seen, where a mask or context parallelism changes them."""
    cp_world, cp_rank, prefix = ranks
    if not 0 <= cp_rank < cp_world:
        require(False, "cp_rank", cp_rank, f"0 ... {cp_world - 1}, below cp_world")
    if cp_world > 1 and (longest != 1 or window_left >= 0):
        require(prefix is not None, "causal_seqlens_kv_global", None, "a tensor, with several queries or a window")
        require(mask is None, "mask", "a tensor", f"None with cp_world {cp_world}")
        prefix = flat_integers(prefix, "causal_seqlens_kv_global", query.device, lens.shape[0])
        indptr = queries.get("qo_indptr")
        total = prefix + (queries["q_len"] if indptr is None else indptr[1:] - indptr[:-1])
        return dict(masked=shard_mask(queries, lens, total, cp_world, cp_rank, window_left), causal=False,
                    window_left=-1)  # fmt: skip
    if mask is None:
        return {}
    return dict(masked=draft_mask(mask, queries, lens, query.shape[0], longest), causal=False)


def _by_head(query, kv_cache, kv_layout: str, tables, seq_lens, queries: dict, output: Output, call: dict):
    """Attention whose KV heads have tables [kv_heads, batch, pages] and lengths [kv_heads, batch] of their own.

    Each KV head and its query heads are an attention of one KV head.
    """
    k, v = pair_of(kv_cache, kv_layout)
    axis = 1 if kv_layout == "HND" else 2
    heads = k.shape[axis]
    fits = tables.dim() == 3 and tables.shape[0] == heads
    require(fits, "block_tables", tuple(tables.shape), f"[{heads}, batch, pages], tables of each KV head")
    require(seq_lens.dim() == 2 and tuple(seq_lens.shape) == tuple(tables.shape[:2]), "seq_lens",
            tuple(seq_lens.shape), f"{tuple(tables.shape[:2])}, as block_tables")  # fmt: skip
    require(query.shape[1] % heads == 0, "query", f"{query.shape[1]} heads", f"a multiple of {heads}, the KV heads")
    group, given = query.shape[1] // heads, output.call
    shape = (*query.shape[:2], v.shape[-1])
    rows = given["out"]
    if rows is None:
        rows = torch.empty(shape, dtype=output.dtype, device=query.device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device) if given["return_lse"] else None
    sinks, factors = call.pop("sinks"), {name: call.pop(name) for name in ("k_factors", "v_factors") if name in call}
    for h in range(heads):
        mine = slice(h * group, (h + 1) * group)
        of_head = {name: t[:, :, h : h + 1] for name, t in factors.items()}
        got = attend_pages(
            query[:, mine], (k.narrow(axis, h, 1), v.narrow(axis, h, 1)), kv_layout, tables[h], seq_lens[h], queries,
            out=rows[:, mine], return_lse=lse is not None, sinks=None if sinks is None else sinks[mine], **of_head,
            **call,
        )  # fmt: skip
        if lse is not None:
            lse[:, mine] = got[1]
    if given["lse"] is not None:
        lse = given["lse"].copy_(lse)
    return output.finish((rows, lse) if lse is not None else rows)


def _check_rows(query: torch.Tensor) -> None:
    if query.dim() != 3:
        require(False, "query", tuple(query.shape), "[tokens, num_qo_heads, head_dim]")


def queries_of(query: torch.Tensor, batch: int, q_len: int | None, indptr: torch.Tensor | None,
               longest: int | None) -> tuple[dict, int]:  # fmt: skip
    """What tells the queries of each request (see `Table`), and the most that a request has; 0 if that is unknown."""
    _check_rows(query)
    if indptr is not None:
        longest = None if longest is None else whole("max_q_len", longest, 1)
        found = flat_integers(indptr, "cum_seq_lens_q", query.device, batch + 1)
        check_values("cum_seq_lens_q", indptr if indptr.dtype == torch.int64 else found, 0, query.shape[0])
        return dict(qo_indptr=found), longest or 0
    tokens = query.shape[0]
    q_len = whole("q_len_per_req", q_len, 1) if q_len is not None else max(tokens // batch, 1) if batch else 1
    if tokens != batch * q_len:
        require(False, "query", f"{tokens} tokens", f"{batch} requests of {q_len} queries")
    return dict(q_len=q_len), q_len


def _in_requests(result: torch.Tensor, query: torch.Tensor, seq_lens: torch.Tensor, out, indptr) -> torch.Tensor:
    """A new output with an axis for several queries of a request."""
    batch = seq_lens.numel()
    if out is not None or indptr is not None or len(query) <= batch:
        return result
    return result.unflatten(0, (batch, -1))


@direct(bounds=("max_seq_len",))
@attention_op(
    like_query,
    ("out",),
    lambda its: _in_requests(its["out"], its["query"], its["seq_lens"], its["own"], its["q_cu_seq_lens"]),
    given={"own": lambda its: its["out"]},
)
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="kv_cache",
       num_kv_heads="kv_cache", head_dim_vo="kv_cache", page_size="kv_cache", v_scale="bmm2_scale",
       q_scale="bmm1_scale", kv_indptr="seq_lens", num_heads="query", max_q_len="q_len_per_req",
       cum_seq_lens_q="q_cu_seq_lens", kv_block_scales="kv_cache_sf")  # fmt: skip
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: KvLayout = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf=None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`trtllm_batch_decode_with_kv_cache` under the name of another kernel.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, out,
    sinks, enable_pdl, o_scale, mask, kv_cache_sf
        As there with backend "xqa".
    kv_layout : str
        "NHD" or "HND".
    q_len_per_req : int, optional
        Queries of every request; with q_cu_seq_lens, the most of any.
    q_cu_seq_lens : int32 Tensor [batch + 1], optional
        First token of each request, for requests of different numbers of queries.

    Returns
    -------
    Tensor
        `out`, or a new one: [tokens, num_qo_heads, head_dim], and [batch, q_len_per_req, num_qo_heads, head_dim] where
        every request has that many queries, more than one.

    Raises
    ------
    ValueError
        As `trtllm_batch_decode_with_kv_cache` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, kv = torch.randn(2, 8, 64).half(), torch.randn(4, 2, 16, 2, 64).half()
    >>> scratch = torch.empty(0, dtype=torch.uint8)
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([20, 5]).int()
    >>> flashinfer.decode.xqa_batch_decode_with_kv_cache(q, kv, scratch, pages, lens, 20, bmm1_scale=0.125).shape
    torch.Size([2, 8, 64])
    """
    result = trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left,
        out, sinks=sinks, kv_layout=kv_layout, backend="xqa", q_len_per_req=q_len_per_req, o_scale=o_scale, mask=mask,
        max_q_len=None if q_cu_seq_lens is None else q_len_per_req, cum_seq_lens_q=q_cu_seq_lens,
        kv_cache_sf=kv_cache_sf,
    )  # fmt: skip
    return _in_requests(cast(torch.Tensor, result), query, seq_lens, out, q_cu_seq_lens)

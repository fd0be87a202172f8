"""Prefill over block tables, or ragged keys and values, with lengths on the device and without a plan."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import require
from flashinfer._core.direct_replay import direct
from flashinfer._core.literals import Backend, KvLayout
from flashinfer._direct.given import check_bound, flag, head_sinks, scale, whole, with_pages
from flashinfer._direct.outputs import Output, attention_op, like_query
from flashinfer._direct.pages import as_one_type, gathered
from flashinfer._direct.sage import widened
from flashinfer.ops.attention.engine import (
    attend_pages, attend_rows, factors_of, flat_integers, refuse, scales_of, value_dim,
)  # fmt: skip
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.kv_layout import check_layout
from flashinfer.utils import FP4Tensor

_HALVES = (torch.bfloat16, torch.float16)


@direct(bounds=("max_kv_len",))
@attention_op(like_query)
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="kv_cache",
       num_kv_heads="kv_cache", head_dim_vo="kv_cache", page_size="kv_cache", v_scale="bmm2_scale",
       q_scale="bmm1_scale", qo_indptr="cum_seq_lens_q", kv_indptr="cum_seq_lens_kv",
       num_heads="query")  # fmt: skip
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: KvLayout = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_cache_sf=None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: Backend = "trtllm-gen",
    *,
    kv_block_scales=None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill or append attention of a batch that only the device knows.

    Nothing waits for the device: one launch makes the work list, another computes. A CUDA graph that captured the call
    follows the tables as they change in place.

    Parameters
    ----------
    query : Tensor [tokens, num_qo_heads, head_dim]
        bf16, fp16 or fp8.
    kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, window_left, out, out_dtype, o_sf_scale, o_sf_vec_size
        As in `trtllm_batch_decode_with_kv_cache`.
    workspace_buffer, enable_pdl, skip_softmax_threshold_scale_factor, multi_ctas_kv_counter_buffer
    use_fp16_softmax, uses_spcompress
        Scratch and permissions that change no result.
    max_q_len : int
        The most queries of a request: tiles are chosen by it.
    max_kv_len : int
        Not read: `block_tables` bounds the lengths.
    batch_size : int
        Requests.
    cum_seq_lens_q : int32 Tensor [batch + 1]
        First token of each request.
    cum_seq_lens_kv : int32 Tensor [batch + 1]
        Sums of seq_lens; not read.
    kv_layout, sinks, kv_cache_sf, kv_block_scales, uses_shared_paged_kv_idx, lse, return_lse
        As in `trtllm_batch_decode_with_kv_cache`.
    causal : bool
        A query sees keys at its position and before; its request's last query stands at the last key.
    backend : str
        One of upstream's names (see flashinfer/_core/backends.py); "trtllm-gen" admits every variant.

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
    >>> q, scratch = torch.randn(7, 8, 64).half(), torch.empty(0, dtype=torch.uint8)
    >>> lens, of_q, of_k = torch.tensor([20, 5]).int(), torch.tensor([0, 4, 7]).int(), torch.tensor([0, 20, 25]).int()
    >>> kv, pages = torch.randn(4, 2, 2, 16, 64).half(), torch.tensor([[3, 1], [0, 0]]).int()
    >>> flashinfer.prefill.trtllm_batch_context_with_kv_cache(
    ...     q, kv, scratch, pages, lens, 4, 20, 0.125, 1.0, 2, of_q, of_k).shape
    torch.Size([7, 8, 64])
    """
    check_layout(kv_layout)
    require(query.dim() == 3, "query", tuple(query.shape), "[tokens, num_qo_heads, head_dim]")
    batch, device = whole("batch_size", batch_size, 0), query.device
    check_bound("max_kv_len", max_kv_len)
    require(block_tables.dim() > 1, "block_tables", tuple(block_tables.shape), "[batch, max_pages]")
    require(block_tables.shape[0] == batch, "batch_size", batch, f"{block_tables.shape[0]}, as block_tables")
    kv_cache = as_one_type(with_pages(kv_cache, kv_layout))
    output = Output(query, (*query.shape[:2], value_dim(kv_cache)), out, out_dtype, o_sf_scale, o_sf_vec_size, lse,
                    return_lse)  # fmt: skip
    factors = factors_of(kv_cache_sf, kv_block_scales, kv_layout, backend, device)
    if not flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        kv_cache, block_tables, factors = gathered(kv_cache, kv_layout, block_tables, factors)
    queries = dict(qo_indptr=flat_integers(cum_seq_lens_q, "cum_seq_lens_q", device, batch + 1))
    return output.finish(attend_pages(
        query, kv_cache, kv_layout, block_tables, seq_lens, queries, longest_q=whole("max_q_len", max_q_len, 0),
        causal=flag("causal", causal), window_left=whole("window_left", window_left), o_dtype=output.dtype,
        backend=backend, sinks=head_sinks(sinks, query.shape[1]), **output.call, **factors,
        **scales_of(scale("bmm1_scale", bmm1_scale, device), scale("bmm2_scale", bmm2_scale, device)),
    ))  # fmt: skip


def _like_values(its: dict) -> tuple:
    query = its["query"]
    return (*query.shape[:2], its["value"].shape[-1]), _o_dtype(query, its["out"]) or query.dtype, query.device


def _o_dtype(query: torch.Tensor, out) -> torch.dtype | None:
    """Of a new output of queries in eight bits."""
    narrow = query.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    return torch.bfloat16 if narrow and out is None else None


@direct(bounds=("max_kv_len",))
@attention_op(_like_values)
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="key",
       num_kv_heads="key", head_dim_vo="value", page_size="key", v_scale="bmm2_scale",
       q_scale="bmm1_scale", kv_cache="key", sinks="attention_sinks", qo_indptr="cum_seq_lens_q",
       kv_indptr="cum_seq_lens_kv", num_heads="query")  # fmt: skip
def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None,
    enable_pdl: bool,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | FP4Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple = (0, 0, 0, 0),
    backend: Backend = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over ragged keys and values, whose head dims may differ, as of DeepSeek's prefill (192 and 128).

    Parameters
    ----------
    query : Tensor [tokens, num_qo_heads, head_dim_qk]
        bf16, fp16 or fp8.
    key : Tensor [kv_tokens, num_kv_heads, head_dim_qk]
    value : Tensor [kv_tokens, num_kv_heads, head_dim_vo]
        query's dtype, or fp8.
    seq_lens : int32 Tensor [batch]
        Keys of each request.
    max_q_len : int
        The most queries of a request: tiles are chosen by it.
    bmm1_scale, bmm2_scale : float or float32 Tensor [1]
        Factors of q . k and of the output.
    o_sf_scale : float
        Of nvfp4 outputs, which this function has none of; of others it says nothing.
    batch_size : int
        Requests.
    window_left : int
        A query sees itself and this many keys before it; -1 for all.
    cum_seq_lens_q, cum_seq_lens_kv : int32 Tensor [batch + 1]
        First query, and first row of key and value, of each request. The second may be None: keys of requests then
        follow one another.
    is_causal : bool
        A query sees keys at its position and before; its request's last query stands at the last key.
    return_lse : bool
    attention_sinks : float32 Tensor [num_qo_heads], optional
        A logit per head that takes part in the softmax without a value.
    out : Tensor [tokens, num_qo_heads, head_dim_vo], optional
        Default of query's dtype, bfloat16 for fp8.
    lse : float32 Tensor [tokens, num_qo_heads], optional
    sage_attn_sfs : tuple of four
        Scales of q, k, p and v that SageAttention quantised, float32: of q and k [heads, blocks], request i beginning
        in block cum_seq_lens[i] div size + i; of v [num_kv_heads, head_dim_vo]; None of p. Operands are int8 or fp8,
        and are multiplied as bf16, or as fp16 where `out` is.
    num_elts_per_sage_attn_blk : tuple of four int
        Tokens that share a scale, of each; 0 for v's scales of channels.
    backend : str
        One of upstream's names (see flashinfer/_core/backends.py); "trtllm-gen" admits every variant.
    workspace_buffer, max_kv_len, enable_pdl, q_seq_lens_cpu, kv_seq_lens_cpu
    skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress, skip_all_rows_active_check
        Scratch, bounds, permissions and copies that change no result. Requests without keys are always allowed.

    Returns
    -------
    out : Tensor [tokens, num_qo_heads, head_dim_vo]
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
    >>> q, scratch = torch.randn(7, 8, 64).half(), torch.empty(0, dtype=torch.uint8)
    >>> lens, of_q, of_k = torch.tensor([20, 5]).int(), torch.tensor([0, 4, 7]).int(), torch.tensor([0, 20, 25]).int()
    >>> k, v = torch.randn(25, 8, 64).half(), torch.randn(25, 8, 32).half()
    >>> flashinfer.prefill.trtllm_ragged_attention_deepseek(
    ...     q, k, v, scratch, lens, 4, 20, 0.125, 1.0, 1.0, 2, -1, of_q, of_k, False, True, False).shape
    torch.Size([7, 8, 32])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(x.dim() == 3, name, tuple(x.shape), "[tokens, heads, head_dim]")
    device, batch = query.device, whole("batch_size", batch_size, 0)
    check_bound("max_kv_len", max_kv_len)
    kv_lens = flat_integers(seq_lens, "seq_lens", device, batch)
    table = Table(
        flat_integers(cum_seq_lens_q, "cum_seq_lens_q", device, batch + 1),
        flat_integers(cum_seq_lens_kv, "cum_seq_lens_kv", device, batch + 1), kv_lens=kv_lens,
    )  # fmt: skip
    default = _o_dtype(query, out)
    if any(sfs is not None for sfs in sage_attn_sfs):
        dtype = out.dtype if isinstance(out, torch.Tensor) and out.dtype in _HALVES else torch.bfloat16
        kv_indptr = table.kv_indptr
        if kv_indptr is None:
            # Keys of requests follow one another.
            kv_indptr = torch.nn.functional.pad(kv_lens.cumsum(0), (1, 0))
        indptrs = table.qo_indptr, kv_indptr
        query, key, value = widened(query, key, value, sage_attn_sfs, num_elts_per_sage_attn_blk, indptrs, dtype)
    else:
        sizes = [n for n in num_elts_per_sage_attn_blk if n]
        refuse("num_elts_per_sage_attn_blk", sizes, "0 without sage_attn_sfs")
        key, value = as_one_type((key, value))
    shape = (*query.shape[:2], value.shape[-1])
    output = Output(query, shape, out, default, lse=lse, return_lse=flag("return_lse", return_lse))
    return output.finish(attend_rows(
        query, key, value, table, longest_q=whole("max_q_len", max_q_len, 0), causal=flag("is_causal", is_causal),
        window_left=whole("window_left", window_left), o_dtype=output.dtype, backend=backend, **output.call,
        sinks=head_sinks(attention_sinks, query.shape[1]),
        **scales_of(scale("bmm1_scale", bmm1_scale, device), scale("bmm2_scale", bmm2_scale, device)),
    ))  # fmt: skip

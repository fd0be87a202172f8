"""Prefill with the signature of TensorRT-LLM's FMHA v2: q, k and v in one argument, names for layouts and masks."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import UnsupportedConfig, dtype_name, present, require, require_tensor
from flashinfer._core.custom_op import one_op
from flashinfer._core.direct_replay import direct
from flashinfer._direct.given import check_bound, flag, head_sinks, real, scale, whole, with_pages
from flashinfer._direct.outputs import Output, attention_op
from flashinfer._direct.pages import as_one_type, gathered, in_blocks
from flashinfer.ops.attention.engine import attend_pages, attend_rows, flat_integers, scales_of, value_dim
from flashinfer.ops.attention.masks import chunk_mask
from flashinfer.ops.attention.options import MOST_KEYS
from flashinfer.ops.attention.tables import Table

_LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
_MASKS = ("causal", "sliding_window", "chunked", "padding")


def _like_queries(its: dict) -> tuple:
    query, kv = _operands(its["qkv"], its["input_layout"])
    return (*query.shape[:2], value_dim(kv)), query.dtype, query.device


def _stats(its: dict) -> torch.Tensor | None:
    shape, _, device = _like_queries(its)
    return torch.empty((*shape[:2], 2), dtype=torch.float32, device=device) if its["save_softmax_stats"] else None


@direct(bounds=("max_kv_len",))
@attention_op(
    _like_queries,
    ("out",),
    lambda its: its["out"] if its["stats"] is None else (its["out"], its["stats"]),
    given={"stats": _stats},
    written=("stats",),
    made=lambda result: {"stats": result[1]} if isinstance(result, tuple) else {},
)
@named(q_data_type="qkv", num_qo_heads="qkv", head_dim_qk="qkv", kv_data_type="qkv",
       num_kv_heads="qkv", head_dim_vo="qkv", page_size="qkv", v_scale="bmm2_scale",
       q_scale="bmm1_scale", kv_cache="qkv", qo_indptr="cum_seq_lens_q",
       kv_indptr="cum_seq_lens_kv", logits_soft_cap="logits_soft_cap_scale", num_heads="qkv",
       query="qkv", key="qkv", value="qkv", k="qkv", v="qkv")  # fmt: skip
def trtllm_fmha_v2_prefill(
    qkv: torch.Tensor | tuple[torch.Tensor, ...],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill attention of a batch that only the device knows.

    Nothing waits for the device: one launch makes the work list, another computes.

    Parameters
    ----------
    qkv : Tensor or tuple of Tensor
        By `input_layout`: "PACKED_QKV" [tokens, 3, heads, head_dim]; "CONTIGUOUS_Q_KV" q [tokens, num_qo_heads,
        head_dim] and kv [kv_tokens, 2, num_kv_heads, head_dim]; "SEPARATE_Q_K_V" q, k and v; "Q_PAGED_KV_NHD" and
        "Q_PAGED_KV_HND" q and the cache, as in `trtllm_batch_decode_with_kv_cache`. bf16, fp16 or fp8.
    input_layout : str
        "PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD" or "Q_PAGED_KV_HND": what qkv is.
    workspace_buffer, max_kv_len, skip_softmax_threshold_scale_factor
        Scratch, a bound and a permission that change no result.
    seq_lens : int32 Tensor [batch]
        Keys of each request.
    max_q_len : int
        The most queries of a request: tiles are chosen by it.
    bmm1_scale, bmm2_scale : float or float32 Tensor [1]
        Factors of q . k and of the output.
    batch_size : int
        Requests.
    cum_seq_lens_q, cum_seq_lens_kv : int32 Tensor [batch + 1]
        First query, and first row of k and v, of each request. The second is not read for pages.
    block_tables : int32 Tensor [batch, max_pages], optional
        With pages. Of a cache in two tensors also [batch, 2, max_pages]: the blocks of K and of V, counted from the
        first of K, each of the bytes of one page of K. The pages that they name are then copied side by side first.
    out : Tensor [tokens, num_qo_heads, head_dim], optional
    out_dtype : dtype or its name, optional
        Default out's, else query's; fp8 saturates.
    sinks : float32 Tensor [num_qo_heads], optional
        A logit per head that takes part in the softmax without a value.
    pos_encoding_mode : str, optional
        None, "NONE" or "ALIBI", in any case.
    logits_soft_cap_scale : float, optional
        Logits become cap * tanh(logits / cap).
    mask_mode : str
        "padding", where a query sees all keys of its request, unless ALiBi makes it causal; else "causal",
        "sliding_window" or "chunked", which are one: causal, with what window_left and chunked_attention_size say. In
        any case.
    window_left : int
        A query sees itself and this many keys before it; -1 for all. Not with "padding".
    chunked_attention_size : int
        A query sees keys of its own chunk of this many tokens; 0 for all. Not with "padding", and not with a window.
    save_softmax_stats : bool
        Whether to return the statistics of the softmax, too.

    Returns
    -------
    out : Tensor [tokens, num_qo_heads, head_dim]
    stats : float32 Tensor [tokens, num_qo_heads, 2], with save_softmax_stats
        Two numbers m and s of each row, m + ln(s) being the natural log-sum-exp of its scaled logits, as the maximum
        and the sum of exp(logit - maximum) are; here m is that log-sum-exp itself and s is 1. -inf and 0 for a row
        that sees no key.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        A problem that no variant takes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> qkv, indptr, lens = torch.randn(5, 3, 2, 64).half(), torch.tensor([0, 3, 5]).int(), torch.tensor([3, 2]).int()
    >>> sizes = 3, 3, 0.125, 1.0, 2  # longest q and kv, scales of both products, requests
    >>> scratch = torch.empty(0, dtype=torch.uint8)
    >>> flashinfer.trtllm_fmha_v2_prefill(qkv, "PACKED_QKV", scratch, lens, *sizes, indptr, indptr).shape
    torch.Size([5, 2, 64])
    """
    require(input_layout in _LAYOUTS, "input_layout", repr(input_layout), ", ".join(_LAYOUTS))
    mask = mask_mode.lower() if isinstance(mask_mode, str) else mask_mode
    if mask not in _MASKS:
        raise UnsupportedConfig(f"mask_mode: got {mask_mode!r}; allowed: {', '.join(_MASKS)}")
    window, chunk = whole("window_left", window_left), whole("chunked_attention_size", chunked_attention_size, 0)
    require(mask != "padding" or window < 0, "window_left", window, "-1 with mask_mode 'padding'")
    require(mask != "padding" or not chunk, "chunked_attention_size", chunk, "0 with mask_mode 'padding'")
    require(not chunk or window < 0, "window_left", window, f"-1 with chunked_attention_size = {chunk}")
    known = pos_encoding_mode is None or str(pos_encoding_mode).upper() in ("NONE", "ALIBI")
    require(known, "pos_encoding_mode", repr(pos_encoding_mode), "None, 'NONE' or 'ALIBI'")
    alibi = pos_encoding_mode is not None and pos_encoding_mode.upper() == "ALIBI"
    paged, batch = input_layout.startswith("Q_PAGED_KV"), whole("batch_size", batch_size, 0)
    check_bound("max_kv_len", max_kv_len)
    require(paged or block_tables is None, "block_tables", "a tensor", f"None with {input_layout}")
    query, kv = _operands(qkv, input_layout)
    device = query.device
    indptr = flat_integers(cum_seq_lens_q, "cum_seq_lens_q", device, batch + 1)
    lens = flat_integers(seq_lens, "seq_lens", device, batch)
    saves = flag("save_softmax_stats", save_softmax_stats)
    output = Output(query, (*query.shape[:2], value_dim(kv)), out, out_dtype, return_lse=saves)
    cap = None if logits_soft_cap_scale is None else real("logits_soft_cap_scale", logits_soft_cap_scale)
    options: dict[str, Any] = dict(
        longest_q=whole("max_q_len", max_q_len, 0), causal=mask != "padding" or alibi, window_left=window,
        o_dtype=output.dtype, soft_cap=cap or None, alibi=alibi, sinks=head_sinks(sinks, query.shape[1]), **output.call,
        masked=chunk_mask(min(chunk, MOST_KEYS)) if chunk else (None, None),
        **scales_of(scale("bmm1_scale", bmm1_scale, device), scale("bmm2_scale", bmm2_scale, device)),
    )  # fmt: skip
    if paged:
        layout, block_tables = input_layout[-3:], present("block_tables", block_tables, f"a tensor with {input_layout}")
        if block_tables.dim() == 3:
            require(not isinstance(kv, torch.Tensor), "block_tables", tuple(block_tables.shape),
                    "[batch, pages], of a cache in one tensor")  # fmt: skip
            kv, block_tables, _ = gathered(kv, layout, in_blocks(*kv, block_tables), {})
        result = attend_pages(query, kv, layout, block_tables, lens, dict(qo_indptr=indptr), **options)
    else:
        kv_indptr = flat_integers(cum_seq_lens_kv, "cum_seq_lens_kv", device, batch + 1)
        k, v = kv
        result = attend_rows(query, k, v, Table(indptr, kv_indptr, kv_lens=lens), **options)
    result = output.finish(result)
    return (result[0], _stats_of(result[1])) if isinstance(result, tuple) else result


def _operands(qkv, input_layout: str):
    """The queries, and the cache or the rows (k, v)."""
    packed, paged = input_layout == "PACKED_QKV", input_layout.startswith("Q_PAGED_KV")
    if packed:
        require_tensor("qkv", qkv)
        require(qkv.dim() == 4 and qkv.shape[1] == 3, "qkv", tuple(qkv.shape), "[tokens, 3, heads, head_dim]")
        query, *kv = qkv.unbind(1)
        return query, tuple(kv)
    counts = (3,) if input_layout == "SEPARATE_Q_K_V" else (2, 3) if paged else (2,)
    fits = not isinstance(qkv, torch.Tensor) and len(qkv) in counts
    require(fits, "qkv", "a tensor" if isinstance(qkv, torch.Tensor) else f"{len(qkv)} elements",
            f"a tuple of {' or '.join(map(str, counts))} with {input_layout}")  # fmt: skip
    query, *kv = qkv
    require(query.dim() == 3, "qkv[0]", tuple(query.shape), "[tokens, heads, head_dim]")
    if input_layout == "CONTIGUOUS_Q_KV":
        fits = kv[0].dim() == 4 and kv[0].shape[1] == 2
        require(fits, "qkv[1]", tuple(kv[0].shape), "[kv_tokens, 2, num_kv_heads, head_dim]")
        return query, tuple(kv[0].unbind(1))
    if paged:
        kv = kv[0] if len(kv) == 1 else tuple(kv)
        return query, as_one_type(with_pages(tuple(kv) if isinstance(kv, list) else kv, input_layout[-3:]))
    return query, as_one_type(tuple(kv))


def _stats_of(lse: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, 2]: m and s of each row, for which m + ln(s) is the natural log-sum-exp.

    Any such pair merges alike. Rows without keys have -inf and 0.
    """
    shift = lse * math.log(2.0)
    return torch.stack((shift, (shift != -math.inf).float()), -1)


def _new_lse(its: dict) -> torch.Tensor | None:
    if its["lse"] is not None or not its["return_lse"]:
        return its["lse"]
    return torch.empty((*its["query"].shape[:3], 2), dtype=torch.float32, device=its["query"].device)


@one_op(
    ("out", "lse"),
    {"lse": _new_lse},
    lambda its: (its["out"], its["lse"]) if its["return_lse"] else its["out"],
    between=True,
)
@named(q_data_type="query", num_qo_heads="query", head_dim_qk="query", kv_data_type="key",
       num_kv_heads="key", head_dim_vo="value", page_size="key", kv_cache="key", q_scale="scale_bmm1",
       v_scale="scale_bmm2")  # fmt: skip
def fmha_v2_prefill_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    num_heads: int,
    head_dim: int,
    seq_len: int,
    scale_softmax: float,
    scale_bmm1: float | None = None,
    scale_bmm2: float | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    scale_bmm1_d: torch.Tensor | None = None,
    scale_bmm2_d: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of requests of one length, as of DeepSeek's prefill.

    Parameters
    ----------
    query : Tensor [batch, seq_len, num_heads, head_dim_qk]
        bf16, fp16 or fp8.
    key : Tensor [batch, seq_len, num_kv_heads, head_dim_qk]
    value : Tensor [batch, seq_len, num_kv_heads, head_dim_vo]
    out : Tensor [batch, seq_len, num_heads, head_dim_vo]
        Written.
    num_heads, head_dim, seq_len : int
        As query has them.
    scale_softmax : float
        1 or 0 for none; another, a scale of quantised probabilities, is refused: they are not quantised here.
    scale_bmm1 : float, optional
        Factor of q . k; default 1 / sqrt(head_dim).
    scale_bmm2 : float, optional
        Factor of the output; default 1.
    return_lse : bool
        Whether to return `lse`, too.
    lse : float32 Tensor, optional
        [batch, seq_len, num_heads, 2]: written as the `stats` of `trtllm_fmha_v2_prefill` are. [batch, seq_len,
        num_heads] or with 1 for the last axis: the natural log-sum-exp.
    scale_bmm1_d, scale_bmm2_d : float32 Tensor [1], optional
        The same two scales on the device, in their place.

    Returns
    -------
    out : Tensor
        The argument.
    lse : Tensor, with return_lse
        The argument, or a new one [batch, seq_len, num_heads, 2].

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 1, 5, 8, 64).half()
    >>> flashinfer.prefill.fmha_v2_prefill_deepseek(q, k, v, torch.empty_like(v), 8, 64, 5, 1.0).shape
    torch.Size([1, 5, 8, 64])
    """
    if scale_softmax not in (0, 1):
        raise UnsupportedConfig(f"scale_softmax: got {scale_softmax}; allowed: 1, as probabilities are not quantised")
    for name, x in (("query", query), ("key", key), ("value", value), ("out", out)):
        require(x.dim() == 4 and x.shape[1] == seq_len, name, tuple(x.shape), f"[batch, {seq_len}, heads, head_dim]")
    allowed = f"{(num_heads, head_dim)} last"
    require(tuple(query.shape[2:]) == (num_heads, head_dim), "query", tuple(query.shape), allowed)
    bmm1 = head_dim**-0.5 if scale_bmm1 is None else scale_bmm1
    bmm2 = 1.0 if scale_bmm2 is None else scale_bmm2
    bmm1, bmm2 = (scale(name, x, query.device) for name, x in (
        ("scale_bmm1", bmm1 if scale_bmm1_d is None else scale_bmm1_d),
        ("scale_bmm2", bmm2 if scale_bmm2_d is None else scale_bmm2_d),
    ))  # fmt: skip
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    require(out.is_contiguous(), "out", f"strides {out.stride()}", "contiguous")
    dtype_name(out.dtype, "out")
    saves, rows = flag("return_lse", return_lse) or lse is not None, (query.shape[0], seq_len, num_heads)
    if lse is not None:
        fits = tuple(lse.shape) in (rows, (*rows, 1), (*rows, 2)) and lse.dtype == torch.float32
        require(fits, "lse", f"{lse.dtype} {tuple(lse.shape)}", f"float32 {rows} or {(*rows, 2)}")
    elif saves:
        lse = torch.empty((*rows, 2), dtype=torch.float32, device=query.device)
    if out.numel():
        lens = torch.full((query.shape[0],), seq_len, dtype=torch.int32, device=query.device)
        table = Table(q_len=seq_len, kv_lens=lens, kv_stride=seq_len)
        result = attend_rows(
            q, k, v, table, longest_q=seq_len, o_dtype=out.dtype, out=out.flatten(0, 1), return_lse=saves,
            **scales_of(bmm1, bmm2),
        )  # fmt: skip
        if lse is not None:
            stats = _stats_of(result[1])
            lse.copy_((stats if lse.shape[-1] == 2 and lse.dim() == 4 else stats[..., 0]).view(lse.shape))
    return out if lse is None or not return_lse else (out, lse)

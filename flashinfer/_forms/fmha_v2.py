"""Prefill in the form of TensorRT-LLM's FMHA v2: one argument for q, k and v, and names for layouts and masks."""

from __future__ import annotations

import torch

from flashinfer._core.checks import UnsupportedConfig, require
from flashinfer.ops.attention.engine import (
    attend_pages, attend_rows, flat_integers, output_of, refuse, scales_of, sinks_of, value_dim,
)  # fmt: skip
from flashinfer.ops.attention.engine_masks import chunk_mask
from flashinfer.ops.attention.problem import Table

_LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
_MASKS = ("causal", "sliding_window", "chunked", "padding")


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
) -> torch.Tensor:
    """Prefill attention of a batch that only the device knows.

    Nothing waits for the device: one launch makes the work list, another computes.

    Parameters
    ----------
    qkv : Tensor or tuple of Tensor
        By `input_layout`: "PACKED_QKV" [tokens, 3, heads, head_dim]; "CONTIGUOUS_Q_KV" q [tokens, num_qo_heads,
        head_dim] and kv [kv_tokens, 2, num_kv_heads, head_dim]; "SEPARATE_Q_K_V" q, k and v; "Q_PAGED_KV_NHD" and
        "Q_PAGED_KV_HND" q and the cache, as in `trtllm_batch_decode_with_kv_cache`. bf16, fp16, fp32 or fp8.
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
        With pages.
    out : Tensor [tokens, num_qo_heads, head_dim], optional
    out_dtype : dtype or its name, optional
        Default out's, else query's; fp8 saturates.
    sinks : float32 Tensor [num_qo_heads], optional
        A logit per head that takes part in the softmax without a value.
    pos_encoding_mode : str, optional
        None, "NONE" or "ALIBI".
    logits_soft_cap_scale : float, optional
        Logits become cap * tanh(logits / cap).
    mask_mode : str
        "causal"; "sliding_window", which is causal and wants window_left; or "padding", where a query sees all keys of
        its request; or "chunked", which is causal within chunks of chunked_attention_size tokens.
    window_left : int
        A query sees itself and this many keys before it; -1 for all.
    chunked_attention_size : int
        With mask_mode "chunked"; else 0.
    save_softmax_stats : bool
        Refused: the maximum and sum of a row are not kept. `trtllm_batch_context_with_kv_cache` and
        `trtllm_ragged_attention_deepseek` return their log-sum-exp.
    workspace_buffer, max_kv_len, skip_softmax_threshold_scale_factor
        Scratch, a bound and a permission that change no result.

    Returns
    -------
    Tensor [tokens, num_qo_heads, head_dim]

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.
    """
    require(input_layout in _LAYOUTS, "input_layout", repr(input_layout), ", ".join(_LAYOUTS))
    refuse("save_softmax_stats", save_softmax_stats, "False: the maximum and sum of a row are not kept")
    if mask_mode not in _MASKS:
        raise UnsupportedConfig(f"mask_mode: got {mask_mode!r}; allowed: {', '.join(_MASKS)}")
    require(mask_mode != "sliding_window" or window_left >= 0, "window_left", window_left, "0 or more, with a window")
    require(mask_mode != "padding" or window_left < 0, "window_left", window_left, "-1 with mask_mode 'padding'")
    chunked = mask_mode == "chunked"
    require(chunked or not chunked_attention_size, "chunked_attention_size", chunked_attention_size, "0, not chunked")
    known = pos_encoding_mode in (None, "NONE", "ALIBI")
    require(known, "pos_encoding_mode", repr(pos_encoding_mode), "None, 'NONE' or 'ALIBI'")
    paged = input_layout.startswith("Q_PAGED_KV")
    require(paged == (block_tables is not None), "block_tables", "a tensor" if not paged else None,
            f"{'a tensor' if paged else 'None'} with {input_layout}")  # fmt: skip
    query, *kv = qkv.unbind(1) if input_layout == "PACKED_QKV" else qkv
    if input_layout == "CONTIGUOUS_Q_KV":
        kv = kv[0].unbind(1)
    elif paged:
        kv = kv[0] if len(kv) == 1 else tuple(kv)
    indptr = flat_integers(cum_seq_lens_q, "cum_seq_lens_q", query.device, batch_size + 1)
    lens = flat_integers(seq_lens, "seq_lens", query.device, batch_size)
    out, o_dtype = output_of(query, (*query.shape[:2], value_dim(kv)), out, out_dtype)
    options = dict(
        longest_q=max_q_len, causal=mask_mode != "padding", window_left=window_left, o_dtype=o_dtype,
        soft_cap=logits_soft_cap_scale or None, alibi=pos_encoding_mode == "ALIBI", out=out, sinks=sinks_of(sinks),
        masked=chunk_mask(chunked_attention_size) if chunked else (None, None), **scales_of(bmm1_scale, bmm2_scale),
    )  # fmt: skip
    if paged:
        return attend_pages(query, kv, input_layout[-3:], block_tables, lens, dict(qo_indptr=indptr), **options)
    kv_indptr = flat_integers(cum_seq_lens_kv, "cum_seq_lens_kv", query.device, batch_size + 1)
    return attend_rows(query, *kv, Table(indptr, kv_indptr, kv_lens=lens), **options)


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
) -> torch.Tensor:
    """Causal attention of requests of one length, as of DeepSeek's prefill.

    Parameters
    ----------
    query : Tensor [batch, seq_len, num_heads, head_dim_qk]
        bf16, fp16, fp32 or fp8.
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
        Refused: upstream's form of it is the maximum and the sum of each row, which are not kept.
    lse : Tensor, optional
        Refused, as return_lse.
    scale_bmm1_d, scale_bmm2_d : float32 Tensor [1], optional
        The same two scales on the device, in their place.

    Returns
    -------
    Tensor
        `out`.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.
    """
    refuse("return_lse", return_lse, "False: the maximum and sum of a row are not kept")
    refuse("lse", lse, "None: the maximum and sum of a row are not kept")
    if scale_softmax not in (0, 1):
        raise UnsupportedConfig(f"scale_softmax: got {scale_softmax}; allowed: 1, as probabilities are not quantised")
    for name, x in (("query", query), ("key", key), ("value", value), ("out", out)):
        require(x.dim() == 4 and x.shape[1] == seq_len, name, tuple(x.shape), f"[batch, {seq_len}, heads, head_dim]")
    allowed = f"{(num_heads, head_dim)} last"
    require(tuple(query.shape[2:]) == (num_heads, head_dim), "query", tuple(query.shape), allowed)
    bmm1 = head_dim**-0.5 if scale_bmm1 is None else scale_bmm1
    bmm2 = 1.0 if scale_bmm2 is None else scale_bmm2
    scales = scales_of(bmm1 if scale_bmm1_d is None else scale_bmm1_d, bmm2 if scale_bmm2_d is None else scale_bmm2_d)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    require(out.is_contiguous(), "out", f"strides {out.stride()}", "contiguous")
    if not out.numel():
        return out
    lens = torch.full((query.shape[0],), seq_len, dtype=torch.int32, device=query.device)
    table = Table(q_len=seq_len, kv_lens=lens, kv_stride=seq_len)
    attend_rows(q, k, v, table, longest_q=seq_len, o_dtype=out.dtype, out=out.flatten(0, 1), **scales)
    return out

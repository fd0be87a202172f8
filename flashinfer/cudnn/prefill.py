"""Prefill in the form of upstream's cuDNN binding."""

from __future__ import annotations

import math

import torch

from flashinfer._core import env
from flashinfer._core.checks import require
from flashinfer.ops.attention.engine import attend_pages, attend_rows, flat_integers, integers, output_of
from flashinfer.ops.attention.problem import Table


def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prefill or append attention over a paged cache or contiguous keys; every variant of ours answers to the name.

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : Tensor [tokens, num_qo_heads, head_dim_qk]
        bf16, fp16, fp32 or fp8. Without batch_offsets_q, requests follow one another; if there are batch *
        max_token_per_sequence rows, each has that many, and its queries are the first of them.
    k_cache, v_cache : Tensor
        With block_tables [pages, num_kv_heads, page_size, head_dim]; else rows [kv_tokens, num_kv_heads, head_dim],
        laid out as q is, with batch_offsets_k and max_sequence_kv. q's dtype, or fp8.
    scale : float
        Factor of q . k, 1 / sqrt(head_dim_qk) as a rule.
    max_token_per_sequence, max_sequence_kv : int
        The most queries, and keys, of a request.
    actual_seq_lens_q, actual_seq_lens_kv : int Tensor of batch elements, optional
        Queries and keys of each request; without them what the offsets, or the two bounds, say.
    block_tables : int32 Tensor [batch, max_pages], optional
        Page ids of each request; past its keys anything.
    causal : bool
        A query sees keys at its position and before; its request's last query stands at the last key.
    return_lse : bool
    q_scale, k_scale, v_scale : float or float32 Tensor [1], optional
        Scales of quantised q, k and v.
    batch_offsets_q, batch_offsets_k : int Tensor of batch + 1 elements, optional
        Where each request begins.
    batch_offsets_o, batch_offsets_v : int Tensor, optional
        They have to say the same rows as those of q and of k. On a GPU that is checked in debug mode alone
        (FLASHINFER_DEBUG), since looking waits for the device.
    batch_offsets_stats : int Tensor, optional
        Given, lse is packed: in the rows of q.
    batch_offsets_units : str
        "elements" (rows times the stride of a row) or "tokens".
    out : Tensor [tokens, num_qo_heads, head_dim_vo], optional
        Rows that no request has are not written.
    lse : float32 Tensor, optional
    backend : str, optional
        One of upstream's names (see flashinfer/_core/backends.py).
    o_data_type : torch.dtype, optional
        Default out's, else q's; fp8 saturates.
    lse_base : str
        "log2" or "ln".
    workspace_buffer, is_cuda_graph_compatible
        Scratch and a hint that change no result.

    Returns
    -------
    out : Tensor [tokens, num_qo_heads, head_dim_vo]
    lse : float32 Tensor or None
        With return_lse: [tokens, num_qo_heads] if batch_offsets_stats or an lse of two axes is given, else [batch,
        max_token_per_sequence, num_qo_heads], -inf past a request's queries.

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    """
    require(q.dim() == 3, "q", tuple(q.shape), "[tokens, num_qo_heads, head_dim]")
    require(batch_offsets_units in ("elements", "tokens"), "batch_offsets_units", repr(batch_offsets_units),
            "'elements' or 'tokens'")  # fmt: skip
    require(lse_base in ("log2", "ln"), "lse_base", repr(lse_base), "'log2' or 'ln'")
    batch = _batch_size(block_tables, actual_seq_lens_q, actual_seq_lens_kv, batch_offsets_q, batch_offsets_k)
    paged, per_element = block_tables is not None, batch_offsets_units == "elements"
    queries = _spans(q, batch_offsets_q, actual_seq_lens_q, batch, max_token_per_sequence, per_element, "q")
    out, o_dtype = output_of(q, (*q.shape[:2], v_cache.shape[-1]), out, o_data_type)
    packed = batch_offsets_stats is not None or (lse is not None and lse.dim() == 2)
    out_row = q.shape[1] * v_cache.shape[-1] if out is None else out.stride(0)
    _check_rows("o", batch_offsets_o, out_row, "q", batch_offsets_q, q.stride(0), per_element)
    if not paged:
        _check_rows("v", batch_offsets_v, v_cache.stride(0), "k", batch_offsets_k, k_cache.stride(0), per_element)
    call = dict(
        longest_q=max_token_per_sequence, causal=causal, o_dtype=o_dtype, backend=backend or "auto", out=out,
        return_lse=return_lse, lse=lse if packed else None, q_scale=scale if q_scale is None else scale * q_scale,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if paged:
        lens = flat_integers(actual_seq_lens_kv, "actual_seq_lens_kv", q.device, batch)
        if lens is None:
            lens = torch.full((batch,), max_sequence_kv, dtype=torch.int32, device=q.device)
        result = attend_pages(q, (k_cache, v_cache), "HND", block_tables, lens, queries, **call)
    else:
        keys = _spans(k_cache, batch_offsets_k, actual_seq_lens_kv, batch, max_sequence_kv, per_element, "k")
        table = Table(
            **queries, kv_indptr=keys.get("qo_indptr"), kv_lens=keys.get("q_lens"), kv_stride=keys.get("q_len", 0)
        )
        result = attend_rows(q, k_cache, v_cache, table, **call)
    if not return_lse:
        return result, None
    out, rows = result
    if lse_base == "ln":
        rows.mul_(math.log(2.0))
    if packed:
        return out, rows
    # Of the keys, only that there are as many requests.
    table = Table(**queries, kv_lens=torch.zeros(batch, dtype=torch.int32, device=q.device))
    return out, _padded(rows, table, max_token_per_sequence, lse)


def _batch_size(block_tables, lens_q, lens_kv, offsets_q, offsets_k) -> int:
    for x, more in ((lens_q, 0), (lens_kv, 0), (offsets_q, 1), (offsets_k, 1)):
        if x is not None:
            return x.numel() - more
    require(block_tables is not None, "actual_seq_lens_q", None, "a tensor, or batch_offsets_q, or block_tables")
    return block_tables.shape[0]


def _spans(x: torch.Tensor, offsets, lens, batch: int, most: int, per_element: bool, name: str) -> dict:
    """Where the rows of each request are in `x`: qo_indptr, q_lens and q_len of a Table, whichever tell it."""
    lens = flat_integers(lens, f"actual_seq_lens_{name}", x.device, batch)
    if offsets is not None:
        flat = offsets.reshape(-1)
        fits = flat.shape[0] == batch + 1 or (flat.shape[0] == batch and lens is not None)
        require(fits, f"batch_offsets_{name}", tuple(offsets.shape), f"{batch + 1} elements")
        if per_element:
            flat = torch.div(flat, x.stride(0), rounding_mode="floor")
        return dict(qo_indptr=integers(flat, f"batch_offsets_{name}", x.device, (None,)), q_lens=lens)
    padded = x.shape[0] == batch * most
    require(padded or lens is not None, f"actual_seq_lens_{name}", None,
            f"a tensor, or batch_offsets_{name}, or {batch} x {most} rows")  # fmt: skip
    return dict(q_lens=lens, q_len=most if padded else 0)


def _check_rows(name: str, offsets, row: int, base: str, base_offsets, base_row: int, per_element: bool) -> None:
    """Check that offsets say the same rows as those of `base`; row and base_row are elements from row to row."""
    if offsets is None:
        return
    allowed = f"the rows of batch_offsets_{base}"
    require(base_offsets is not None, f"batch_offsets_{name}", "a tensor", f"None without batch_offsets_{base}")
    require(offsets.numel() == base_offsets.numel(), f"batch_offsets_{name}", tuple(offsets.shape), allowed)
    if offsets.is_cuda and not env.DEBUG.is_on():
        return
    a, b = offsets.reshape(-1).cpu().long(), base_offsets.reshape(-1).cpu().long()
    same = torch.equal(a * base_row, b * row) if per_element else torch.equal(a, b)
    require(same, f"batch_offsets_{name}", a.tolist(), allowed)


def _padded(rows: torch.Tensor, table: Table, most: int, out) -> torch.Tensor:
    """Rows [tokens, heads] as [batch, most, heads], -inf past the rows of a request."""
    begin, count = table.q_spans()
    number = torch.arange(most, device=rows.device)
    at = (begin[:, None] + number).clamp_(max=max(rows.shape[0] - 1, 0))
    shape = (table.batch_size, most, rows.shape[1])
    if not rows.shape[0]:
        padded = rows.new_full(shape, -math.inf)
    else:
        padded = rows[at].masked_fill_((number >= count[:, None])[..., None], -math.inf)
    if out is None:
        return padded
    require(tuple(out.shape) == shape, "lse", tuple(out.shape), str(shape))
    return out.copy_(padded)

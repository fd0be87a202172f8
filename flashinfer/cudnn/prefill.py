"""Prefill with the signature of upstream's cuDNN binding."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import as_dtype, check_apart, check_values, require
from flashinfer._core.direct_replay import direct
from flashinfer._core.literals import Backend, LseBase
from flashinfer._direct.given import check_caches, elements_of_a_row, flag, most_rows
from flashinfer._direct.given import scale as scale_of
from flashinfer._direct.outputs import attention_op
from flashinfer._direct.pages import as_one_type
from flashinfer.ops.attention.engine import attend_pages, attend_rows, flat_integers, integers, output_of
from flashinfer.ops.attention.tables import Table


def _like_q(its: dict) -> tuple:
    q = its["q"]
    return (*q.shape[:2], its["v_cache"].shape[-1]), as_dtype(its["o_data_type"], q.dtype, "o_data_type"), q.device


@direct(bounds=("max_sequence_kv",), only_with="block_tables")
@attention_op(_like_q, returned=lambda its: (its["out"], its["lse"]))
@named(q_data_type="q", num_qo_heads="q", head_dim_qk="q", kv_data_type="k_cache",
       num_kv_heads="k_cache", head_dim_vo="v_cache", page_size="k_cache", kv_cache="k_cache",
       qo_indptr="batch_offsets_q", kv_indptr="actual_seq_lens_kv", num_heads="q", seq_lens="actual_seq_lens_kv",
       query="q", key="k_cache", value="v_cache")  # fmt: skip
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
    backend: Backend | None = None,
    o_data_type: torch.dtype | None = None,
    lse_base: LseBase = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prefill or append attention over a paged cache or contiguous keys; every variant of ours answers to the name.

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : Tensor [tokens, num_qo_heads, head_dim_qk]
        bf16, fp16 or fp8. Without batch_offsets_q, requests follow one another; if there are batch *
        max_token_per_sequence rows, each has that many, and its queries are the first of them.
    k_cache, v_cache : Tensor
        With block_tables [pages, num_kv_heads, page_size, head_dim]; else rows [kv_tokens, num_kv_heads, head_dim],
        laid out as q is, with batch_offsets_k and max_sequence_kv. q's dtype, or fp8.
    scale : float
        Factor of q . k, 1 / sqrt(head_dim_qk) as a rule.
    workspace_buffer, is_cuda_graph_compatible
        Scratch and a hint that change no result.
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
    batch_offsets_o, batch_offsets_v : int Tensor of batch + 1 elements, optional
        Where each request begins in `out` and in v_cache, in the rows of q and of k without them, and the other way
        round. On a GPU, rows of V, or of the output, are copied unless these are the same tensors as those of k, and of
        q, in the same units: their values are not looked at, since looking waits for the device.
    batch_offsets_stats : int Tensor of batch + 1 elements, optional
        Where each request begins in a packed lse; in the rows of q without it.
    batch_offsets_units : str
        "elements" (rows times the stride of a row) or "tokens".
    out : Tensor [tokens, num_qo_heads, head_dim_vo], optional
        Rows that no request has are not written.
    lse : float32 Tensor [tokens, num_qo_heads] or [batch, max_token_per_sequence, num_qo_heads], optional
        Written and returned, return_lse or not. With three axes it is padded, -inf past a request's queries.
    backend : str, optional
        One of upstream's names (see flashinfer/_core/backends.py).
    o_data_type : torch.dtype, optional
        Default out's, else q's; fp8 saturates.
    lse_base : str
        "log2" or "ln".

    Returns
    -------
    out : Tensor [tokens, num_qo_heads, head_dim_vo]
    lse : float32 Tensor or None
        With return_lse: `lse`, or a new one [tokens, num_qo_heads].

    Raises
    ------
    ValueError
        An argument out of its range, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = (torch.randn(shape).half() for shape in ((7, 8, 64), (4, 2, 16, 64), (4, 2, 16, 64)))
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([20, 5]).int()
    >>> out, lse = flashinfer.prefill.cudnn_batch_prefill_with_kv_cache(
    ...     q, k, v, 0.125, torch.empty(0, dtype=torch.uint8), max_token_per_sequence=4, max_sequence_kv=32,
    ...     actual_seq_lens_q=torch.tensor([4, 3]).int(), actual_seq_lens_kv=lens, block_tables=pages, causal=True,
    ...     return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([7, 8, 64]), torch.Size([7, 8]))
    """
    require(q.dim() == 3, "q", tuple(q.shape), "[tokens, num_qo_heads, head_dim]")
    require(batch_offsets_units in ("elements", "tokens"), "batch_offsets_units", repr(batch_offsets_units),
            "'elements' or 'tokens'")  # fmt: skip
    require(lse_base in ("log2", "ln"), "lse_base", repr(lse_base), "'log2' or 'ln'")
    most_q = most_rows("max_token_per_sequence", max_token_per_sequence)
    most_kv = most_rows("max_sequence_kv", max_sequence_kv)
    if block_tables is None:
        check_caches(k_cache, v_cache, (3,), "[kv_tokens, num_kv_heads, head_dim], without block_tables")
    else:
        check_caches(k_cache, v_cache, (3, 4), "[pages, num_kv_heads, page_size, head_dim], with block_tables")
    return_lse = flag("return_lse", return_lse) or lse is not None
    given_offsets = batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v
    batch = _batch_size(block_tables, actual_seq_lens_q, actual_seq_lens_kv, *given_offsets)
    k_cache, v_cache = as_one_type((k_cache, v_cache))
    # An output that has offsets of its own may have any number of rows.
    fits = out is None or batch_offsets_o is None or out.dim() == 3
    require(fits, "out", out is not None and tuple(out.shape), "[rows, num_qo_heads, head_dim], with batch_offsets_o")
    check_apart((("out", out), ("lse", lse)), (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)))
    o_rows = q.shape[0] if out is None or batch_offsets_o is None else out.shape[0]
    given, (out, o_dtype) = out, output_of(q, (o_rows, q.shape[1], v_cache.shape[-1]), out, o_data_type)
    tokens = batch_offsets_units == "tokens"
    row = lambda t, name: Rows(t, f"batch_offsets_{name}", batch, q.device)
    step = lambda t, name, offsets: 1 if tokens or offsets is None else elements_of_a_row(t, name)
    out_row = step(out, "out", batch_offsets_o) if out is not None or tokens else q.shape[1] * v_cache.shape[-1]
    of_q, of_o = row(batch_offsets_q, "q").by(step(q, "q", batch_offsets_q)), row(batch_offsets_o, "o").by(out_row)
    queries = _spans(of_q if of_q.starts is not None else of_o, q, actual_seq_lens_q, batch, most_q, "q")
    packed = batch_offsets_stats is not None or lse is None or lse.dim() == 2
    if lse is not None:
        fits = lse.dtype == torch.float32 and (not packed or lse.dim() == 2 and lse.shape[1] == q.shape[1])
        require(fits, "lse", f"{lse.dtype} {tuple(lse.shape)}", f"float32 [tokens, {q.shape[1]}], or three axes")
    moved = not of_o.same_as(of_q) or o_rows != q.shape[0]
    of_lse = row(batch_offsets_stats, "stats").by(1 if tokens else q.shape[1])
    lse_moved = packed and (not of_lse.same_as(of_q) or (lse is not None and lse.shape[0] != q.shape[0]))
    require(not lse_moved or of_lse.starts is not None, "lse", "other rows than q", "the rows of q")
    call: dict[str, Any] = dict(
        longest_q=most_q, causal=flag("causal", causal), o_dtype=o_dtype, backend=backend or "auto",
        out=None if moved else out, return_lse=return_lse, lse=lse if packed and not lse_moved else None,
        q_scale=scale if q_scale is None else scale * scale_of("q_scale", q_scale, q.device),
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if block_tables is not None:
        lens = flat_integers(actual_seq_lens_kv, "actual_seq_lens_kv", q.device, batch)
        if lens is None:
            lens = torch.full((batch,), most_kv, dtype=torch.int32, device=q.device)
        call |= dict(operands=("q", "k_cache", "v_cache"))
        result = attend_pages(q, (k_cache, v_cache), "HND", block_tables, lens, queries, **call)
    else:
        of_k = row(batch_offsets_k, "k").by(step(k_cache, "k_cache", batch_offsets_k))
        of_v = row(batch_offsets_v, "v").by(step(v_cache, "v_cache", batch_offsets_v))
        keys = _spans(of_k if of_k.starts is not None else of_v, k_cache, actual_seq_lens_kv, batch, most_kv, "k")
        if "q_len" in keys and keys["q_lens"] is None:
            keys["q_lens"] = torch.full((batch,), most_kv, dtype=torch.int32, device=q.device)
        if of_k.starts is not None and of_v.starts is not None and not of_v.same_as(of_k):
            v_cache = _beside(v_cache, of_v.starts, of_k.starts[:batch], k_cache.shape[0])
        table = Table(
            **queries, kv_indptr=keys.get("qo_indptr"), kv_lens=keys.get("q_lens"), kv_stride=keys.get("q_len", 0)
        )
        result = attend_rows(q, k_cache, v_cache, table, **call)
    rows, row_lse = result if isinstance(result, tuple) else (result, None)
    spans = Table()
    if moved or (row_lse is not None and (not packed or lse_moved)):
        # The lengths of keys do not matter here, only the number of requests.
        spans = Table(**queries, kv_lens=torch.zeros(batch, dtype=torch.int32, device=q.device))
    if moved and of_o.starts is not None:
        out = torch.empty(rows.shape, dtype=o_dtype, device=q.device) if out is None else out
        rows = _placed(rows, out, of_o.starts[:batch], spans)
    rows = rows if given is None else given
    if row_lse is None:
        return rows, None
    if lse_base == "ln":
        row_lse.mul_(math.log(2.0))
    if not packed:
        return rows, _padded(row_lse, spans, most_q, lse)
    if lse_moved and of_lse.starts is not None:
        row_lse = _placed(row_lse, torch.empty_like(row_lse) if lse is None else lse, of_lse.starts[:batch], spans)
    return rows, row_lse


class Rows:
    """Offsets of one tensor, as the caller gave them: where each request begins.

    Attributes
    ----------
    starts : int64 Tensor, optional
        In rows.
    """

    def __init__(self, offsets: torch.Tensor | None, name: str, batch: int, device: torch.device):
        self._given, self.name, self.starts, self._row = offsets, name, None, 1
        if offsets is not None:
            fits = offsets.numel() in (batch, batch + 1)
            require(fits, name, tuple(offsets.shape), f"{batch + 1} elements, or {batch} beside lengths")
            require(offsets.dtype in (torch.int32, torch.int64), name, offsets.dtype, "int32 or int64")
            check_values(name, offsets, 0, torch.iinfo(offsets.dtype).max)
            self.starts = offsets.reshape(-1).to(device, torch.int64, non_blocking=True)

    def by(self, row: int) -> Rows:
        """These offsets, which count elements, `row` of them in each row."""
        self._row, given = row, self._given
        if given is not None and self.starts is not None and row > 1:
            if given.device.type == "cpu":
                whole = not bool((given % row).any())
                require(whole, self.name, given.tolist(), f"multiples of {row}, the elements from row to row")
            self.starts = torch.div(self.starts, row, rounding_mode="floor")
        return self

    def same_as(self, other: Rows) -> bool:
        """Whether both say the same rows, or one of them says nothing. Offsets on a GPU are not looked at."""
        a, b = self._given, other._given
        if a is None or b is None or self.starts is None or other.starts is None:
            return True
        if self.starts.device.type == "cpu":
            count = min(len(self.starts), len(other.starts))
            return torch.equal(self.starts[:count], other.starts[:count])
        alike = a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and self._row == other._row


def _batch_size(block_tables, lens_q, lens_kv, offsets_q, offsets_o, offsets_k, offsets_v) -> int:
    for lens in (lens_q, lens_kv):
        if lens is not None:
            return lens.numel()
    if block_tables is not None:
        return block_tables.shape[0]
    for offsets in (offsets_q, offsets_o, offsets_k, offsets_v):
        if offsets is not None:
            return offsets.numel() - 1
    raise ValueError("actual_seq_lens_q: got None; allowed: a tensor, or batch_offsets_q, or block_tables")


def _spans(rows: Rows, x: torch.Tensor, lens, batch: int, most: int, name: str) -> dict:
    """Where the rows of each request are in `x`: qo_indptr, q_lens and q_len of a Table, whichever tell it."""
    given, lens = lens, flat_integers(lens, f"actual_seq_lens_{name if name == 'q' else 'kv'}", x.device, batch)
    if lens is not None and name == "q":
        check_values("actual_seq_lens_q", given if given.dtype == torch.int64 else lens, 0, x.shape[0])
    if rows.starts is not None:
        fits = rows.starts.shape[0] == batch + 1 or lens is not None
        require(fits, rows.name, f"{rows.starts.shape[0]} elements", f"{batch + 1} elements")
        return dict(qo_indptr=integers(rows.starts, rows.name, x.device, (None,)), q_lens=lens)
    padded = x.shape[0] == batch * most
    require(padded or lens is not None, f"actual_seq_lens_{'q' if name == 'q' else 'kv'}", None,
            f"a tensor, or batch_offsets_{name}, or {batch} x {most} rows")  # fmt: skip
    return dict(q_lens=lens, q_len=most if padded else 0)


def _request_of(starts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request that begins last before each of `count` rows, and the place of the row in it."""
    row = torch.arange(count, dtype=torch.int64, device=starts.device)
    request = torch.searchsorted(starts, row, right=True).sub_(1).clamp_(min=0)
    return request, row - starts[request]


def _beside(v: torch.Tensor, v_starts: torch.Tensor, k_starts: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of V copied to where K's are, whose requests begin at k_starts."""
    if not count or not v.shape[0] or not k_starts.shape[0]:
        return v[:count]
    request, place = _request_of(k_starts, count)
    at = (v_starts[request] + place).clamp_(0, v.shape[0] - 1)
    return v.view(torch.uint8)[at].view(v.dtype) if v.element_size() == 1 else v[at]


def _placed(rows: torch.Tensor, out: torch.Tensor, starts: torch.Tensor, spans: Table) -> torch.Tensor:
    """Write the rows of each request to `out` from its start on; rows of no request stay as they are."""
    if not rows.shape[0] or not starts.shape[0] or not out.shape[0]:
        return out
    begin, lens = spans.q_spans()
    request, place = _request_of(starts, out.shape[0])
    there = (place >= 0) & (place < lens[request])
    at = (begin[request] + place).clamp_(0, rows.shape[0] - 1)
    bits = (lambda t: t.view(torch.uint8)) if rows.element_size() == 1 else (lambda t: t)
    there = there.view(-1, *[1] * (rows.dim() - 1))
    bits(out).copy_(torch.where(there, bits(rows)[at], bits(out)))
    return out


def _padded(rows: torch.Tensor, table: Table, most: int, out) -> torch.Tensor:
    """Rows [tokens, heads] as [batch, most, heads], -inf past the rows of a request."""
    begin, count = table.q_spans()
    number = torch.arange(most, dtype=torch.int64, device=rows.device)
    at = (begin[:, None] + number).clamp_(max=max(rows.shape[0] - 1, 0))
    shape = (table.batch_size, most, rows.shape[1])
    if not rows.shape[0]:
        padded = torch.full(shape, -math.inf, dtype=rows.dtype, device=rows.device)
    else:
        padded = rows[at].masked_fill_((number >= count[:, None])[..., None], -math.inf)
    if out is None:
        return padded
    require(tuple(out.shape) == shape, "lse", tuple(out.shape), str(shape))
    return out.copy_(padded)

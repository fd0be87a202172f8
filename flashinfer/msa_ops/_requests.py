"""Which request a query belongs to, and which of its keys the query sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import check_indptr, require
from flashinfer._direct.given import flag
from flashinfer.ops.attention.block_scores import BLOCK
from flashinfer.ops.attention.engine import check_pages, flat_integers, integers


@dataclass
class Requests:
    """A batch of queries over keys in pages, or side by side. All tensors are int64.

    Attributes
    ----------
    request : Tensor [tokens]
        Of each query; those of none count as the first or the last.
    seen : Tensor [tokens]
        Keys that each query sees, the first of its request's; 0 for queries of no request.
    starts : Tensor [batch], optional
        First key of each request, of keys side by side.
    lens : Tensor [batch]
        Keys of each request.
    page_table : int32 Tensor [batch, pages], optional
    """

    request: torch.Tensor
    seen: torch.Tensor
    starts: torch.Tensor | None
    lens: torch.Tensor
    page_table: torch.Tensor | None

    @property
    def batch(self) -> int:
        return self.lens.shape[0]


def requests_of(q, k, q_indptr, cu_seqlens_k, page_table, seqused_k, causal, q_offset) -> Requests:
    """The batch that the arguments of the functions of msa_ops describe; `q_indptr` are offsets, or queries a request.

    The last query of a request stands at its last key, or query i at q_offset + i.
    """
    device, tokens = q.device, q.shape[0]
    paged = page_table is not None
    require(k.dim() == (4 if paged else 3), "k", tuple(k.shape),
            "[pages, kv_heads, 128, dim] with page_table" if paged else "[keys, kv_heads, dim] without page_table")
    starts = None
    if paged:
        require(k.shape[2] == BLOCK, "k", tuple(k.shape), f"pages of {BLOCK} tokens")
        require(seqused_k is not None, "seqused_k", None, "a tensor, with page_table")
        page_table = integers(page_table, "page_table", device, (None, None))
        batch = page_table.shape[0]
        lens = flat_integers(seqused_k, "seqused_k", device, batch).long().clamp(0, page_table.shape[1] * BLOCK)
        check_pages({"page_table": page_table, "seqused_k": lens}, BLOCK, k.shape[0], page_table.shape[1] * BLOCK)
    else:
        require(cu_seqlens_k is not None, "cu_seqlens_k", None, "a tensor, without page_table")
        batch = cu_seqlens_k.numel() - 1
        offsets = flat_integers(cu_seqlens_k, "cu_seqlens_k", device, batch + 1).long()
        if offsets.device.type == "cpu":
            check_indptr("cu_seqlens_k", offsets.numpy(), k.shape[0], "the rows of k", sliced=True)
        starts = offsets[:-1]
        lens = offsets[1:] - starts
        if seqused_k is not None:
            lens = torch.minimum(lens, flat_integers(seqused_k, "seqused_k", device, batch).long())
    row = torch.arange(tokens, dtype=torch.int64, device=device)
    if isinstance(q_indptr, int):
        require(tokens == batch * q_indptr, "q", f"{tokens} rows", f"{batch} requests of seqlen_q = {q_indptr}")
        request = torch.div(row, max(q_indptr, 1), rounding_mode="floor")
        begin, count = request * q_indptr, q_indptr
        there = torch.ones(tokens, dtype=torch.bool, device=device)
        counts = torch.full((batch,), q_indptr, dtype=torch.int64, device=device)
    else:
        offsets = flat_integers(q_indptr, "cu_seqlens_q", device, batch + 1).long()
        request = torch.searchsorted(offsets, row, right=True).sub_(1).clamp_(0, max(batch - 1, 0))
        counts = offsets[1:] - offsets[:-1]
        if not batch:
            return Requests(request, row * 0, starts, lens, page_table)
        begin, count = offsets[request], counts[request]
        there = (row >= begin) & (row < begin + count)
    seen = lens[request] if batch else row * 0
    if flag("causal", causal) and batch:
        if q_offset is None:
            offset = (lens - counts)[request]
        elif isinstance(q_offset, torch.Tensor) and q_offset.numel() != 1:
            offset = flat_integers(q_offset, "q_offset", device, batch).long()[request]
        else:
            offset = q_offset.to(device).long().reshape(()) if isinstance(q_offset, torch.Tensor) else q_offset
        seen = torch.minimum(seen, offset + row - begin + 1)
    seen = torch.where(there, seen, 0).clamp_(min=0)
    return Requests(request, seen, starts, lens, page_table)

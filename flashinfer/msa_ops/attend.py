"""Attention of each query over the blocks of keys that it chose."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import present, require
from flashinfer._direct.given import flag, real, whole
from flashinfer.msa_ops._requests import Requests, requests_of
from flashinfer.ops import layouts
from flashinfer.ops.attention.block_scores import BLOCK
from flashinfer.ops.attention.engine import attend_pages

_FP8 = torch.float8_e4m3fn
_FAR = 1 << 30


@checked
@named(q_data_type="q", kv_data_type="k", head_dim_qk="k", head_dim_vo="v")
def msa_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | torch.Tensor | None = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
    workspace=None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention of each query over the blocks of 128 keys that its row of q2k_indices names.

    Nothing waits for the device, and a CUDA graph can capture the call. Keys side by side are copied into pages first.

    Parameters
    ----------
    q : Tensor [tokens, num_qo_heads, head_dim]
        bf16 or fp16; float8_e4m3fn beside keys and values of that type.
    k, v : Tensor
        [keys, num_kv_heads, head_dim] with cu_seqlens_k, or [pages, num_kv_heads, 128, head_dim] with page_table and
        seqused_k. q's dtype, float8_e4m3fn, or uint8 with head_dim / 2: nvfp4, two e2m1 a byte.
    q2k_indices : int32 Tensor [num_kv_heads, tokens, topk]
        Blocks of each query's request, as `msa_topk_select` gives them but for the order of axes; -1 for none. Blocks
        that a query does not see are left out.
    cu_seqlens_q : int32 Tensor [batch + 1]
        First query of each request.
    cu_seqlens_k, page_table, seqused_k, q_offset
        As in `msa_proxy_score`.
    causal : bool
        A query sees keys at its position and before; its request's last query stands at the last key.
    softmax_scale : float, optional
        Default 1 / sqrt(head_dim).
    return_softmax_lse : bool
    k_scale, v_scale : uint8 or float8_e4m3fn Tensor, optional
        Of nvfp4, e4m3 factors of 16 elements: in the 128x4 layout, rows in the order of (token, head), or (page, head,
        token) of pages; or [pages, num_kv_heads, 128, head_dim / 16], those of K row by row, those of V four tokens
        interleaved, as `nvfp4_quantize_paged_kv_cache` gives them.
    k_global_scale, v_global_scale : float, optional
        Further factors of logits and of outputs.
    return_temperature_lse : bool
        Also return the log-sum-exp of the logits times lse_temperature_scale.
    lse_temperature_scale : float
    workspace : optional
        Not read.

    Returns
    -------
    out : Tensor, as q
        bf16 for fp8 queries; 0 for a query that sees no key.
    lse : float32 Tensor [tokens, num_qo_heads], with return_softmax_lse or return_temperature_lse
        Natural; -inf for a query that sees no key.
    lse_t : float32 Tensor [tokens, num_qo_heads], with return_temperature_lse

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, (k, v) = torch.randn(5, 4, 64).bfloat16(), torch.randn(2, 3, 2, 128, 64).bfloat16()
    >>> pages, lens, blocks = torch.tensor([[2, 0]]).int(), torch.tensor([200]).int(), torch.tensor([1, 0]).int()
    >>> flashinfer.msa_ops.msa_sparse_attention(
    ...     q, k, v, blocks.expand(2, 5, 2).contiguous(), torch.tensor([0, 5]).int(), causal=True,
    ...     page_table=pages, seqused_k=lens).shape
    torch.Size([5, 4, 64])
    """
    batch = requests_of(q, k, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, q_offset)
    call = _Call(q, k, v, q2k_indices, batch, softmax_scale, (k_scale, v_scale), (k_global_scale, v_global_scale))
    wants_t = flag("return_temperature_lse", return_temperature_lse)
    if not wants_t and not flag("return_softmax_lse", return_softmax_lse):
        return call.run()
    out, lse = call.run(lse=True)
    if not wants_t:
        return out, lse
    return out, lse, call.run(lse=True, temperature=real("lse_temperature_scale", lse_temperature_scale))[1]


@checked
def msa_sparse_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | torch.Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    force_fused: bool | None = None,
    workspace=None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`msa_sparse_attention` of requests of seqlen_q queries each, the last of their tokens.

    Parameters
    ----------
    q : Tensor [batch * seqlen_q, num_qo_heads, head_dim]
    k, v, q2k_indices, page_table, seqused_k, cu_seqlens_k, causal, softmax_scale, return_softmax_lse, k_scale, v_scale
        As there.
    seqlen_q : int
        Queries of each request.
    k_global_scale, v_global_scale, q_offset
        As there.
    partial_dtype, force_fused, workspace : optional
        Hints and scratch that change no result: partial results are float32.
    out : Tensor, as q, optional
        Where to write; bf16 for fp8 queries.

    Returns
    -------
    out : Tensor, as q
    lse : float32 Tensor [batch * seqlen_q, num_qo_heads], with return_softmax_lse
        Natural; -inf for a query that sees no key.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, (k, v) = torch.randn(1, 4, 64).bfloat16(), torch.randn(2, 3, 2, 128, 64).bfloat16()
    >>> pages, lens, blocks = torch.tensor([[2, 0]]).int(), torch.tensor([200]).int(), torch.tensor([1, 0]).int()
    >>> flashinfer.msa_ops.msa_sparse_decode_attention(
    ...     q, k, v, blocks.expand(2, 1, 2).contiguous(), page_table=pages, seqused_k=lens).shape
    torch.Size([1, 4, 64])
    """
    each = whole("seqlen_q", seqlen_q, 1)
    batch = requests_of(q, k, each, cu_seqlens_k, page_table, seqused_k, causal, q_offset)
    call = _Call(q, k, v, q2k_indices, batch, softmax_scale, (k_scale, v_scale), (k_global_scale, v_global_scale))
    return call.run(lse=flag("return_softmax_lse", return_softmax_lse), out=out)


class _Call:
    """A checked call as attention of one KV head: every (query, KV head) is a request with a page table of its own."""

    def __init__(self, q, k, v, indices, batch: Requests, softmax_scale, factors: tuple, global_scales: tuple):
        require(q.dim() == 3, "q", tuple(q.shape), "[tokens, num_qo_heads, head_dim]")
        require(v.dim() == k.dim() and v.shape[:-1] == k.shape[:-1], "v", tuple(v.shape), "pages or rows as k's")
        (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
        fits = kv_heads > 0 and heads % kv_heads == 0
        require(fits, "q", f"{heads} heads", f"a multiple of {kv_heads}, the KV heads")
        fits = indices.dim() == 3 and tuple(indices.shape[:2]) == (kv_heads, tokens)
        require(fits, "q2k_indices", tuple(indices.shape), f"[{kv_heads}, {tokens}, topk]")
        known = indices.dtype in (torch.int32, torch.int64)
        require(known, "q2k_indices", indices.dtype, "int32, int64")
        self.q, self.heads = q.reshape(tokens * kv_heads, heads // kv_heads, dim), (tokens, heads)
        self.scale = dim**-0.5 if softmax_scale is None else real("softmax_scale", softmax_scale)
        names = "k_global_scale", "v_global_scale"
        given = [1.0 if x is None else real(name, x) for name, x in zip(names, global_scales, strict=True)]
        self.global_scales = given
        self.pools, tables, self.factors = _pages(k, v, factors, batch)
        self.tables, self.lens = _chosen(indices, batch, tables, kv_heads)
        self.dtype = torch.bfloat16 if q.dtype == _FP8 else q.dtype

    def run(self, lse: bool = False, temperature: float = 1.0, out: torch.Tensor | None = None):
        shape = *self.heads, self.pools[1].shape[-1] * (2 if self.pools[1].dtype == torch.uint8 else 1)
        rows = None
        if out is not None:
            require(tuple(out.shape) == shape and out.is_contiguous(), "out", tuple(out.shape), f"{shape}, contiguous")
            require(out.dtype == self.dtype, "out", out.dtype, str(self.dtype))
            rows = out.view(*self.q.shape[:2], shape[2])
        result = attend_pages(
            self.q, self.pools, "HND", self.tables, self.lens, dict(q_len=1), longest_q=1, causal=False,
            o_dtype=self.dtype, out=rows, return_lse=lse, q_scale=self.scale * self.global_scales[0] * temperature,
            v_scale=self.global_scales[1], operands=("q", "k", "v"), **self.factors,
        )  # fmt: skip
        rows, base2 = result if isinstance(result, tuple) else (result, None)
        out = rows.view(shape) if out is None else out
        return out if base2 is None else (out, base2.view(self.heads).mul_(math.log(2.0)))


def _chosen(indices: torch.Tensor, batch: Requests, tables, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page tables and lengths [tokens * kv_heads] of the blocks that queries chose and see, in ascending order.

    All but the last of them are whole, since a query sees the first keys of its request.
    """
    seen = batch.seen[:, None, None]
    blocks = indices.permute(1, 0, 2).long()
    blocks = torch.where((blocks >= 0) & (blocks * BLOCK < seen), blocks, _FAR).sort(-1).values
    there = blocks < _FAR
    count = there.sum(-1)
    last = torch.where(there, blocks, -1).amax(-1) if blocks.shape[-1] else count
    lens = torch.where(count > 0, (count - 1) * BLOCK + (batch.seen[:, None] - last * BLOCK).clamp(max=BLOCK), 0)
    head = torch.arange(kv_heads, dtype=torch.int64, device=indices.device)[None, :, None]
    pages = torch.where(there, tables(torch.where(there, blocks, 0), head), 0)
    return pages.flatten(0, 1).int(), lens.flatten().int()


def _pages(k, v, factors: tuple, batch: Requests):
    """K and V as pages of one KV head each, [pages, 1, 128, dim]; which page has a block of a query; and factors.

    Returns
    -------
    (k, v), tables (blocks [tokens, heads, n], heads) -> pages, factors as `attend_pages` takes them
    """
    nvfp4 = k.dtype == torch.uint8
    for name, given in zip(("k_scale", "v_scale"), factors, strict=True):
        require((given is not None) == nvfp4, name, "none" if given is None else "a tensor",
                "e4m3 factors of nvfp4, and none of other keys and values")  # fmt: skip
    laid_out: dict[str, Any] = {}
    as_bytes = []
    if nvfp4:
        interleaved = factors[0].dim() == 4
        rows = [f if interleaved else _restored(name, f, x) for name, f, x in
                (("k_scale", factors[0], k), ("v_scale", factors[1], v))]  # fmt: skip
        laid_out = dict(interleaved=interleaved and batch.starts is None)
        as_bytes = [f.view(torch.uint8) for f in rows]
    if batch.starts is None:
        tensors, ratio = _by_head((k, v, *as_bytes))
        tables = lambda blocks, head: _page_ids(batch, blocks) * ratio + head
    else:
        tensors, first, count = _paged((k, v, *as_bytes), batch)
        tables = lambda blocks, head: first[batch.request][:, None, None] + blocks + head * count
    if nvfp4:
        laid_out |= dict(zip(("k_factors", "v_factors"), (t.transpose(1, 2) for t in tensors[2:]), strict=True))
    return tuple(tensors[:2]), tables, laid_out


def _page_ids(batch: Requests, blocks: torch.Tensor) -> torch.Tensor:
    table = batch.page_table
    if table is None or not batch.batch or not table.shape[1]:
        return blocks * 0
    return table[batch.request[:, None, None], blocks].long()


def _by_head(tensors: tuple) -> tuple[list[torch.Tensor], int]:
    """Pages [pages, heads, 128, dim] as [pages x ratio, 1, 128, dim]: that of head h of page p is p x ratio + h."""
    ratios = {t.stride(0) // max(t.stride(1), 1) for t in tensors if t.shape[0] > 1}
    # Heads that are one by a stride of 0 are no steps from page to page.
    even = all(t.stride(1) and t.stride(0) % t.stride(1) == 0 and t.stride(3) == 1 for t in tensors)
    even = even and len(ratios) <= 1
    heads = tensors[0].shape[1]
    ratio = ratios.pop() if even and ratios else heads
    if not even or ratio < heads:
        tensors, ratio = tuple(t.contiguous() for t in tensors), heads
    pages = tensors[0].shape[0]
    count = (pages - 1) * ratio + heads if pages else 0
    return [
        t.as_strided((count, 1, *t.shape[2:]), (t.stride(1), t.stride(1), t.stride(2), 1), t.storage_offset())
        for t in tensors
    ], ratio


def _paged(tensors: tuple, batch: Requests):
    """Rows [keys, heads, dim] copied into pages [heads x count, 1, 128, dim], and the first page of each request."""
    keys, heads = tensors[0].shape[:2]
    device = tensors[0].device
    used = torch.div(batch.lens.clamp(min=0) + BLOCK - 1, BLOCK, rounding_mode="floor")
    first, count = used.cumsum(0) - used, keys // BLOCK + batch.batch
    page = torch.arange(count, dtype=torch.int64, device=device)
    request = torch.searchsorted(first, page, right=True).sub_(1).clamp_(min=0)
    slot = torch.arange(BLOCK, dtype=torch.int64, device=device)
    copies = []
    if batch.batch and keys:
        at = (present("cu_seqlens_k", batch.starts)[request] + (page - first[request]) * BLOCK)[:, None] + slot
        at = at.clamp_(0, keys - 1).flatten()
    for t in tensors:
        if not batch.batch or not keys:
            copies.append(torch.zeros((heads * count, 1, BLOCK, t.shape[2]), dtype=t.dtype, device=device))
            continue
        bits = t.view(torch.uint8) if t.element_size() == 1 else t
        copy = bits.transpose(0, 1)[:, at].contiguous().view(t.dtype)
        copies.append(copy.view(heads * count, 1, BLOCK, t.shape[2]))
    return copies, first, count


def _restored(name: str, factors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Factors in the 128x4 layout as the rows of `codes` have them, [..., dim / 16]."""
    rows, blocks = math.prod(codes.shape[:-1]), codes.shape[-1] // 8
    flat, wanted = factors.contiguous().view(torch.uint8).view(-1), math.prod(layouts.padded(rows, blocks, "128x4"))
    require(flat.numel() == wanted, name, tuple(factors.shape), f"{wanted} bytes: {rows} rows of {blocks}, as 128x4")
    return layouts.restore(flat, rows, blocks, "128x4").view(*codes.shape[:-1], blocks)

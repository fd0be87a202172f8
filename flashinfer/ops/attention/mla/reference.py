"""Latent attention in torch: the CPU backend, the oracle, and the plainest statement of the op.

Requests of like shape are padded to one batch and computed together in float32, a block of query rows at a time.
"""

from __future__ import annotations

import math

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.attention.evaluate import vary
from flashinfer.ops.attention.mla.problem import Inputs, Problem
from flashinfer.ops.attention.reference import divided, softmax
from flashinfer.ops.attention.variants import find

# Elements of keys, and of logits, in memory at a time: 4M float32 are 16 MiB.
_ELEMENTS = 1 << 22


def run(problem: Problem, config, x: Inputs) -> None:
    """Write latent attention of `x` to x.out, and its log-sum-exp to x.lse if there is one."""
    q_begin, q_len = x.table.q_spans()
    kv_begin, kv_len = x.table.kv_spans(1 if problem.sparse else problem.page_size)
    kinds: dict[tuple, list[int]] = {}
    for request, (queries, keys) in enumerate(zip(q_len.tolist(), kv_len.tolist(), strict=True)):
        if queries:
            kinds.setdefault(((queries - 1).bit_length(), (keys - 1).bit_length()), []).append(request)
    for (_, bits), requests in kinds.items():
        at_once = max(1, _ELEMENTS // (problem.head_dim_ckv << max(bits, 0)))
        for start in range(0, len(requests), at_once):
            chosen = torch.tensor(requests[start : start + at_once], dtype=torch.int64, device=q_len.device)
            spans = [t[chosen][:, None] for t in (q_begin, q_len, kv_begin, kv_len)]
            _attend(problem, x, chosen, *spans)


def _attend(problem: Problem, x: Inputs, request, q_begin, q_len, kv_begin, kv_len) -> None:
    """The requests [requests] that have these spans; all int64 [requests, 1]."""
    kv_pos = torch.arange(int(kv_len.max()), device=q_len.device)[None]
    latent, position, there = _keys(problem, x, kv_begin, kv_pos, kv_pos < kv_len)
    most_q, per_row = int(q_len.max()), problem.num_heads * max(latent.shape[:2].numel(), 1)
    for first in range(0, most_q, max(1, _ELEMENTS // per_row)):
        row = torch.arange(first, min(first + max(1, _ELEMENTS // per_row), most_q), device=q_len.device)[None]
        ok_row = row < q_len
        n = (q_begin + row).clamp(max=x.q_nope.shape[0] - 1)
        logits = torch.einsum("bqhd,bkd->bqhk", _at(x.q_nope, n).float(), latent)
        if problem.head_dim_kpe:
            logits += x.pe_ratio * torch.einsum("bqhd,bkd->bqhk", _at(x.q_pe, n).float(), position)
        logits *= x.sm_scale
        if problem.scales:
            logits *= x.qk_scale
        seen = there[:, None, :]
        if problem.mask == "causal":
            seen = seen & (kv_pos[:, None, :] <= (row + kv_len - q_len)[:, :, None])
        seen = seen[:, :, None, :]
        if problem.variant:
            logits, seen = _vary(problem, x, request, logits, seen, row + kv_len - q_len, kv_pos, kv_len)
        logits.masked_fill_(~seen, -math.inf if problem.softmax else 0.0)
        if problem.softmax:
            p, total, lse = softmax(logits, x.sinks)
            out = divided(torch.einsum("bqhk,bkd->bqhd", p, latent), total)
        else:
            out, lse = torch.einsum("bqhk,bkd->bqhd", logits, latent), None
        out *= x.out_scale
        if problem.scales:
            out *= x.v_scale
        _put(x.out, n[ok_row], out[ok_row])
        if x.lse is not None:
            x.lse[n[ok_row]] = lse[ok_row] * (1.0 if problem.base_e else math.log2(math.e))


def _vary(problem: Problem, x: Inputs, request, logits, seen, q_pos, kv_pos, kv_len):
    """What a user's variant makes of logits [requests, rows, heads, keys], and which of them take part.

    Positions past a request's end are its last, so that what a function loads by them is there.
    """
    last = (kv_len - 1).clamp(min=0)
    q_pos, kv_pos = (torch.where(kv_len > 0, torch.minimum(at, last), 0).int() for at in (q_pos, kv_pos))
    head = torch.arange(problem.num_heads, dtype=torch.int32, device=logits.device)
    logits, takes_part = vary(
        find(problem.variant), x.params, logits, request.int().view(-1, 1, 1, 1), q_pos[:, :, None, None],
        kv_pos[:, None, None, :], head.view(-1, 1),
    )  # fmt: skip
    return logits, seen if takes_part is None else seen & takes_part


def _keys(problem: Problem, x: Inputs, kv_begin, kv_pos, there):
    """Latent and positional rows, float32 [requests, keys, dim], zeros where there is no key; and where there are."""
    entry = kv_pos if problem.sparse else kv_pos // problem.page_size
    at = (kv_begin + entry).clamp(max=max(x.table.kv_indices.shape[0] - 1, 0))
    named = torch.where(there, x.table.kv_indices.long()[at] if x.table.kv_indices.shape[0] else -1, 0)
    if problem.sparse:
        there = there & (named >= 0)
        named = named.clamp(min=0)
        page, slot = named // problem.page_size, named % problem.page_size
    else:
        page, slot = named, (kv_pos % problem.page_size).expand_as(named)
    if not problem.first:
        latent = _rows(x.ckv, page, slot, there)
    else:
        # A key that lies in the other cache reads page 0 of this one, and is masked.
        in_first = there & (kv_pos < problem.first)
        of_first = torch.where(in_first, named, 0)
        latent = _rows(x.ckv, torch.where(in_first, 0, page), torch.where(in_first, 0, slot), there & ~in_first)
        latent += _rows(x.first_ckv, of_first // problem.first_page, of_first % problem.first_page, in_first)
    position = _rows(x.kpe, page, slot, there) if problem.head_dim_kpe else None
    return latent, position, there


def _rows(cache: torch.Tensor, page, slot, there) -> torch.Tensor:
    if not cache.numel():
        return torch.zeros((*page.shape, cache.shape[-1]), dtype=torch.float32, device=cache.device)
    rows = _at(cache, (page, slot)).float()
    return rows.masked_fill_(~there[..., None], 0.0)


def _at(t: torch.Tensor, index) -> torch.Tensor:
    if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return t.view(torch.uint8)[index].view(t.dtype)
    return t[index]


def _put(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows of the output in its type. FP8 saturates, as the chips' conversions do."""
    if out.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        most = torch.finfo(out.dtype).max
        values, out = values.clamp(-most, most).to(out.dtype).view(torch.uint8), out.view(torch.uint8)
    out[rows] = values.to(out.dtype)


IMPLEMENTATION = Implementation(run)

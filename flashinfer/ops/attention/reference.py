"""Attention in torch: the CPU backend, the oracle, and the plainest statement of the op.

Requests of like shape are padded to one batch and computed together in float32; query rows are taken in blocks, so that
the logits of a block stay in cache and a causal block multiplies no key behind its diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.attention.evaluate import vary
from flashinfer.ops.attention.problem import Inputs, Problem
from flashinfer.ops.attention.variants import AttentionVariant, find
from flashinfer.ops.formats import KV_FORMATS
from flashinfer.ops.narrow import widened

# Logits computed at a time: 1M float32 are 4 MiB, about the L2 of two CPU cores.
_LOGITS = 1 << 20


@dataclass
class _Bucket:
    """Requests padded to one shape: their numbers and, per request, int64 columns [n, 1] to index with."""

    requests: torch.Tensor
    q_begin: torch.Tensor
    q_len: torch.Tensor
    kv_len: torch.Tensor
    kv_first: torch.Tensor
    most_q: int
    most_kv: int


def run(problem: Problem, config, x: Inputs) -> None:
    """Write attention of `x` to x.out, and its log-sum-exp (base 2) to x.lse if there is one."""
    for bucket in _buckets(problem, x):
        k, v = _gather(problem, x, bucket)
        heads = x.q.shape[1]
        rows = max(1, _LOGITS // (len(bucket.requests) * heads * max(bucket.most_kv, 1)))
        for first in range(0, bucket.most_q, rows):
            _attend_rows(problem, x, bucket, k, v, first, min(first + rows, bucket.most_q))


def _buckets(problem: Problem, x: Inputs):
    """Requests whose query lengths and whose visible key lengths have the same power of two above them.

    Those without queries are in none, and those without keys by themselves: what a variant's functions load for a
    request need not be there for these.
    """
    q_begin, q_len = x.table.q_spans()
    _, kv_len = x.table.kv_spans(problem.page_size)
    first = torch.zeros_like(kv_len)
    if problem.window:
        # No query of the request sees a key before this one.
        first = torch.minimum((kv_len - q_len - x.scalars.window_left).clamp(min=0), kv_len)
    kinds: dict[tuple, list[int]] = {}
    for request, (nq, nkv) in enumerate(zip(q_len.tolist(), (kv_len - first).tolist())):
        if nq:
            kinds.setdefault(((nq - 1).bit_length(), (nkv - 1).bit_length() if nkv else -1), []).append(request)
    for requests in kinds.values():
        chosen = torch.tensor(requests, dtype=torch.int64, device=q_len.device)
        nq, nkv, lo = q_len[chosen], kv_len[chosen], first[chosen]
        most_q, most_kv = int(nq.max()), int((nkv - lo).max())
        yield _Bucket(chosen, q_begin[chosen][:, None], nq[:, None], nkv[:, None], lo[:, None], most_q, most_kv)


def _gather(problem: Problem, x: Inputs, b: _Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 [requests, kv_heads, most_kv, head_dim]; rows past a request's end repeat its last."""
    positions = b.kv_first + torch.arange(b.most_kv, device=b.kv_first.device)
    positions = torch.minimum(positions, (b.kv_len - 1).clamp(min=0))
    base = x.table.kv_spans(problem.page_size)[0][b.requests][:, None]
    if problem.page_size:
        entries = (base + positions // problem.page_size).clamp(max=max(x.table.kv_indices.shape[0] - 1, 0))
        if not x.table.kv_indices.shape[0]:
            entries = None
        pages = x.table.kv_indices.long()[entries] if entries is not None else torch.zeros_like(positions)
        # What a block table holds for a request without keys may be no page.
        pages = torch.where(b.kv_len > 0, pages, 0)
        offsets = positions % problem.page_size
        k, v = (_rows(t, pages, offsets) for t in (x.k, x.v))
        if problem.kv_dtype in KV_FORMATS:
            element = KV_FORMATS[problem.kv_dtype].element
            k = _dequantise(element, k, _rows(x.k_factors, pages, offsets))
            v_factors = _interleaved if problem.interleaved else _rows
            v = _dequantise(element, v, v_factors(x.v_factors, pages, offsets))
    else:
        rows = (base + positions).clamp(max=max(x.k.shape[0] - 1, 0))
        k, v = (_at(t, rows) for t in (x.k, x.v))
    k, v = k.float(), v.float()
    if b.most_kv and bool((b.kv_len == 0).any()):
        # What was read for a request without keys has no weight, and 0 times NaN is NaN.
        v = v.masked_fill((b.kv_len == 0)[:, :, None, None], 0.0)
    if problem.pos_encoding == "ROPE_LLAMA":
        k = _rotate(k, b.kv_first + torch.arange(b.most_kv, device=k.device), x)
    return k.transpose(1, 2), v.transpose(1, 2)


def _at(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if not t.shape[0]:
        return t.new_zeros((*rows.shape, *t.shape[1:]))
    if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return t.view(torch.uint8).index_select(0, rows.flatten()).view(t.dtype).view(*rows.shape, *t.shape[1:])
    return t.index_select(0, rows.flatten()).view(*rows.shape, *t.shape[1:])


def _rows(t: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows (page, offset) of a paged tensor [pages, page_size, heads, dim]."""
    page_stride, row_stride, *inner = t.stride()
    if not row_stride or page_stride % row_stride or not t.shape[0]:
        if not t.shape[0]:
            return t.new_zeros((*pages.shape, *t.shape[2:]))
        return (t if t.dtype == torch.uint8 else t.float())[pages, offsets]
    # Where a page is a whole number of rows apart, one flat row number saves indexing twice.
    per_page = page_stride // row_stride
    flat = t.as_strided(((t.shape[0] - 1) * per_page + t.shape[1], *t.shape[2:]), (row_stride, *inner))
    return _at(flat, pages * per_page + offsets)


def _dequantise(element: str, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Rows of bytes of codes, each block of a row times its factor."""
    values = widened(codes, element)
    return (values.unflatten(-1, (factors.shape[-1], -1)) * factors.float()[..., None]).flatten(-2)


def _interleaved(t: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows (page, offset) of factors that lie four tokens interleaved (see `PlanOptions`)."""
    count = t.shape[-1]
    place = 4 * torch.arange(count, device=t.device) + offsets[..., None] % 4
    found = t.float()[pages[..., None], offsets[..., None] // 4 * 4 + place // count, :, place % count]
    return found.transpose(-1, -2)


def _rotate(rows: torch.Tensor, positions: torch.Tensor, x: Inputs) -> torch.Tensor:
    """LLaMA's rotary embedding: element i pairs with i + dim / 2. rows [n, len, heads, dim], positions [n, len]."""
    half = rows.shape[-1] // 2
    exponent = torch.arange(half, device=rows.device, dtype=torch.float64) / half
    frequency = x.scalars.rope_theta**-exponent / x.scalars.rope_scale
    angle = (positions[..., None] * frequency)[:, :, None, :]
    cos, sin = angle.cos().float(), angle.sin().float()
    lo, hi = rows[..., :half], rows[..., half:]
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


def _attend_rows(problem: Problem, x: Inputs, b: _Bucket, k, v, first: int, last: int) -> None:
    """Query rows first : last of each request of the bucket against all its keys."""
    row = torch.arange(first, last, device=k.device)
    ok_row = row < b.q_len
    q_pos = row + b.kv_len - b.q_len
    n = (b.q_begin + row).clamp(max=max(x.q.shape[0] - 1, 0))
    q = _at(x.q, n).float()
    if problem.pos_encoding == "ROPE_LLAMA":
        q = _rotate(q, q_pos, x)
    most_kv = b.most_kv
    if problem.mask == "causal":
        seen = int((q_pos.max(1, keepdim=True).values - b.kv_first).max()) + 1
        most_kv = max(min(most_kv, seen), 0)
        k, v = k[:, :, :most_kv], v[:, :, :most_kv]

    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    # GQA heads of a group stand side by side as rows against their one KV head.
    q = q.view(batch, rows, kv_heads, problem.group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    # Scaled behind the product: a scaled query is rounded, and equal roundings of equal elements add up.
    logits = (q @ k.transpose(-1, -2)).mul_(x.scalars.sm_scale)
    logits = logits.view(batch, kv_heads, problem.group, rows, most_kv)
    if problem.head_scales:
        logits *= x.qk_scale.view(kv_heads, problem.group, 1, 1)
    kv_pos = b.kv_first + torch.arange(most_kv, device=k.device)
    if problem.pos_encoding == "ALIBI":
        distance = (kv_pos[:, None, :] - q_pos[:, :, None])[:, None, None].float()
        logits += x.alibi_slopes.view(kv_heads, problem.group, 1, 1) * distance
    if problem.soft_cap:
        logits = x.scalars.soft_cap * torch.tanh(logits / x.scalars.soft_cap)
    hidden = _hidden(problem, x, b, row, q_pos, kv_pos)
    hidden = None if hidden is None else hidden[:, None, None]
    if problem.variant:
        logits, hidden = _vary(find(problem.variant), x, b, logits, hidden, q_pos, kv_pos)
    if hidden is not None:
        logits.masked_fill_(hidden, -math.inf if problem.softmax else 0.0)
    if problem.softmax:
        out, lse = _softmax_times(logits, v, x.sinks.view(kv_heads, problem.group, 1) if problem.sinks else None)
    else:
        out = (logits.view(batch, kv_heads, problem.group * rows, most_kv) @ v).view(*logits.shape[:-1], -1)

    # [batch, kv_heads, group, rows, ...] -> [batch, rows, heads, ...]
    out = out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, -1) * x.scalars.out_scale
    if problem.head_scales:
        out *= x.v_scale[:, None]
    n, ok_row = n.flatten(), ok_row.flatten()
    every = bool(ok_row.all())
    out, n_ok = out.flatten(0, 1), n if every else n[ok_row]
    _put(x.out, n_ok, out if every else out[ok_row])
    if x.lse is not None:
        lse = lse.permute(0, 3, 1, 2).reshape(batch * rows, heads)
        x.lse[n_ok] = lse if every else lse[ok_row]


def _vary(variant: AttentionVariant, x: Inputs, b: _Bucket, logits, hidden, q_pos, kv_pos):
    """What the functions of `variant` make of the logits, and what they hide beside `hidden`.

    Positions past a request's end are its last, so that what a function loads by them is there; of a request without
    keys, 0.
    """
    last = (b.kv_len - 1).clamp(min=0)
    q_pos, kv_pos = torch.minimum(q_pos, last), torch.minimum(kv_pos, last)
    q_pos = torch.where(b.kv_len > 0, q_pos, 0)
    kv_heads, group = logits.shape[1:3]
    head = torch.arange(kv_heads * group, dtype=torch.int32, device=logits.device).view(kv_heads, group, 1, 1)
    logits, seen = vary(
        variant, x.params, logits, b.requests.int().view(-1, 1, 1, 1, 1), q_pos.int()[:, None, None, :, None],
        kv_pos.int()[:, None, None, None, :], head,
    )  # fmt: skip
    if seen is not None:
        hidden = ~seen if hidden is None else hidden | ~seen
    return logits, hidden


def _put(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows of the output in its type. FP8 saturates, as the chips' conversions do."""
    if out.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        most = torch.finfo(out.dtype).max
        values, to = values.clamp(-most, most).to(out.dtype).view(torch.uint8), out.view(torch.uint8)
        to[rows] = values
    else:
        out[rows] = values.to(out.dtype)


def _hidden(problem: Problem, x: Inputs, b: _Bucket, row, q_pos, kv_pos) -> torch.Tensor | None:
    """[batch, rows, keys], True where a query does not see a key; None where every query sees all."""
    hidden = None
    if problem.mask == "causal":
        hidden = kv_pos[:, None, :] > q_pos[:, :, None]
    elif bool((b.kv_len - b.kv_first != kv_pos.shape[1]).any()):
        hidden = (kv_pos >= b.kv_len)[:, None, :].expand(-1, row.shape[0], -1)
    if problem.window:
        outside = kv_pos[:, None, :] + x.scalars.window_left < q_pos[:, :, None]
        hidden = outside if hidden is None else hidden | outside
    if problem.mask == "custom":
        bit = row[None, :, None] * b.kv_len[:, :, None] + kv_pos[:, None, :]
        byte = (x.table.mask_indptr.long()[b.requests][:, None, None] + (bit >> 3)).clamp(max=x.table.mask.shape[0] - 1)
        unset = (x.table.mask[byte].long() >> (bit & 7)) & 1 == 0
        hidden = unset if hidden is None else hidden | unset
    return hidden


def softmax(logits: torch.Tensor, sinks: torch.Tensor | None):
    """Weights [..., keys] that do not sum to one yet, their sums [...], and the log-sum-exp in base e; in place.

    A row with nothing to attend to, or whose logits are all -inf, has sums of 0 and -inf. A sink of inf has all the
    weight.
    """
    top = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -math.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    base = torch.where(top == -math.inf, 0.0, top)
    p = logits.sub_(base[..., None]).exp_()
    total = p.sum(-1)
    if sinks is not None:
        total = total + torch.where(sinks == math.inf, 1.0, torch.exp(sinks - base))
    return p, total, base + total.log()


def divided(sums: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Sums [..., dim] of weighted values by the sums of their weights; 0 for a row that saw no key, whatever the values
    are: 0 times NaN is NaN."""
    none = (total == 0)[..., None]
    return (sums / torch.where(none, 1.0, total[..., None])).masked_fill_(none, 0.0)


def _softmax_times(logits: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None):
    """softmax(logits) @ v and the base-2 log-sum-exp."""
    batch, kv_heads, group, rows, keys = logits.shape
    p, total, lse = softmax(logits, sinks)
    out = (p.view(batch, kv_heads, group * rows, keys) @ v).view(batch, kv_heads, group, rows, -1)
    return divided(out, total), lse * math.log2(math.e)


IMPLEMENTATION = Implementation(run)

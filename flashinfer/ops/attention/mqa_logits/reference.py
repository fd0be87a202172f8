"""An indexer's scores in torch: the CPU backend, the oracle, and the plainest statement of the op."""

from __future__ import annotations

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.attention.mqa_logits import Beside
from flashinfer.ops.narrow import from_e2m1, from_ue8m0

# Products in memory at a time: 4M float32 are 16 MiB.
_ELEMENTS = 1 << 22


def run(problem, config, q, keys, scales, weights, lens, tables, logits, context: int, beside=Beside()) -> None:
    """Write the logits of every request.

    Parameters
    ----------
    q : Tensor [batch, tokens, heads, dim]
        float8_e4m3fn, bf16 or fp16; uint8 with dim / 2 for mxfp4.
    keys : Tensor [pages, page_size, dim], or [keys, dim] side by side
        float8_e4m3fn as bytes, or as q.
    scales : Tensor, optional
        float32 [pages, page_size] or [keys]; uint8 [pages, page_size, dim / 32] for mxfp4.
    weights : float32 Tensor [batch * tokens, heads]
    lens : int32 Tensor [batch], or [batch * tokens] with problem.each
        Side by side, where a query's keys end.
    tables : int32 Tensor [batch, max_pages], optional
    logits : Tensor [batch * tokens, context]
        Each query's keys are written; with problem.clean, -inf beside them.
    beside : Beside
    """
    query = _wide(problem, q, beside.q_scales)
    if not problem.page_size:
        return _side_by_side(problem, query[:, 0], keys, scales, weights, lens, beside, logits, context)
    tokens, page, device = problem.tokens, problem.page_size, q.device
    for i in range(q.shape[0]):
        ends = lens[i * tokens : (i + 1) * tokens] if problem.each else lens[i].expand(tokens)
        rows = logits[i * tokens : (i + 1) * tokens]
        count = min(max(int(ends.max()), 0), context)
        position = torch.arange(count, dtype=torch.int64, device=device)
        if count:
            at = tables[i].long()[position // page], position % page
            if problem.qk_format == "mxfp4":
                k, scale = _wide(problem, keys[at], scales[at[0], _place(problem, at[1])]), 1.0
            else:
                k, scale = _wide(problem, keys[at], None), scales[at]
            dots = torch.einsum("thd,kd->thk", query[i], k).relu()
            own = weights[i * tokens : (i + 1) * tokens]
            rows[:, :count] = (torch.einsum("thk,th->tk", dots, own) * scale).to(logits.dtype)
        if problem.clean:
            # The last query stands at the last key, the one before it a key earlier.
            back = torch.arange(tokens - 1, -1, -1, dtype=torch.int64, device=device)
            every = torch.arange(context, dtype=torch.int64, device=device)
            rows.masked_fill_(every[None, :] >= (ends if problem.each else ends - back)[:, None], float("-inf"))
    return None


def _side_by_side(problem, query, keys, scales, weights, ends, beside, logits, context) -> None:
    k, (_, begins, origin) = _wide(problem, keys[:context], None), beside
    position = torch.arange(origin, origin + context, dtype=torch.int64, device=k.device)
    step = max(1, _ELEMENTS // max(problem.num_heads * context, 1))
    for first in range(0, query.shape[0], step):
        some = slice(first, first + step)
        dots = torch.einsum("qhd,kd->qhk", query[some], k).relu()
        value = torch.einsum("qhk,qh->qk", dots, weights[some])
        value = value if scales is None else value * scales[:context]
        seen = (position >= begins[some, None]) & (position < ends[some, None])
        logits[some, :context] = torch.where(seen, value, float("-inf")).to(logits.dtype)


def _place(problem, slot):
    """Where the factors of a token of a page are."""
    quarter = problem.page_size // 4
    return slot % quarter * 4 + slot // quarter if problem.interleaved else slot


def _wide(problem, x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    if problem.qk_format == "mxfp4":
        return (from_e2m1(x).unflatten(-1, (-1, 32)) * from_ue8m0(factors)[..., None]).flatten(-2)
    return (x.view(torch.float8_e4m3fn) if problem.qk_format == "fp8" else x).float()


IMPLEMENTATION = Implementation(run)

"""Block scores in torch: the CPU backend, the oracle, and the plainest statement of the op."""

from __future__ import annotations

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.attention.block_scores import BLOCK


def run(problem, config, q, k, seen, base, tables, scores) -> None:
    """Write the scores of every query.

    Parameters
    ----------
    q : Tensor [tokens, heads, dim]
    k : Tensor [pages, kv_heads, 128, dim], or [keys, kv_heads, dim] side by side
    seen : int32 Tensor [tokens]
        Keys that a query sees, the first of its request's.
    base : int32 Tensor [tokens]
        The row of `tables` of a query's request; side by side, the first key of it.
    tables : int32 Tensor [batch, pages], optional
    scores : float32 Tensor [heads or 1, blocks, tokens]
    """
    scores.fill_(float("-inf"))
    q, k = q.float(), k.float()
    blocks, group = scores.shape[1], problem.num_heads // problem.num_kv_heads
    for token, (count, first) in enumerate(zip(seen.tolist(), base.tolist(), strict=True)):
        count = min(count, blocks * BLOCK)
        if count <= 0:
            continue
        at = torch.arange(count, dtype=torch.int64, device=q.device)
        if problem.paged:
            keys = k[tables[first].long()[at // BLOCK], :, at % BLOCK]
        else:
            keys = k[first + at]
        own = q[token].unflatten(0, (problem.num_kv_heads, group))
        products = torch.einsum("hgd,khd->hgk", own, keys).flatten(0, 1)
        full = torch.full((problem.num_heads, -(-count // BLOCK) * BLOCK), -torch.inf, device=q.device,
                          dtype=torch.float32)  # fmt: skip
        full[:, :count] = products
        most = full.unflatten(1, (-1, BLOCK)).amax(-1)
        scores[:, : most.shape[1], token] = most.amax(0, keepdim=True) if problem.reduce else most


IMPLEMENTATION = Implementation(run)

"""An indexer's scores in torch: the CPU backend, the oracle, and the plainest statement of the op."""

from __future__ import annotations

import torch


def run(problem, config, q, keys, scales, weights, lens, tables, logits, context: int) -> None:
    """Write the logits of every request.

    Parameters
    ----------
    q : float8 Tensor [batch, tokens, heads, dim]
    keys : uint8 Tensor [pages, page_size, dim]
        float8_e4m3fn as bytes.
    scales : float32 Tensor [pages, page_size]
    weights : float32 Tensor [batch * tokens, heads]
    lens : int32 Tensor [batch], or [batch * tokens] with problem.each
    tables : int32 Tensor [batch, max_pages]
    logits : float32 Tensor [batch * tokens, context]
        Each query's keys are written; with problem.clean, -inf after them.
    """
    tokens, page = problem.tokens, problem.page_size
    device = q.device
    for i in range(q.shape[0]):
        ends = lens[i * tokens : (i + 1) * tokens] if problem.each else lens[i].expand(tokens)
        rows = logits[i * tokens : (i + 1) * tokens]
        count = min(max(int(ends.max()), 0), context)
        position = torch.arange(count, device=device)
        if count:
            at = tables[i].long()[position // page], position % page
            k = keys[at].view(torch.float8_e4m3fn).float()
            dots = torch.einsum("thd,kd->thk", q[i].float(), k).relu()
            own = weights[i * tokens : (i + 1) * tokens]
            rows[:, :count] = torch.einsum("thk,th->tk", dots, own) * scales[at]
        if problem.clean:
            # The last query stands at the last key, the one before it a key earlier.
            seen = ends if problem.each else ends - torch.arange(tokens - 1, -1, -1, device=device)
            every = torch.arange(context, device=device)
            rows.masked_fill_(every[None, :] >= seen[:, None], float("-inf"))

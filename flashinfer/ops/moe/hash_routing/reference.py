"""Routing by token id in torch."""

import torch
from torch.nn.functional import softplus

from flashinfer._core.implementation import Implementation


def run(problem, config, logits, tokens, table, shared_weight, ids, weights):
    """Write ids int32 and weights float32 [tokens, top_k + shared]; shared ones are behind the experts, each once.

    A token outside the table, and an expert that does not exist, have id -1 and weight 0.
    """
    top_k, experts = table.shape[1], logits.shape[1]
    there = (tokens >= 0) & (tokens < len(table))
    chosen = table[tokens.long().clamp(0, len(table) - 1)].long()
    there = there[:, None] & (chosen >= 0) & (chosen < experts)
    score = softplus(logits.float().gather(1, chosen.clamp(0, experts - 1))).sqrt().masked_fill(~there, 0)
    total = score.sum(1, keepdim=True)
    ids[:, :top_k] = torch.where(there, chosen, -1)
    weights[:, :top_k] = torch.where(there, score / total, 0)
    ids[:, top_k:] = torch.arange(experts, experts + ids.shape[1] - top_k, device=ids.device)
    weights[:, top_k:] = shared_weight


IMPLEMENTATION = Implementation(run)

"""Routing in torch: a token's choices by stable sorts."""

import torch

from flashinfer._core.implementation import Implementation


def run(problem, config, logits, bias, groups, kept_groups, top_k, shared, scale, ids, weights, replay=None):
    """Write ids and weights [tokens, top_k + shared] of logits [tokens, experts]; replay as ids, without shared ones.

    kept_groups : of `groups`. shared : experts beyond the last that every token has, with weight 1. scale : a factor of
    the others' weights.
    """
    tokens, experts = logits.shape
    logits = logits.float()
    ranked = logits.sigmoid() if problem.rank == "sigmoid" else logits
    if bias is not None:
        ranked = ranked + bias.float()
    outside = torch.zeros_like(ranked, dtype=torch.bool)
    if groups > 1:
        grouped = ranked.unflatten(1, (groups, -1))
        best = grouped.sort(dim=2, descending=True).values[..., :2].sum(2)
        lost = best.sort(dim=1, descending=True, stable=True).indices[:, kept_groups:]
        outside = torch.zeros_like(best, dtype=torch.bool).scatter(1, lost, True).repeat_interleave(grouped.shape[2], 1)
    order = ranked.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, outside.gather(1, order).sort(dim=1, stable=True).indices)[:, :top_k]
    chosen = logits.gather(1, order)
    if problem.weight == "softmax":
        weight = logits.softmax(1).gather(1, order)
    elif problem.weight == "softmax_kept":
        weight = chosen.softmax(1)
    elif problem.weight == "logit":
        weight = chosen
    else:
        weight = chosen.sigmoid()
        if problem.weight == "sigmoid_sum":
            weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
    ids[:, :top_k] = order
    weights[:, :top_k] = weight * scale
    ids[:, top_k:] = experts + torch.arange(shared, device=ids.device)
    weights[:, top_k:] = 1
    if replay is not None:
        replay.copy_(order)


IMPLEMENTATION = Implementation(run)

"""Routing in torch: stable sorts."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.moe.routing import Map, Route


def run(problem, config, *args):
    _RUN[type(problem)](problem, *args)


def route(problem, logits, bias, groups, kept_groups, top_k, shared, scale, ids, weights, replay=None):
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


def token_map(problem, ids, offset, tile, out, weights=None):
    """Write the TokenMap `out` of ids [tokens, top_k], for len(out.count) experts from `offset` on.

    weights : float32 [tokens, top_k], receives those of packed ids.
    """
    experts = len(out.count)
    flat = ids.reshape(-1).long()
    if problem.ids == "packed":
        weights.copy_((ids << 16).view(torch.float32))
        flat = flat >> 16
    local = flat - offset
    local = local.masked_fill((local < 0) | (local >= experts) | (flat < 0), experts)
    count = local.bincount(minlength=experts + 1)[:experts]
    padded = (count + tile - 1) // tile * tile
    first = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    pair = local.sort(stable=True).indices[: int(count.sum())]
    expert = local[pair]
    row = first[expert] + torch.arange(len(pair), device=ids.device) - (count.cumsum(0) - count)[expert]
    tile_expert = torch.arange(experts, device=ids.device).repeat_interleave(padded // tile)
    tiles = len(tile_expert)
    out.first.copy_(first)
    out.count.copy_(count)
    out.tiles.fill_(tiles)
    out.tile_expert.fill_(-1)
    out.tile_expert[:tiles] = tile_expert
    out.tile_end[:tiles] = (first[:-1] + count)[tile_expert]
    out.row_pair[: tiles * tile] = -1
    out.row_pair[row] = pair.int()
    out.pair_row.fill_(-1)
    out.pair_row.view(-1)[pair] = row.int()


_RUN = {Route: route, Map: token_map}

IMPLEMENTATION = Implementation(run)

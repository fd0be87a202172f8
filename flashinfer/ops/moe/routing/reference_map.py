"""The token map in torch, by a stable sort."""

import torch

from flashinfer._core.implementation import Implementation


def run(problem, config, ids, offset, tile, out, weights=None):
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


IMPLEMENTATION = Implementation(run)

"""The map between tokens and the rows that experts compute: written by routing, read by experts and finalize."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenMap(NamedTuple):
    """Rows grouped by expert, each expert's padded to whole tiles.

    A pair is a token and one of its choices, with the number token * top_k + choice. A rank has the experts
    [offset, offset + experts), counted from offset below. Pairs of other experts, and of negative ids, have no row.

    Rows are numbered expert by expert, and an expert's pairs are in ascending order, so equal ids give equal maps.
    Expert e has rows first[e] .. first[e] + count[e] - 1, then padding up to first[e + 1]. first[e] is a multiple of
    `tile`, and tile t is rows t * tile .. (t + 1) * tile - 1 of one expert. An expert without a pair has no tile. All
    tensors are int32, contiguous, on the device; entries past the last tile are not written.

    An example with tile 4, two experts, and top-1 ids 1, 0, 1 of three tokens: first is 0 4 8, count 1 2, tiles 2,
    tile_expert 0 1, tile_end 1 6, row_pair 1 -1 -1 -1 0 2 -1 -1, and pair_row 4 0 5.

    Attributes
    ----------
    first : [experts + 1]; first[experts] is the number of rows, padding included.
    count : [experts]; pairs of each expert.
    tiles : [1]; the number of tiles, first[experts] / tile.
    tile_expert : [most]; the expert of each tile. Tiles past the last have -1.
    tile_end : [most]; first[e] + count[e] of the tile's expert: rows from here on are padding. Not written past the
        last tile.
    row_pair : [most * tile]; the pair of each row, -1 in padding. Its token is row_pair // top_k.
    pair_row : [tokens, top_k]; the row of each pair, -1 for a pair without one.
    """

    first: torch.Tensor
    count: torch.Tensor
    tiles: torch.Tensor
    tile_expert: torch.Tensor
    tile_end: torch.Tensor
    row_pair: torch.Tensor
    pair_row: torch.Tensor


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """The largest number of tiles that any choice of experts gives: the size of grids and buffers."""
    used = min(pairs, experts)
    return (pairs + used * (tile - 1)) // tile


def empty_map(tokens: int, top_k: int, experts: int, tile: int, device: torch.device) -> TokenMap:
    """A TokenMap with undefined contents."""
    most = most_tiles(tokens * top_k, experts, tile)
    shapes = ((experts + 1,), (experts,), (1,), (most,), (most,), (most * tile,), (tokens, top_k))
    return TokenMap(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))

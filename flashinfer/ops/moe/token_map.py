"""The map between tokens and the rows that experts compute, which routing makes and experts and finalize read."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenMap(NamedTuple):
    """Rows grouped by expert without a sort, each expert's padded to whole tiles.

    A pair is a token and one of its choices: pair token * top_k + choice. Pairs whose expert is not one of this rank's,
    [offset, offset + experts), have no row; a negative id is such. Experts below are counted from offset.

    Rows are numbered expert by expert; an expert's pairs are in ascending order, so equal ids give equal maps. Expert e
    has rows first[e] .. first[e] + count[e] - 1, then padding up to first[e + 1]. first[e] is a multiple of `tile`, and
    tile t is rows t * tile .. (t + 1) * tile - 1 of one expert. An expert without a pair has no tile. Everything is
    int32, contiguous, on the device; what lies past the last tile is not written.

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
    """The number of tiles that no choice of experts exceeds: grids and buffers have this size."""
    used = min(pairs, experts)
    return (pairs + used * (tile - 1)) // tile


def empty_map(tokens: int, top_k: int, experts: int, tile: int, device: torch.device) -> TokenMap:
    """A TokenMap to be written."""
    most = most_tiles(tokens * top_k, experts, tile)
    shapes = ((experts + 1,), (experts,), (1,), (most,), (most,), (most * tile,), (tokens, top_k))
    return TokenMap(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))

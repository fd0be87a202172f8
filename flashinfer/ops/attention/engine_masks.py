"""Masks of the engine forms: the variant that has them, and what its function is given."""

from __future__ import annotations

from functools import lru_cache

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.variants import AttentionVariant

_TELLS = {"uniform": {"q_len": "i32"}, "ragged": {"qo_indptr": "*i32"}}
_DRAFT = {"kv_lens": "*i32", "bits": "*u8", "row_bytes": "i32"}
_SHARD = {"kv_lens": "*i32", "global_lens": "*i32", "world": "i32", "rank": "i32", "window_left": "i32"}


@lru_cache(maxsize=None)
def _variant(name: str, **params: str) -> AttentionVariant:
    # Imported at first use, since it loads Triton.
    from flashinfer.ops.attention._device import masks

    return AttentionVariant(mask=getattr(masks, name), params=params)


def draft_mask(mask: torch.Tensor, queries: dict, kv_lens: torch.Tensor, tokens: int, longest: int):
    """The mask of speculative decoding: what each draft token of a request sees of the request's draft.

    Parameters
    ----------
    mask : Tensor [batch, q_len, width] or [tokens, width]
        uint8, uint16, uint32 or int32: packed, low bit first, bit c of a row for draft token c. bool: one element each.
    queries : dict
        qo_indptr or q_len of Table.
    kv_lens : int32 Tensor [batch]
        Keys of each request, its draft the last of them.
    tokens, longest : int
        Query rows in all, and the most of a request (0 where unknown).

    Returns
    -------
    AttentionVariant, dict
        And the parameters of a call.
    """
    require(mask.device == kv_lens.device, "mask", f"a tensor on {mask.device}", str(kv_lens.device))
    if mask.dtype == torch.bool:
        width = mask.shape[-1]
        bits = torch.nn.functional.pad(mask.reshape(-1, width), (0, -width % 8)).view(-1, (width + 7) // 8, 8)
        # Nothing here comes from the host, so that a graph can capture it.
        place = torch.arange(8, dtype=torch.uint8, device=mask.device)
        mask = (bits.to(torch.uint8) << place).sum(-1, dtype=torch.uint8)
    else:
        packed = (torch.uint8, torch.uint16, torch.uint32, torch.int32)
        require(mask.dtype in packed, "mask", mask.dtype, "bool, or packed bits as uint8, uint16, uint32 or int32")
        require(mask.is_contiguous(), "mask", f"strides {mask.stride()}", "contiguous")
        mask = mask.reshape(-1, mask.shape[-1]).view(torch.uint8)
    rows, row_bytes = mask.shape
    require(rows == tokens, "mask", f"{rows} rows", f"{tokens}, one for each query")
    require(8 * row_bytes >= longest, "mask", f"rows of {8 * row_bytes} bits", f"at least {longest}, the draft's")
    form = "uniform" if "q_len" in queries else "ragged"
    variant = _variant(f"draft_of_{form}", **_DRAFT, **_TELLS[form])
    return variant, dict(kv_lens=kv_lens, bits=mask, row_bytes=row_bytes, **queries)


def shard_mask(queries: dict, kv_lens: torch.Tensor, global_lens: torch.Tensor, world: int, rank: int, window: int):
    """The causal mask of a rank that has every `world`th key of each request, from key `rank` on.

    Parameters
    ----------
    queries : dict
        qo_indptr or q_len of Table.
    kv_lens, global_lens : int32 Tensor [batch]
        Keys of each request on this rank, and on all. Its queries are the last of all.
    world, rank : int
    window : int
        A query sees itself and this many keys, of all ranks, before it; -1 for all.

    Returns
    -------
    AttentionVariant, dict
        And the parameters of a call.
    """
    form = "uniform" if "q_len" in queries else "ragged"
    given = dict(kv_lens=kv_lens, global_lens=global_lens, world=world, rank=rank, window_left=window, **queries)
    return _variant(f"shard_of_{form}", **_SHARD, **_TELLS[form]), given


def chunk_mask(size: int):
    """The mask that keeps queries to keys of their own chunk of `size` tokens, with the parameters of a call."""
    require(size > 0, "chunked_attention_size", size, "at least 1")
    return _variant("same_chunk", size="i32"), dict(size=size)

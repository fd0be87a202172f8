"""Masks: packed bits of custom ones, that of multi-item scoring, and those of engines' calls as variants."""

from __future__ import annotations

from functools import lru_cache

import torch

from flashinfer._core.checks import number, require, require_tensor
from flashinfer.ops.attention.agree import as_count
from flashinfer.ops.attention.host_tables import host_lengths
from flashinfer.ops.attention.options import MOST_KEYS, PlanOptions
from flashinfer.ops.attention.tables import KV_INDPTR, LENGTHS, Table
from flashinfer.ops.attention.variants import AttentionVariant

_QUERIES = {"uniform": {"q_len": "i32"}, "ragged": {"qo_indptr": "*i32"}}
_DRAFT = {"kv_lens": "*i32", "bits": "*u8", "row_bytes": "i32"}
_SHARD = {"kv_lens": "*i32", "global_lens": "*i32", "world": "i32", "rank": "i32", "window_left": "i32"}


def packed_indptr(bits: torch.Tensor) -> torch.Tensor:
    """First byte of each request whose mask has `bits` [batch] bits; int32 [batch + 1]. Requests start on a byte."""
    ends = torch.cumsum((bits.long() + 7) // 8, 0)
    return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


def pack(mask: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a flat boolean mask into bits, low bit first, each request starting on a byte.

    Parameters
    ----------
    mask : bool Tensor [sum(bits)]
        Requests one after another, each row-major [q_len, kv_len].
    bits : int Tensor [batch]
        q_len * kv_len of each request, on the mask's device.

    Returns
    -------
    packed : uint8 Tensor
        At least one byte long, so that it always has an address.
    indptr : int32 Tensor [batch + 1]
    """
    indptr = packed_indptr(bits)
    starts = torch.cumsum(bits.long(), 0) - bits.long()
    number = torch.arange(mask.shape[0], dtype=torch.int64, device=mask.device)
    # Where each element's request starts: searchsorted takes the last start that is <= it, past empty requests.
    request = torch.searchsorted(starts, number, right=True) - 1
    within = number - starts[request]
    byte = indptr.long()[request] + (within >> 3)
    packed = torch.zeros((mask.shape[0] + 7) // 8 + bits.shape[0] + 1, dtype=torch.int32, device=mask.device)
    packed.index_add_(0, byte, mask.to(torch.int32) << (within & 7).to(torch.int32))
    return packed.to(torch.uint8), indptr


def as_bool(name: str, mask: torch.Tensor) -> torch.Tensor:
    """A mask of booleans, or of integers that are not 0 where a key is seen."""
    require_tensor(name, mask)
    fits = not mask.is_floating_point() and not mask.is_complex()
    require(fits, name, mask.dtype, "bool, True where a query sees a key; of an additive mask that is mask == 0")
    return mask.to(torch.bool)


def multi_item(
    q_lens: list[int], kv_lens: list[int], prefix_lens: list[int], positions: torch.Tensor, most: int
) -> torch.Tensor:
    """The mask of multi-item scoring: each item sees the shared prefix and itself, as if it stood alone behind it.

    A delimiter sees the prefix alone, and no token sees a delimiter.

    Parameters
    ----------
    q_lens, kv_lens, prefix_lens : list of int
        Per request: query rows, keys, and how many of the keys are the prefix.
    positions : int Tensor [batch * most]
        For each request, the position of each token after the prefix within its item; 0 is a delimiter.
    most : int
        Positions of each request, padded with zeros.

    Returns
    -------
    Tensor
        bool [sum(q_len * kv_len)].
    """
    masks = []
    for i, (q_len, kv_len, prefix) in enumerate(zip(q_lens, kv_lens, prefix_lens)):
        within = positions[i * most : (i + 1) * most].long()
        row = torch.arange(kv_len - q_len, kv_len, dtype=torch.int64, device=positions.device)[:, None]
        key = torch.arange(kv_len, dtype=torch.int64, device=positions.device)[None, :]
        after = (row - prefix).clamp(min=0)
        delimiter = row - within[after.clamp(max=max(most - 1, 0))] if most else row
        seen = (key < prefix) | (key > delimiter) | (row < prefix)
        masks.append((seen & (key <= row)).flatten())
    return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device=positions.device)


def custom_mask_table(table: Table, page_size: int, custom_mask, packed_custom_mask, fixed: Table | None = None,
                      pairs: torch.Tensor | None = None) -> None:  # fmt: skip
    """Bring a custom mask onto the device as packed bits, into `table`; in CUDA-graph mode in `fixed`, its buffers.

    `pairs` [batch] are queries times keys of each request, where the host knows them. A mask of another size is refused
    then.
    """
    if custom_mask is None and packed_custom_mask is None:
        return
    bits = table.q_spans()[1] * table.kv_spans(page_size)[1]
    if pairs is None and not bits.is_cuda:
        pairs = bits
    length = check_mask(custom_mask, packed_custom_mask, pairs, table.batch_size, fixed)
    if packed_custom_mask is not None:
        packed = packed_custom_mask.reshape(-1).to(bits.device, non_blocking=True)
        table.mask, table.mask_indptr = packed.contiguous(), packed_indptr(bits)
        if not packed.numel():
            table.mask = torch.zeros(1, dtype=torch.uint8, device=bits.device)
    else:
        mask = as_bool("custom_mask", custom_mask).reshape(-1).to(bits.device, non_blocking=True)
        table.mask, table.mask_indptr = pack(mask, bits)
    if fixed is None:
        return
    fixed.mask[:length].copy_(table.mask[:length])
    fixed.mask_indptr[: table.mask_indptr.shape[0]].copy_(table.mask_indptr)
    table.mask, table.mask_indptr = fixed.mask, fixed.mask_indptr


def check_mask(custom_mask, packed_custom_mask, pairs: torch.Tensor | None, batch: int, fixed: Table | None) -> int:
    """Refuse a mask of another kind, of another size than `pairs` make, or too long for the buffers `fixed`. Returns
    the bytes of a packed mask that count."""
    require(fixed is None or fixed.mask is not None, "custom_mask", "a mask",
            "None in CUDA-graph mode without custom_mask_buf")  # fmt: skip
    if packed_custom_mask is not None:
        require_tensor("packed_custom_mask", packed_custom_mask)
        require(packed_custom_mask.dtype == torch.uint8, "packed_custom_mask", packed_custom_mask.dtype, "uint8")
        length = packed_custom_mask.numel()
        least = 0 if pairs is None else int(((pairs + 7) // 8).sum())
        require(length >= least, "packed_custom_mask", f"{length} bytes", f"at least {least}")
        length = max(length, 1)
    else:
        as_bool("custom_mask", custom_mask)
        count = custom_mask.numel()
        total = count if pairs is None else int(pairs.sum())
        require(count == total, "custom_mask", tuple(custom_mask.shape), f"{total} elements, sum(q_len * kv_len)")
        # pack() pads for the worst rounding; what is past the bits is zero and may be left out.
        length = (count + 7) // 8 + batch
    if fixed is not None:
        most = fixed.mask.shape[0]
        require(length <= most, "custom_mask", f"{length} bytes packed", f"at most {most}, custom_mask_buf's length")
    return length


def any_items(prefix_len, positions, most, max_item_len, **masks) -> bool:
    """Whether a plan asks for multi-item scoring. What belongs to it is refused without the prefix, other masks with
    it."""
    if prefix_len is not None:
        for name, mask in masks.items():
            require(mask is None, name, "a mask", "None with prefix_len_ptr: multi-item scoring has a mask of its own")
        return True
    given = dict(token_pos_in_items_ptr=positions, token_pos_in_items_len=most or None, max_item_len_ptr=max_item_len)
    for name, value in given.items():
        require(value is None, name, "a value", "None without prefix_len_ptr, which asks for multi-item scoring")
    return False


def multi_item_mask(asked: PlanOptions, tables: tuple, names: tuple, prefix_len, positions, most) -> torch.Tensor:
    """The multi-item mask of a batch. It is built from lengths on the host: with tables on a GPU this waits for it.

    Parameters
    ----------
    asked, tables, names
        Options and tables of a plan, and what the caller calls those.
    prefix_len : int Tensor [batch], or int
    positions : int Tensor [batch * most]
    most : int
        Each as `multi_item` has it.
    """
    page_size = asked.plain().checked().page_size
    host_lengths(tables, names, page_size, 0)
    require(positions is not None, "token_pos_in_items_ptr", None, "a tensor, with prefix_len_ptr")
    most, batch = as_count("token_pos_in_items_len", most), tables[KV_INDPTR].numel() - 1
    require_tensor("token_pos_in_items_ptr", positions)
    positions = positions.flatten().to(torch.int64)
    enough = most > 0 and positions.numel() >= batch * most
    has = positions.numel() // max(batch, 1)
    require(enough, "token_pos_in_items_len", most, f"1 ... {has}, what token_pos_in_items_ptr has of each request")
    q_indptr, kv_indptr = (t.tolist() for t in tables[:2])
    kv_lens = [b - a for a, b in zip(kv_indptr, kv_indptr[1:])]
    if tables[LENGTHS] is not None:
        last = tables[LENGTHS].tolist()
        kv_lens = [max((pages - 1) * page_size + tail, 0) for pages, tail in zip(kv_lens, last)]
    q_lens = [b - a for a, b in zip(q_indptr, q_indptr[1:])]
    if isinstance(prefix_len, torch.Tensor) and prefix_len.numel() > 1:
        prefixes = prefix_len.flatten().tolist()
    else:
        prefixes = [as_count("prefix_len_ptr", prefix_len)] * batch
    require(len(prefixes) == batch, "prefix_len_ptr", f"{len(prefixes)} elements", f"{batch}, one for each request")
    for i, (prefix, keys, queries) in enumerate(zip(prefixes, kv_lens, q_lens)):
        require(0 <= prefix <= keys, "prefix_len_ptr", f"{prefix} of request {i}", f"0 ... {keys}, its keys")
        enough = keys - prefix <= most or not queries
        require(enough, "token_pos_in_items_len", most, f"at least {keys - prefix}, the items of request {i}")
    return multi_item(q_lens, kv_lens, prefixes, positions, most)


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
    fits = mask.dim() in (2, 3) and mask.shape[-1] > 0
    require(fits, "mask", tuple(mask.shape), "[batch, q_len, width] or [tokens, width]")
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
    source = "uniform" if "q_len" in queries else "ragged"
    variant = _variant(f"draft_of_{source}", **_DRAFT, **_QUERIES[source])
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
    source = "uniform" if "q_len" in queries else "ragged"
    window = min(window, MOST_KEYS)
    given = dict(kv_lens=kv_lens, global_lens=global_lens, world=world, rank=rank, window_left=window, **queries)
    return _variant(f"shard_of_{source}", **_SHARD, **_QUERIES[source]), given


def chunk_mask(size: int):
    """The mask that keeps queries to keys of their own chunk of `size` tokens, with the parameters of a call."""
    require(size > 0, "chunked_attention_size", size, "at least 1")
    return _variant("same_chunk", size="i32"), dict(size=size)

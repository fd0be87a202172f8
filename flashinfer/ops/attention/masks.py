"""Custom masks: packing bits, bringing them onto the device, and the mask of multi-item scoring."""

from __future__ import annotations

import torch

from flashinfer._core.checks import number, require, require_tensor
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.problem import Table
from flashinfer.ops.attention.request import Request


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


def check_bits(mask: torch.Tensor, total: int) -> None:
    require(mask.dim() == 1 and mask.shape[0] == total, "custom_mask", tuple(mask.shape),
            f"one axis of {total} = sum(q_len * kv_len) elements")  # fmt: skip


def multi_item(
    q_lens: list[int], kv_lens: list[int], prefix_lens: list[int], positions: torch.Tensor, most: int
) -> torch.Tensor:
    """The mask of multi-item scoring: each item sees the shared prefix and itself, not the other items.

    Parameters
    ----------
    q_lens, kv_lens, prefix_lens : list of int
        Per request: query rows, keys, and how many of the keys are the prefix.
    positions : int Tensor [batch * most]
        For each request, the position of each token after the prefix within its item; 0 is a delimiter.
    most : int
        Positions held per request (they are padded with zeros).

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
        item_start = row - within[after.clamp(max=max(most - 1, 0))] if most else row
        seen = (key < prefix) | (key >= item_start) | (row < prefix)
        masks.append((seen & (key <= row)).flatten())
    return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device=positions.device)


def custom_mask_table(request: Request, table: Table) -> None:
    """Bring the request's custom mask onto the device as packed bits, into `table`."""
    if not request.has_mask:
        return
    bits = table.q_spans()[1] * table.kv_spans(request.options.page_size)[1]
    device = bits.device
    if request.packed_custom_mask is not None:
        packed = request.packed_custom_mask.to(device, non_blocking=True)
        require(packed.dtype == torch.uint8, "packed_custom_mask", packed.dtype, "uint8")
        table.mask, table.mask_indptr = packed.contiguous(), packed_indptr(bits)
        if not packed.is_cuda:
            most = int(table.mask_indptr[-1])
            require(packed.numel() >= most, "packed_custom_mask", f"{packed.numel()} bytes", f"at least {most}")
        if not packed.numel():
            table.mask = torch.zeros(1, dtype=torch.uint8, device=device)
        return
    mask = as_bool("custom_mask", request.custom_mask).to(device, non_blocking=True)
    if not mask.is_cuda:
        check_bits(mask, int(bits.sum()))
    table.mask, table.mask_indptr = pack(mask, bits)


def any_items(prefix_len, positions, most, max_item_len) -> bool:
    """Whether a plan asks for multi-item scoring. What belongs to it is refused without the prefix."""
    if prefix_len is not None:
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
    request = Request(asked.plain().checked(), *tables, names=names)
    request.lengths_on_host()
    require(positions is not None, "token_pos_in_items_ptr", None, "a tensor, with prefix_len_ptr")
    most, batch = int(number("token_pos_in_items_len", most)), request.batch_size
    require_tensor("token_pos_in_items_ptr", positions)
    positions = positions.flatten().to(torch.int64)
    enough = most > 0 and positions.numel() >= batch * most
    has = positions.numel() // max(batch, 1)
    require(enough, "token_pos_in_items_len", most, f"1 ... {has}, what token_pos_in_items_ptr has of each request")
    q_indptr, kv_indptr = (t.tolist() for t in tables[:2])
    kv_lens = [b - a for a, b in zip(kv_indptr, kv_indptr[1:])]
    if request.last_page_len is not None:
        last = request.last_page_len.tolist()
        kv_lens = [max((pages - 1) * request.options.page_size + tail, 0) for pages, tail in zip(kv_lens, last)]
    q_lens = [b - a for a, b in zip(q_indptr, q_indptr[1:])]
    if isinstance(prefix_len, torch.Tensor) and prefix_len.numel() > 1:
        prefixes = prefix_len.flatten().tolist()
    else:
        prefixes = [int(number("prefix_len_ptr", prefix_len))] * batch
    require(len(prefixes) == batch, "prefix_len_ptr", f"{len(prefixes)} elements", f"{batch}, one for each request")
    for i, (prefix, keys) in enumerate(zip(prefixes, kv_lens)):
        require(0 <= prefix <= keys, "prefix_len_ptr", f"{prefix} of request {i}", f"0 ... {keys}, its keys")
    return multi_item(q_lens, kv_lens, prefixes, positions, most)

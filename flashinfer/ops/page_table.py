"""Checks of a paged cache's index tensors, as appending functions take them."""

from __future__ import annotations

import torch

from flashinfer._core.checks import indptr_values, require

INDEX_DTYPES = (torch.int32, torch.int64)


def check_vector(name: str, tensor: torch.Tensor, length: int | None = None) -> None:
    fits = tensor.dim() == 1 and (length is None or tensor.shape[0] == length)
    require(fits, name, tuple(tensor.shape), "one dimension" if length is None else f"[{length}]")
    require(tensor.dtype in INDEX_DTYPES, name, tensor.dtype, "int32 (int64 is converted)")


def check_page_table(tables: dict[str, torch.Tensor], num_pages: int, page_size: int) -> None:
    """What only the values of the index tensors tell; waits for a GPU. kv_last_page_len may be absent."""
    kv_indices, batch_indices, positions = tables["kv_indices"], tables["batch_indices"], tables["positions"]
    most = kv_indices.shape[0], "the length of kv_indices"
    indptr = indptr_values("kv_indptr", tables["kv_indptr"], *most, sliced=True)
    batch = len(indptr) - 1
    if indptr[-1] > indptr[0]:
        low, high = (int(x) for x in kv_indices[indptr[0] : indptr[-1]].aminmax())
        require(low >= 0 and high < num_pages, "kv_indices", f"pages {low} to {high}", f"0 to {num_pages - 1}")
    last = int(batch_indices.max()) if len(batch_indices) else -1
    require(last < batch, "batch_indices", last, f"below {batch}, the number of requests")
    if last < 0:
        return
    last_page_len = tables["kv_last_page_len"].tolist() if "kv_last_page_len" in tables else [page_size] * batch
    fits = all(0 <= tokens <= page_size for tokens in last_page_len)
    require(fits, "kv_last_page_len", last_page_len, f"0 to {page_size}, the page size")
    pages = [b - a for a, b in zip(indptr, indptr[1:])]
    lengths = [(n - 1) * page_size + tokens if n else 0 for n, tokens in zip(pages, last_page_len)]
    # Padding has a negative batch index: it reads request 0's end, and is left out of the verdict.
    request = batch_indices.clamp(min=0)
    ends = torch.tensor(lengths, dtype=torch.int64, device=positions.device)
    past = (positions >= ends[request]) & (batch_indices >= 0)
    if past.any():
        at = int(past.nonzero()[0])
        request = int(batch_indices[at])
        of = f"below {lengths[request]}, the length of request {request} by its page table"
        raise ValueError(f"positions: got {int(positions[at])}; allowed: {of}")

"""Appending tokens to a paged KV cache, as they are."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core import env
from flashinfer._core.checks import dtype_name, is_aligned, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.literals import KvLayout
from flashinfer._core.replay import replayed
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import page as room
from flashinfer.ops.kv_layout import check_layout, paged_views
from flashinfer.ops.page_table import check_page_table, check_vector


@replayed
@named(k_cache="paged_kv_cache", v_cache="paged_kv_cache")
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: KvLayout = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Token t becomes the token at `positions[t]` of request `batch_indices[t]`: it goes to slot
    ``positions[t] % page_size`` of page ``kv_indices[kv_indptr[batch_indices[t]] + positions[t] // page_size]``. The
    page table is that after the append. One launch writes keys and values.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        [nnz, num_kv_heads, head_dim], in the dtype of the cache (any, fp8 included: elements are copied as they are),
        any strides. Keys and values may differ in head_dim where the cache is a pair.
    batch_indices, positions : torch.Tensor
        [nnz]. A token with a negative one of the two is padding and is not written; see `get_batch_indices_positions`.
    paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
        A pair (keys, values) of [max_num_pages, page_size, num_kv_heads, head_dim] for "NHD" or
        [max_num_pages, num_kv_heads, page_size, head_dim] for "HND"; or one tensor with keys and values along a second
        dimension of 2. Any page size, any strides. With pages of one token the page axis may be left out:
        [slots, num_kv_heads, head_dim], or [slots, 2, num_kv_heads, head_dim], which both layouts share.
    kv_indices : torch.Tensor
        [kv_indptr[-1]] or longer: the pages of every request.
    kv_indptr : torch.Tensor
        [batch_size + 1]: request i has the pages ``kv_indices[kv_indptr[i] : kv_indptr[i + 1]]``. It may be a slice of
        a larger batch's, whose first is not 0.
    kv_last_page_len : torch.Tensor
        [batch_size]: tokens in the last page of each request. It is no part of the address; positions are checked
        against it.
    kv_layout : str
        "NHD" or "HND".

        Index tensors are int32; int64 is taken and converted, which costs a launch each.

    Raises
    ------
    ValueError
        A shape, dtype, device or layout other than the above. On the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits
        for the device), also: a kv_indptr that decreases or runs past kv_indices, a batch index that is no request, a
        position past its request's tokens, a page outside the cache. On a GPU without FLASHINFER_DEBUG such tokens are
        not written, and nothing outside the cache is touched.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
    https://arxiv.org/abs/2309.06180

    Examples
    --------
    >>> import torch, flashinfer
    >>> k, v, cache = torch.ones(3, 1, 64), torch.ones(3, 1, 64), torch.zeros(4, 2, 2, 1, 64)
    >>> indptr, pages, last = torch.tensor([0, 2]).int(), torch.tensor([3, 1]).int(), torch.tensor([1]).int()
    >>> request, position = torch.zeros(3, dtype=torch.int32), torch.arange(3).int()
    >>> flashinfer.append_paged_kv_cache(k, v, request, position, cache, pages, indptr, last)
    >>> cache[:, 0, :, 0, 0]
    tensor([[0., 0.],
            [1., 0.],
            [0., 0.],
            [1., 1.]])
    """
    check_layout(kv_layout)
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    _append_paged_kv_cache(
        append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len
    )


@replayed
@named(k_cache="ckv_cache", v_cache="kpe_cache")
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write the compressed rows of new tokens into a paged cache of multi-head latent attention, in place.

    Parameters
    ----------
    append_ckv : torch.Tensor
        [nnz, ckv_dim] (512 in DeepSeek models; any size), in the dtype of the cache, any strides.
    append_kpe : torch.Tensor
        [nnz, kpe_dim] (64 in DeepSeek models; any size), in the dtype of the cache, any strides.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        As in `append_paged_kv_cache`, as are the errors.
    ckv_cache : torch.Tensor
        [max_num_pages, page_size, ckv_dim], any strides.
    kpe_cache : torch.Tensor
        [max_num_pages, page_size, kpe_dim], any strides.

    Raises
    ------
    ValueError
        As `append_paged_kv_cache` raises it.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1, https://arxiv.org/abs/2405.04434

    Examples
    --------
    >>> import torch, flashinfer
    >>> ckv, kpe = torch.ones(3, 512).half(), torch.ones(3, 64).half()
    >>> ckv_cache, kpe_cache = torch.zeros(4, 2, 512).half(), torch.zeros(4, 2, 64).half()
    >>> indptr, pages, last = torch.tensor([0, 2]).int(), torch.tensor([3, 1]).int(), torch.tensor([1]).int()
    >>> request, position = torch.zeros(3, dtype=torch.int32), torch.arange(3).int()
    >>> flashinfer.append_paged_mla_kv_cache(ckv, kpe, request, position, ckv_cache, kpe_cache, pages, indptr, last)
    >>> ckv_cache[:, :, 0]
    tensor([[0., 0.],
            [1., 0.],
            [0., 0.],
            [1., 1.]], dtype=torch.float16)
    """
    for name, rows, cache in (("ckv", append_ckv, ckv_cache), ("kpe", append_kpe, kpe_cache)):
        paged = cache.dim() == 3 and cache.shape[:2] == ckv_cache.shape[:2]
        require(paged, f"{name}_cache", tuple(cache.shape), "[max_num_pages, page_size, dim], the first two in common")
        fits = rows.dim() == 2 and rows.shape[0] == append_ckv.shape[0] and rows.shape[1] == cache.shape[2]
        require(fits, f"append_{name}", tuple(rows.shape), f"[nnz, {cache.shape[2]}], nnz in common")
        for tensor, of in ((rows, f"append_{name}"), (cache, f"{name}_cache")):
            require(tensor.dtype == append_ckv.dtype, of, tensor.dtype, f"{append_ckv.dtype}, the dtype of append_ckv")
    same_device(append_ckv=append_ckv, append_kpe=append_kpe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    _append_paged_kv_cache(
        append_ckv.unsqueeze(1),
        append_kpe.unsqueeze(1),
        batch_indices,
        positions,
        ckv_cache.unsqueeze(2),
        kpe_cache.unsqueeze(2),
        kv_indices,
        kv_indptr,
        kv_last_page_len,
    )


@custom_op("flashinfer::append_paged_kv_cache", mutates_args=("k_cache", "v_cache"))
def _append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    tables = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    tables |= {"kv_last_page_len": kv_last_page_len}
    same_device(append_key=append_key, append_value=append_value, k_cache=k_cache, v_cache=v_cache, **tables)
    _check_rows(append_key, append_value, k_cache, v_cache)
    nnz = append_key.shape[0]
    check_vector("batch_indices", batch_indices, nnz)
    check_vector("positions", positions, nnz)
    check_vector("kv_indices", kv_indices)
    check_vector("kv_indptr", kv_indptr)
    check_vector("kv_last_page_len", kv_last_page_len, kv_indptr.shape[0] - 1)
    if append_key.numel() + append_value.numel() == 0:
        return
    if not append_key.is_cuda or env.DEBUG.is_on():
        check_page_table(tables, k_cache.shape[0], k_cache.shape[1])
    problem = room.Append(
        dtype="u8" if append_key.element_size() == 1 else dtype_name(append_key.dtype),
        key_block=power_of_two(append_key.shape[2]),
        value_block=power_of_two(append_value.shape[2]),
        aligned=_aligned(append_key, k_cache) and _aligned(append_value, v_cache),
    )
    choice = room.append(problem, append_key.device)
    table = room.PageTable(*(as_int32(x) for x in (batch_indices, positions, kv_indices, kv_indptr)))
    choice.run((append_key, append_value), (k_cache, v_cache), table)


def _check_rows(append_key, append_value, k_cache, v_cache) -> None:
    """Shapes and dtypes; messages are made only when wanted, for this is on the path of every launch."""
    for name, rows, cache in (("append_key", append_key, k_cache), ("append_value", append_value, v_cache)):
        if rows.dim() != 3 or rows.shape[1:] != cache.shape[2:]:
            heads, dim = cache.shape[2:]
            allowed = f"[nnz, {heads}, {dim}], as the cache has heads and dimensions"
            require(False, name, tuple(rows.shape), allowed)
        if rows.dtype != cache.dtype:
            require(False, name, rows.dtype, f"{cache.dtype}, the dtype of the cache")
    if append_value.shape[0] != append_key.shape[0]:
        require(False, "append_value", tuple(append_value.shape), f"{append_key.shape[0]} tokens, as append_key has")
    if append_value.dtype != append_key.dtype:
        require(False, "append_value", append_value.dtype, f"{append_key.dtype}, the dtype of append_key")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        allowed = f"{tuple(k_cache.shape[:3])}, the pages, slots and heads of the k cache"
        require(False, "paged_kv_cache", f"values of {tuple(v_cache.shape[:3])}", allowed)
    require(k_cache.shape[1] > 0, "paged_kv_cache", "pages of no token", "a page size of 1 or more")


def as_int32(index: torch.Tensor) -> torch.Tensor:
    return index.to(torch.int32).contiguous()


def _aligned(rows: torch.Tensor, cache: torch.Tensor) -> bool:
    return rows.shape[-1] * rows.element_size() % 16 == 0 and is_aligned(rows, cache)

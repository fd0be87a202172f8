"""The index arithmetic of page tables."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, indptr_values, require, require_fit, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer.ops import page as room
from flashinfer.ops.page_table import check_vector
from flashinfer.page.append import as_int32


@replayed
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each appended token, and its position in that request, as `append_paged_kv_cache` takes them.

    The appended tokens of a request are its last ones: token t of request i is at position
    ``seq_lens[i] - append_indptr[i + 1] + t``.

    Parameters
    ----------
    append_indptr : torch.Tensor
        [batch_size + 1], int32 or int64: the appended tokens of request i are ``append_indptr[i]`` to
        ``append_indptr[i + 1]``. Requests may append nothing. Offsets may be a slice of a larger batch's, from any
        first one: entries of the result before it are padding, too.
    seq_lens : torch.Tensor
        [batch_size], int32 or int64: tokens of each request after the append. It may be on the host.
    nnz : int
        Entries of the result. Those from ``append_indptr[-1]`` on are padding: batch index -1 and position 0, which
        `append_paged_kv_cache` skips. A captured CUDA graph takes nnz for its largest batch.
    batch_indices, positions : torch.Tensor, optional
        Receive the result; [nnz], int32, contiguous.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        batch_indices and positions, int32 [nnz].

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above. On the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits for the
        device), also an append_indptr that decreases, is negative or runs past nnz, or appends more tokens to a
        request than it has.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.page import get_batch_indices_positions
    >>> append_indptr = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    >>> seq_lens = torch.tensor([5, 5, 5], dtype=torch.int32)
    >>> get_batch_indices_positions(append_indptr, seq_lens, 6)
    (tensor([0, 1, 1, 2, 2, 2], dtype=torch.int32), tensor([4, 3, 4, 2, 3, 4], dtype=torch.int32))
    """
    require(nnz >= 0, "nnz", nnz, "0 or more")
    made = []
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        if tensor is None:
            tensor = torch.empty(nnz, dtype=torch.int32, device=append_indptr.device)
        require_fit(name, tensor, tensor.shape == (nnz,), f"[{nnz}], nnz", torch.int32)
        require(tensor.is_contiguous(), name, f"stride {tensor.stride()}", "contiguous")
        made.append(tensor)
    if seq_lens.device.type == "cpu" and append_indptr.is_cuda:
        seq_lens = seq_lens.to(append_indptr.device, non_blocking=True)
    _batch_indices_positions(append_indptr, seq_lens, *made)
    return made[0], made[1]


@checked
def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request, from its page table: ``(pages - 1) * page_size + last_page_len``.

    Parameters
    ----------
    kv_indptr : torch.Tensor
        [batch_size + 1], int32 or int64: pages ``kv_indptr[i]`` to ``kv_indptr[i + 1]`` are those of request i.
    kv_last_page_len : torch.Tensor
        [batch_size], int32 or int64: tokens in the last page. A request without pages has length 0, whatever
        stands here.
    page_size : int
        Tokens of a page.

    Returns
    -------
    torch.Tensor
        [batch_size], int64 if either table is.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.get_seq_lens(torch.tensor([0, 2, 3]).int(), torch.tensor([4, 5]).int(), 16)
    tensor([20,  5], dtype=torch.int32)
    """
    require(page_size > 0, "page_size", page_size, "1 or more")
    if kv_indptr.dtype != kv_last_page_len.dtype:
        check_vector("kv_indptr", kv_indptr)
        check_vector("kv_last_page_len", kv_last_page_len)
        kv_indptr, kv_last_page_len = kv_indptr.long(), kv_last_page_len.long()
    out = torch.empty_like(kv_last_page_len, memory_format=torch.contiguous_format)
    _seq_lens(kv_indptr, kv_last_page_len, out, page_size)
    return out


@custom_op("flashinfer::get_batch_indices_positions", mutates_args=("batch_indices", "positions"))
def _batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    check_vector("append_indptr", append_indptr)
    check_vector("seq_lens", seq_lens, append_indptr.shape[0] - 1)
    same_device(append_indptr=append_indptr, seq_lens=seq_lens, batch_indices=batch_indices, positions=positions)
    nnz = positions.shape[0]
    if not append_indptr.is_cuda or env.DEBUG.is_on():
        indptr_values("append_indptr", append_indptr, nnz, "nnz", sliced=True)
        before = seq_lens - append_indptr.diff()
        negative = (before < 0).nonzero().flatten().tolist()
        require(not negative, "seq_lens", f"fewer tokens than are appended in requests {negative}", "at least as many")
    if nnz == 0:
        return
    choice = room.positions(room.Positions(), positions.device)
    choice.run(as_int32(append_indptr), as_int32(seq_lens), batch_indices, positions)


@custom_op("flashinfer::get_seq_lens", mutates_args=("out",))
def _seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    check_vector("kv_indptr", kv_indptr)
    check_vector("kv_last_page_len", kv_last_page_len, kv_indptr.shape[0] - 1)
    same_dtype = kv_last_page_len.dtype == kv_indptr.dtype
    require(same_dtype, "kv_last_page_len", kv_last_page_len.dtype, f"{kv_indptr.dtype}, the dtype of kv_indptr")
    same_device(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    if out.numel() == 0:
        return
    choice = room.seq_lens(room.SeqLens(dtype_name(out.dtype)), out.device)
    choice.run(kv_indptr.contiguous(), kv_last_page_len.contiguous(), out, page_size)

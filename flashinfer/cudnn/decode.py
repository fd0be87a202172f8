"""Decode with the signature of upstream's cuDNN binding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashinfer._core import env
from flashinfer._core.arguments import named
from flashinfer._core.checks import require
from flashinfer._core.direct_replay import direct
from flashinfer._direct.given import (
    check_bound, check_caches, elements_of_a_row, head_sinks, most_rows, scale as scale_of, whole, with_pages,
)  # fmt: skip
from flashinfer._direct.outputs import Output, attention_op
from flashinfer._direct.pages import as_one_type
from flashinfer.ops.attention.engine import attend_pages, flat_integers, scales_of


def _like_q(its: dict) -> tuple:
    q = its["q"]
    return (*q.shape[:2], its["v_cache"].shape[-1]), q.dtype, q.device


@direct(bounds=("max_sequence_kv",))
@attention_op(_like_q)
@named(q_data_type="q", num_qo_heads="q", head_dim_qk="q", kv_data_type="k_cache",
       num_kv_heads="k_cache", head_dim_vo="v_cache", page_size="k_cache", kv_cache="k_cache",
       qo_indptr="batch_offsets_q", kv_indptr="actual_seq_lens_kv", num_heads="q",
       seq_lens="actual_seq_lens_kv")  # fmt: skip
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a paged cache; every variant of ours answers to the name.

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : Tensor [batch * q_len_per_req, num_qo_heads, head_dim]
        bf16, fp16 or fp8.
    k_cache, v_cache : Tensor [pages, num_kv_heads, page_size, head_dim]
        q's dtype, or fp8. Any strides, head_dim contiguous.
    scale : float
        Factor of q . k, 1 / sqrt(head_dim) as a rule.
    max_sequence_kv : int
        The most keys of a request; also their number, without actual_seq_lens_kv.
    actual_seq_lens_kv : int Tensor of batch elements, optional
        Keys of each request.
    block_tables : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything. Without it request i has page i for all of its keys.
    batch_offsets_q, batch_offsets_o : int Tensor, optional
        Where requests begin, in elements or in tokens. They can only say what q_len_per_req says; on a GPU that is
        checked in debug mode alone (FLASHINFER_DEBUG), since looking waits for the device.
    batch_offsets_k, batch_offsets_v : Tensor, optional
        Not read: block_tables says where keys are.
    out : Tensor, as q, optional
    return_lse : bool
    lse : float32 Tensor [batch * q_len_per_req, num_qo_heads], optional
    q_len_per_req : int
        Queries of every request, its last tokens, causal among themselves.
    window_left : int
        A query sees itself and this many keys before it; -1 for all.
    sinks : float32 Tensor [num_qo_heads], optional
        A logit per head that takes part in the softmax without a value.
    workspace_buffer, is_cuda_graph_compatible
        Scratch and a hint that change no result.

    Returns
    -------
    out : Tensor [batch * q_len_per_req, num_qo_heads, head_dim]
    lse : float32 Tensor [batch * q_len_per_req, num_qo_heads], with return_lse
        Base 2; -inf for a request without keys, whose out is 0.

    Raises
    ------
    ValueError
        An argument out of its range, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = (torch.randn(shape).half() for shape in ((2, 8, 64), (4, 2, 16, 64), (4, 2, 16, 64)))
    >>> scratch, lens, pages = torch.empty(0, dtype=torch.uint8), torch.tensor([20, 5]), torch.tensor([[3, 1], [0, 0]])
    >>> flashinfer.cudnn_batch_decode_with_kv_cache(q, k, v, 0.125, scratch, max_sequence_kv=32,
    ...     actual_seq_lens_kv=lens.int(), block_tables=pages.int()).shape
    torch.Size([2, 8, 64])
    """
    require(q.dim() == 3, "q", tuple(q.shape), "[batch * q_len_per_req, num_qo_heads, head_dim]")
    check_caches(k_cache, v_cache, (3, 4), "[pages, num_kv_heads, page_size, head_dim]")
    q_len, window_left = whole("q_len_per_req", q_len_per_req, 1), whole("window_left", window_left)
    batch, rest = divmod(q.shape[0], q_len)
    require(not rest, "q", f"{q.shape[0]} rows", f"a multiple of q_len_per_req = {q_len}")
    k_cache, v_cache = as_one_type(with_pages((k_cache, v_cache), "HND"))
    if block_tables is None:
        require(k_cache.shape[0] >= batch, "block_tables", None, f"a tensor, or a cache of at least {batch} pages")
        block_tables = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    lens = flat_integers(actual_seq_lens_kv, "actual_seq_lens_kv", q.device, batch)
    check_bound("max_sequence_kv", max_sequence_kv)
    if lens is None:
        most = most_rows("max_sequence_kv", max_sequence_kv)
        lens = torch.full((batch,), most, dtype=torch.int32, device=q.device)
    output = Output(q, (*q.shape[:2], v_cache.shape[-1]), out, lse=lse, return_lse=return_lse)
    new_row, given = q.shape[1] * v_cache.shape[-1], output.rows
    _check_uniform("batch_offsets_q", batch_offsets_q, q_len, lambda: elements_of_a_row(q, "q"))
    _check_uniform("batch_offsets_o", batch_offsets_o, q_len,
                   lambda: new_row if given is None else elements_of_a_row(given, "out"))  # fmt: skip
    return output.finish(attend_pages(
        q, (k_cache, v_cache), "HND", block_tables, lens, dict(q_len=q_len), longest_q=q_len, causal=q_len > 1,
        window_left=window_left, o_dtype=output.dtype, sinks=head_sinks(sinks, q.shape[1]), **output.call,
        operands=("q", "k_cache", "v_cache"), **scales_of(scale_of("scale", scale, q.device), 1.0),
    ))  # fmt: skip


def _check_uniform(name: str, offsets: torch.Tensor | None, q_len: int, row: Callable[[], int]) -> None:
    """Check that offsets, in tokens or in elements of `row()` a token, are those of requests of q_len queries."""
    if offsets is None or (offsets.is_cuda and not env.DEBUG.is_on()):
        return
    found = offsets.reshape(-1).cpu().long()
    tokens = torch.arange(found.shape[0], dtype=torch.int64, device="cpu") * q_len
    fits = torch.equal(found, tokens) or torch.equal(found, tokens * row())
    require(fits, name, found.tolist(), f"{q_len} queries for each request, as q_len_per_req says")

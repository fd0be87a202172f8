"""Decode of one batch, again and again, as its lengths change on the device."""

from __future__ import annotations

import math

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_tensor, same_device
from flashinfer._core.literals import KvLayout
from flashinfer._direct.given import whole, with_pages
from flashinfer._direct.trtllm_decode import trtllm_batch_decode_with_kv_cache
from flashinfer.ops.attention.engine import engine_views
from flashinfer.ops.kv_layout import check_layout


class BalancedDecode:
    """What `prepare_balanced_batch_decode_with_kv_cache` returns: a call runs the batch, on the current stream.

    Parameters
    ----------
    out : torch.Tensor
        Receives the result of each call, and is returned.
    given : dict
        The arguments of `trtllm_batch_decode_with_kv_cache`.
    """

    def __init__(self, out: torch.Tensor, given: dict):
        self.out, self._given = out, given

    def __call__(self) -> torch.Tensor:
        """Run the batch with what its tensors hold now.

        Returns
        -------
        torch.Tensor
            `out`.
        """
        return trtllm_batch_decode_with_kv_cache(out=self.out, **self._given)


@checked
def prepare_balanced_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace_buffer: torch.Tensor,
    *,
    sm_scale: float | None = None,
    q_len_per_req: int = 1,
    out: torch.Tensor | None = None,
    kv_layout: KvLayout = "HND",
    backend: str = "cake",
) -> BalancedDecode:
    """Bind the tensors of a batch that decodes again and again, requests of very different lengths in it.

    Each call of the result shares the keys out between blocks by the lengths that `seq_lens` has on the device then:
    long requests are split, and no host knows them. It is `trtllm_batch_decode_with_kv_cache` with these tensors, and
    so is every problem that it takes: any head_dim, page size and number of query heads a KV head.

    Parameters
    ----------
    query : Tensor [batch * q_len_per_req, num_qo_heads, head_dim]
        bf16 or fp16. The queries of a request follow one another, and are its last tokens.
    kv_cache : Tensor or (Tensor, Tensor)
        As in `trtllm_batch_decode_with_kv_cache`.
    block_tables : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything.
    seq_lens : int32 Tensor [batch]
        Keys of each request, those of its queries among them.
    workspace_buffer : Tensor
        Not read: the work list and partial results are in buffers of our own, kept for the stream.
    sm_scale : float, optional
        Factor of q . k; 1 / sqrt(head_dim) by default.
    q_len_per_req : int
        Queries of every request, causal among themselves.
    out : Tensor [batch * q_len_per_req, num_qo_heads, head_dim of V], optional
        Receives each result; by default a tensor made here, in query's dtype.
    kv_layout : str
        "HND" or "NHD".
    backend : str
        "cake" or "auto": every variant of ours answers to both.

    Returns
    -------
    BalancedDecode
        A callable without parameters that returns `out`. It reads the tensors at each call, and its launches can be
        captured in a CUDA graph, after a call that compiles them.

    Raises
    ------
    ValueError
        An argument other than the above. What only `trtllm_batch_decode_with_kv_cache` refuses, the first call does.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, kv = torch.randn(2, 8, 64).half(), torch.randn(4, 2, 1, 16, 64).half()
    >>> pages, lens, scratch = torch.tensor([[3, 1], [0, 2]]).int(), torch.tensor([20, 5]).int(), torch.empty(0)
    >>> decode = flashinfer.prepare_balanced_batch_decode_with_kv_cache(q, kv, pages, lens, scratch)
    >>> first = decode().clone()
    >>> _ = lens.copy_(torch.tensor([7, 5]))
    >>> (decode() == first).flatten(1).all(1)
    tensor([False,  True])
    """
    require(backend in ("cake", "auto"), "backend", repr(backend), "'cake', 'auto'")
    check_layout(kv_layout)
    for name, tensor in (("query", query), ("block_tables", block_tables), ("seq_lens", seq_lens)):
        require_tensor(name, tensor)
    k, v = engine_views(with_pages(kv_cache, kv_layout), kv_layout)
    queries, batch = whole("q_len_per_req", q_len_per_req, 1), len(block_tables) if block_tables.dim() else 0
    require(block_tables.dim() == 2, "block_tables", tuple(block_tables.shape), "[batch, max_pages]")
    require(block_tables.dtype == torch.int32, "block_tables", block_tables.dtype, "int32")
    require(tuple(seq_lens.shape) == (batch,), "seq_lens", tuple(seq_lens.shape), f"({batch},)")
    require(seq_lens.dtype == torch.int32, "seq_lens", seq_lens.dtype, "int32")
    fits = query.dim() == 3 and len(query) == batch * queries and query.shape[2] == k.shape[3]
    require(fits, "query", tuple(query.shape), f"[{batch * queries}, num_qo_heads, {k.shape[3]}]")
    require(query.dtype in (torch.bfloat16, torch.float16), "query", query.dtype, "bfloat16, float16")
    page, heads = k.shape[1:3]
    require(heads > 0, "kv_cache", "0 KV heads", "1 or more")
    require(query.shape[1] % heads == 0, "query", tuple(query.shape), f"a multiple of {heads} heads, the KV heads")
    shape = (*query.shape[:2], v.shape[3])
    out = query.new_empty(shape) if out is None else out
    require_tensor("out", out)
    require(tuple(out.shape) == shape, "out", tuple(out.shape), f"{shape}")
    same_device(query=query, kv_cache=k, block_tables=block_tables, seq_lens=seq_lens, out=out)
    scale = 1 / math.sqrt(query.shape[2]) if sm_scale is None else sm_scale
    require(isinstance(scale, (int, float)) and math.isfinite(scale), "sm_scale", scale, "a finite number, or None")
    given = dict(
        query=query, kv_cache=kv_cache, workspace_buffer=workspace_buffer, block_tables=block_tables,
        seq_lens=seq_lens, max_seq_len=block_tables.shape[1] * page, bmm1_scale=float(scale), kv_layout=kv_layout,
        q_len_per_req=queries,
    )  # fmt: skip
    return BalancedDecode(out, given)

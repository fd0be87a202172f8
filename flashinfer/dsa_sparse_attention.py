"""Latent attention over keys that queries name one by one, with latents and positions in tensors of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer._direct.given import flag, real
from flashinfer.mla.batch import factors_of
from flashinfer.mla.decode import token_table
from flashinfer.ops.attention.direct import run_latent
from flashinfer.ops.attention.engine import flat_integers, integers, refuse
from flashinfer.ops.attention.options import latent_options

__all__ = ["dsa_sparse_attention", "dsa_sparse_attention_varlen"]

# What latent attention calls these arguments.
_NAMES = {
    "q_nope": "q_latent", "q_pe": "q_rope", "ckv_cache": "kv_latent", "kpe_cache": "k_rope", "num_heads": "q_latent",
    "q_data_type": "q_latent", "kv_data_type": "kv_latent", "head_dim_ckv": "q_latent", "head_dim_kpe": "q_rope",
}  # fmt: skip


def _without_gradients(function: Callable) -> Callable:
    """Refuse tensors whose gradients the caller wants recorded."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def call(*args, **given):
        for name, x in (*zip(parameters, args), *given.items()):
            wanted = isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()
            allowed = "one that does not: there is no backward pass"
            require(not wanted, name, "a tensor that requires a gradient", allowed)
        return function(*args, **given)

    return call


@_without_gradients
@checked
@named(**_NAMES)
def dsa_sparse_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_latent: torch.Tensor,
    k_rope: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    key_passes: int | None = None,
    backend: str = "cake",
    dkv_acc: torch.Tensor | None = None,
    dkv_dst_map: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale (q_latent . kv_latent + q_rope . k_rope)) kv_latent over the keys that each query's row names.

    There is no backward pass: tensors that require a gradient are refused where gradients are recorded. Nothing waits
    for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q_latent : Tensor [queries, num_heads, latent_dim]
        bf16, fp16 or fp8; latent_dim up to 512, up to 128 heads. Any strides but the last, as the next three.
    q_rope : Tensor [queries, num_heads, rope_dim]
    kv_latent : Tensor [keys, latent_dim]
        q's dtype, or fp8. Columns of a wider row as well.
    k_rope : Tensor [keys, rope_dim]
    indices : int32 Tensor [queries, topk]
        Rows of kv_latent; negative ones and those past its end are none, wherever they stand.
    topk_length : int32 Tensor [queries], optional
        How many of a row count, from the first on.
    softmax_scale : float, optional
        Default 1 / sqrt(latent_dim + rope_dim).
    return_lse : bool
    key_passes : int, optional
        Of the backward pass; not read.
    backend : str
        "cake" or "auto", or one of our variants' names.
    dkv_acc, dkv_dst_map : optional
        Of the backward pass; refused.

    Returns
    -------
    out : Tensor [queries, num_heads, latent_dim]
        0 for a query without keys; bf16 for fp8 queries.
    lse : float32 Tensor [queries, num_heads], with return_lse
        Natural; -inf for a query without keys.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.dsa_sparse_attention import dsa_sparse_attention
    >>> q, rope, keys = (torch.zeros(*shape).half() for shape in ((1, 2, 16), (1, 2, 8), (3, 16)))
    >>> keys[1:] = torch.tensor([1.0, 2.0])[:, None]
    >>> rows = torch.tensor([[2, -1, 1]], dtype=torch.int32)
    >>> dsa_sparse_attention(q, rope, keys, torch.zeros(3, 8).half(), rows)[0, 0, 0].item()
    1.5
    """
    for name, t in (("dkv_acc", dkv_acc), ("dkv_dst_map", dkv_dst_map)):
        refuse(name, t, "None: there is no backward pass")
    for name, t in (("q_latent", q_latent), ("q_rope", q_rope)):
        require(t.dim() == 3, name, tuple(t.shape), "[queries, num_heads, dim]")
    for name, t, q in (("kv_latent", kv_latent, q_latent), ("k_rope", k_rope, q_rope)):
        require(t.dim() == 2 and t.shape[1] == q.shape[2], name, tuple(t.shape), f"[keys, {q.shape[2]}]")
    require(k_rope.shape[0] == kv_latent.shape[0], "k_rope", tuple(k_rope.shape), f"{kv_latent.shape[0]} keys")
    (count, heads, dim), rope = q_latent.shape, q_rope.shape[2]
    scale = (dim + rope) ** -0.5 if softmax_scale is None else real("softmax_scale", softmax_scale)
    asked = latent_options(heads, dim, rope, 1, q_latent.dtype, kv_latent.dtype, sparse=True)
    require(indices.dim() == 2, "indices", tuple(indices.shape), f"[{count}, topk]")
    rows = integers(indices, "indices", q_latent.device, (count, None))
    rows = torch.where(rows < kv_latent.shape[0], rows, -1)
    table = token_table(rows, rows.shape[1], topk_length, q_latent, "indices", "topk_length")
    return run_latent(
        asked, table, q_latent, q_rope, kv_latent[:, None], k_rope[:, None], factors_of(scale, 1.0), longest_q=1,
        backend="auto" if backend == "cake" else backend, return_lse=flag("return_lse", return_lse), base_e=True,
    )  # fmt: skip


@_without_gradients
@checked
@named(**_NAMES)
def dsa_sparse_attention_varlen(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_latent: torch.Tensor,
    k_rope: torch.Tensor,
    gather_kv_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    key_passes: int | None = None,
    backend: str = "cake",
    dkv_acc: torch.Tensor | None = None,
    dkv_dst_map: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`dsa_sparse_attention` of documents side by side, whose rows name keys of their own document.

    Parameters
    ----------
    q_latent, q_rope, kv_latent, k_rope, topk_length, softmax_scale, return_lse, key_passes
        As there.
    gather_kv_indices : int32 Tensor [queries, topk]
        Keys within the query's document; negative ones and those past its end are none.
    cu_seqlens_q, cu_seqlens_k : int32 Tensor [documents + 1]
        First query, and first key, of each document.
    max_seqlen_q, max_seqlen_k : int, optional
        Bounds that change no result.
    causal : bool
        Leave out keys after the query, where the last query of a document stands at its last key.
    backend, dkv_acc, dkv_dst_map
        As there.

    Returns
    -------
    As of `dsa_sparse_attention`; 0 and -inf for rows of no document.

    Raises
    ------
    ValueError
        As `dsa_sparse_attention` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, q_rope = torch.randn(3, 16, 512).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    >>> kv, k_rope, keys = torch.randn(20, 512).bfloat16(), torch.randn(20, 64).bfloat16(), torch.zeros(3, 4).int()
    >>> of_q, of_k = torch.tensor([0, 2, 3]).int(), torch.tensor([0, 15, 20]).int()
    >>> attend = flashinfer.dsa_sparse_attention.dsa_sparse_attention_varlen
    >>> attend(q, q_rope, kv, k_rope, keys, of_q, of_k).shape
    torch.Size([3, 16, 512])
    """
    require(q_latent.dim() == 3, "q_latent", tuple(q_latent.shape), "[queries, num_heads, dim]")
    device, documents = q_latent.device, cu_seqlens_q.numel() - 1
    of_q = flat_integers(cu_seqlens_q, "cu_seqlens_q", device, documents + 1).long()
    of_k = flat_integers(cu_seqlens_k, "cu_seqlens_k", device, documents + 1).long()
    rows = integers(gather_kv_indices, "gather_kv_indices", device, (q_latent.shape[0], None)).long()
    row = torch.arange(q_latent.shape[0], dtype=torch.int64, device=device)
    if documents:
        document = torch.searchsorted(of_q, row, right=True).sub_(1).clamp_(0, documents - 1)
        count, keys = (of_q[1:] - of_q[:-1])[document], (of_k[1:] - of_k[:-1])[document]
        place = row - of_q[document]
        end = torch.minimum(keys, keys - count + place + 1) if flag("causal", causal) else keys
        end = torch.where((place >= 0) & (place < count), end, 0)
        rows = torch.where((rows >= 0) & (rows < end[:, None]), rows + of_k[document][:, None], -1)
    else:
        rows = torch.full_like(rows, -1)
    return dsa_sparse_attention(
        q_latent, q_rope, kv_latent, k_rope, rows.int(), topk_length=topk_length, softmax_scale=softmax_scale,
        return_lse=return_lse, key_passes=key_passes, backend=backend, dkv_acc=dkv_acc, dkv_dst_map=dkv_dst_map,
    )  # fmt: skip

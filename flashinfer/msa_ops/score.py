"""Scores of blocks of keys, by which queries choose."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import aligned_rows, dtype_name, number, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._direct.given import flag, real, whole
from flashinfer.msa_ops._requests import requests_of
from flashinfer.ops.attention.block_scores import BLOCK, Problem, block_scores
from flashinfer.quantization import _rows

_HALVES = (torch.bfloat16, torch.float16)


@checked
def msa_proxy_score(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: torch.Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest q . k of each query with the keys of each block of 128 that it sees, unscaled.

    Parameters
    ----------
    q : Tensor [tokens, num_qo_heads, head_dim]
        bf16 or fp16; float8_e4m3fn beside keys of that type. head_dim a multiple of 16 up to 256.
    k : Tensor
        [keys, num_kv_heads, head_dim] with cu_seqlens_k, or [pages, num_kv_heads, 128, head_dim] with page_table and
        seqused_k. q's dtype, or float8_e4m3fn. Any strides but the last.
    cu_seqlens_q : int32 Tensor [batch + 1]
        First query of each request.
    cu_seqlens_k : int32 Tensor [batch + 1], optional
        First key of each request.
    page_table : int32 Tensor [batch, max_pages], optional
        Page ids of each request; past its keys anything.
    seqused_k : int32 Tensor [batch], optional
        Keys of each request.
    causal : bool
        A query sees keys at its position and before; its request's last query stands at the last key.
    max_seqlen_q : int, optional
        A bound that changes no result.
    max_k_tiles : int, optional
        Blocks of the result. Without it, and without `output`: those of the longest request, which waits for the
        device and is refused in a captured stream.
    output : float32 Tensor [num_qo_heads or 1, max_k_tiles, tokens], optional
        Where to write.
    reduce_heads : bool
        Give the largest score of all heads.
    q_offset : int or int Tensor [batch], optional
        Query i of a request stands at q_offset + i instead.

    Returns
    -------
    float32 Tensor [num_qo_heads, or 1 with reduce_heads, max_k_tiles, tokens]
        -inf for blocks of which a query sees nothing.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.msa_ops import msa_proxy_score
    >>> q, k = torch.ones(1, 1, 16, dtype=torch.float16), torch.ones(130, 1, 16, dtype=torch.float16)
    >>> k[128:] *= 2
    >>> offsets = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 130], dtype=torch.int32)
    >>> msa_proxy_score(q, k, *offsets).flatten().tolist()
    [16.0, 32.0]
    """
    require(q.dim() == 3, "q", tuple(q.shape), "[tokens, num_qo_heads, head_dim]")
    batch = requests_of(q, k, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, q_offset)
    heads = 1 if flag("reduce_heads", reduce_heads) else q.shape[1]
    if output is not None:
        blocks = output.shape[1] if max_k_tiles is None and output.dim() == 3 else max_k_tiles or 0
    elif max_k_tiles is not None:
        blocks = whole("max_k_tiles", max_k_tiles, 0)
    else:
        blocks = -(-number("max_k_tiles", batch.lens.max()) // BLOCK) if batch.batch else 0
    shape = heads, blocks, q.shape[0]
    if output is None:
        output = torch.empty(shape, dtype=torch.float32, device=q.device)
    require(tuple(output.shape) == shape, "output", tuple(output.shape), str(shape))
    require(output.dtype == torch.float32, "output", output.dtype, "float32")
    base = batch.request if batch.starts is None else batch.starts[batch.request] if batch.batch else batch.request
    _block_scores(q, k, batch.seen.int(), base.int(), batch.page_table, output)
    return output


@custom_op("flashinfer::block_scores", mutates_args=("scores",))
def _block_scores(
    q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, base: torch.Tensor, tables: torch.Tensor | None,
    scores: torch.Tensor,
) -> None:  # fmt: skip
    same_device(q=q, k=k, output=scores)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    fp8 = torch.float8_e4m3fn
    require(q.dtype in _HALVES or (q.dtype == fp8 and k.dtype == fp8), "q", q.dtype, "bfloat16, float16, float8_e4m3fn")
    require(k.dtype in (q.dtype, fp8), "k", k.dtype, f"{q.dtype}, as q, or float8_e4m3fn")
    require(k.shape[-1] == dim, "k", tuple(k.shape), f"rows of {dim} elements, as q")
    require(dim % 16 == 0 and dim <= 256, "q", tuple(q.shape), "a head_dim that is a multiple of 16 up to 256")
    fits = kv_heads > 0 and heads % kv_heads == 0
    require(fits, "q", f"{heads} heads", f"a multiple of {kv_heads}, the KV heads")
    q, k = aligned_rows(q), aligned_rows(k)
    problem = Problem(heads, kv_heads, dim, dtype_name(q.dtype), dtype_name(k.dtype), tables is not None,
                      scores.shape[0] == 1 and heads > 1)  # fmt: skip
    block_scores(problem, q.device).run(q, k, seen, base, tables, scores)


@checked
@named(q="q_fp4", k="k_fp4")
def msa_proxy_score_fp4(
    q_fp4: torch.Tensor,
    k_fp4: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    q_global_scale: float,
    k_global_scale: float,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: torch.Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """`msa_proxy_score` of nvfp4 queries and keys, which are widened to bf16 first, exactly.

    Parameters
    ----------
    q_fp4 : uint8 Tensor [tokens, num_qo_heads, head_dim / 2]
        Two e2m1 a byte, the first in the low half.
    k_fp4 : uint8 Tensor
        As k there, with head_dim / 2.
    q_scale, k_scale : uint8 or float8_e4m3fn Tensor
        e4m3 factors of 16 elements in the 128x4 layout, rows in the order of (token, head), or (page, head, token) of
        a paged k.
    q_global_scale, k_global_scale : float
        Scores are multiplied by both; positive.
    cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, max_seqlen_q, max_k_tiles, output, reduce_heads, q_offset
        As in `msa_proxy_score`.

    Returns
    -------
    float32 Tensor, as of `msa_proxy_score`

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.
    """
    scales = real("q_global_scale", q_global_scale), real("k_global_scale", k_global_scale)
    for name, scale in zip(("q_global_scale", "k_global_scale"), scales, strict=True):
        require(scale > 0, name, scale, "a positive number")
    wide = (widened(name, x, s) for name, x, s in (("q_fp4", q_fp4, q_scale), ("k_fp4", k_fp4, k_scale)))
    scores = msa_proxy_score(
        *wide, cu_seqlens_q, cu_seqlens_k, page_table=page_table, seqused_k=seqused_k, causal=causal,
        max_seqlen_q=max_seqlen_q, max_k_tiles=max_k_tiles, output=output, reduce_heads=reduce_heads, q_offset=q_offset,
    )  # fmt: skip
    return scores.mul_(scales[0] * scales[1])


def widened(name: str, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """nvfp4 codes [..., dim / 2] with factors in the 128x4 layout as bf16 [..., dim], which holds the products."""
    require(codes.dtype == torch.uint8, name, codes.dtype, "uint8: two e2m1 a byte")
    require(codes.dim() > 0 and codes.shape[-1] > 0, name, tuple(codes.shape), "[..., dim / 2]")
    names = name, name.replace("_fp4", "_scale")
    rows = codes.reshape(-1, codes.shape[-1])
    flat = factors.contiguous().view(torch.uint8).view(-1)
    wide = _rows.dequantize(names, rows, flat, None, "e2m1", "e4m3", 16, "128x4", torch.bfloat16)
    return wide.view(*codes.shape[:-1], -1)

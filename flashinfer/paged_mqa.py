"""Scores of an indexer that chooses keys for sparse attention, over a paged FP8 cache."""

from __future__ import annotations

import math

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import aligned_rows, dtype_name, require
from flashinfer._core.custom_op import custom_op
from flashinfer.ops.attention.engine import check_pages, integers, refuse
from flashinfer.ops.attention.mqa_logits import Problem, mqa_logits

__all__ = ["fp8_paged_mqa_logits"]


@checked
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of every key for every query: scale_k * sum over heads of weights[q, h] * relu(q_h . k).

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : float8_e4m3fn Tensor [batch, next_n, num_heads, head_dim]
        The queries of a request, which are its last tokens. head_dim a multiple of 16 up to 256, up to 128 heads.
    kv_cache : uint8 Tensor [pages, page_size, 1, head_dim + 4]
        Each page holds page_size * head_dim bytes of float8_e4m3fn, then page_size float32 scales, one per key. Pages
        may be further apart. Any page size.
    weights : float32 Tensor [batch * next_n, num_heads]
    context_lens : int32 Tensor [batch], or [batch, next_n]
        Keys of each request, or of each query. Keys past those of block_table are refused on a CPU, and not there on a
        card, which is not waited for.
    block_table : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything.
    schedule_meta : Tensor, optional
        Not read: the keys of a request are shared out among programs by its length, on the device.
    max_context_len : int
        Columns of the result; longer requests are cut there.
    clean_logits : bool
        Write -inf where a query sees no key: from context_len - next_n + 1 + (its place in the request) on, or from its
        own length on. Otherwise columns up to the request's, or the query's, length are written, and those behind it
        are left as they are, undefined.
    indices : optional
        Refused.

    Returns
    -------
    float32 Tensor [batch * next_n, max_context_len]

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    DeepSeek-V3.2-Exp, 2025: the lightning indexer.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, kv = torch.ones(1, 1, 64, 128).to(torch.float8_e4m3fn), torch.ones(2, 32 * 128).to(torch.float8_e4m3fn)
    >>> kv = torch.cat((kv.view(torch.uint8), torch.ones(2, 32).view(torch.uint8)), 1).view(2, 32, 1, 132)
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([40]).int()
    >>> flashinfer.paged_mqa.fp8_paged_mqa_logits(q, kv, torch.ones(1, 64), lens, table, None, 64)[0, 0].item()
    8192.0
    """
    refuse("indices", indices, "None: requests stand in the order of context_lens")
    require(q.dim() == 4 and q.dtype == torch.float8_e4m3fn, "q", f"{q.dtype} {tuple(q.shape)}",
            "float8_e4m3fn [batch, next_n, num_heads, head_dim]")  # fmt: skip
    require(max_context_len >= 0, "max_context_len", max_context_len, "at least 0")
    logits = torch.empty(q.shape[0] * q.shape[1], max_context_len, dtype=torch.float32, device=q.device)
    _fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, logits, clean_logits)
    return logits


@custom_op("flashinfer::fp8_paged_mqa_logits", mutates_args=("logits",))
def _fp8_paged_mqa_logits(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor,
    block_table: torch.Tensor, logits: torch.Tensor, clean_logits: bool,
) -> None:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    require(dim % 16 == 0, "q", tuple(q.shape), "a head_dim that is a multiple of 16")
    q = aligned_rows(q)
    keys, scales = _parts(kv_cache, dim)
    device = q.device
    for name, t in (("kv_cache", kv_cache), ("weights", weights)):
        require(t.device == device, name, f"a tensor on {t.device}", f"{device}, where q is")
    fits = weights.dtype == torch.float32 and weights.shape[-1:] == (heads,)
    fits = fits and weights.numel() == batch * tokens * heads
    require(fits, "weights", f"{weights.dtype} {tuple(weights.shape)}", f"float32 [{batch * tokens}, {heads}]")
    each = context_lens.dim() == 2 and context_lens.shape[1] > 1
    shape = (batch, tokens) if each else (batch, 1) if context_lens.dim() == 2 else (batch,)
    lens = integers(context_lens, "context_lens", device, shape)
    tables = integers(block_table, "block_table", device, (batch, None))
    check_pages({"block_table": tables, "context_lens": lens}, kv_cache.shape[1], kv_cache.shape[0], logits.shape[1])
    problem = Problem(heads, dim, kv_cache.shape[1], max(tokens, 1), each, clean_logits, keys.stride(0) % 16 == 0,
                      out=dtype_name(logits.dtype))  # fmt: skip
    choice = mqa_logits(problem, device)
    weights = weights.reshape(-1, heads).contiguous()
    # On a card nothing looks at the lengths: no column past the table's keys is computed.
    columns = min(logits.shape[1], tables.shape[1] * kv_cache.shape[1])
    if clean_logits and columns < logits.shape[1]:
        logits[:, columns:] = -math.inf
    choice.run(q, keys, scales, weights, lens.contiguous().view(-1), tables, logits[:, :columns], columns)


def _parts(kv_cache: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, as bytes [pages, page_size, dim], and scales [pages, page_size] of a cache."""
    shape = tuple(kv_cache.shape)
    allowed = f"uint8 [pages, page_size, 1, {dim} + 4], a page without gaps"
    fits = kv_cache.dtype == torch.uint8 and len(shape) == 4 and shape[2:] == (1, dim + 4)
    fits = fits and kv_cache.stride(3) == 1 and (shape[1] == 1 or kv_cache.stride(1) == dim + 4)
    require(fits, "kv_cache", f"{kv_cache.dtype} {shape}, strides {kv_cache.stride()}", allowed)
    whole = kv_cache.stride(0) % 4 == 0 and kv_cache.storage_offset() % 4 == 0 and kv_cache.data_ptr() % 16 == 0
    require(whole, "kv_cache", f"pages {kv_cache.stride(0)} bytes apart", "pages that start on 4 bytes, the first "
            "on 16")  # fmt: skip
    pages, size = shape[:2]
    keys = kv_cache.as_strided((pages, size, dim), (kv_cache.stride(0), dim, 1))
    rows = kv_cache.as_strided((pages, size * (dim + 4)), (kv_cache.stride(0), 1))
    return keys, rows.view(torch.float32)[:, size * dim // 4 :]

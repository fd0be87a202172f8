"""Scoring and choosing the keys of sparse attention in one call, over packed sequences (DeepSeek-V3.2, 2025)."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer._direct.given import real, whole
from flashinfer.dense_mqa import score_rows
from flashinfer.ops.attention.engine import flat_integers

__all__ = ["dsa_indexer_topk", "dsa_indexer_topk_workspace_size"]

# Queries and keys scored at a time: 32 MiB of float32 scores, and 64 MiB of int64 sort keys.
_QUERIES, _KEYS = 1024, 8192
_MOST_K = 4096
# Sort keys: of NaN, which is below every score, and of what the query does not see, which is below all.
_LEAST, _NONE = -(1 << 31) + 1, -(1 << 63)


@checked
def dsa_indexer_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    top_k: int = 2048,
    softmax_scale: float | None = None,
    q_causal_offsets: torch.Tensor | None = None,
    ratio: int = 1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    workspace_buffer: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    backend: str = "cake",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k keys of the largest scores for each query, exactly: sum over heads of w[q, h] * relu(scale * q_h . k).

    Of equal scores the later key is taken, and -0 equals 0; NaN is below all. The scores of all keys are never in
    memory at once: the best so far are chosen from again beside those of the next 8192 keys. Nothing waits for the
    device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : Tensor [queries, num_heads, head_dim]
        bf16 or fp16; head_dim a multiple of 16 up to 256, up to 128 heads.
    k : Tensor [keys, head_dim]
        q's dtype. Rows may have any stride.
    w : float32 Tensor [queries, num_heads]
    cu_seqlens_q, cu_seqlens_k : int32 Tensor [segments + 1]
        First query, and first key, of each segment. On the device; read at every call.
    top_k : int
        1 to 4096.
    softmax_scale : float, optional
        A positive factor of the products; default 1 / sqrt(head_dim).
    q_causal_offsets : int Tensor [segments], optional
        Query u of a segment sees its first floor((offset + u + 1) / ratio) keys, as far as there are. Default: keys
        less queries for a ratio of 1, so that the last query sees all, and 0 for others. Negative ones are allowed.
    ratio : int
        Positions of a key, at least 1.
    max_seqlen_q, max_seqlen_k, workspace_buffer : optional
        Bounds and scratch that change no result.
    indices : int32 Tensor [queries, top_k], optional
    scores : float32 Tensor [queries, top_k], optional
        Where to write.
    backend : str
        "cake" or "auto": names of upstream's that every variant of ours answers to.

    Returns
    -------
    indices : int32 Tensor [queries, top_k]
        Keys within the segment, in ascending order, then -1.
    scores : float32 Tensor [queries, top_k]
        Of those keys, then -inf.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.dsa_indexer import dsa_indexer_topk
    >>> q, k = torch.ones(2, 1, 16, dtype=torch.float16), torch.ones(4, 16, dtype=torch.float16)
    >>> k[1] *= 3
    >>> offsets = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    >>> indices, scores = dsa_indexer_topk(q, k, torch.ones(2, 1), *offsets, top_k=2)
    >>> indices.tolist(), scores.tolist()
    ([[1, 2], [1, 3]], [[12.0, 4.0], [12.0, 4.0]])
    """
    require(backend in ("cake", "auto"), "backend", repr(backend), "'cake', 'auto'")
    require(q.dim() == 3 and q.dtype in (torch.bfloat16, torch.float16), "q", f"{q.dtype} {tuple(q.shape)}",
            "bfloat16 or float16 [queries, num_heads, head_dim]")  # fmt: skip
    fits = k.dim() == 2 and k.shape[1] == q.shape[2] and k.dtype == q.dtype
    require(fits, "k", f"{k.dtype} {tuple(k.shape)}", f"{q.dtype} [keys, {q.shape[2]}]")
    require(w.dtype == torch.float32 and w.shape == q.shape[:2], "w", f"{w.dtype} {tuple(w.shape)}",
            f"float32 {tuple(q.shape[:2])}")  # fmt: skip
    top_k, ratio = whole("top_k", top_k, 1), whole("ratio", ratio, 1)
    require(top_k <= _MOST_K, "top_k", top_k, f"at most {_MOST_K}")
    scale = q.shape[2] ** -0.5 if softmax_scale is None else real("softmax_scale", softmax_scale)
    require(scale > 0, "softmax_scale", scale, "a positive number")
    shape = q.shape[0], top_k
    for name, given, dtype in (("indices", indices, torch.int32), ("scores", scores, torch.float32)):
        if given is not None:
            fits = tuple(given.shape) == shape and given.dtype == dtype and given.device == q.device
            require(fits, name, f"{given.dtype} {tuple(given.shape)}", f"{dtype} {shape} on {q.device}")
    indices = torch.empty(shape, dtype=torch.int32, device=q.device) if indices is None else indices
    scores = torch.empty(shape, dtype=torch.float32, device=q.device) if scores is None else scores
    begins, ends = _windows(q, cu_seqlens_q, cu_seqlens_k, q_causal_offsets, ratio)
    # relu(scale x) is scale relu(x).
    weights = w * scale
    for first in range(0, q.shape[0], _QUERIES):
        some = slice(first, first + _QUERIES)
        _choose(q[some], k, weights[some], begins[some], ends[some], indices[some], scores[some])
    return indices, scores


def dsa_indexer_topk_workspace_size(top_k: int = 2048, device: torch.device | None = None) -> int:
    """Bytes of the workspace_buffer of `dsa_indexer_topk`: none is needed.

    Parameters
    ----------
    top_k : int
        Keys to choose: 1 to 4096.
    device : torch.device, optional
        Not read.

    Returns
    -------
    int
        0.

    Raises
    ------
    ValueError
        top_k out of its range.

    Examples
    --------
    >>> from flashinfer.dsa_indexer import dsa_indexer_topk_workspace_size
    >>> dsa_indexer_topk_workspace_size(2048)
    0
    """
    require(1 <= whole("top_k", top_k) <= _MOST_K, "top_k", top_k, f"1 ... {_MOST_K}")
    return 0


def _windows(q, cu_seqlens_q, cu_seqlens_k, offsets, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that each query sees: from where on, and up to where, int32 [queries]."""
    device, segments = q.device, cu_seqlens_q.numel() - 1
    of_q = flat_integers(cu_seqlens_q, "cu_seqlens_q", device, segments + 1).long()
    of_k = flat_integers(cu_seqlens_k, "cu_seqlens_k", device, segments + 1).long()
    row = torch.arange(q.shape[0], dtype=torch.int64, device=device)
    if not segments:
        return row.int() * 0, row.int() * 0
    segment = torch.searchsorted(of_q, row, right=True).sub_(1).clamp_(0, segments - 1)
    count, keys = of_q[1:] - of_q[:-1], of_k[1:] - of_k[:-1]
    place = row - of_q[segment]
    if offsets is not None:
        fits = offsets.numel() == segments and not offsets.is_floating_point()
        require(fits, "q_causal_offsets", f"{offsets.dtype} {tuple(offsets.shape)}", f"int64 [{segments}]")
        offset = offsets.reshape(-1).to(device).long()[segment]
    else:
        offset = (keys - count)[segment] if ratio == 1 else 0
    seen = torch.div(offset + place + 1, ratio, rounding_mode="floor").clamp(min=0)
    there = (place >= 0) & (place < count[segment])
    seen = torch.where(there, torch.minimum(seen, keys[segment]), 0)
    begin = of_k[segment]
    return begin.int(), (begin + seen).int()


def _choose(q, k, weights, begins, ends, indices, scores) -> None:
    """Write the best keys of some queries: of 8192 keys after 8192, those that are among the best so far."""
    count, top_k = q.shape[0], indices.shape[1]
    best = torch.zeros((count, 0), dtype=torch.int64, device=q.device)
    values = torch.zeros((count, 0), dtype=torch.float32, device=q.device)
    for first in range(0, k.shape[0], _KEYS):
        keys = k[first : first + _KEYS]
        found = torch.empty((count, keys.shape[0]), dtype=torch.float32, device=q.device)
        score_rows(q, keys, None, weights, begins, ends, found, first)
        number = torch.arange(first, first + keys.shape[0], dtype=torch.int64, device=q.device)
        seen = (number >= begins[:, None]) & (number < ends[:, None])
        ranks = torch.where(seen, (_order(found) << 32) | number, _NONE)
        best, values = torch.cat((best, ranks), 1), torch.cat((values, found), 1)
        if best.shape[1] > top_k:
            best, at = best.topk(top_k, sorted=False)
            values = values.gather(1, at)
    number = torch.where(best != _NONE, best & 0xFFFFFFFF, 1 << 32)
    number, at = number.sort(dim=1)
    there, width = number < 1 << 32, number.shape[1]
    indices[:, :width] = torch.where(there, number - begins[:, None], -1).int()
    scores[:, :width] = torch.where(there, values.gather(1, at), -torch.inf)
    indices[:, width:], scores[:, width:] = -1, -torch.inf


def _order(x: torch.Tensor) -> torch.Tensor:
    """int64 within 32 bits in the order of float32 numbers: NaN is below all, -0 and 0 are equal."""
    bits = torch.where(x == 0, 0.0, x).contiguous().view(torch.int32).long()
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return torch.where(x.isnan(), _LEAST, rank)

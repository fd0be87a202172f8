"""Scores of an indexer that chooses keys for sparse attention, over keys side by side, as prefill has them."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import aligned_rows, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._direct.given import flag, whole
from flashinfer.ops.attention.engine import integers
from flashinfer.ops.attention.mqa_logits import Beside, Problem, mqa_logits

__all__ = ["fp8_mqa_logits"]


@checked
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int = 0,
    *,
    sm_count: int | None = None,
) -> torch.Tensor:
    """Scores of the keys that each query sees: scale_k * sum over heads of weights[q, h] * relu(q_h . k).

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : float8_e4m3fn Tensor [queries, num_heads, head_dim]
        head_dim a multiple of 16 up to 256, up to 128 heads.
    kv : (Tensor, Tensor)
        Keys, float8_e4m3fn [keys, head_dim], and their scales, float32 [keys] or [keys, 1].
    weights : float32 Tensor [queries, num_heads]
    ks, ke : int32 Tensor [queries]
        The keys of each query: from ks up to, without, ke. What lies outside of 0 ... keys is left out.
    clean_logits : bool
        Changes nothing: every element is written.
    max_seqlen_k : int
        0; a result of another layout is refused.
    sm_count : int, optional
        A hint that changes no result.

    Returns
    -------
    float32 Tensor [queries, keys]
        -inf for keys that a query does not see.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    DeepSeek-V3.2-Exp, 2025: the lightning indexer.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.dense_mqa import fp8_mqa_logits
    >>> q, k = torch.ones(2, 1, 16).to(torch.float8_e4m3fn), torch.ones(3, 16).to(torch.float8_e4m3fn)
    >>> ks, ke = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    >>> fp8_mqa_logits(q, (k, torch.ones(3)), torch.ones(2, 1), ks, ke).tolist()
    [[16.0, 16.0, -inf], [-inf, 16.0, 16.0]]
    """
    flag("clean_logits", clean_logits)
    require(whole("max_seqlen_k", max_seqlen_k) == 0, "max_seqlen_k", max_seqlen_k, "0")
    keys, scales = kv
    require(q.dim() == 3 and q.dtype == torch.float8_e4m3fn, "q", f"{q.dtype} {tuple(q.shape)}",
            "float8_e4m3fn [queries, num_heads, head_dim]")  # fmt: skip
    fits = keys.dim() == 2 and keys.dtype == torch.float8_e4m3fn and keys.shape[1] == q.shape[2]
    require(fits, "kv", f"{keys.dtype} {tuple(keys.shape)}", f"float8_e4m3fn [keys, {q.shape[2]}]")
    require(scales.dtype == torch.float32 and scales.numel() == keys.shape[0], "kv",
            f"scales {scales.dtype} {tuple(scales.shape)}", f"float32 [{keys.shape[0]}]")  # fmt: skip
    logits = torch.empty((q.shape[0], keys.shape[0]), dtype=torch.float32, device=q.device)
    score_rows(q, keys, scales.reshape(-1).contiguous(), weights, ks, ke, logits, 0)
    return logits


@custom_op("flashinfer::mqa_logits_of_rows", mutates_args=("logits",))
def score_rows(
    q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor, begins: torch.Tensor,
    ends: torch.Tensor, logits: torch.Tensor, origin: int,
) -> None:  # fmt: skip
    """Scores of all `keys` [keys, head_dim], whose first has the number `origin`, to logits [queries, keys].

    Queries see keys `begins` up to `ends`. q and keys are e4m3 under `scales`, or bf16 or fp16 without.
    """
    queries, heads, dim = q.shape
    device, qk_format = q.device, {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(q.dtype, "fp8")
    same_device(q=q, k=keys, weights=weights, scales=scales)
    require(keys.dtype == q.dtype, "k", keys.dtype, f"{q.dtype}, as q")
    require(dim % 16 == 0 and dim <= 256, "q", f"head_dim {dim}", "a multiple of 16 up to 256")
    require(weights.dtype == torch.float32 and weights.shape == (queries, heads), "weights",
            f"{weights.dtype} {tuple(weights.shape)}", f"float32 {(queries, heads)}")  # fmt: skip
    ks, ke = (integers(t, name, device, (queries,)).contiguous() for name, t in (("ks", begins), ("ke", ends)))
    q, keys = aligned_rows(q), aligned_rows(keys)
    problem = Problem(heads, dim, 0, 1, each=True, clean=True, qk_format=qk_format)
    rows = keys.view(torch.uint8) if qk_format == "fp8" else keys
    mqa_logits(problem, device).run(
        q[:, None], rows, scales, weights.contiguous(), ke, None, logits, logits.shape[1], Beside(None, ks, origin)
    )

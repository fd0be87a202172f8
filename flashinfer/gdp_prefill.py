"""Gated DeltaProduct over whole prompts: several corrections of the state for each token."""

from __future__ import annotations

from typing import Any, Literal

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import (
    INPUTS,
    output_like,
    require_dtype,
    require_heads,
    require_offsets,
    require_shape,
    variant_for,
)
from flashinfer.gdn_prefill import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_product"]


@checked
def chunk_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    *,
    backend: OwnBackend | Literal["cudnn"] = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences through a delta rule of n corrections for each token, in chunks of 64 corrections.

    Per head and token: ``S = g S``; n times ``S += beta_j (v_j - S k_j) k_j^T``; then ``out = scale S q``.

    Parameters
    ----------
    q, g, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state
        As of `chunk_gated_delta_rule`, for each token.
    k, v : torch.Tensor
        [tokens n, heads, K or V]: those of token t are rows t n to t n + n - 1.
    beta : torch.Tensor, optional
        [tokens n, heads]; 1 if not given.
    num_householder : int
        n, at least 1.
    backend : str
        "auto", "cudnn" (which is ours), "portable" or "reference".

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `chunk_gated_delta_rule`, which this is for n = 1.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Siems et al., DeltaProduct, 2025, https://arxiv.org/abs/2502.10297

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 2, 64).bfloat16(), torch.randn(6, 2, 64).bfloat16(), torch.randn(6, 2, 64).bfloat16()
    >>> flashinfer.chunk_gated_delta_product(q, k, v, num_householder=2, cu_seqlens=torch.tensor([0, 3])).shape
    torch.Size([3, 2, 64])
    """
    n, variant = num_householder, variant_for(backend, "cudnn")
    require(n >= 1, "num_householder", n, "at least 1")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.dim() == 3, name, f"shape {tuple(x.shape)}", "[tokens, heads, head_dim]")
    require_dtype("q", q, INPUTS)
    heads, count = require_heads(q, k, v, 1), q.shape[0]
    require_shape("k", k, count * n, None, q.shape[2])
    require_shape("v", v, count * n, None, None)
    require_shape("g", g, count, heads)
    cu_seqlens = require_offsets(cu_seqlens)
    out = output_like(output, (count, heads, v.shape[2]), q.dtype, q.device)
    more: dict[str, Any] = {"output_state": output_state, "backend": variant}
    if n > 1:
        # Corrections are tokens of their own: the first one decays, the last one is read.
        wide = torch.zeros(count, n, *q.shape[1:], dtype=q.dtype, device=q.device)
        wide[:, -1] = q
        q = wide.flatten(0, 1)
        if g is not None:
            ones = torch.ones(count, n, heads, dtype=g.dtype, device=g.device)
            ones[:, 0] = g
            g = ones.flatten(0, 1)
    result = chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens * n, use_qk_l2norm_in_kernel, **more
    )
    all_rows, state = result if isinstance(result, tuple) else (result, None)
    out.copy_(all_rows.unflatten(0, (count, n))[:, -1] if count else all_rows)
    return out if state is None else (out, state)

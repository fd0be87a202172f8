"""Gated delta rule 2 over whole prompts: gates of each channel for what is forgotten, erased and written."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import (
    INPUTS,
    output_like,
    require_offsets,
    require_shape,
    require_tokens,
    scale_or_unset,
    variant_for,
)
from flashinfer._delta_prefill import check_states, run_chunks
from flashinfer.ops.recurrent.delta.operands import Gates, Pool, Tokens

__all__ = ["chunk_gated_delta_rule2"]


@checked
def chunk_gated_delta_rule2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
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
    """Packed sequences through a delta rule with gates of each channel, in chunks of 64 tokens.

    Per head: ``S = S diag(exp(g)); S += (w v - S (beta k)) k^T; out = scale S q``.

    Parameters
    ----------
    q, k, v, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state
        As of `chunk_gated_delta_rule`.
    g : torch.Tensor, optional
        [tokens, heads, K]: the logarithm of the decay of each key channel; 0 if not given. Below -64 it is taken for
        that.
    beta : torch.Tensor, optional
        [tokens, heads, K]: what is erased of each key channel; 1 if not given.
    w : torch.Tensor, optional
        [tokens, heads, V]: what is written of each value; 1 if not given.
    backend : str
        "auto", "cudnn" (which is ours), "portable" or "reference".

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        [tokens, heads, V] in the dtype of q; with `output_final_state` also the final states, in float32 if
        `output_state` was not given.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 5, 2, 64).bfloat16().unbind(0)
    >>> flashinfer.chunk_gated_delta_rule2(q, k, v, cu_seqlens=torch.tensor([0, 2, 5])).shape
    torch.Size([5, 2, 64])
    """
    heads = require_tokens(q, k, v, "tokens, heads, head_dim")
    require_offsets(cu_seqlens)
    count, key_dim, value_dim = q.shape[0], q.shape[2], v.shape[2]
    for name, x, dim in (("g", g, key_dim), ("beta", beta, key_dim), ("w", w, value_dim)):
        require_shape(name, x, count, heads, dim, dtypes=INPUTS)
    one = torch.ones(1, dtype=q.dtype, device=q.device)
    g = torch.zeros(1, dtype=q.dtype, device=q.device).expand(count, heads, key_dim) if g is None else g
    beta = one.expand(count, heads, key_dim) if beta is None else beta
    tokens = Tokens(q[None], k[None], v[None], g[None], beta[None], cu_seqlens)
    if output_state is None and output_final_state:
        shape = tokens.sequences, heads, value_dim, key_dim
        output_state = torch.empty(shape, dtype=torch.float32, device=q.device)
    pool = Pool(initial_state, output_state)
    check_states(tokens, pool, ("initial_state", "output_state", ""))
    out = output_like(output, (count, heads, value_dim), q.dtype, q.device)
    run_chunks(
        tokens,
        Gates(),
        pool,
        out[None],
        scale_or_unset(scale, key_dim),
        gate="log",
        beta="channels",
        normalize=use_qk_l2norm_in_kernel,
        backend=variant_for(backend, "cudnn"),
        write=None if w is None else w[None],
    )
    return out if output_state is None or not output_final_state else (out, output_state)

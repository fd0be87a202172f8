"""Gated delta rules by the names of upstream's cuDNN bindings: the same functions, with kernels of ours."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, require
from flashinfer._delta import STATES, require_shape
from flashinfer._kda import check_inputs
from flashinfer.gdn2_prefill import chunk_gated_delta_rule2
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.gdp_prefill import chunk_gated_delta_product
from flashinfer.kda import recurrent_kda

__all__ = [
    "cudnn_chunk_gated_delta_product",
    "cudnn_chunk_gated_delta_rule",
    "cudnn_chunk_gated_delta_rule2",
    "cudnn_recurrent_kda",
]


@checked
def cudnn_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    batch_invariant: bool = False,
):
    """`flashinfer.chunk_gated_delta_rule`, by the name of upstream's cuDNN binding.

    Parameters
    ----------
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output
        As in `flashinfer.chunk_gated_delta_rule`.
    output_state
        As in `flashinfer.chunk_gated_delta_rule`.
    batch_invariant : bool
        Bits of a sequence do not depend on the batch; they never do.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `flashinfer.chunk_gated_delta_rule`.

    Raises
    ------
    ValueError
        As `chunk_gated_delta_rule` raises it.
    """
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output,
        output_state,
    )  # fmt: skip


@checked
def cudnn_chunk_gated_delta_rule2(
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
    batch_invariant: bool = False,
):
    """`flashinfer.chunk_gated_delta_rule2`, by the name of upstream's cuDNN binding.

    Parameters
    ----------
    q, k, v, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state, g
        As in `flashinfer.chunk_gated_delta_rule2`.
    beta, w
        As in `flashinfer.chunk_gated_delta_rule2`.
    batch_invariant : bool
        Bits of a sequence do not depend on the batch; they never do.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `flashinfer.chunk_gated_delta_rule2`.

    Raises
    ------
    ValueError
        As `chunk_gated_delta_rule2` raises it.
    """
    return chunk_gated_delta_rule2(
        q, k, v, g, beta, w, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output,
        output_state,
    )  # fmt: skip


@checked
def cudnn_chunk_gated_delta_product(
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
    batch_invariant: bool = False,
):
    """`flashinfer.chunk_gated_delta_product`, by the name of upstream's cuDNN binding.

    Parameters
    ----------
    q, g, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state, k, v
        As in `flashinfer.chunk_gated_delta_product`.
    beta, num_householder
        As in `flashinfer.chunk_gated_delta_product`.
    batch_invariant : bool
        Bits of a sequence do not depend on the batch; they never do.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        As of `chunk_gated_delta_rule`, which this is for n = 1.

    Raises
    ------
    ValueError
        As `chunk_gated_delta_product` raises it.
    """
    return chunk_gated_delta_product(
        q, k, v, g, beta, num_householder, scale, initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel, output, output_state,
    )  # fmt: skip


@checked
def cudnn_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    batch_invariant: bool = False,
):
    """`flashinfer.recurrent_kda` of decode and prefill, by the name of upstream's cuDNN binding.

    Parameters
    ----------
    q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel
        As in `flashinfer.recurrent_kda`.
    use_gate_in_kernel, lower_bound, cu_seqlens, beta_is_logit, output
        As in `flashinfer.recurrent_kda`.
    output_state : torch.Tensor, optional
        Receives the final states, and `initial_state` stays as it is; without one that is written in place.
    batch_invariant : bool
        Bits of a sequence do not depend on the batch; they never do.

    Returns
    -------
    (torch.Tensor, torch.Tensor or None)
        The output, and the final states with output_final_state.

    Raises
    ------
    ValueError
        As `recurrent_kda` raises it.
    """
    state = initial_state
    if output_state is not None:
        check_inputs(q, k, v, g, beta)
        read = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
        check_apart([("output", output), ("output_state", output_state)], read.items())
        require_shape("cu_seqlens", cu_seqlens, None)
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        require_shape("output_state", output_state, sequences, v.shape[2], v.shape[3], k.shape[3], dtypes=STATES)
        require(output_state.device == q.device, "output_state", output_state.device, f"{q.device}, as q")
        alike = initial_state is None or initial_state.shape == output_state.shape
        require(alike, "initial_state", "another shape", f"{tuple(output_state.shape)}, that of output_state")
        # What is wrong with other arguments is found before output_state is written.
        state = torch.zeros_like(output_state) if initial_state is None else initial_state.to(output_state, copy=True)
    out, final = recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, lower_bound, cu_seqlens, output=output, beta_is_logit=beta_is_logit,
    )  # fmt: skip
    if output_state is None or state is None:
        return out, final
    output_state.copy_(state)
    return out, output_state if output_final_state else None

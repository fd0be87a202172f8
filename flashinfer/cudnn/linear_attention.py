"""Gated delta rules by the names of upstream's cuDNN bindings: the same functions, with kernels of ours."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, require
from flashinfer._delta import STATES, require_dtype, require_shape
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
    q, k : torch.Tensor
        [tokens, query heads or key heads, K]; bfloat16, float16 or float32, any strides. K up to 128 on a GPU.
    v : torch.Tensor
        [tokens, value heads, V] of that dtype. The largest count of heads is that of the states; it is a multiple of
        the others, and keys have as many heads as queries or values.
    g : torch.Tensor, optional
        [tokens, heads], the decay, not its logarithm; any floating dtype. 1 if not given. Decays below exp(-64) are
        taken for that.
    beta : torch.Tensor, optional
        [tokens, heads]; 1 if not given.
    scale : float, optional
        Of the output; 1 / sqrt(K) if not given or 0.
    initial_state : torch.Tensor, optional
        [sequences, heads, V, K], or a pool [slots, heads, V, K] with `state_indices`; float32, bfloat16, float16,
        float8_e4m3fn or float8_e5m2, any strides. Zero if not given.
    output_final_state : bool
        Whether to return the final states.
    cu_seqlens : torch.Tensor
        [sequences + 1], int32 or int64: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1]. Tokens of no
        sequence have output 0.
    use_qk_l2norm_in_kernel : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    output : torch.Tensor, optional
        [tokens, heads, V]; receives the result.
    output_state : torch.Tensor, optional
        Receives the final states; it may be `initial_state`. Required with `output_final_state` and `state_indices`.
    batch_invariant : bool
        Bits of a sequence do not depend on the batch; they never do.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        [tokens, heads, V] in the dtype of q; with `output_final_state` also the final states, in float32 if
        `output_state` was not given.

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
    q, k, v, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state
        As of `chunk_gated_delta_rule`.
    g : torch.Tensor, optional
        [tokens, heads, K]: the logarithm of the decay of each key channel; 0 if not given. Below -64 it is taken for
        that.
    beta : torch.Tensor, optional
        [tokens, heads, K]: what is erased of each key channel; 1 if not given.
    w : torch.Tensor, optional
        [tokens, heads, V]: what is written of each value; 1 if not given.
    batch_invariant : bool
        Bits of a sequence do not depend on the batch; they never do.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        [tokens, heads, V] in the dtype of q; with `output_final_state` also the final states, in float32 if
        `output_state` was not given.

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
    q, g, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state
        As of `chunk_gated_delta_rule`, for each token.
    k, v : torch.Tensor
        [tokens n, heads, K or V]: those of token t are rows t n to t n + n - 1.
    beta : torch.Tensor, optional
        [tokens n, heads]; 1 if not given.
    num_householder : int
        n, at least 1.
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
    q, k : torch.Tensor
        [batch, T, query heads, K], or [1, tokens, query heads, K] with `cu_seqlens`; bfloat16, float16 or float32, any
        strides. K up to 256 on a GPU, in prefill up to 128.
    v : torch.Tensor
        [batch, T, heads, V] of that dtype; heads is a multiple of the query heads.
    g : torch.Tensor
        [batch, T, heads, K]: the logarithm of the decay, or the raw gate with `use_gate_in_kernel`.
        Decays below exp(-64) are taken for that in prefill.
    beta : torch.Tensor
        [batch, T, heads]; its sigmoid is taken with `beta_is_logit`.
    A_log : torch.Tensor, optional
        [query heads] or [heads]; required with `use_gate_in_kernel`.
    dt_bias : torch.Tensor, optional
        [query heads or heads, K], or flat.
    scale : float, optional
        Of the output; 1 / sqrt(K) if not given.
    initial_state : torch.Tensor, optional
        [sequences, heads, V, K], or a pool [slots, heads, V, K] with `ssm_state_indices`; float32, bfloat16, float16 or
        float8, any strides. Updated in place. Zero if not given.
    output_final_state : bool
        Whether to return the states.
    use_qk_l2norm_in_kernel : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    use_gate_in_kernel : bool
        The decay is exp(-exp(A_log) softplus(g + dt_bias)), or with a `lower_bound`
        exp(lower_bound sigmoid(exp(A_log) (g + dt_bias))).
    lower_bound : float, optional
        Less than 0.
    cu_seqlens : torch.Tensor, optional
        [sequences + 1], int32 or int64. Tokens of no sequence have output 0.
    beta_is_logit : bool
        See `beta`.
    output : torch.Tensor, optional
        Shape of v; receives the result.
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
        require_shape("output_state", output_state, sequences, v.shape[2], v.shape[3], k.shape[3])
        require_dtype("output_state", output_state, STATES)
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

"""Kimi delta attention of one step: by upstream's older name, and fused with what is around it in a layer."""

from __future__ import annotations

import torch

from flashinfer import kda

__all__ = ["recurrent_kda"]


def recurrent_kda(
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
    ssm_state_indices: torch.Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    *,
    disable_state_update: bool = False,
    correction_cache: torch.Tensor | None = None,
    kg_cache: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flashinfer.recurrent_kda` without checkpoints, by the name that it had before: same parameters, same results."""
    return kda.recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, lower_bound, cu_seqlens, ssm_state_indices, num_spec_tokens, num_accepted_tokens, output,
        initial_state_source, initial_state_indices, beta_is_logit, disable_state_update=disable_state_update,
        correction_cache=correction_cache, kg_cache=kg_cache, backend=backend or "auto",
    )  # fmt: skip

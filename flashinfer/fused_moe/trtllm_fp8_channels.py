"""Mixtures of experts by TensorRT-LLM's names: FP8 with a scale for each token and for each row of the weights."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.fused_moe import experts
from flashinfer.fused_moe.trtllm import (
    activation,
    check_rows,
    check_weights,
    finished,
    routed_by_ids,
    routed_by_logits,
)
from flashinfer.tllm_enums import ActivationType, WeightLayout


@checked
def trtllm_fp8_per_channel_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_per_channel_weight_scale: torch.Tensor,
    output1_scale_scalar: torch.Tensor,
    output1_scale_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_per_channel_weight_scale: torch.Tensor,
    output2_scale_scalar: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
) -> list[torch.Tensor] | torch.Tensor:
    """A mixture of experts in FP8 with a scale for each token and each row of the weights, from router logits.

    With s the scale of a token and w1, w2 those of the rows of weights, u and g the halves, up and gate, of
    ``s * w1 * (hidden_states @ gemm1_weights[e].T)``, and c, d, f the elements of output1_scale_scalar,
    output1_scale_gate_scalar and output2_scale_scalar::

        h = e4m3(c * u * act(d * g))          or, without a gate, h = e4m3(c * act(d * u))
        result of e = f * w2 * (h @ gemm2_weights[e].T) The result is bfloat16.

    Parameters
    ----------
    routing_logits, routing_bias, num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset
        As in `flashinfer.trtllm_bf16_moe`.
    local_num_experts, routed_scaling_factor, routing_method_type, do_finalize, enable_pdl, tune_max_num_tokens
        As in `flashinfer.trtllm_bf16_moe`.
    activation_type, norm_topk_prob
        As in `flashinfer.trtllm_bf16_moe`.
    hidden_states, gemm1_weights, use_routing_scales_on_input
        As in `flashinfer.trtllm_fp8_per_tensor_scale_moe`.
    hidden_states_scale : torch.Tensor
        float32 [tokens, 1].
    gemm1_per_channel_weight_scale : torch.Tensor
        float32 [local_num_experts, rows of gemm1_weights], in the order in which the rows are stored.
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar : torch.Tensor
        float32 [local_num_experts]. c of a gated activation holds d as a factor: it is applied over d to ``d * u``.
    gemm2_weights, gemm2_per_channel_weight_scale : torch.Tensor
        float8_e4m3fn [local_num_experts, hidden, intermediate_size], shuffled in the same way, and float32
        [local_num_experts, hidden].

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        As those of `trtllm_bf16_moe`: bfloat16 [tokens, hidden], or [rows, weights, row] without `do_finalize`.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> ones, logits, renormalize = torch.ones(4), torch.randn(2, 4), flashinfer.fused_moe.RoutingMethodType.Renormalize
    >>> out = flashinfer.fused_moe.trtllm_fp8_per_channel_scale_moe(logits, None, x, torch.ones(2, 1), w1,
    ...     torch.ones(4, 256), ones, ones, w2, torch.ones(4, 128), ones, 4, 2, None, None, 128, 0, 4, None, False,
    ...     renormalize)
    >>> out.shape
    torch.Size([2, 128])
    """
    routed = routed_by_logits(
        routing_logits, routing_bias, num_experts, top_k, n_group, topk_group,
        (local_expert_offset, local_num_experts), routed_scaling_factor, routing_method_type, norm_topk_prob, None,
    )  # fmt: skip
    given = (gemm1_weights, gemm1_per_channel_weight_scale), (gemm2_weights, gemm2_per_channel_weight_scale)
    scales = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    routed = routed._replace(on_input=bool(use_routing_scales_on_input))
    return _per_channel(routed, hidden_states, hidden_states_scale, given, scales, activation_type, intermediate_size,
                        do_finalize)  # fmt: skip


@checked
def trtllm_fp8_per_channel_scale_routed_moe(
    topk_ids: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_per_channel_weight_scale: torch.Tensor,
    output1_scale_scalar: torch.Tensor,
    output1_scale_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_per_channel_weight_scale: torch.Tensor,
    output2_scale_scalar: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool = False,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
) -> list[torch.Tensor] | torch.Tensor:
    """`trtllm_fp8_per_channel_scale_moe` of experts that are already chosen.

    Parameters
    ----------
    topk_ids : torch.Tensor
        int32 [tokens, top_k], each with its expert and weight, packed as in
        `flashinfer.fused_moe.trtllm_bf16_routed_moe`.
    routing_bias, n_group, topk_group, routed_scaling_factor, routing_method_type
        Have no effect: they say how the experts were chosen.
    hidden_states, gemm1_weights, use_routing_scales_on_input
        As in `flashinfer.trtllm_fp8_per_tensor_scale_moe`.
    hidden_states_scale, gemm1_per_channel_weight_scale, output1_scale_scalar, output1_scale_gate_scalar
        As in `trtllm_fp8_per_channel_scale_moe`.
    output2_scale_scalar, gemm2_weights, gemm2_per_channel_weight_scale
        As in `trtllm_fp8_per_channel_scale_moe`.
    num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts, do_finalize, enable_pdl
        As in `flashinfer.trtllm_bf16_moe`.
    tune_max_num_tokens, activation_type
        As in `flashinfer.trtllm_bf16_moe`.

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        As those of `trtllm_bf16_moe`: bfloat16 [tokens, hidden], or [rows, weights, row] without `do_finalize`.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> ones, chosen = torch.ones(4), torch.tensor([[0, 1], [2, 3]]).int() << 16
    >>> out = flashinfer.fused_moe.trtllm_fp8_per_channel_scale_routed_moe(chosen, None, x, torch.ones(2, 1), w1,
    ...     torch.ones(4, 256), ones, ones, w2, torch.ones(4, 128), ones, 4, 2, None, None, 128, 0, 4, None)
    >>> out.shape
    torch.Size([2, 128])
    """
    routed = routed_by_ids(topk_ids, num_experts, top_k, (local_expert_offset, local_num_experts), None)
    given = (gemm1_weights, gemm1_per_channel_weight_scale), (gemm2_weights, gemm2_per_channel_weight_scale)
    scales = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    routed = routed._replace(on_input=bool(use_routing_scales_on_input))
    return _per_channel(routed, hidden_states, hidden_states_scale, given, scales, activation_type, intermediate_size,
                        do_finalize)  # fmt: skip


def _per_channel(routed, x, x_scale, given, scales, activation_type, intermediate, do_finalize):
    check_rows(x)
    require(x.dtype == torch.float8_e4m3fn, "hidden_states", x.dtype, "float8_e4m3fn")
    require(x_scale.dtype == torch.float32, "hidden_states_scale", x_scale.dtype, "float32")
    require(x_scale.numel() == len(x), "hidden_states_scale", tuple(x_scale.shape), f"[{len(x)}, 1]")
    act, gated = activation(activation_type, None, None, None, routed.experts, x.device)
    names = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    scale_out, scale, second = (
        experts.per_expert(name, value, routed.experts, x.device) for name, value in zip(names, scales)
    )
    weights = []
    for number, (codes, channels), paired in ((1, given[0], gated), (2, given[1], False)):
        codes, _ = check_weights(f"gemm{number}_weights", codes, (torch.float8_e4m3fn,), 8, WeightLayout.MajorK)
        name = f"gemm{number}_per_channel_weight_scale"
        require(channels.dtype == torch.float32, name, channels.dtype, "float32")
        require(channels.shape == codes.shape[:2], name, tuple(channels.shape), f"{tuple(codes.shape[:2])}")
        weights.append(
            experts.Weight(
                f"gemm{number}_weights", codes, "fp8", paired=paired, shuffle=32, channels=channels.contiguous()
            )
        )
    tokens = experts.Tokens(x, "fp8", row_scale=x_scale.reshape(-1).contiguous())
    between = experts.Between("fp8", scale=scale, scale_out=scale_out, ratio=gated, second=second)
    return finished(tokens, routed, weights, act, between, intermediate, None, do_finalize)

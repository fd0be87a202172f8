"""Mixtures of experts by TensorRT-LLM's names: FP8 with block scales, and with a scale for each tensor."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_fit
from flashinfer._core.replay import replayed
from flashinfer.fused_moe import experts
from flashinfer.fused_moe.trtllm import (
    activation,
    check_rows,
    check_valid,
    check_weights,
    finished,
    routed_by_ids,
    routed_by_logits,
)
from flashinfer.ops import layouts
from flashinfer.ops.formats import FACTOR_DTYPES
from flashinfer.ops.moe.experts import extents
from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, WeightLayout

_E4M3 = (torch.float8_e4m3fn,)


@replayed
def trtllm_fp8_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts: int | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    *,
    gemm1_bias: torch.Tensor | None = None,
    gemm2_bias: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    """A mixture of experts in FP8 with block scales, from router logits.

    Parameters
    ----------
    routing_logits, routing_bias, num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset
        As in `flashinfer.trtllm_bf16_moe`.
    local_num_experts, routed_scaling_factor, routing_method_type, weight_layout, do_finalize, enable_pdl
        As in `flashinfer.trtllm_bf16_moe`.
    tune_max_num_tokens, activation_type, norm_topk_prob, routing_replay_out, gemm1_alpha, gemm1_beta
        As in `flashinfer.trtllm_bf16_moe`.
    gemm1_clamp_limit, output
        As in `flashinfer.trtllm_bf16_moe`.
    hidden_states : torch.Tensor
        float8_e4m3fn [tokens, hidden], contiguous rows.
    hidden_states_scale : torch.Tensor
        DeepSeekFp8: float32 [hidden / 128, tokens], any strides. MxFp8: ue8m0 bytes (uint8, or an 8-bit float)
        [tokens, hidden / 32], contiguous.
    gemm1_weights : torch.Tensor
        float8_e4m3fn [experts, 2 * intermediate_size, hidden] of a gated activation, the up-projection's rows first and
        then the gate's; [., intermediate_size, hidden] of another. As BlockMajorK [., hidden / 128, rows, 128].
    gemm1_weights_scale : torch.Tensor
        DeepSeekFp8: float32 [experts, rows / 128, hidden / 128], of rows that are not shuffled. MxFp8: ue8m0 bytes,
        rows x hidden / 32 for each expert; of shuffled weights rows are where the weights' are, in 128x4 tiles, as
        `flashinfer.shuffle_matrix_sf_a` gives them; of others row-major.
    gemm2_weights, gemm2_weights_scale : torch.Tensor
        The same, of [experts, hidden, intermediate_size].
    use_shuffled_weight : bool
        Rows of the weights are where `flashinfer.shuffle_matrix_a` puts them: DeepSeekFp8 with an epilogue tile of 64,
        MxFp8 with one of 128, after those of a gated gemm1 were made to alternate.
    fp8_quantization_type : Fp8QuantizationType
        DeepSeekFp8 or MxFp8. What stands between the products is quantised in the same way.
    num_fused_shared_experts : int, optional
        Experts that every token has beside the chosen, with weight 1; their weights follow those of the others, on the
        rank that has the last of these.
    valid_hidden_size, valid_intermediate_size : int, optional
        Sizes without padding. The result has the first alone; padding of the input and of the weights has to be zeros.
    gemm1_bias, gemm2_bias : torch.Tensor, optional
        [experts, rows], float32 or bfloat16, in the order in which the weights' rows are.

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        As those of `trtllm_bf16_moe`: bfloat16 [tokens, hidden], or [rows, weights, row] without `do_finalize`.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Notes
    -----
    Between the products rows are rounded to bfloat16, and then quantised with the least scale that holds them.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437; OCP Microscaling Formats
    Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> scales, logits = (torch.ones(1, 2), torch.ones(4, 2, 1), torch.ones(4, 1, 1)), torch.randn(2, 4)
    >>> out = flashinfer.trtllm_fp8_block_scale_moe(logits, None, x, scales[0], w1, scales[1], w2, scales[2], 4, 2,
    ...     None, None, 128, 0, 4, None, flashinfer.RoutingMethodType.Renormalize)
    >>> out.shape
    torch.Size([2, 128])
    """
    check_rows(hidden_states)
    sizes = hidden_states.shape[1], intermediate_size
    valid = check_valid(*sizes, valid_hidden_size, valid_intermediate_size, do_finalize)
    routed = routed_by_logits(
        routing_logits, routing_bias, num_experts, top_k, n_group, topk_group,
        (local_expert_offset, local_num_experts), routed_scaling_factor, routing_method_type, norm_topk_prob,
        routing_replay_out, shared=num_fused_shared_experts,
    )  # fmt: skip
    given = [(gemm1_weights, gemm1_weights_scale, gemm1_bias), (gemm2_weights, gemm2_weights_scale, gemm2_bias)]
    act = activation(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, routed.experts, hidden_states.device)
    return _block_scaled(routed, hidden_states, hidden_states_scale, given, fp8_quantization_type, use_shuffled_weight,
                         weight_layout, act, intermediate_size, valid, output, do_finalize)  # fmt: skip


@replayed
def trtllm_fp8_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu.value,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    """`trtllm_fp8_block_scale_moe` of experts that are already chosen.

    Parameters
    ----------
    topk_ids : torch.Tensor or (torch.Tensor, torch.Tensor)
        int32 [tokens, top_k], packed; or ids and weights: as in `flashinfer.fused_moe.trtllm_bf16_routed_moe`.
    routing_bias, n_group, topk_group, routed_scaling_factor, routing_method_type
        Have no effect: they say how the experts were chosen.
    hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale
        As in `trtllm_fp8_block_scale_moe`.
    use_shuffled_weight, fp8_quantization_type, valid_hidden_size, valid_intermediate_size
        As in `trtllm_fp8_block_scale_moe`.
    num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts, weight_layout, do_finalize
        As in `flashinfer.trtllm_bf16_moe`.
    enable_pdl, output, tune_max_num_tokens, activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit
        As in `flashinfer.trtllm_bf16_moe`.
    gemm1_lora_delta
        As in `flashinfer.fused_moe.trtllm_bf16_routed_moe`.

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        As those of `flashinfer.fused_moe.trtllm_bf16_routed_moe`.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> scales, ids = (torch.ones(1, 2), torch.ones(4, 2, 1), torch.ones(4, 1, 1)), torch.tensor([[0, 1], [2, 3]])
    >>> out = flashinfer.trtllm_fp8_block_scale_routed_moe((ids.int(), torch.full((2, 2), 0.5)), None, x, scales[0], w1,
    ...     scales[1], w2, scales[2], 4, 2, None, None, 128, 0, 4, None)
    >>> out.shape
    torch.Size([2, 128])
    """
    check_rows(hidden_states)
    sizes = hidden_states.shape[1], intermediate_size
    valid = check_valid(*sizes, valid_hidden_size, valid_intermediate_size, do_finalize)
    local = (local_expert_offset, local_num_experts)
    routed = routed_by_ids(topk_ids, num_experts, top_k, local, delta=gemm1_lora_delta)
    given = [(gemm1_weights, gemm1_weights_scale, None), (gemm2_weights, gemm2_weights_scale, None)]
    act = activation(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, routed.experts, hidden_states.device)
    return _block_scaled(routed, hidden_states, hidden_states_scale, given, fp8_quantization_type, use_shuffled_weight,
                         weight_layout, act, intermediate_size, valid, output, do_finalize)  # fmt: skip


def _block_scaled(
    routed, x, x_scale, given, kind, shuffled, layout, act, intermediate, valid, output, do_finalize, /
) -> list[torch.Tensor] | torch.Tensor:
    kinds = (Fp8QuantizationType.DeepSeekFp8, Fp8QuantizationType.MxFp8)
    require(isinstance(kind, int) and kind in kinds, "fp8_quantization_type", kind, "DeepSeekFp8, MxFp8")
    deepseek = kind == Fp8QuantizationType.DeepSeekFp8
    encoding = "fp8_block" if deepseek else "mxfp8"
    require(x.dtype == torch.float8_e4m3fn, "hidden_states", x.dtype, "float8_e4m3fn")
    tokens = experts.Tokens(x, encoding, _row_factors(x_scale, x, deepseek))
    act, gated = act
    weights = []
    names = ("gemm1_weights", "gemm2_weights")
    for name, (codes, scale, bias), paired in zip(names, given, (gated and shuffled and not deepseek, False)):
        codes, block = check_weights(name, codes, _E4M3, 8, layout)
        n, k = extents(codes, encoding, block)
        if deepseek:
            shape = (len(codes), -(-n // 128), -(-k // 128))
            fits = scale.shape == shape and scale.stride(2) == 1
            require_fit(f"{name}_scale", scale, fits, f"{shape}, contiguous rows", torch.float32)
            shuffle, placed = 16 if shuffled else 0, "linear"
        else:
            shuffle, placed = (32, "128x4") if shuffled else (0, "linear")
            scale = experts.expert_factors(f"{name}_scale", scale, len(codes), n, -(-k // 32), placed)
        weights.append(experts.Weight(name, codes, encoding, scale, placed, bias, paired, shuffle, block))
    between = experts.Between(encoding)
    return finished(tokens, routed, weights, act, between, intermediate, output, do_finalize, hidden=valid)


def _row_factors(scale, x, deepseek: bool) -> torch.Tensor:
    """hidden_states_scale as [tokens, blocks]."""
    name = "hidden_states_scale"
    tokens, hidden = x.shape
    if deepseek:
        require(isinstance(scale, torch.Tensor), name, scale, "a float32 tensor")
        shape = (-(-hidden // 128), tokens)
        require_fit(name, scale, scale.shape == shape, f"[hidden / 128, tokens], {shape}", torch.float32)
        return scale.T
    return byte_factors(name, scale, tokens, hidden // 32)


def byte_factors(name, scale, tokens: int, blocks: int) -> torch.Tensor:
    """Row-major scale factors of a byte, [tokens, blocks]."""
    require(isinstance(scale, torch.Tensor), name, scale, "a tensor of bytes")
    fits = layouts.holds(scale, tokens, blocks, "linear") and scale.is_contiguous()
    fits = fits and scale.dtype in FACTOR_DTYPES
    require(fits, name, f"{scale.dtype} {tuple(scale.shape)}", f"bytes, [{tokens}, {blocks}], contiguous")
    return scale.view(torch.uint8).view(tokens, blocks)


@checked
def trtllm_fp8_per_tensor_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    output1_scales_scalar: torch.Tensor,
    output1_scales_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    output2_scales_scalar: torch.Tensor,
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
    routing_replay_out: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    """A mixture of experts in FP8 with a scale for each tensor, from router logits.

    With the halves u (up) and g (gate) of ``hidden_states @ gemm1_weights[e].T``, c, d and f the elements of
    output1_scales_scalar, output1_scales_gate_scalar and output2_scales_scalar::

        h = e4m3(c * u * act(d * g))          or, without a gate, h = e4m3(c * act(d * u))
        result of e = f * (h @ gemm2_weights[e].T) The result is bfloat16.

    Parameters
    ----------
    routing_logits, routing_bias, num_experts, top_k, n_group, topk_group, intermediate_size
        As in `trtllm_bf16_moe`.
    hidden_states : torch.Tensor
        float8_e4m3fn [tokens, hidden], contiguous rows.
    gemm1_weights : torch.Tensor
        float8_e4m3fn [local_num_experts, 2 * intermediate_size, hidden] of a gated activation, whose rows alternate, up
        and gate; [., intermediate_size, hidden] of another. Rows are then where `flashinfer.shuffle_matrix_a` with an
        epilogue tile of 128 puts them.
    output1_scales_scalar, output1_scales_gate_scalar, output2_scales_scalar : torch.Tensor
        float32 [local_num_experts]. d is the dequantising scale of the product, c of a gated activation that times the
        quantising scale of h, and else the quantising scale alone.
    gemm2_weights : torch.Tensor
        float8_e4m3fn [local_num_experts, hidden, intermediate_size], shuffled in the same way.
    local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type, do_finalize, enable_pdl
        As in `trtllm_bf16_moe`.
    use_routing_scales_on_input : bool
        The weight of a choice multiplies the input of its expert, and not the result (Llama 4).
    tune_max_num_tokens, activation_type, norm_topk_prob, routing_replay_out, output
        As in `trtllm_bf16_moe`.
    gemm1_clamp_limit : torch.Tensor, optional
        float32 [local_num_experts], for Swiglu: d * g is clamped to at most it, d * u to -limit ... limit.

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
    >>> ones, logits, renormalize = torch.ones(4), torch.randn(2, 4), flashinfer.RoutingMethodType.Renormalize
    >>> out = flashinfer.trtllm_fp8_per_tensor_scale_moe(logits, None, x, w1, ones, ones, w2, ones, 4, 2, None, None,
    ...     128, 0, 4, None, False, renormalize)
    >>> out.shape
    torch.Size([2, 128])
    """
    routed = routed_by_logits(
        routing_logits, routing_bias, num_experts, top_k, n_group, topk_group,
        (local_expert_offset, local_num_experts), routed_scaling_factor, routing_method_type, norm_topk_prob,
        routing_replay_out,
    )  # fmt: skip
    scales = (output1_scales_scalar, output1_scales_gate_scalar, output2_scales_scalar)
    routed = routed._replace(on_input=bool(use_routing_scales_on_input))
    return _per_tensor(routed, hidden_states, (gemm1_weights, gemm2_weights), scales, activation_type,
                       gemm1_clamp_limit, intermediate_size, output, do_finalize)  # fmt: skip


@checked
def trtllm_fp8_per_tensor_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    output1_scales_scalar: torch.Tensor,
    output1_scales_gate_scalar: torch.Tensor,
    gemm2_weights: torch.Tensor,
    output2_scales_scalar: torch.Tensor,
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
    routing_replay_out: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    """`trtllm_fp8_per_tensor_scale_moe` of experts that are already chosen.

    Parameters
    ----------
    topk_ids : torch.Tensor or (torch.Tensor, torch.Tensor)
        int32 [tokens, top_k], packed; or ids and weights: as in `flashinfer.fused_moe.trtllm_bf16_routed_moe`.
    routing_bias, n_group, topk_group, routed_scaling_factor, routing_method_type
        Have no effect: they say how the experts were chosen.
    hidden_states, gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar, gemm2_weights
        As in `trtllm_fp8_per_tensor_scale_moe`.
    output2_scales_scalar, use_routing_scales_on_input, gemm1_clamp_limit
        As in `trtllm_fp8_per_tensor_scale_moe`.
    num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts, do_finalize, enable_pdl
        As in `flashinfer.trtllm_bf16_moe`.
    tune_max_num_tokens, activation_type, output
        As in `flashinfer.trtllm_bf16_moe`.
    routing_replay_out : torch.Tensor, optional
        int16 [tokens or more, top_k]; receives the experts of `topk_ids`.

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
    >>> ones, chosen = torch.ones(4), (torch.tensor([[0, 1], [2, 3]]).int(), torch.full((2, 2), 0.5))
    >>> out = flashinfer.trtllm_fp8_per_tensor_scale_routed_moe(chosen, None, x, w1, ones, ones, w2, ones, 4, 2, None,
    ...     None, 128, 0, 4, None, False)
    >>> out.shape
    torch.Size([2, 128])
    """
    routed = routed_by_ids(topk_ids, num_experts, top_k, (local_expert_offset, local_num_experts), routing_replay_out)
    scales = (output1_scales_scalar, output1_scales_gate_scalar, output2_scales_scalar)
    routed = routed._replace(on_input=bool(use_routing_scales_on_input))
    return _per_tensor(routed, hidden_states, (gemm1_weights, gemm2_weights), scales, activation_type,
                       gemm1_clamp_limit, intermediate_size, output, do_finalize)  # fmt: skip


def _per_tensor(routed, x, given, scales, activation_type, limit, intermediate, output, do_finalize, /):
    check_rows(x)
    require(x.dtype == torch.float8_e4m3fn, "hidden_states", x.dtype, "float8_e4m3fn")
    act, gated = activation(activation_type, None, None, limit, routed.experts, x.device)
    names = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
    scale_out, scale, second = (
        experts.per_expert(name, value, routed.experts, x.device) for name, value in zip(names, scales)
    )
    for name, value in zip(names, (scale_out, scale, second)):
        require(value is not None, name, None, "a float32 tensor")
    weights = []
    for name, codes, paired in zip(("gemm1_weights", "gemm2_weights"), given, (gated, False)):
        codes, _ = check_weights(name, codes, _E4M3, 8, WeightLayout.MajorK)
        weights.append(experts.Weight(name, codes, "fp8", paired=paired, shuffle=32))
    between = experts.Between("fp8", scale=scale, scale_out=scale_out, ratio=gated, second=second)
    return finished(experts.Tokens(x, "fp8"), routed, weights, act, between, intermediate, output, do_finalize)

"""Mixtures of experts by TensorRT-LLM's names: weights of 4-bit integers with block scales."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.fused_moe import experts
from flashinfer.fused_moe.trtllm import activation, check_rows, check_valid, finished, routed_by_ids, routed_by_logits
from flashinfer.ops import layouts
from flashinfer.ops.moe.experts import extents
from flashinfer.tllm_enums import ActivationType


@checked
def trtllm_mxint4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
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
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> list[torch.Tensor]:
    """A mixture of experts in bfloat16 with weights of 4-bit integers, from router logits. Its activation is SwiGLU.

    Parameters
    ----------
    routing_logits, routing_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, num_experts, top_k, n_group
        As in `trtllm_bf16_moe`.
    hidden_states : torch.Tensor
        bfloat16 [tokens, hidden], contiguous rows.
    gemm1_weights : torch.Tensor
        uint8 [local_num_experts, 2 * intermediate_size, hidden / 2], two's complement halves of bytes, the first in the
        low half; or in blocks of 128 bytes, [., hidden / 256, rows, 128], as `flashinfer.fused_moe` makes them with
        convert_to_block_layout. Rows alternate, up and gate, and are then where `flashinfer.shuffle_matrix_a` with an
        epilogue tile of 128 puts them.
    gemm1_weights_scale : torch.Tensor
        bfloat16, one for 32 elements, for the rows where they are, in 128x4 tiles, as
        `flashinfer.block_scale_interleave` gives them: rows x hidden / 32 for each expert.
    gemm2_weights, gemm2_weights_scale : torch.Tensor
        The same, of [local_num_experts, hidden, intermediate_size], rows shuffled only.
    topk_group, intermediate_size, local_expert_offset, local_num_experts, routed_scaling_factor
        As in `trtllm_bf16_moe`.
    routing_method_type, do_finalize, enable_pdl, output, tune_max_num_tokens, norm_topk_prob
        As in `trtllm_bf16_moe`.
    routing_replay_out
        As in `trtllm_bf16_moe`.
    valid_hidden_size, valid_intermediate_size : int, optional
        Sizes without padding. The result has the first alone; padding of the input and of the weights has to be zeros.

    Returns
    -------
    list of torch.Tensor
        [output], bfloat16 [tokens, hidden]; without `do_finalize` as in `flashinfer.fused_moe.trtllm_bf16_moe`.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Notes
    -----
    An integer times its scale is rounded to bfloat16 before it is multiplied.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = torch.randn(2, 128).bfloat16(), torch.zeros(4, 256, 64).byte(), torch.zeros(4, 128, 64).byte()
    >>> s1, s2 = torch.zeros(4, 256, 4).bfloat16(), torch.zeros(4, 128, 4).bfloat16()
    >>> logits, renormalize = torch.randn(2, 4), flashinfer.fused_moe.RoutingMethodType.Renormalize
    >>> (out,) = flashinfer.fused_moe.trtllm_mxint4_block_scale_moe(logits, None, x, w1, s1, None, None,
    ...     None, w2, s2, 4, 2, None, None, 128, 0, 4, None, renormalize)
    >>> out.shape
    torch.Size([2, 128])
    """
    check_rows(hidden_states)
    sizes = hidden_states.shape[1], intermediate_size
    valid = check_valid(*sizes, valid_hidden_size, valid_intermediate_size, do_finalize)
    routed = routed_by_logits(
        routing_logits, routing_bias, num_experts, top_k, n_group, topk_group,
        (local_expert_offset, local_num_experts), routed_scaling_factor, routing_method_type, norm_topk_prob,
        routing_replay_out,
    )  # fmt: skip
    shape = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    given = (gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale)
    return _mxint4(routed, hidden_states, given, shape, intermediate_size, valid, output, do_finalize)


@checked
def trtllm_mxint4_block_scale_routed_moe(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
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
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> list[torch.Tensor]:
    """`trtllm_mxint4_block_scale_moe` of experts that are already chosen.

    Parameters
    ----------
    topk_ids : torch.Tensor
        int32 [tokens, top_k], each with its expert and weight, packed as in
        `flashinfer.fused_moe.trtllm_bf16_routed_moe`.
    hidden_states, gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, valid_hidden_size
        As in `trtllm_mxint4_block_scale_moe`.
    valid_intermediate_size
        As in `trtllm_mxint4_block_scale_moe`.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit, num_experts, top_k, intermediate_size, local_expert_offset
        As in `flashinfer.trtllm_bf16_moe`.
    local_num_experts, do_finalize, enable_pdl, output, tune_max_num_tokens
        As in `flashinfer.trtllm_bf16_moe`.
    gemm1_lora_delta
        As in `flashinfer.fused_moe.trtllm_bf16_routed_moe`.
    n_group, topk_group, routed_scaling_factor, routing_method_type
        Have no effect: they say how the experts were chosen.

    Returns
    -------
    list of torch.Tensor
        [output], bfloat16 [tokens, hidden]; without `do_finalize`, and with `gemm1_lora_delta`, as in
        `flashinfer.fused_moe.trtllm_bf16_routed_moe`.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = torch.randn(2, 128).bfloat16(), torch.zeros(4, 256, 64).byte(), torch.zeros(4, 128, 64).byte()
    >>> s1, s2 = torch.zeros(4, 256, 4).bfloat16(), torch.zeros(4, 128, 4).bfloat16()
    >>> chosen = torch.tensor([[0, 1], [2, 3]]).int() << 16  # weights of 0
    >>> (out,) = flashinfer.fused_moe.trtllm_mxint4_block_scale_routed_moe(chosen, x, w1, s1, None, None,
    ...     None, w2, s2, 4, 2, None, None, 128, 0, 4, None)
    >>> out.shape
    torch.Size([2, 128])
    """
    check_rows(hidden_states)
    sizes = hidden_states.shape[1], intermediate_size
    valid = check_valid(*sizes, valid_hidden_size, valid_intermediate_size, do_finalize)
    local = (local_expert_offset, local_num_experts)
    routed = routed_by_ids(topk_ids, num_experts, top_k, local, delta=gemm1_lora_delta)
    shape = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    given = (gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale)
    return _mxint4(routed, hidden_states, given, shape, intermediate_size, valid, output, do_finalize)


def _mxint4(routed, hidden_states, given, shape, intermediate_size, valid, output, do_finalize) -> list[torch.Tensor]:
    require(hidden_states.dtype == torch.bfloat16, "hidden_states", hidden_states.dtype, "bfloat16")
    alpha, beta, limit = shape
    act, _ = activation(ActivationType.Swiglu, alpha, beta, limit, routed.experts, hidden_states.device)
    weights = []
    for name, (codes, scale), paired in zip(("gemm1_weights", "gemm2_weights"), given, (True, False)):
        require(codes.dtype == torch.uint8, name, codes.dtype, "uint8")
        require(codes.dim() in (3, 4), name, tuple(codes.shape), "three dimensions, or four in blocks")
        block = 128 if codes.dim() == 4 else 0
        fits = not block or codes.shape[3] == block
        require(fits, name, tuple(codes.shape), "[experts, columns / 256, rows, 128]")
        n, k = extents(codes, "mxint4", block)
        require(scale.dtype == torch.bfloat16, f"{name}_scale", scale.dtype, "bfloat16")
        high, wide = layouts.padded(n, k // 32, "128x4")
        fits = scale.numel() == len(codes) * high * wide and scale.is_contiguous()
        require(fits, f"{name}_scale", tuple(scale.shape), f"{high} x {wide} for each expert, contiguous")
        scale = scale.view(len(codes), high * wide)
        weights.append(experts.Weight(name, codes, "mxint4", scale, "128x4", None, paired, 32, block))
    tokens = experts.Tokens(hidden_states, "bf16")
    between = experts.Between()
    done = finished(tokens, routed, weights, act, between, intermediate_size, output, do_finalize, hidden=valid)
    return done if isinstance(done, list) else [done]

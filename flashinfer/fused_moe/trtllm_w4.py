"""Mixtures of experts by TensorRT-LLM's names: weights of four bits, NVFP4 and MXFP4."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.fused_moe import experts
from flashinfer.fused_moe.trtllm import activation, check_rows, check_valid, finished, routed_by_ids, routed_by_logits
from flashinfer.fused_moe.trtllm_fp8 import byte_factors
from flashinfer.ops import layouts
from flashinfer.ops.formats import FACTOR_DTYPES
from flashinfer.quantization._rows import layout_name
from flashinfer.tllm_enums import ActivationType, RoutingMethodType, SfLayout

_FP4 = (torch.uint8, torch.float4_e2m1fn_x2)


@checked
def trtllm_fp4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
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
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    num_fused_shared_experts: int | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """A mixture of experts with NVFP4 or MXFP4 weights, from router logits.

    With the halves u (up) and g (gate) of ``hidden_states @ gemm1_weights[e].T + gemm1_bias[e]``, block scales inside,
    and c, d and f the elements of output1_scale_scalar, output1_scale_gate_scalar and output2_scale_scalar, or 1::

        h = c * u * act(d * g)                or, without a gate, h = c * act(d * u)
        result of e = f * (h @ gemm2_weights[e].T) + gemm2_bias[e]

    where h is quantised as hidden_states is. A bias is of the product times d: it is added behind it.

    Parameters
    ----------
    routing_logits, routing_bias, num_experts, top_k, n_group, topk_group, intermediate_size
        As in `trtllm_bf16_moe`.
    hidden_states : torch.Tensor
        bfloat16 [tokens, hidden]; or float8_e4m3fn, MXFP8 with scales and as it is without; or NVFP4, uint8
        [tokens, hidden / 2], two e2m1 a byte with the first in the low half. Contiguous rows.
    hidden_states_scale : torch.Tensor, optional
        Bytes: ue8m0 for 32 of MXFP8, e4m3 for 16 of NVFP4; [tokens, blocks].
    gemm1_weights : torch.Tensor
        uint8 [experts, 2 * intermediate_size, hidden / 2] of a gated activation, whose rows alternate, up and gate;
        [., intermediate_size, .] of another. Rows are then where `flashinfer.shuffle_matrix_a` with an epilogue tile
        of 128 puts them.
    gemm1_weights_scale : torch.Tensor
        Bytes, for the rows where they are, in 128x4 tiles: what `flashinfer.shuffle_matrix_sf_a` gives. e4m3 for 16
        elements makes the weights NVFP4, ue8m0 for 32 MXFP4; their number tells which.
    gemm1_bias, gemm2_bias : torch.Tensor, optional
        [experts, rows], float32 or bfloat16, in the order in which the weights' rows are.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit : torch.Tensor, optional
        float32 [experts], as in `flashinfer.fused_moe.trtllm_bf16_moe`, of the products times d.
    gemm2_weights, gemm2_weights_scale : torch.Tensor
        The same, of [experts, hidden, intermediate_size], rows shuffled only.
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar : torch.Tensor, optional
        float32 [experts]. The first two come together; with a bias, a limit or beta both halves have the scale d.
    local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type, do_finalize, enable_pdl
        As in `trtllm_bf16_moe`.
    activation_type, output, tune_max_num_tokens, norm_topk_prob, routing_replay_out
        As in `trtllm_bf16_moe`.
    per_token_scale : torch.Tensor, optional
        float32 [tokens] or [tokens, 1], of NVFP4 rows: a factor of each, as `flashinfer.nvfp4_quantize` with
        `per_token_activation` gives it. The rows between the products then have scales of their own, too: the largest
        magnitude over 448 * 6.
    num_fused_shared_experts : int, optional
        As in `flashinfer.fused_moe.trtllm_fp8_block_scale_moe`.
    valid_hidden_size, valid_intermediate_size : int, optional
        Sizes without padding. The result has the first alone; padding of the input and of the weights has to be zeros.
    hidden_states_scale_layout : SfLayout, optional
        Of hidden_states_scale, or its number; None is row-major.

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
    Codes are multiplied exactly, in bfloat16 with their scales, on every chip; weights move as four bits.

    References
    ----------
    OCP Microscaling Formats Specification 1.0; NVIDIA, PTX ISA, block scaling of mma (NVFP4 and the tiles of scale
    factors)

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = torch.randn(2, 128).bfloat16(), torch.zeros(4, 256, 64).byte(), torch.zeros(4, 128, 64).byte()
    >>> s1, s2 = torch.zeros(4, 256, 8).byte(), torch.zeros(4, 128, 8).byte()  # e4m3, of 16 elements: nvfp4
    >>> logits, renormalize, nones = torch.randn(2, 4), flashinfer.RoutingMethodType.Renormalize, (None,) * 4
    >>> (out,) = flashinfer.trtllm_fp4_block_scale_moe(logits, None, x, None, w1, s1, *nones, w2, s2, *nones,
    ...     4, 2, None, None, 128, 0, 4, None, renormalize)
    >>> out.shape
    torch.Size([2, 128])
    """
    routed = routed_by_logits(
        routing_logits, routing_bias, num_experts, top_k, n_group, topk_group,
        (local_expert_offset, local_num_experts), routed_scaling_factor, routing_method_type, norm_topk_prob,
        routing_replay_out, shared=num_fused_shared_experts,
    )  # fmt: skip
    given = [(gemm1_weights, gemm1_weights_scale, gemm1_bias), (gemm2_weights, gemm2_weights_scale, gemm2_bias)]
    scales = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    act = activation(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, routed.experts, hidden_states.device)
    tokens = _tokens(hidden_states, hidden_states_scale, hidden_states_scale_layout)
    tokens = _of_row_scale(tokens, per_token_scale)
    valid = (valid_hidden_size, valid_intermediate_size)
    return _fp4(routed, tokens, given, act, scales, intermediate_size, valid, output, do_finalize)


@checked
def trtllm_fp4_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
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
    activation_type: int = ActivationType.Swiglu.value,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """`trtllm_fp4_block_scale_moe` of experts that are already chosen.

    Parameters
    ----------
    topk_ids : torch.Tensor or (torch.Tensor, torch.Tensor)
        int32 [tokens, top_k], packed; or ids and weights: as in `flashinfer.fused_moe.trtllm_bf16_routed_moe`.
    routing_bias, n_group, topk_group, routed_scaling_factor, routing_method_type
        Have no effect but for `num_fused_shared_experts`: they say how the experts were chosen.
    hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta
        As in `trtllm_fp4_block_scale_moe`.
    gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias, output1_scale_scalar, output1_scale_gate_scalar
        As in `trtllm_fp4_block_scale_moe`.
    output2_scale_scalar, per_token_scale, valid_hidden_size, valid_intermediate_size, hidden_states_scale_layout
        As in `trtllm_fp4_block_scale_moe`.
    num_experts, top_k, intermediate_size, local_expert_offset, local_num_experts, do_finalize, enable_pdl
        As in `flashinfer.trtllm_bf16_moe`.
    activation_type, output, tune_max_num_tokens
        As in `flashinfer.trtllm_bf16_moe`.
    gemm1_lora_delta : torch.Tensor, optional
        As in `flashinfer.fused_moe.trtllm_bf16_routed_moe`. It is added as it is, after output1_scale_gate_scalar and
        the bias.
    num_fused_shared_experts : int, optional
        More than None or 0 only with DeepSeekV3 and all experts on this rank: then `topk_ids` has [tokens, top_k +
        num_fused_shared_experts], of which the shared ones are `num_experts` and on, and weights have as many experts.

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
    >>> s1, s2 = torch.zeros(4, 256, 8).byte(), torch.zeros(4, 128, 8).byte()  # e4m3, of 16 elements: nvfp4
    >>> chosen, nones = (torch.tensor([[0, 1], [2, 3]]).int(), torch.full((2, 2), 0.5)), (None,) * 4
    >>> (out,) = flashinfer.trtllm_fp4_block_scale_routed_moe(chosen, None, x, None, w1, s1, *nones, w2, s2,
    ...     *nones, 4, 2, None, None, 128, 0, 4, None)
    >>> out.shape
    torch.Size([2, 128])
    """
    shared, whole = num_fused_shared_experts or 0, (local_expert_offset, local_num_experts) == (0, num_experts)
    fits = shared == 0 or (shared > 0 and whole and routing_method_type == RoutingMethodType.DeepSeekV3)
    require(fits, "num_fused_shared_experts", shared, "0 or, with DeepSeekV3 and all experts on this rank, more")
    local = (local_expert_offset, local_num_experts + shared)
    routed = routed_by_ids(topk_ids, num_experts + shared, top_k + shared, local, delta=gemm1_lora_delta)
    given = [(gemm1_weights, gemm1_weights_scale, gemm1_bias), (gemm2_weights, gemm2_weights_scale, gemm2_bias)]
    scales = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    act = activation(activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, routed.experts, hidden_states.device)
    tokens = _tokens(hidden_states, hidden_states_scale, hidden_states_scale_layout)
    tokens = _of_row_scale(tokens, per_token_scale)
    valid = (valid_hidden_size, valid_intermediate_size)
    return _fp4(routed, tokens, given, act, scales, intermediate_size, valid, output, do_finalize)


def _tokens(x, scale, layout) -> experts.Tokens:
    """Rows by their dtype: bfloat16, MXFP8 or FP8, NVFP4."""
    check_rows(x)
    named = "linear" if layout is None else layout_name("hidden_states_scale_layout", layout)
    name = "hidden_states_scale"
    if x.dtype == torch.bfloat16 or (x.dtype == torch.float8_e4m3fn and scale is None):
        require(scale is None, name, "a tensor", "None with bfloat16")
        return experts.Tokens(x, "bf16" if x.dtype == torch.bfloat16 else "fp8")
    dtypes = (torch.float8_e4m3fn, *_FP4)
    require(x.dtype in dtypes, "hidden_states", x.dtype, "bfloat16, float8_e4m3fn, uint8")
    encoding = "mxfp8" if x.dtype == torch.float8_e4m3fn else "nvfp4"
    x = x if encoding == "mxfp8" else x.view(torch.uint8)
    blocks = x.shape[1] * (1 if encoding == "mxfp8" else 2) // experts.room.WIDTH[encoding]
    if named == "linear":
        return experts.Tokens(x, encoding, byte_factors(name, scale, len(x), blocks))
    require(isinstance(scale, torch.Tensor), name, scale, "a tensor of bytes")
    high, wide = layouts.padded(len(x), blocks, named)
    fits = scale.dtype in FACTOR_DTYPES and scale.numel() == high * wide and scale.is_contiguous()
    require(fits, name, f"{scale.dtype} {tuple(scale.shape)}", f"{high} x {wide} bytes, {named}")
    return experts.Tokens(x, encoding, scale.view(torch.uint8).view(-1), named)


def _of_row_scale(tokens: experts.Tokens, scale: torch.Tensor | None) -> experts.Tokens:
    if scale is None:
        return tokens
    count, name = len(tokens.codes), "per_token_scale"
    require(tokens.encoding == "nvfp4", name, "a tensor", "None, but with rows in NVFP4")
    require(scale.dtype == torch.float32, name, scale.dtype, "float32")
    require(scale.numel() == count, name, tuple(scale.shape), f"({count},), one for each token")
    near = scale.device == tokens.codes.device
    require(near, name, f"a tensor on {scale.device}", f"{tokens.codes.device}, where hidden_states is")
    return tokens._replace(row_scale=scale.reshape(-1).contiguous())


def _fp4(routed, tokens, given, act, scales, intermediate, valid, output, do_finalize, /) -> list[torch.Tensor]:
    act, gated = act
    device, count = tokens.codes.device, routed.experts
    hidden = tokens.codes.shape[1] * (2 if tokens.encoding == "nvfp4" else 1)
    valid = check_valid(hidden, intermediate, valid[0], valid[1], do_finalize)
    weights = []
    for name, (codes, scale, bias), paired in zip(("gemm1_weights", "gemm2_weights"), given, (gated, False)):
        require(codes.dtype in _FP4, name, codes.dtype, "uint8")
        require(codes.dim() == 3, name, tuple(codes.shape), "[experts, rows, columns / 2]")
        _, n, half = codes.shape
        named = f"{name}_scale"
        require(scale.dtype in FACTOR_DTYPES, named, scale.dtype, "uint8, float8_e4m3fn, float8_e8m0fnu")
        sizes = {name: layouts.padded(n, 2 * half // width, "128x4") for name, width in (("nvfp4", 16), ("mxfp4", 32))}
        require(half > 32, name, tuple(codes.shape), "more than 64 columns: with fewer, factors do not tell the format")
        per = scale.numel() // max(len(codes), 1)
        encoding = "nvfp4" if per == sizes["nvfp4"][0] * sizes["nvfp4"][1] else "mxfp4"
        blocks = 2 * half // experts.room.WIDTH[encoding]
        scale = experts.expert_factors(named, scale, len(codes), n, blocks, "128x4")
        weights.append(experts.Weight(name, codes.view(torch.uint8), encoding, scale, "128x4", bias, paired, 32))
    names = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    scale_out, scale, second = (
        experts.per_expert(name, value, count, device) for name, value in zip(names, scales)
    )
    both = (scale is None) == (scale_out is None)
    require(both, "output1_scale_gate_scalar", "one of two", "a tensor with output1_scale_scalar, None without")
    encoding, base = "" if tokens.encoding == "bf16" else tokens.encoding, None
    if tokens.row_scale is not None:
        base = torch.full((1,), 1 / (448 * 6), dtype=torch.float32, device=device)
    between = experts.Between(encoding, base, scale=scale, scale_out=scale_out, ratio=gated, second=second)
    done = finished(tokens, routed, weights, act, between, intermediate, output, do_finalize, hidden=valid)
    return done if isinstance(done, list) else [done]

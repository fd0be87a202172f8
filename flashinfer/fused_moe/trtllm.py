"""Mixtures of experts by TensorRT-LLM's names: what their calls have in common, and bfloat16."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import present, require, require_fit, same_device
from flashinfer._core.replay import replayed
from flashinfer.fused_moe import experts, routing
from flashinfer.tllm_enums import ActivationType, WeightLayout


@named(routing_method="routing_method_type")
def routed_by_logits(
    logits, bias, num_experts, top_k, n_group, topk_group, local, scaling, method, norm, replay, /, *, shared=None
) -> experts.Routed:
    """Routing of a call that has logits. local : offset and number of this rank's experts."""
    offset, count = local
    require(logits.dim() == 2 and logits.shape[1] == num_experts, "routing_logits", tuple(logits.shape),
            f"[tokens, {num_experts}], num_experts")  # fmt: skip
    shared = shared or 0
    if shared:
        fits = offset + count == num_experts
        require(fits, "num_fused_shared_experts", shared, "0, but on the rank of the last experts")
    check_local(offset, count, num_experts)
    ids, weights = routing.route(
        logits, bias, method, top_k, n_group=n_group, topk_group=topk_group, routed_scaling_factor=scaling,
        norm_topk_prob=norm, num_fused_shared_experts=shared, routing_replay_out=replay,
    )  # fmt: skip
    return experts.Routed(ids, weights, offset, count + shared, by_logits=True, ids_name="routing_logits")


def routed_by_ids(topk_ids, num_experts, top_k, local, replay=None, delta=None) -> experts.Routed:
    """Routing of a call that has ids, packed with their weights or beside them, and what adapters add."""
    offset, count = local
    check_local(offset, count, num_experts)
    ids, weights = topk_ids if isinstance(topk_ids, (tuple, list)) else (topk_ids, None)
    require_fit("topk_ids", ids, ids.dim() == 2 and ids.shape[1] == top_k, f"[tokens, {top_k}], top_k", torch.int32)
    if weights is not None:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        require(weights.dtype in dtypes, "topk_weights", weights.dtype, "float32, bfloat16, float16")
    if replay is not None:
        same_device(topk_ids=ids, routing_replay_out=replay)
        kept = present("routing_replay_out", routing.check_replay(replay, ids.shape))
        kept.copy_(ids >> 16 if weights is None else ids)
    if delta is not None:
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        require(delta.dtype in dtypes, "gemm1_lora_delta", delta.dtype, "bfloat16, float16, float32")
        delta = delta.contiguous()
    return experts.Routed(ids, weights, offset, count, delta=delta)


def check_local(offset, count, num_experts) -> None:
    fits = 0 <= offset and 1 <= count and offset + count <= num_experts
    require(fits, "local_expert_offset, local_num_experts", (offset, count), f"experts among {num_experts}")


def check_rows(x) -> None:
    require(x.dim() == 2, "hidden_states", tuple(x.shape), "[tokens, hidden]")


def check_valid(hidden, intermediate, valid_hidden_size, valid_intermediate_size, do_finalize=True) -> int:
    """Columns of the result: those of `hidden` that are no padding."""
    for name, value, size in (("valid_hidden_size", valid_hidden_size, hidden),
                              ("valid_intermediate_size", valid_intermediate_size, intermediate)):  # fmt: skip
        require(value is None or 1 <= value <= size, name, value, f"None, or 1 to {size}, the padded size")
    if valid_hidden_size is None:
        return hidden
    whole = -(-valid_hidden_size // 128) * 128 == hidden
    require(do_finalize or whole, "valid_hidden_size", valid_hidden_size, f"None or {hidden} without do_finalize")
    return valid_hidden_size if do_finalize else hidden


def check_weights(name: str, codes, dtypes, bits: int, weight_layout) -> tuple[torch.Tensor, int]:
    """Weights and their block, in stored elements, 0 for rows; a block is 128 bytes of a row."""
    layout, allowed = int(weight_layout), (WeightLayout.MajorK, WeightLayout.BlockMajorK)
    require(layout in allowed, "weight_layout", repr(weight_layout), "MajorK, BlockMajorK")
    require(codes.dtype in (*dtypes, torch.uint8), name, codes.dtype, ", ".join(map(str, (*dtypes, torch.uint8))))
    if codes.dtype == torch.uint8 and bits > 8:
        require(codes.shape[-1] % 2 == 0, name, tuple(codes.shape), "bytes of bfloat16")
        codes = codes.view(torch.bfloat16)
    require(codes.dim() in (3, 4), name, tuple(codes.shape), "[experts, rows, columns], or blocks of them")
    block = 0
    if layout == WeightLayout.BlockMajorK:
        block = 128 // codes.element_size()
        fits = codes.dim() == 4 and codes.shape[3] == block
        require(fits, name, tuple(codes.shape), f"[experts, columns / {block}, rows, {block}]")
    return codes, block


def activation(activation_type, alpha, beta, limit, count, device) -> tuple[experts.Activation, bool]:
    """The activation of a call, and whether it is gated."""
    given = {"gemm1_alpha": alpha, "gemm1_beta": beta, "gemm1_clamp_limit": limit}
    act, gated = experts.activation_of("activation_type", activation_type, **given)
    clamped = act == "clamped_relu2"
    require(not clamped, "activation_type", "ClampedRelu2", "one without a limit of its own: these calls take none")
    values = [experts.per_expert(name, value, count, device) for name, value in given.items()]
    # SiTU's tanh scales are 1 where none are given.
    numbers = experts.Numbers(1.0, 1.0) if act == "situ" else experts.Numbers(limit=experts.STEP_LIMIT)
    return experts.Activation(act, *values, numbers=numbers), gated


@replayed
def trtllm_bf16_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = WeightLayout.BlockMajorK,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    """A mixture of experts in bfloat16, from router logits.

    With experts e of a token and their weights s from `flashinfer.fused_moe.routing.route`::

        output = sum_e s_e * (act(x @ gemm1_weights[e].T) @ gemm2_weights[e].T)

    Parameters
    ----------
    routing_logits : torch.Tensor
        [tokens, num_experts]; float32, bfloat16 or float16.
    routing_bias : torch.Tensor, optional
        [num_experts]; float32, bfloat16 or float16: added to what is ranked by DeepSeekV3 and MiniMax2, and not read by
        other methods.
    hidden_states : torch.Tensor
        x, bfloat16 [tokens, hidden], contiguous rows. Zero tokens are valid.
    gemm1_weights : torch.Tensor
        bfloat16 [local_num_experts, 2 * intermediate_size, hidden] of a gated activation, the up-projection's rows
        first and then the gate's; [., intermediate_size, hidden] of another. As BlockMajorK
        [., hidden / 64, rows, 64], also as bytes (uint8, [., ., rows, 128]).
    gemm2_weights : torch.Tensor
        bfloat16 [local_num_experts, hidden, intermediate_size], or as BlockMajorK.
    num_experts, top_k : int
        Experts of the layer, and of a token.
    n_group, topk_group : int, optional
        Groups of experts, and how many of them are chosen from (DeepSeekV3).
    intermediate_size : int
        Of this rank: a slice of tensor parallelism has its own.
    local_expert_offset, local_num_experts : int
        This rank has the weights of experts from the offset on; what other experts would give is left out.
    routed_scaling_factor : float, optional
        A factor of all weights s of DeepSeekV3 and MiniMax2; not read by other methods.
    routing_method_type : int
        A `flashinfer.fused_moe.RoutingMethodType`.
    use_shuffled_weight : bool
        Rows of the weights are where `flashinfer.shuffle_matrix_a` with an epilogue tile of 128 puts them, after
        those of a gated gemm1 were made to alternate by `flashinfer.reorder_rows_for_gated_act_gemm`.
    weight_layout : int
        WeightLayout.MajorK or BlockMajorK.
    do_finalize : bool
        False: stop before the weighted sum.
    enable_pdl, tune_max_num_tokens
        Have no effect on results, and none on the launches yet.
    activation_type : int
        A `flashinfer.ActivationType`: Swiglu, Geglu, GegluTanh, SwigluStep, Situ; Relu2, Silu, Gelu, Relu, Identity.
    norm_topk_prob : bool
        False: SigmoidRenorm does not divide the weights of chosen experts by their sum. Not read by other methods.
    routing_replay_out : torch.Tensor, optional
        int16 [tokens or more, top_k]; receives the chosen experts.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit : torch.Tensor, optional
        float32 [local_num_experts], of Swiglu: gate * sigmoid(alpha * gate) * (up + beta), the gate first clamped to
        at most the limit and up to -limit ... limit. SwigluStep takes a limit, 7 by default: it clamps up and
        silu(gate). Of Situ, alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta), both 1 by default; a
        limit clamps as that of Swiglu.
    output : torch.Tensor, optional
        Receives the result; bfloat16 [tokens, hidden].

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        bfloat16 [tokens, hidden]. Without `do_finalize` [rows, weights, row]: what experts gave, bfloat16
        [rows, hidden] with padding between experts that is not written; weights [tokens, top_k], bfloat16; and int32
        [tokens * top_k], the row of each choice, -1 where another rank has it.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Notes
    -----
    Products are summed in float32; the activation's result and each expert's are rounded to bfloat16. Sums over a
    token's experts are in the order of its choices, so results repeat bit for bit.

    References
    ----------
    Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017,
    https://arxiv.org/abs/1701.06538

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.randn(shape).bfloat16() for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> logits, routing = torch.randn(2, 4).bfloat16(), flashinfer.RoutingMethodType.Renormalize
    >>> out = flashinfer.trtllm_bf16_moe(logits, None, x, w1, w2, 4, 2, None, None, 128, 0, 4, None, routing,
    ...     use_shuffled_weight=False, weight_layout=flashinfer.fused_moe.WeightLayout.MajorK)
    >>> out.shape
    torch.Size([2, 128])
    """
    local = (local_expert_offset, local_num_experts)
    routed = routed_by_logits(
        routing_logits, routing_bias, num_experts, top_k, n_group, topk_group, local, routed_scaling_factor,
        routing_method_type, norm_topk_prob, routing_replay_out,
    )  # fmt: skip
    shape = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    return _bf16(routed, hidden_states, gemm1_weights, gemm2_weights, intermediate_size, use_shuffled_weight,
                 weight_layout, do_finalize, activation_type, shape, output)  # fmt: skip


@replayed
def trtllm_bf16_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = WeightLayout.BlockMajorK,
    do_finalize: bool = True,
    enable_pdl: bool = True,
    gemm1_lora_delta: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = ActivationType.Swiglu.value,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    """`trtllm_bf16_moe` of experts that are already chosen.

    Parameters
    ----------
    topk_ids : torch.Tensor or (torch.Tensor, torch.Tensor)
        int32 [tokens, top_k], each with an expert in its upper half and its weight, as bfloat16, in the lower:
        ``expert << 16 | weight``; or int32 ids and weights (float32, bfloat16 or float16), both [tokens, top_k]. A
        choice with a negative id is left out.
    hidden_states, gemm1_weights, gemm2_weights, num_experts, top_k, intermediate_size, local_expert_offset
        As in `trtllm_bf16_moe`.
    local_num_experts, use_shuffled_weight, weight_layout, do_finalize, enable_pdl, tune_max_num_tokens
        As in `trtllm_bf16_moe`.
    activation_type, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, output
        As in `trtllm_bf16_moe`.
    n_group, topk_group, routed_scaling_factor, routing_method_type
        Have no effect: they say how the experts were chosen.
    gemm1_lora_delta : torch.Tensor, optional
        [tokens, top_k, rows of an expert's gemm1_weights]; bfloat16, float16 or float32: what adapters add to the first
        product of each choice, before the activation. The up-projection's columns come first and then the gate's,
        however the weights are arranged.
    routing_replay_out : torch.Tensor, optional
        int16 [tokens or more, top_k]; receives the experts of `topk_ids`.

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        bfloat16 [tokens, hidden]. Without `do_finalize` [rows, weights, row] as of `trtllm_bf16_moe`; weights that were
        given beside the ids are returned as they are.

        With `gemm1_lora_delta` [output, row, activated], and without `do_finalize` [rows, weights, row, activated]:
        activated is what the activation gave, bfloat16 [rows, intermediate_size], in the same rows.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.randn(shape).bfloat16() for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> chosen = torch.tensor([[0, 1], [2, 3]]).int(), torch.full((2, 2), 0.5)
    >>> out = flashinfer.trtllm_bf16_routed_moe(chosen, x, w1, w2, 4, 2, None, None, 128, 0, 4,
    ...     use_shuffled_weight=False, weight_layout=flashinfer.fused_moe.WeightLayout.MajorK)
    >>> out.shape
    torch.Size([2, 128])
    """
    local = (local_expert_offset, local_num_experts)
    routed = routed_by_ids(topk_ids, num_experts, top_k, local, routing_replay_out, gemm1_lora_delta)
    shape = (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    return _bf16(routed, hidden_states, gemm1_weights, gemm2_weights, intermediate_size, use_shuffled_weight,
                 weight_layout, do_finalize, activation_type, shape, output)  # fmt: skip


def _bf16(routed, x, w1, w2, intermediate, shuffled, layout, do_finalize, activation_type, shape, output, /):
    require(x.dtype == torch.bfloat16, "hidden_states", x.dtype, "bfloat16")
    check_rows(x)
    alpha, beta, limit = shape
    act, gated = activation(activation_type, alpha, beta, limit, routed.experts, x.device)
    weights = []
    for name, codes, paired in (("gemm1_weights", w1, gated and shuffled), ("gemm2_weights", w2, False)):
        codes, block = check_weights(name, codes, (torch.bfloat16,), 16, layout)
        shuffle = 32 if shuffled else 0
        weights.append(experts.Weight(name, codes, "bf16", paired=paired, shuffle=shuffle, block=block))
    return finished(experts.Tokens(x, "bf16"), routed, weights, act, experts.Between(), intermediate, output,
                    do_finalize)  # fmt: skip


@named(gemm1_weights_bias="gemm1_bias", gemm2_weights_bias="gemm2_bias")
def finished(tokens, routed, weights, act, between, intermediate, output, do_finalize, /, hidden=None):
    """The mixture with a bfloat16 result of `hidden` columns; without finalize, or with a delta, a list."""
    x, (first, second) = tokens.codes, weights
    hidden = x.shape[1] if hidden is None else hidden
    if second.codes.dim() == (4 if second.block else 3):
        columns = second.codes.shape[2 if second.block else 1]
        fits = hidden <= columns
        require(fits, second.name, tuple(second.codes.shape), f"{hidden} rows, the size of a result, or more")
    rows = first.codes.shape[2 if first.block else 1]
    expected = intermediate * (2 if act.act in experts.room.GATED else 1)
    require(rows == expected, first.name, tuple(first.codes.shape), f"{expected} rows for intermediate_size")
    out = experts.result("output", output, len(x), hidden, torch.bfloat16, x.device)
    results = experts.run(tokens, routed, first, act, between, second, out, do_finalize)
    return results[0] if do_finalize and routed.delta is None else results

"""`cutlass_fused_moe`: a mixture of experts that are already chosen, in the formats of CUTLASS's kernels."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import UnsupportedConfig, as_dtype, present, require
from flashinfer._core.replay import replayed
from flashinfer.fused_moe import experts
from flashinfer.ops import layouts, narrow
from flashinfer.ops.moe.experts import fragments
from flashinfer.tllm_enums import ActivationType

_PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_BYTES = (torch.uint8, torch.int64, torch.float4_e2m1fn_x2)
_NAMES = ("fc1_expert_weights", "fc2_expert_weights")
# SiTU's tanh scales of the gate and of the factor where none are given, upstream's.
SITU_SCALES = (4.0, 25.0)


@replayed
@named(fc1_expert_weights_bias="fc1_expert_biases", fc2_expert_weights_bias="fc2_expert_biases")
def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor] | None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: torch.Tensor | float | None = None,
    situ_beta: torch.Tensor | float | None = None,
    situ_linear_beta: torch.Tensor | float | None = None,
    backend: str = "cutlass",
) -> list[torch.Tensor]:
    """A mixture of experts that are already chosen: ``output = sum_e s_e * (act(x @ fc1[e].T) @ fc2[e].T)``.

    =================  ==============================  =====================================================
    weights            input                           quant_scales
    =================  ==============================  =====================================================
    as the input       bfloat16, float16, float32      None or empty
    float8_e4m3fn      float8_e4m3fn                   d1 [experts], q2 [1], d2 [experts], the input's [1]
    float8_e4m3fn,     bfloat16, float16               float32 scales of 128 x 128 weights, of fc1 and of fc2
    DeepSeek
    float8_e4m3fn,     float8_e4m3fn with input_sf,    factors of fc1, d1 [experts], factors of fc2,
    MXFP8              bfloat16, float16               d2 [experts]
    NVFP4              uint8 with input_sf,            q1, factors of fc1, d1 [experts], q2, factors of fc2,
                       bfloat16, float16               d2 [experts]
    MXFP4              as MXFP8                        as MXFP8
    MXFP4              float8_e4m3fn                   factors of fc1, d1 [experts], q2, factors of fc2,
                                                       d2 [experts]
    MXFP4, W4          bfloat16, float16               factors of fc1, factors of fc2
    INT4, W4           bfloat16, float16               factors of fc1 and of fc2, a1, a2, two empty tensors,
                                                       d1 [experts], d2 [experts]
    MXFP4, Humming     bfloat16, float16               offsets of fc1, d1 [experts], one that is not read,
                                                       offsets of fc2, d2 [experts]
    =================  ==============================  =====================================================

    A product's d multiplies it, before bias and activation. q2 multiplies what stands between the products before it is
    rounded to e4m3, or is NVFP4's global scale of it, as q1 is of an input that is not quantised yet: [1] or [experts],
    q1 [1]. a1 and a2, [hidden] or [experts, hidden] and [intermediate] or [experts, intermediate], are the same for
    each column, before it is rounded to e4m3; empty is 1. Humming's rows are rounded to e4m3 over a scale of each row.

    Parameters
    ----------
    input : torch.Tensor
        x, [tokens, hidden], contiguous rows; NVFP4 [tokens, hidden / 2]. Zero tokens are valid.
    token_selected_experts : torch.Tensor
        [tokens, top_k], int32 or int64: experts of all ranks. A negative one, or one of another rank, gives nothing.
    token_final_scales : torch.Tensor
        s, [tokens, top_k]; float32, bfloat16 or float16. None is 1.
    fc1_expert_weights : torch.Tensor
        [experts, 2 * intermediate, hidden] of a gated activation, the up-projection's rows first and then the gate's;
        [experts, intermediate, hidden] of another. FP4 as uint8, two codes a byte with the first in the low half, or
        the same memory as int64; INT4, in two's complement, as uint8.
    fc2_expert_weights : torch.Tensor
        [experts, hidden, intermediate].
    output_dtype : torch.dtype
        bfloat16, float16 or float32.
    quant_scales : list of torch.Tensor, optional
        As above. Factors of weights are a byte for each 16 (NVFP4, e4m3) or 32 elements (ue8m0), rows padded to a
        multiple of 128 and factors to one of 4, in 128x4 tiles; any one-byte dtype, or the same memory as int32. With
        `use_w4_group_scaling` they are as
        `flashinfer.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm` makes them, and the weights as
        `flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm` does: nothing in a tensor tells which they
        are, and others give wrong results. Those of INT4 are bfloat16, one for 128 elements, as are a1 and a2: as
        upstream has it, float16 tensors are their bytes. Weights and offsets of Humming's are as
        `flashinfer.fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming` makes them, and d its residual times
        64. q and d are float32.
    fc1_expert_biases, fc2_expert_biases : torch.Tensor, optional
        [experts, rows of the weights]; float32, bfloat16 or float16. That of fc2 is added on `tp_rank` 0 only.
    input_sf : torch.Tensor, optional
        Scale factors of a quantised input, in 128x4 tiles or, without `swizzled_input_sf`, [tokens, blocks].
    swiglu_alpha, swiglu_beta, swiglu_limit : torch.Tensor, optional
        float32 [experts], as gemm1_alpha, gemm1_beta and gemm1_clamp_limit of
        `flashinfer.fused_moe.trtllm_bf16_moe`.
    tp_size, tp_rank : int
        Weights are a slice of the intermediate size; ranks' results are summed by the caller.
    ep_size, ep_rank : int
        Weights are those of experts from ep_rank * experts on.
    cluster_size, cluster_rank : int
        Only 1 and 0.
    output : torch.Tensor, optional
        Receives the result; [tokens, hidden] of `output_dtype`.
    enable_alltoall, use_packed_weights, tune_max_num_tokens, enable_pdl
        Have no effect on results, and none on the launches yet.
    use_fused_finalize, profile_ids, workspace_buffer
        Have no effect on results, and none on the launches yet.
    use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling : bool
        Choose a row of the table where dtypes do not.
    min_latency_mode : bool
        Only False; the error is a NotImplementedError, too, as it is upstream.
    use_wfp4afp8_humming : bool
        The last row of the table, with `use_w4_group_scaling` or without.
    activation_type : ActivationType
        Any. ClampedRelu2 is (l * tanh(max(y, 0) / l)) ** 2 with l = `clamped_relu2_limit`; Situ is
        a * tanh(gate / a) * sigmoid(gate) * b * tanh(up / b) with a = `situ_beta` and b = `situ_linear_beta`.
    swizzled_input_sf : bool
        Whether input_sf is in 128x4 tiles.
    clamped_relu2_limit : torch.Tensor or float, optional
        l, above 0: a number or a float32 tensor of one element. With ClampedRelu2 alone, which needs it.
    situ_beta, situ_linear_beta : torch.Tensor or float, optional
        Numbers above 0, or float32 [experts]. With Situ alone; 4 and 25 by default.
    backend : str
        "cutlass" or "auto".

    Returns
    -------
    list of torch.Tensor
        [output].

    Raises
    ------
    ValueError
        A shape, dtype, device, number or combination other than the above.

    Notes
    -----
    Products are summed in float32; each expert's result is rounded to `output_dtype`, and so is the activation's, or
    quantised. Sums over a token's experts are in the order of its choices, so results repeat bit for bit. Products of
    float16 rows with MXFP4 round weights to float16: below 2^-24 they are 0, from 65520 on infinite.

    References
    ----------
    Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017,
    https://arxiv.org/abs/1701.06538; OCP Microscaling Formats Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = torch.randn(2, 64).bfloat16(), torch.randn(4, 128, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()
    >>> experts, weights = torch.tensor([[0, 3], [1, 2]]).int(), torch.full((2, 2), 0.5)
    >>> flashinfer.cutlass_fused_moe(x, experts, weights, w1, w2, torch.bfloat16, [])[0].shape
    torch.Size([2, 64])
    """
    if min_latency_mode:
        raise UnsupportedConfig("min_latency_mode: got True; allowed: False")
    for name, value, only in (("cluster_size", cluster_size, 1), ("cluster_rank", cluster_rank, 0)):
        require(value == only, name, value, str(only))
    require(backend in ("cutlass", "auto"), "backend", repr(backend), "'cutlass', 'auto'")
    require(0 <= tp_rank < tp_size, "tp_rank", tp_rank, f"0 to {tp_size - 1}, below tp_size")
    require(0 <= ep_rank < ep_size, "ep_rank", ep_rank, f"0 to {ep_size - 1}, below ep_size")
    require(input.dim() == 2, "input", tuple(input.shape), "[tokens, hidden]")
    for name, weight in (("fc1_expert_weights", fc1_expert_weights), ("fc2_expert_weights", fc2_expert_weights)):
        require(weight.dim() == 3, name, tuple(weight.shape), "[experts, rows, columns]")
    dtype = as_dtype(output_dtype, None, "output_dtype")
    require(dtype in _PLAIN, "output_dtype", dtype, "bfloat16, float16, float32")
    count, device = len(fc1_expert_weights), input.device
    routed = _routed(token_selected_experts, token_final_scales, ep_rank * count, count, device)

    shape = {"swiglu_alpha": swiglu_alpha, "swiglu_beta": swiglu_beta, "swiglu_limit": swiglu_limit}
    act, _ = experts.activation_of("activation_type", activation_type, **shape)
    shape = [experts.per_expert(name, value, count, device) for name, value in shape.items()]
    situ = {"situ_beta": situ_beta, "situ_linear_beta": situ_linear_beta}
    activation = _activation(act, shape, situ, clamped_relu2_limit, count, device)

    flags = (use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling, use_wfp4afp8_humming)
    given = (fc1_expert_weights, fc2_expert_weights)
    encoding, scales = _encoding(input, given, quant_scales, flags)
    biases = (fc1_expert_biases, fc2_expert_biases if tp_rank == 0 else None)
    first, second = _weights(encoding, given, scales, biases)
    between = _between(encoding, scales, count, fc2_expert_weights)
    if encoding == "int4":
        tokens = _columns_scaled(input, input_sf, scales["a1"], routed)
    else:
        tokens = _tokens(encoding, input, input_sf, swizzled_input_sf, scales)
    tokens = tokens._replace(name="input")
    out = experts.result("output", output, len(input), second.codes.shape[1], dtype, device)
    return experts.run(tokens, routed, first, activation, between, second, out)


def _routed(ids, weights, offset: int, count: int, device) -> experts.Routed:
    """The routing as it is given; each expert has weight 1 where there are none."""
    require(ids.dtype in (torch.int32, torch.int64), "token_selected_experts", ids.dtype, "int32, int64")
    given = torch.ones(ids.shape, dtype=torch.float32, device=device) if weights is None else weights
    weights = given if given.dim() != 2 or given.stride(1) == 1 else given.contiguous()
    allowed = (torch.float32, torch.bfloat16, torch.float16)
    require(weights.dtype in allowed, "token_final_scales", weights.dtype, "float32, bfloat16, float16")
    return experts.Routed(ids, weights, offset, count, ids_name="token_selected_experts",
                          weights_name="token_final_scales")  # fmt: skip


def _activation(act: str, shape, situ, clamp, count: int, device) -> experts.Activation:
    """shape : alpha, beta and limit of SwiGLU. situ : SiTU's two tanh scales by name. clamp : ClampedRelu2's limit."""
    numbers = [0.0, 0.0, experts.STEP_LIMIT]
    alpha, beta, limit = shape
    if act == "situ":
        for name, value in zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), shape, strict=True):
            require(value is None, name, "a tensor", "None with Situ")
        given = [_scale_of(name, value, count, device) for name, value in situ.items()]
        numbers[:2] = [number or default for (_, number), default in zip(given, SITU_SCALES, strict=True)]
        alpha, beta = (tensor for tensor, _ in given)
    else:
        for name, value in situ.items():
            require(value is None, name, value, "None but with Situ")
    if act == "clamped_relu2":
        require(clamp is not None, "clamped_relu2_limit", None, "a number above 0, or a tensor of one element")
        limit, number = _scale_of("clamped_relu2_limit", clamp, 1, device)
        limit = None if limit is None else limit.expand(count).contiguous()
        numbers[2] = number or 0.0
    else:
        require(clamp is None, "clamped_relu2_limit", clamp, "None but with ClampedRelu2")
    return experts.Activation(act, alpha, beta, limit, experts.Numbers(*numbers))


def _scale_of(name: str, value, count: int, device) -> tuple[torch.Tensor | None, float | None]:
    """A float32 tensor with `count` elements, or a number above 0; neither where nothing is given."""
    if isinstance(value, torch.Tensor):
        return experts.per_expert(name, value, count, device), None
    require(value is None or 0 < value < float("inf"), name, value, f"a number above 0, or float32 [{count}]")
    return None, None if value is None else float(value)


# What stands between the products, and the names of quant_scales, by encoding: of weights, and of other rows.
_SCALES = {
    "plain": (),
    "fp8": ("d1", "q2", "d2", "input"),
    "fp8_block": ("fc1", "fc2"),
    "mxfp8": ("fc1", "d1", "fc2", "d2"),
    "nvfp4": ("q1", "fc1", "d1", "q2", "fc2", "d2"),
    "mxfp4": ("fc1", "d1", "fc2", "d2"),
    "mxfp4_fp8": ("fc1", "d1", "q2", "fc2", "d2"),
    "mxfp4_w4": ("fc1", "fc2"),
    "int4": ("fc1", "fc2", "a1", "a2", "zeros of fc1", "zeros of fc2", "d1", "d2"),
    "humming": ("fc1", "d1", "q2", "fc2", "d2"),
}
_STORED = {"mxfp4_fp8": "mxfp4", "mxfp4_w4": "mxfp4", "humming": "mxfp4"}
# An e2m1 code in the bits of an e4m3 one, as Humming multiplies it, is its value over so much.
_HUMMING = 64.0


def _encoding(x, given, quant_scales, flags) -> tuple[str, dict[str, torch.Tensor]]:
    """The row of the table, and its scales by name."""
    deepseek, w4, mxfp8, humming = flags
    w4 = w4 or humming
    dtype, scales = given[0].dtype, list(quant_scales or ())
    one = sum(map(bool, (deepseek, w4, mxfp8))) <= 1
    require(one, "use_w4_group_scaling", flags, "one of three: DeepSeek's, W4's, MXFP8's")
    for name, weights in zip(_NAMES, given):
        require(weights.dtype == dtype, name, weights.dtype, f"{dtype}, as {_NAMES[0]}")
    if dtype in _PLAIN:
        require(x.dtype == dtype, "input", x.dtype, f"{dtype}, as the weights")
        encoding = "plain"
    elif dtype == torch.float8_e4m3fn:
        encoding = "fp8_block" if deepseek else "mxfp8" if mxfp8 else "fp8"
    else:
        require(dtype in _BYTES, _NAMES[0], dtype, "bfloat16, float16, float32, float8_e4m3fn, uint8, int64")
        if w4:
            encoding = "humming" if humming else "int4" if len(scales) == 8 else "mxfp4_w4"
        else:
            encoding = "mxfp4" if mxfp8 else "nvfp4" if len(scales) == 6 else "mxfp4_fp8"
    fits = not deepseek or encoding == "fp8_block"
    require(fits, "use_deepseek_fp8_block_scale", True, "False, but with FP8 weights")
    fits = not w4 or encoding in ("mxfp4_w4", "int4", "humming")
    require(fits, "use_wfp4afp8_humming" if humming else "use_w4_group_scaling", True, "False, but with 4-bit weights")
    fits = not mxfp8 or encoding in ("mxfp8", "mxfp4")
    require(fits, "use_mxfp8_act_scaling", True, "False, but with FP8 or FP4 weights")
    names = _SCALES[encoding]
    require(len(scales) == len(names), "quant_scales", f"{len(scales)} tensors", f"{len(names)}: {', '.join(names)}")
    return encoding, dict(zip(names, scales))


def _weights(encoding: str, given, scales, biases) -> list[experts.Weight]:
    stored = _STORED.get(encoding, encoding)
    made = []
    for name, codes, bias, factors in zip(_NAMES, given, biases, ("fc1", "fc2")):
        if encoding == "plain":
            made.append(experts.Weight(name, codes, _PLAIN[codes.dtype], bias=bias))
            continue
        if codes.dtype in _BYTES:
            codes = codes.view(torch.uint8)
        scale, layout, arranged = None, "linear", False
        _, n, k = codes.shape
        k *= 2 if stored in experts.room.PACKED else 1
        if encoding == "fp8_block":
            scale = scales[factors]
            wanted = (len(codes), -(-n // 128), -(-k // 128))
            fits = tuple(scale.shape) == wanted and scale.dtype == torch.float32 and scale.stride(2) == 1
            require(fits, f"quant_scales: {factors}", f"{scale.dtype} {tuple(scale.shape)}", f"float32 {wanted}")
        elif encoding == "int4":
            layout, scale = "strips", _group_scales(f"quant_scales: {factors}", scales[factors], len(codes), n, k)
        elif encoding in ("mxfp4_w4", "humming"):
            layout, wanted = "strips", (len(codes), k // 128, n * 4)
            scale = scales[factors].view(torch.uint8)
            fits = tuple(scale.shape) == wanted and scale.is_contiguous() and k % 128 == 0
            require(fits, f"quant_scales: {factors}", tuple(scale.shape), f"{wanted}, contiguous, of whole 128s")
            # Offsets are exponents without a bias.
            scale = scale + 127 if encoding == "humming" else scale
            arranged = fragments.fits(n, k)
            require(codes.is_contiguous() or not arranged, name, f"strides {codes.stride()}", "contiguous")
        elif encoding != "fp8":
            layout = "128x4"
            blocks = k // experts.room.WIDTH[stored]
            scale = experts.expert_factors(f"quant_scales: {factors}", scales[factors], len(codes), n, blocks, layout)
        made.append(experts.Weight(name, codes, stored, scale, layout, bias, fragments=arranged))
    return made


def _group_scales(name: str, scale, experts_: int, n: int, k: int) -> torch.Tensor:
    """Factors of 128 elements as [experts, k / 128, n]; those of 4 or 2 groups may stand together, a row's beside one
    another."""
    require(k % 128 == 0, name, f"rows of {k}", "a multiple of 128 elements")
    scale, groups = _as_bf16(name, scale), k // 128
    shape = tuple(scale.shape)
    together = next((f for f in (1, 2, 4) if groups % f == 0 and shape == (experts_, groups // f, n * f)), 0)
    fits = bool(together) and scale.is_contiguous()
    require(fits, name, shape, f"{(experts_, groups, n)}, contiguous, or 4 or 2 groups together")
    if together == 1:
        return scale
    return scale.unflatten(2, (n, together)).transpose(2, 3).reshape(experts_, groups, n).contiguous()


def _as_bf16(name: str, scale) -> torch.Tensor:
    require(scale.dtype in (torch.bfloat16, torch.float16), name, scale.dtype, "bfloat16, or its bytes as float16")
    return scale.view(torch.bfloat16)


def _column_scales(name: str, scale, count: int, n: int, device) -> torch.Tensor:
    """[1 or experts, n] in float32."""
    require(scale.device == device, name, f"a tensor on {scale.device}", f"{device}, where the rows are")
    if not scale.numel():
        return torch.ones(1, n, dtype=torch.float32, device=device)
    longer = [size for size in scale.shape if size != 1]
    fits = scale.numel() in (n, count * n) and (longer or [1])[-1] in (n, count * n)
    require(fits, name, tuple(scale.shape), f"[{n}] or [{count}, {n}]")
    return _as_bf16(name, scale).float().reshape(-1, n)


def _columns_scaled(x, factors, scale, routed) -> experts.Tokens:
    """The input in e4m3, times a scale for each column: of all experts, or of each, and then a row for each pair."""
    require(x.dtype in (torch.bfloat16, torch.float16), "input", x.dtype, "bfloat16, float16")
    require(factors is None, "input_sf", "a tensor", f"None with {x.dtype}")
    scale = _column_scales("quant_scales: a1", scale, routed.experts, x.shape[1], x.device)
    rows, each = x.float(), len(scale) > 1
    if each:
        expert = (routed.ids.long().flatten() - routed.offset).clamp(0, routed.experts - 1)
        rows, scale = rows.repeat_interleave(routed.ids.shape[1], 0), scale[expert]
    return experts.Tokens(narrow.to_fp8(rows * scale, torch.float8_e4m3fn), "fp8", of_pairs=each)


def _between(encoding, scales, count, second_weights) -> experts.Between:
    device = second_weights.device

    def vector(name, one=False):
        return experts.per_expert(f"quant_scales: {name}", scales.get(name), count, device, one)

    first, second = vector("d1", one=True), vector("d2", one=True)
    if encoding in ("plain", "mxfp4_w4"):
        return experts.Between()
    if encoding == "int4":
        for name in ("zeros of fc1", "zeros of fc2"):
            require(not scales[name].numel(), f"quant_scales: {name}", tuple(scales[name].shape), "an empty tensor")
        n = 2 * second_weights.shape[2]
        columns = _column_scales("quant_scales: a2", scales["a2"], count, n, device)
        return experts.Between("fp8_columns", scale=first, second=second, columns=columns)
    if encoding == "humming":
        both = (present(f"quant_scales: {name}", x) / _HUMMING for name, x in (("d1", first), ("d2", second)))
        return experts.Between("fp8_rows", scale=next(both), second=next(both))
    q2 = vector("q2", one=True)
    if encoding in ("fp8", "mxfp4_fp8"):
        return experts.Between("fp8", scale=first, scale_out=q2, second=second)
    middle = "mxfp8" if encoding == "mxfp4" else encoding
    return experts.Between(middle, global_scale=q2, scale=first, second=second)


def _tokens(encoding, x, factors, swizzled: bool, scales) -> experts.Tokens:
    """The input as the products read it, quantised here where it is not yet."""
    others = {"plain": _PLAIN.get(x.dtype), "mxfp4": "mxfp8", "mxfp4_fp8": "fp8", "mxfp4_w4": _PLAIN.get(x.dtype)}
    rows = others.get(encoding, encoding)
    floats = (torch.bfloat16, torch.float16)
    if encoding == "humming":
        require(x.dtype in floats, "input", x.dtype, "bfloat16, float16")
        require(factors is None, "input_sf", "a tensor", f"None with {x.dtype}")
        codes, row_scale = experts.tokens_over_rows(x)
        return experts.Tokens(codes, "fp8", row_scale=row_scale)
    if encoding in ("plain", "fp8", "mxfp4_fp8", "mxfp4_w4"):
        needed = {"plain": (x.dtype,), "mxfp4_w4": floats}.get(encoding, (torch.float8_e4m3fn,))
        require(x.dtype in needed, "input", x.dtype, ", ".join(map(str, needed)))
        require(factors is None, "input_sf", "a tensor", f"None with {x.dtype}")
        return experts.Tokens(x, rows)
    if x.dtype in floats:
        require(factors is None, "input_sf", "a tensor", f"None with {x.dtype}")
        scale = experts.per_expert("quant_scales: q1", scales.get("q1"), 1, x.device)
        codes, made = experts.quantized_tokens(x, rows, scale)
        return experts.Tokens(codes, rows, made)
    quantised = torch.float8_e4m3fn if rows == "mxfp8" else torch.uint8
    allowed = x.dtype == quantised or (rows == "nvfp4" and x.dtype in _BYTES)
    require(rows != "fp8_block", "input", x.dtype, "bfloat16, float16")
    require(allowed, "input", x.dtype, f"bfloat16, float16, {quantised}")
    x = x.view(torch.uint8) if rows == "nvfp4" else x
    layout = "128x4" if swizzled else "linear"
    blocks = x.shape[1] * (2 if rows == "nvfp4" else 1) // experts.room.WIDTH[rows]
    require(isinstance(factors, torch.Tensor), "input_sf", factors, "a tensor of bytes, as the input is quantised")
    high, wide = layouts.padded(len(x), blocks, layout)
    flat = factors.view(torch.uint8) if factors.is_contiguous() else factors
    fits = factors.is_contiguous() and layouts.holds(factors, len(x), blocks, layout)
    require(fits, "input_sf", f"{factors.dtype} {tuple(factors.shape)}", f"{high} x {wide} bytes, {layout}")
    return experts.Tokens(x, rows, flat.view(-1) if swizzled else flat.view(high, wide), layout)


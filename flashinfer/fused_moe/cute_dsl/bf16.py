"""`cute_dsl_fused_moe_bf16` and its wrapper: experts in 16 bits, already chosen."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import as_dtype, dtype_name, require, same_device
from flashinfer.compat.queries import answering
from flashinfer.fused_moe import experts
from flashinfer.fused_moe.cute_dsl.fused_moe import _activation
from flashinfer.tllm_enums import (
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
)

_HALVES = (torch.bfloat16, torch.float16)
# Rows of the up-projection, then as many of the gate, in a gated w1.
_GROUP = 32


@answering()
@checked
@named(weights="token_final_scales")
def cute_dsl_fused_moe_bf16(
    x: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    w1_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    use_fused_finalize: bool = True,
    moe_output: torch.Tensor | None = None,
    enable_pdl: bool = True,
    activation_type: int = ActivationType.Swiglu.value,
    swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
    swiglu_beta: float = DEFAULT_SWIGLU_BETA,
    swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    intermediate_buffer: torch.Tensor | None = None,
    tactic: tuple | None = None,
) -> torch.Tensor:
    """A mixture of experts that are already chosen, in bfloat16 or float16, on every chip.

    With experts e of a token and their weights s: ``output = sum_e s_e * (act(x @ w1[e].T) @ w2[e].T)``.

    Parameters
    ----------
    x : torch.Tensor
        [tokens, hidden], bfloat16 or float16, contiguous rows. Zero tokens are valid.
    token_selected_experts : torch.Tensor
        [tokens, top_k], int32 or int64: experts of all ranks. A negative one, or one of another rank, gives nothing.
    token_final_scales : torch.Tensor
        s, [tokens, top_k]; float32, bfloat16 or float16.
    w1_weight : torch.Tensor
        [local experts, 2 * intermediate, hidden] of a gated activation, of the dtype of `x`, whose rows alternate in
        groups of 32: 32 of the up-projection, then the gate's 32, and so on. Rows of halves w, up first, come so by
        ``w.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)``. Of Relu2 [., intermediate, .].
    w2_weight : torch.Tensor
        [local experts, hidden, intermediate], in plain order of rows.
    num_experts, top_k : int
        Experts of the layer, and of a token.
    num_local_experts, local_expert_offset : int, optional
        This rank has the weights of so many experts, all by default, from the offset on.
    use_fused_finalize, enable_pdl, intermediate_buffer, tactic
        Have no effect on results, and none on the launches.
    moe_output : torch.Tensor, optional
        Receives the result; [tokens, hidden] of the dtype of `x`, contiguous rows.
    activation_type : int
        A `flashinfer.ActivationType`: Swiglu, GegluTanh or Relu2, which has no gate.
    swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta
        As in `flashinfer.cute_dsl_fused_moe`.

    Returns
    -------
    torch.Tensor
        [tokens, hidden] of the dtype of `x`; moe_output if given.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride, number or combination other than the above.

    Notes
    -----
    Products are summed in float32; the activation's result and each expert's are rounded to the dtype of `x`. Sums over
    a token's experts are in the order of its choices, so results repeat bit for bit.

    References
    ----------
    Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017,
    https://arxiv.org/abs/1701.06538

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, w1, w2 = (torch.randn(shape).bfloat16() for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> chosen, weights = torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5)
    >>> flashinfer.cute_dsl_fused_moe_bf16(x, chosen, weights, w1, w2, 4, 2).shape
    torch.Size([2, 128])
    """
    require(num_experts >= 1, "num_experts", num_experts, "1 or more")
    count = num_experts if num_local_experts is None else num_local_experts
    require(1 <= count <= num_experts, "num_local_experts", count, f"1 to {num_experts}, num_experts")
    fits = 0 <= local_expert_offset <= num_experts - count
    require(fits, "local_expert_offset", local_expert_offset,
            f"0 to {num_experts - count}: {count} of {num_experts} experts")  # fmt: skip
    swiglu = (swiglu_alpha, swiglu_beta, swiglu_limit)
    activation = _activation(activation_type, swiglu, (situ_beta, situ_linear_beta))
    require(x.dtype in _HALVES, "x", x.dtype, "bfloat16, float16")
    require(x.dim() == 2, "x", tuple(x.shape), "[tokens, hidden]")
    device = same_device(
        x=x, token_selected_experts=token_selected_experts, token_final_scales=token_final_scales,
        w1_weight=w1_weight, w2_weight=w2_weight, moe_output=moe_output,
    )  # fmt: skip
    shape = (len(x), top_k)
    floats = (torch.float32, *_HALVES)
    for name, value, dtypes in (
        ("token_selected_experts", token_selected_experts, (torch.int32, torch.int64)),
        ("token_final_scales", token_final_scales, floats),
    ):
        require(tuple(value.shape) == shape, name, tuple(value.shape), f"{shape}, a row of top_k for each token")
        require(value.dtype in dtypes, name, value.dtype, ", ".join(map(str, dtypes)))
    group = _GROUP if activation.act in experts.room.GATED else 0
    weights = []
    for name, codes, paired in (("w1_weight", w1_weight, group), ("w2_weight", w2_weight, 0)):
        require(codes.dtype == x.dtype, name, codes.dtype, f"{x.dtype}, as x")
        require(codes.dim() == 3, name, tuple(codes.shape), "[local experts, rows, columns]")
        fits = not paired or codes.shape[1] % (2 * paired) == 0
        require(fits, name, tuple(codes.shape), f"a multiple of {2 * paired} rows: {paired} of the up-projection, "
                f"{paired} of the gate")  # fmt: skip
        weights.append(experts.Weight(name, codes, dtype_name(x.dtype), paired=paired))
    scales = token_final_scales if token_final_scales.stride(1) == 1 else token_final_scales.contiguous()
    routed = experts.Routed(token_selected_experts, scales, local_expert_offset, count,
                            ids_name="token_selected_experts", weights_name="token_final_scales")  # fmt: skip
    out = experts.result("moe_output", moe_output, len(x), w2_weight.shape[1], x.dtype, device)
    tokens = experts.Tokens(x, dtype_name(x.dtype), name="x")
    return experts.run(tokens, routed, weights[0], activation, experts.Between(), weights[1], out)[0]


class CuteDslBf16MoEWrapper:
    """`cute_dsl_fused_moe_bf16` for a layer: what does not change from call to call is given once.

    Parameters
    ----------
    num_experts, top_k, num_local_experts, local_expert_offset, enable_pdl, use_fused_finalize, activation_type
        As in `cute_dsl_fused_moe_bf16`.
    hidden_size, intermediate_size : int
        Of the weights that `run` is given.
    output_dtype : torch.dtype
        bfloat16 or float16, that of the tensors of `run`.
    swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta
        As in `cute_dsl_fused_moe_bf16`.

    Raises
    ------
    ValueError
        A number, dtype or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> layer = flashinfer.CuteDslBf16MoEWrapper(4, 2, 128, 128)
    >>> x, w1, w2 = (torch.randn(shape).bfloat16() for shape in ((2, 128), (4, 256, 128), (4, 128, 128)))
    >>> layer.run(x, torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5), w1, w2).shape
    torch.Size([2, 128])
    """

    @checked
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        output_dtype: torch.dtype = torch.bfloat16,
        enable_pdl: bool = True,
        use_fused_finalize: bool = True,
        activation_type: int = ActivationType.Swiglu.value,
        swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
        swiglu_beta: float = DEFAULT_SWIGLU_BETA,
        swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
    ):
        activation = _activation(
            activation_type, (swiglu_alpha, swiglu_beta, swiglu_limit), (situ_beta, situ_linear_beta)
        )
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            require(size >= 1, name, size, "1 or more")
        dtype = as_dtype(output_dtype, None, "output_dtype")
        require(dtype in _HALVES, "output_dtype", dtype, "bfloat16, float16")
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_local_experts = num_experts if num_local_experts is None else num_local_experts
        self.local_expert_offset, self.output_dtype = local_expert_offset, dtype
        self.enable_pdl, self.use_fused_finalize = enable_pdl, use_fused_finalize
        self.activation_type = int(activation_type)
        self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit = swiglu_alpha, swiglu_beta, swiglu_limit
        self.situ_beta, self.situ_linear_beta = situ_beta, situ_linear_beta
        self._rows = intermediate_size * (2 if activation.act in experts.room.GATED else 1)

    @checked
    def run(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        w1_weight: torch.Tensor,
        w2_weight: torch.Tensor,
        tactic: tuple | None = None,
        moe_output: torch.Tensor | None = None,
        intermediate_buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        Parameters
        ----------
        x, token_selected_experts, token_final_scales, w1_weight, w2_weight, moe_output
            As in `cute_dsl_fused_moe_bf16`.
        tactic, intermediate_buffer
            Have no effect on results, and none on the launches.

        Returns
        -------
        torch.Tensor
            [tokens, hidden_size] of `output_dtype`; moe_output if given.

        Raises
        ------
        ValueError
            A shape, dtype, stride or device other than the above or than the constructor's sizes, by name.
        """
        require(x.dtype == self.output_dtype, "x", x.dtype, f"{self.output_dtype}, the wrapper's output_dtype")
        for name, weight, rows in (("w1_weight", w1_weight, self._rows), ("w2_weight", w2_weight, self.hidden_size)):
            fits = weight.dim() == 3 and weight.shape[1] == rows
            require(fits, name, tuple(weight.shape), f"{rows} rows for each expert, by the wrapper's sizes")
        return cute_dsl_fused_moe_bf16(
            x, token_selected_experts, token_final_scales, w1_weight, w2_weight, self.num_experts, self.top_k,
            self.num_local_experts, self.local_expert_offset, moe_output=moe_output,
            activation_type=self.activation_type, swiglu_alpha=self.swiglu_alpha, swiglu_beta=self.swiglu_beta,
            swiglu_limit=self.swiglu_limit, situ_beta=self.situ_beta, situ_linear_beta=self.situ_linear_beta,
        )  # fmt: skip

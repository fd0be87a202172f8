"""Upstream's older names for experts of MXFP8 rows and MXFP4 weights."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer.compat.queries import answering
from flashinfer.fused_moe.cute_dsl.fused_moe import CuteDslMoEWrapper, cute_dsl_fused_moe
from flashinfer.tllm_enums import (
    DEFAULT_SWIGLU_ALPHA,
    DEFAULT_SWIGLU_BETA,
    DEFAULT_SWIGLU_LIMIT,
    ActivationType,
)


@checked
@answering()
def cute_dsl_fused_moe_mxfp8_mxfp4(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    w1_weight: torch.Tensor,
    w1_weight_sf: torch.Tensor,
    w1_alpha: torch.Tensor,
    w2_weight: torch.Tensor,
    w2_weight_sf: torch.Tensor,
    w2_alpha: torch.Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    moe_output: torch.Tensor | None = None,
    aux_stream: torch.cuda.Stream | None = None,
    tactic: tuple[int, ...] | None = None,
    enable_pdl: bool = True,
    activation_type: int = ActivationType.Swiglu.value,
    swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
    swiglu_beta: float = DEFAULT_SWIGLU_BETA,
    swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
) -> torch.Tensor:
    """`flashinfer.cute_dsl_fused_moe` with ``quant_mode="w4a8"`` and a bfloat16 result, by an older name.

    Parameters
    ----------
    x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, w2_weight, w2_weight_sf
        As in `flashinfer.cute_dsl_fused_moe`.
    w2_alpha, num_experts, top_k, num_local_experts, local_expert_offset, moe_output, aux_stream, tactic, enable_pdl
        As in `flashinfer.cute_dsl_fused_moe`.
    activation_type, swiglu_alpha, swiglu_beta, swiglu_limit
        As in `flashinfer.cute_dsl_fused_moe`.

    Returns
    -------
    torch.Tensor
        bfloat16 [tokens, hidden]; moe_output if given.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride, number or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> w1, w2 = torch.zeros(4, 256, 64).byte(), torch.zeros(4, 128, 64).byte()  # 4 experts, 128 columns each way
    >>> s1, s2, ones = torch.zeros(4, 256, 4).byte(), torch.zeros(4, 128, 4).byte(), torch.ones(4)
    >>> x, x_sf = flashinfer.mxfp8_quantize(torch.randn(2, 128).bfloat16(), is_sf_swizzled_layout=False)
    >>> chosen = torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5)
    >>> flashinfer.cute_dsl_fused_moe_mxfp8_mxfp4(x, x_sf, *chosen, w1, s1, ones, w2, s2, ones, 4, 2).shape
    torch.Size([2, 128])
    """
    return cute_dsl_fused_moe(
        x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, None, w2_weight,
        w2_weight_sf, w2_alpha, num_experts, top_k, num_local_experts, local_expert_offset, moe_output=moe_output,
        aux_stream=aux_stream, enable_pdl=enable_pdl, activation_type=activation_type, swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta, swiglu_limit=swiglu_limit, quant_mode="w4a8", tactic=tactic,
    )  # fmt: skip


class CuteDslMxfp8Mxfp4MoEWrapper(CuteDslMoEWrapper):
    """`flashinfer.CuteDslMoEWrapper` with ``quant_mode="w4a8"``, by an older name.

    Parameters
    ----------
    num_experts, top_k, hidden_size, intermediate_size, max_num_tokens, num_local_experts, local_expert_offset
        As in `flashinfer.CuteDslMoEWrapper`.
    use_cuda_graph, device, enable_pdl, activation_type, swiglu_alpha, swiglu_beta, swiglu_limit
        As in `flashinfer.CuteDslMoEWrapper`.

    Raises
    ------
    ValueError
        A number, dtype or combination other than the above.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.CuteDslMxfp8Mxfp4MoEWrapper(4, 2, 128, 128, device="cpu").quant_mode
    'w4a8'
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        max_num_tokens: int | None = None,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        use_cuda_graph: bool = False,
        device: str | torch.device = "cuda",
        enable_pdl: bool = True,
        activation_type: int = ActivationType.Swiglu.value,
        swiglu_alpha: float = DEFAULT_SWIGLU_ALPHA,
        swiglu_beta: float = DEFAULT_SWIGLU_BETA,
        swiglu_limit: float = DEFAULT_SWIGLU_LIMIT,
    ):
        super().__init__(
            num_experts, top_k, hidden_size, intermediate_size, use_cuda_graph, max_num_tokens, num_local_experts,
            local_expert_offset, device=device, enable_pdl=enable_pdl, activation_type=activation_type,
            swiglu_alpha=swiglu_alpha, swiglu_beta=swiglu_beta, swiglu_limit=swiglu_limit, quant_mode="w4a8",
        )  # fmt: skip

    def run(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        w1_weight: torch.Tensor,
        w1_weight_sf: torch.Tensor,
        w1_alpha: torch.Tensor,
        w2_weight: torch.Tensor,
        w2_weight_sf: torch.Tensor,
        w2_alpha: torch.Tensor,
        tactic: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Run the layer, as `flashinfer.CuteDslMoEWrapper.run`, without its fc2_input_scale.

        Parameters
        ----------
        x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, w2_weight
            As there.
        w2_weight_sf, w2_alpha, tactic
            As there.

        Returns
        -------
        torch.Tensor
            New, bfloat16 [tokens, hidden_size].

        Raises
        ------
        ValueError
            A shape, dtype, stride or device other than the above or than the constructor's sizes, by name; another
            tactic.
        """
        return super().run(
            x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha, None, w2_weight,
            w2_weight_sf, w2_alpha, tactic,
        )  # fmt: skip

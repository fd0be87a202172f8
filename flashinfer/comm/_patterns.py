"""What each pattern of the fused all-reduce reads and writes, and the checks of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer._core.checks import check_values, require
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as P
from flashinfer.ops import layouts
from flashinfer.ops.comm.allreduce_fusion import Results, Rows


class Pattern(NamedTuple):
    """norm : a residual and an RMSNorm follow. number_format : of quantised rows. normed : the norm is written.

    source : of the rows, as the Problem has it.
    may_quantise : NVFP4 is written where quant_out is given.
    """

    norm: bool = True
    number_format: str = ""
    normed: bool = True
    source: str = ""
    may_quantise: bool = False


PATTERNS = {
    P.kAllReduce: Pattern(norm=False, normed=False),
    P.kARResidualRMSNorm: Pattern(),
    P.kARResidualRMSNormFP8Quant: Pattern(number_format="fp8", normed=False),
    P.kARResidualRMSNormFP4Quant: Pattern(number_format="nvfp4", normed=False),
    P.kARResidualRMSNormOutFP8Quant: Pattern(number_format="fp8"),
    P.kARResidualRMSNormOutFP4Quant: Pattern(number_format="nvfp4"),
    P.kMoEReductionARResidualRMSNorm: Pattern(source="reduce", may_quantise=True),
    P.kMoEFinalizeARResidualRMSNorm: Pattern(source="finalize", may_quantise=True),
    P.kARResidualRMSNormPerTokenGroupFP8PackedQuant: Pattern(number_format="fp8_group", normed=False),
    P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: Pattern(number_format="fp8_group"),
    P.kARResidualRMSNormDynamicFP8Quant: Pattern(number_format="fp8_row", normed=False),
    P.kARResidualRMSNormOutDynamicFP8Quant: Pattern(number_format="fp8_row"),
    P.kMoEFinalizeARResidualRMSNormFP8Quant: Pattern(number_format="fp8", source="finalize", normed=False),
}
_LAYOUTS = {None: "128x4", 0: "128x4", 1: "8x4", 2: "linear"}
_GROUP = 128


def given_rows(kind: Pattern, input: torch.Tensor, moe: tuple) -> tuple[Rows, int]:
    """This rank's rows, and how many tokens they are."""
    count, scales, experts, beside_reduced, index, factors, shared = moe
    reduced = {
        "moe_reduction_device_num_experts": count, "moe_reduction_scale_input": scales,
        "moe_reduction_active_experts_token_input": experts, "moe_reduction_token_input": beside_reduced,
    }  # fmt: skip
    finalised = {
        "expanded_idx_to_permuted_idx": index, "expert_scale_factor": factors, "shared_expert_output": shared,
    }  # fmt: skip
    for source, arguments in (("reduce", reduced), ("finalize", finalised)):
        for name, value in arguments.items():
            if kind.source != source:
                require(value is None, name, "a value", "None, for the pattern does not use it")
            elif name not in ("expert_scale_factor", "shared_expert_output"):
                require(value is not None, name, None, "a value, for the pattern uses it")
    require(input.is_contiguous(), "input", f"strides {input.stride()}", "a contiguous tensor")
    if not kind.norm:
        return Rows(input), 0
    require(input.dim() == 2, "input", tuple(input.shape), "[tokens, hidden]")
    hidden = input.shape[1]
    if kind.source == "reduce":
        tokens = input.shape[0]
        require(experts.numel() == count * tokens * hidden, "moe_reduction_active_experts_token_input",
                tuple(experts.shape), f"{(count, tokens, hidden)}")  # fmt: skip
        experts, scales = _like(experts, input, "moe_reduction_active_experts_token_input"), scales
        _check("moe_reduction_token_input", beside_reduced, (tokens, hidden), input.dtype)
        _check("moe_reduction_scale_input", scales, (count, tokens), torch.float32)
        return Rows(beside_reduced, experts.view(count, tokens, hidden), scales), tokens
    if kind.source == "finalize":
        require(index.dim() == 2, "expanded_idx_to_permuted_idx", tuple(index.shape), "[tokens, top_k]")
        tokens = index.shape[0]
        _check("expanded_idx_to_permuted_idx", index, tuple(index.shape), torch.int32)
        check_values("expanded_idx_to_permuted_idx", index, -(2**31), len(input) - 1)
        if factors is not None:
            _check("expert_scale_factor", factors, tuple(index.shape), factors.dtype)
            floating = factors.dtype in (torch.bfloat16, torch.float16, torch.float32)
            require(floating, "expert_scale_factor", factors.dtype, "bfloat16, float16, float32")
        if shared is not None:
            _check("shared_expert_output", shared, (tokens, hidden), input.dtype)
        return Rows(input, scales=factors, index=index, beside=shared), tokens
    return Rows(input), input.shape[0]


def check_results(
    kind: Pattern, input: torch.Tensor, tokens: int, outs: tuple, layout_code: int | None, group: int | None
) -> tuple[Results, str, str]:
    """The results, allocated where they may be; their quantised counterpart, and the layout of its scales."""
    total, residual, normed, codes, factors = outs
    number_format = kind.number_format or ("nvfp4" if kind.may_quantise and codes is not None else "")
    if not kind.norm:
        for name, value in (("residual_out", residual), ("norm_out", normed)):
            require(value is None, name, "a tensor", "None, for the pattern has no norm")
        total = torch.empty_like(input) if total is None else total
        _check("output", total, tuple(input.shape), input.dtype)
    else:
        shape = (tokens, input.shape[1])
        residual = input.new_empty(shape) if residual is None else residual
        normed = input.new_empty(shape) if normed is None and kind.normed else normed
        for name, tensor in (("output", total), ("residual_out", residual), ("norm_out", normed)):
            if tensor is not None:
                _check(name, tensor, shape, input.dtype)
    # Engines name a layout whatever the pattern: it has to be one, and only FP4 scales have it.
    layout = _LAYOUTS.get(layout_code, "")
    require(bool(layout), "layout_code", layout_code, "0 (128x4), 1 (8x4), 2 (linear)")
    if not number_format:
        for name, value in (("quant_out", codes), ("scale_out", factors)):
            require(value is None, name, "a tensor", "None, for the pattern quantises nothing")
        return Results(total, residual, normed), "", ""
    codes, factors = _quantised(number_format, layout, group, tokens, input.shape[1], codes, factors)
    return Results(total, residual, normed, codes, factors), number_format, layout if number_format == "nvfp4" else ""


def _quantised(number_format: str, layout: str, group, tokens: int, hidden: int, codes, factors):
    per = {"nvfp4": 16, "fp8_group": _GROUP}.get(number_format, 1)
    require(hidden % per == 0, "input", f"rows of {hidden}", f"rows of a multiple of {per}")
    require(codes is not None, "quant_out", None, "a tensor, for the pattern writes it")
    nbytes = tokens * hidden // (2 if number_format == "nvfp4" else 1)
    fits = codes.nbytes == nbytes and codes.is_contiguous()
    require(fits, "quant_out", f"{codes.dtype} {tuple(codes.shape)}", f"{nbytes} bytes, contiguous")
    if number_format == "fp8":
        return codes, None
    require(factors is not None, "scale_out", None, "a tensor, for the pattern writes it")
    if number_format == "fp8_row":
        _check("scale_out", factors, (tokens, 1), torch.float32)
    elif number_format == "fp8_group":
        require(group in (None, _GROUP), "block_quant_group_size", group, f"{_GROUP}")
        shape = (tokens, -(-hidden // (4 * _GROUP)))
        fits = tuple(factors.shape) == shape and factors.dtype == torch.int32
        require(fits, "scale_out", f"{factors.dtype} {tuple(factors.shape)}", f"int32 {shape}")
    else:
        high, wide = layouts.padded(tokens, hidden // 16, layout)
        fits = factors.nbytes == high * wide and factors.is_contiguous()
        require(fits, "scale_out", f"{factors.dtype} {tuple(factors.shape)}", f"{high * wide} bytes, contiguous")
    return codes, factors


def _check(name: str, tensor, shape: tuple, dtype: torch.dtype) -> None:
    fits = tuple(tensor.shape) == shape and tensor.is_contiguous()
    require(fits, name, f"{tuple(tensor.shape)}, strides {tensor.stride()}", f"{shape}, contiguous")
    require(tensor.dtype == dtype, name, tensor.dtype, f"{dtype}")


def _like(tensor: torch.Tensor, input: torch.Tensor, name: str) -> torch.Tensor:
    require(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "a contiguous tensor")
    require(tensor.dtype == input.dtype, name, tensor.dtype, f"{input.dtype}, the dtype of input")
    return tensor

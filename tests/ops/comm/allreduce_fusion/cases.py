"""Calls of the fused all-reduce, alike on every rank, and what is right about their results."""

import torch

from flashinfer.comm import AllReduceFusionPattern as P
from flashinfer.ops import layouts, narrow
from flashinfer.testing.compare import assert_bitwise, assert_close

EPS, BIAS, TOP_K, EXPERTS = 1e-5, 0.5, 3, 2
FP8 = torch.float8_e4m3fn
# pattern, how its results are quantised, the source of rows
CASES = {
    "plain": (P.kAllReduce, "", ""),
    "norm": (P.kARResidualRMSNorm, "", ""),
    "fp8": (P.kARResidualRMSNormFP8Quant, "fp8", ""),
    "fp8 out": (P.kARResidualRMSNormOutFP8Quant, "fp8", ""),
    "fp4": (P.kARResidualRMSNormFP4Quant, "nvfp4", ""),
    "fp4 out": (P.kARResidualRMSNormOutFP4Quant, "nvfp4", ""),
    "group": (P.kARResidualRMSNormPerTokenGroupFP8PackedQuant, "group", ""),
    "group out": (P.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant, "group", ""),
    "row": (P.kARResidualRMSNormDynamicFP8Quant, "row", ""),
    "row out": (P.kARResidualRMSNormOutDynamicFP8Quant, "row", ""),
    "reduce": (P.kMoEReductionARResidualRMSNorm, "", "reduce"),
    "reduce fp4": (P.kMoEReductionARResidualRMSNorm, "nvfp4", "reduce"),
    "finalize": (P.kMoEFinalizeARResidualRMSNorm, "", "finalize"),
    "finalize fp8": (P.kMoEFinalizeARResidualRMSNormFP8Quant, "fp8", "finalize"),
}
LAYOUTS = {0: "128x4", 1: "8x4", 2: "linear"}


def inputs(case, rank, world, shape, dtype, device="cpu", seed=0):
    """The tensors of a rank's call."""
    tokens, hidden = shape
    _, _, source = CASES[case]
    mine = torch.Generator().manual_seed(1000 * seed + rank)
    same = torch.Generator().manual_seed(1000 * seed + 999)

    def randn(*size, by=mine, dtype=dtype):
        return torch.randn(size, generator=by).to(dtype).to(device)

    given = {"input": randn(tokens, hidden)}
    if case != "plain":
        given |= {"residual_in": randn(tokens, hidden, by=same), "rms_gamma": randn(hidden, by=same)}
    if source == "reduce":
        given["moe_reduction_active_experts_token_input"] = randn(EXPERTS, tokens, hidden)
        given["moe_reduction_scale_input"] = randn(EXPERTS, tokens, dtype=torch.float32)
        given["moe_reduction_token_input"] = randn(tokens, hidden)
        given["moe_reduction_device_num_experts"] = EXPERTS
    elif source == "finalize":
        given["input"] = randn(tokens * TOP_K + 5, hidden)
        index = torch.randint(-1, tokens * TOP_K + 5, (tokens, TOP_K), generator=mine, dtype=torch.int32)
        given["expanded_idx_to_permuted_idx"] = index.to(device)
        if rank % 2 == 0 or case == "finalize":
            given["expert_scale_factor"] = randn(tokens, TOP_K)
        else:
            given["expert_scale_factor"] = torch.ones(tokens, TOP_K, dtype=dtype, device=device)
        given["shared_expert_output"] = randn(tokens, hidden)
    return given


def results(case, shape, dtype, device="cpu", layout=0):
    """What the call writes, poisoned, and the options that say how."""
    tokens, hidden = shape
    pattern, number_format, _ = CASES[case]
    out = {"pattern": pattern}
    if case == "plain":
        return out
    out |= {"rms_eps": EPS, "weight_bias": BIAS}
    for name in ("output", "residual_out", "norm_out"):
        out[name] = torch.full(shape, torch.nan, dtype=dtype, device=device)
    if number_format:
        wide = hidden // 2 if number_format == "nvfp4" else hidden
        out["quant_out"] = torch.full((tokens, wide), 0x55, dtype=torch.uint8, device=device)
        if number_format != "nvfp4":
            out["quant_out"] = out["quant_out"].view(FP8)
    if number_format == "fp8":
        out["scale_factor"] = torch.full((1,), 0.02, device=device)
    elif number_format == "row":
        out["scale_out"] = torch.full((tokens, 1), torch.nan, device=device)
    elif number_format == "group":
        # As DeepGEMM reads them: columns of rows padded to four.
        words = torch.full((-(-hidden // 512), -(-tokens // 4) * 4), 0x55555555, dtype=torch.int32, device=device)
        out |= {"scale_out": words.T[:tokens], "block_quant_group_size": 128}
    elif number_format == "nvfp4":
        high, wide = layouts.padded(tokens, hidden // 16, LAYOUTS[layout])
        out["scale_out"] = torch.full((high, wide), 0x55, dtype=torch.uint8, device=device)
        out |= {"scale_factor": 40.0, "layout_code": layout}
    return out


def own_rows(given):
    """A rank's rows in float64."""
    if "moe_reduction_token_input" in given:
        experts = given["moe_reduction_active_experts_token_input"].double()
        scales = given["moe_reduction_scale_input"].double()
        return given["moe_reduction_token_input"].double() + torch.einsum("eth,et->th", experts, scales)
    if "expanded_idx_to_permuted_idx" in given:
        total = given["shared_expert_output"].double().clone()
        for token, picks in enumerate(given["expanded_idx_to_permuted_idx"].tolist()):
            for choice, row in enumerate(picks):
                if row >= 0:
                    total[token] += given["expert_scale_factor"][token, choice].double() * given["input"][row].double()
        return total
    return given["input"].double()


def check(case, everyone, out, returned, two_shot=False):
    """everyone : the inputs of all ranks. out : one rank's results."""
    given = everyone[0]
    dtype = given["input"].dtype
    rows = [own_rows(each) for each in everyone]
    exact = sum(rows)
    # In the dtype: this rank's rows rounded once, added in float32, and the sum rounded.
    same = sum((row.to(dtype).float() for row in rows[1:]), rows[0].to(dtype).float()).to(dtype)
    if case == "plain":
        assert_bitwise(returned.view(same.shape), same, "the sum")
        return
    # Not every number_format of the call writes it.
    if "output" in out:
        assert_close(out["output"], same, exact, "output")
    total = exact + given["residual_in"].double()
    same_total = same + given["residual_in"]
    assert_close(out["residual_out"], same_total, total, "residual_out")
    norm = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * (given["rms_gamma"].double() + BIAS)
    same_norm = torch.nn.functional.rms_norm(same_total, same_total.shape[-1:], given["rms_gamma"] + BIAS, EPS)
    assert_close(out["norm_out"], same_norm, norm, "norm_out")
    number_format = CASES[case][1]
    written_norm = number_format == "" or case.endswith("out") or CASES[case][2] and number_format == "nvfp4"
    assert returned is (out["norm_out"] if written_norm else out["quant_out"])
    if number_format:
        _check_codes(number_format, out, out["norm_out"].float())


def _check_codes(number_format, out, norm):
    """Codes decode to the norm as nearly as their format can; scales are what their format says."""
    tokens, hidden = norm.shape
    # The norm was rounded before it got here; the codes are of the unrounded one.
    slack = 2 * torch.finfo(out["norm_out"].dtype).eps * norm.abs()
    if number_format == "nvfp4":
        layout = LAYOUTS[out["layout_code"]]
        bytes_of = out["scale_out"].view(-1)
        factors = layouts.restore(bytes_of, tokens, hidden // 16, layout).contiguous()
        assert int(bytes_of.int().sum()) == int(factors.int().sum()), "padding is not zero"
        factors = factors.view(FP8).float() / out["scale_factor"]
        decoded = narrow.from_e2m1(out["quant_out"]) * factors.repeat_interleave(16, -1)
        assert ((decoded - norm).abs() <= 1.01 * factors.repeat_interleave(16, -1) + slack).all()
        largest = norm.unflatten(-1, (-1, 16)).abs().amax(-1) / 6
        assert ((factors - largest).abs() <= 0.07 * largest + 1e-4).all()
        return
    codes = out["quant_out"].float()
    if number_format == "fp8":
        scale = out["scale_factor"].float()
        norm = norm.clamp(-448 * scale, 448 * scale)
    elif number_format == "row":
        scale = out["scale_out"]
        torch.testing.assert_close(scale, norm.abs().amax(-1, keepdim=True) / 448, rtol=0.01, atol=0)
    else:
        words = torch.empty(out["scale_out"].shape, dtype=torch.int32, device=norm.device).copy_(out["scale_out"])
        words = words.view(torch.uint8)
        assert not words[:, hidden // 128 :].any()
        scale = narrow.from_ue8m0(words[:, : hidden // 128])
        ratio = norm.unflatten(-1, (-1, 128)).abs().amax(-1) / scale
        assert (ratio <= 448).all() and (ratio > 224).all()
        scale = scale.repeat_interleave(128, -1)
    # Half a step of e4m3 is 1/16 of a normal value, and 2^-10 of a subnormal.
    assert ((codes * scale - norm).abs() <= norm.abs() / 16 + scale * 2**-10 + slack).all()

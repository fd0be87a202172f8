"""Arrangements of experts' weights against their definitions, element by element."""

import pytest
import torch

import flashinfer
from flashinfer.fused_moe import (
    convert_to_block_layout,
    core,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from flashinfer.testing.compare import assert_bitwise

U8 = torch.uint8
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_rows_by_turns():
    x = torch.randn(10, 3)
    assert core.get_reorder_rows_for_gated_act_gemm_row_indices(x).tolist() == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]
    assert_bitwise(flashinfer.reorder_rows_for_gated_act_gemm(x), x[[0, 5, 1, 6, 2, 7, 3, 8, 4, 9]])
    with pytest.raises(ValueError, match="^x: got .*allowed: "):
        flashinfer.reorder_rows_for_gated_act_gemm(x[:9])


@pytest.mark.parametrize("epilogue_tile_m", [64, 128])
def test_permutations_are_those_of_the_functions_one_after_another(epilogue_tile_m):
    w, factors, cache = torch.randn(256, 8), torch.randint(0, 256, (256, 4), dtype=U8), {}
    w2 = core.get_w2_permute_indices_with_cache(cache, w, epilogue_tile_m)
    assert_bitwise(w[w2], flashinfer.shuffle_matrix_a(w, epilogue_tile_m))
    w31 = core._maybe_get_cached_w3_w1_permute_indices(cache, w, epilogue_tile_m)
    by_turns = flashinfer.reorder_rows_for_gated_act_gemm(w)
    assert_bitwise(w[w31], flashinfer.shuffle_matrix_a(by_turns, epilogue_tile_m))
    plain = core._maybe_get_cached_w3_w1_permute_indices(cache, w, epilogue_tile_m, is_gated_act_gemm=False)
    assert_bitwise(plain, w2)
    of_factors = core.get_w2_permute_indices_with_cache(cache, factors, epilogue_tile_m, num_elts_per_sf=16)
    arranged = flashinfer.block_scale_interleave(factors[of_factors])
    assert_bitwise(arranged, flashinfer.shuffle_matrix_sf_a(factors, epilogue_tile_m))
    count = len(cache)
    assert core.get_w2_permute_indices_with_cache(cache, torch.zeros(256, 8), epilogue_tile_m) is w2
    assert len(cache) == count == 4


def test_blocks():
    x = torch.arange(6 * 8).view(6, 8)
    blocks = convert_to_block_layout(x, 4)
    assert blocks.shape == (2, 6, 4) and blocks.is_contiguous()
    assert all(blocks[b, r, c] == x[r, 4 * b + c] for b in range(2) for r in range(6) for c in range(4))
    for bad, argument in (((x, 3), "blockK"), ((x, 0), "blockK"), ((x[0], 4), "input_tensor")):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            convert_to_block_layout(*bad)


@pytest.mark.parametrize("group_size", [32, 16, 128])
def test_interleaved_scales(group_size):
    f = 128 // group_size
    scales = torch.randint(0, 256, (2, 5, 3 * f), dtype=U8)
    out = interleave_moe_scales_for_sm90_mixed_gemm(scales, group_size)
    assert out.shape == (2, 3, 5 * f) and out.is_contiguous()
    for e in range(2):
        for r in range(5):
            assert all(out[e, i // f, r * f + i % f] == scales[e, r, i] for i in range(3 * f))


def test_weights_are_taken_as_they_are():
    weight = torch.randint(0, 256, (2, 3, 64), dtype=U8)
    out = interleave_moe_weights_for_sm90_mixed_gemm(weight.transpose(1, 2), "int4")
    assert_bitwise(out, weight.transpose(1, 2).contiguous())
    assert out.is_contiguous() and out.data_ptr() != weight.data_ptr()


def decoded(codes, exponents):
    """float64 values of packed codes, times 2 to the exponent of each 32."""
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    table = torch.tensor(E2M1 + [-x for x in E2M1], dtype=torch.float64)
    return table[pairs] * torch.exp2(exponents.double()).repeat_interleave(32, -1)


def nearest(x, scale):
    """x to the nearest e2m1 times scale, ties to the even code."""
    best = min(range(8), key=lambda code: (abs(abs(x) / scale - E2M1[code]), code % 2))
    return E2M1[best] * scale * (-1 if x < 0 else 1)


@pytest.mark.parametrize(("spread", "max_range"), [(8, 11), (14, 11), (20, 3), (5, 0)])
def test_humming(spread, max_range):
    weight = torch.randint(0, 256, (3, 2, 128), dtype=U8)
    scale = torch.randint(110, 110 + spread, (3, 2, 8), dtype=U8)
    codes, offset, residual = preprocess_moe_weights_for_sm90_mixed_gemm_humming(
        weight, scale, max_range, interleave=False
    )
    assert offset.min() >= 1 and offset.max() <= max_range + 1
    assert (torch.log2(residual) % 1 == 0).all() and residual.dtype == torch.float32
    truth = decoded(weight, scale.int() - 127)
    result = decoded(codes, offset) * residual.double()[:, None, None]
    spans = scale.flatten(1).int().amax(1) - scale.flatten(1).int().amin(1)
    for expert in range(3):
        if spans[expert] <= max_range:
            assert torch.equal(result[expert], truth[expert])
        factor = (torch.exp2(offset[expert].double()) * residual[expert].double()).repeat_interleave(32, -1)
        given = zip(truth[expert].flatten().tolist(), factor.flatten().tolist())
        assert result[expert].flatten().tolist() == [nearest(*pair) for pair in given]
    arranged = preprocess_moe_weights_for_sm90_mixed_gemm_humming(weight, scale, max_range)
    assert_bitwise(arranged[0], interleave_moe_weights_for_sm90_mixed_gemm(codes))
    assert_bitwise(arranged[1], interleave_moe_scales_for_sm90_mixed_gemm(offset))
    assert_bitwise(arranged[2], residual)


W, S = torch.zeros(1, 2, 64, dtype=U8), torch.zeros(1, 2, 4, dtype=U8)
HUMMING = preprocess_moe_weights_for_sm90_mixed_gemm_humming
BAD = [
    (interleave_moe_weights_for_sm90_mixed_gemm, (W[0],), "weight"),
    (interleave_moe_weights_for_sm90_mixed_gemm, (W.int(),), "weight"),
    (interleave_moe_weights_for_sm90_mixed_gemm, (W, "fp8"), "quant_type"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (S, 48), "group_size"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (S[..., :3],), "scales"),
    (interleave_moe_scales_for_sm90_mixed_gemm, (S.float(),), "scales"),
    (HUMMING, (W[..., :32], S), "weight"),
    (HUMMING, (W, S[..., :2]), "raw_scale"),
    (HUMMING, (W, S + 255), "raw_scale"),
    (HUMMING, (W, S, 15), "max_range"),
    (core.get_w2_permute_indices_with_cache, ({}, torch.zeros(17, 2), 128), "dst_w2_weight"),
]


@pytest.mark.parametrize(("function", "arguments", "argument"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input(function, arguments, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        function(*arguments)

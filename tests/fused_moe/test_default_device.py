"""Calls inside another default device and dtype, as engines make them while they load a model."""

from contextlib import contextmanager

import pytest
import torch

from flashinfer import fused_moe, gemm
from flashinfer.testing.compare import assert_bitwise
from tests.ops.gemm import scaled
from tests.ops.moe.experts.test_experts import E, K, M, bf16_layer, chosen


@contextmanager
def other_defaults(name):
    if name == "meta device":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def results(given):
    (x, w1, w2), (ids, s), logits, (a, a_scale, b, b_scale), counts = given
    experts = dict(use_shuffled_weight=False, weight_layout=0)
    yield fused_moe.cutlass_fused_moe(x, ids, None, w1, w2, torch.bfloat16, None)[0]
    yield fused_moe.trtllm_bf16_moe(logits, None, x, w1, w2, E, K, None, None, M, 0, E, **experts)
    yield gemm.mm_bf16(x, w1[0].T)
    yield gemm.gemm_fp8_nt_groupwise(a[0], b[0], a_scale[0], b_scale[0], scale_major_mode="K")
    yield gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, counts, expected_m=4)
    workspace = torch.empty(1, dtype=torch.int8, device=x.device)
    yield gemm.SegmentGEMMWrapper(workspace).run(x, w1, 2, True, seg_lens=torch.full_like(counts, 2))


def inputs():
    x, layer = bf16_layer("cpu")[0], chosen("cpu")
    a = scaled.groupwise((2, 4, 128), "e4m3", 1, 128, "cpu")[:2]
    b = scaled.groupwise((2, 128, 128), "e4m3", 128, 128, "cpu")[:2]
    return x, layer, torch.randn(len(x[0]), E), (*a, *b), torch.tensor([4, 4], dtype=torch.int32)


@pytest.mark.parametrize("name", ["meta device", "bfloat16"])
def test_the_same_results(name):
    given = inputs()
    expected = list(results(given))
    with other_defaults(name):
        found = list(results(given))
    for number, (out, same) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise(out, same, f"result {number}")

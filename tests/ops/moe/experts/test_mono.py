"""The call by upstream's single kernel's name, against the layer in float64."""

import pytest
import torch

from flashinfer import fused_moe
from flashinfer.testing.compare import assert_bitwise
from tests.ops.moe.experts.layers import between, random, weights
from tests.ops.moe.experts.test_experts import check, way  # the fixture

E, K, H, M, TOKENS = 4, 2, 256, 128, 3
BF16 = torch.bfloat16


def chosen(logits, scoring, renormalize):
    """In float64: scores of all experts, the best K, divided by their sum or not."""
    scores = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    best, ids = scores.topk(K)
    return ids.int(), (best / best.sum(-1, keepdim=True) if renormalize else best).float()


@pytest.mark.parametrize(
    "scoring, renormalize, interleaved",
    [("softmax", True, False), ("softmax", False, True), ("sigmoid", True, True), ("sigmoid", False, False)],
)
def test_mono_moe(way, device, scoring, renormalize, interleaved):
    x = torch.randn(TOKENS, H, device=device).to(BF16)
    w1, s1, d1 = weights("fp8_block", E, 2 * M, H, device)
    w2, s2, d2 = weights("fp8_block", E, H, M, device)
    logits = torch.randn(TOKENS, E, device=device).to(BF16)
    ids, s = chosen(logits, scoring, renormalize)
    given = fused_moe.interleave_for_tma_wgmma_up(w1) if interleaved else w1
    out = torch.full_like(x, torch.nan)
    scratch = fused_moe.alloc_scratchpad(x.device)
    call = (x, logits, given, s1, w2, s2, K, scoring, renormalize, out, scratch, not interleaved)
    assert fused_moe.mono_moe(*call) is out
    xd = torch.stack([between("fp8_block")(row) for row in x.double()])
    # The truth has the up-projection first.
    check(out, xd, d1.roll(M, 1), d2, ids, s, through=between("fp8_block"))
    if renormalize:
        return
    first = out.clone()
    assert_bitwise(fused_moe.mono_moe(*call), first)
    given.view(torch.uint8).zero_()
    assert not fused_moe.mono_moe(*call).any()


def test_writes_to_weights_that_torch_does_not_count():
    x = torch.randn(TOKENS, H).to(BF16)
    (w1, s1, _), (w2, s2, _) = weights("fp8_block", E, 2 * M, H), weights("fp8_block", E, H, M)
    with torch.inference_mode():
        given = w1.clone()
        call = (x, torch.randn(TOKENS, E), given, s1, w2, s2, K)
        assert fused_moe.mono_moe(*call).any()
        given.view(torch.uint8).zero_()
        assert not fused_moe.mono_moe(*call).any()


def test_interleave():
    w = torch.arange(2 * 256).view(2, 256, 1).expand(2, 256, 3).to(torch.float32).to(torch.float8_e4m3fn)
    out = fused_moe.interleave_for_tma_wgmma_up(w)
    for block in range(2):
        for stripe in range(8):
            row, half = 128 * block + 16 * stripe, 64 * block + 8 * stripe
            assert torch.equal(out[:, row : row + 8].float(), w[:, half : half + 8].float())
            assert torch.equal(out[:, row + 8 : row + 16].float(), w[:, 128 + half : 128 + half + 8].float())
    for wrong in (w[:, :100], w.to(torch.float8_e5m2), w.bool()):
        with pytest.raises(ValueError, match="^w_fp8"):
            fused_moe.interleave_for_tma_wgmma_up(wrong)


def test_scratch_and_refusals():
    assert fused_moe.has_monomoe()
    scratch = fused_moe.alloc_scratchpad("cpu")
    assert scratch.numel() == fused_moe.get_scratchpad_size_bytes() and scratch.dtype == torch.uint8
    x = random("bf16", TOKENS, H)[0]
    (w1, s1, _), (w2, s2, _) = weights("fp8_block", E, 2 * M, H), weights("fp8_block", E, H, M)
    names = ("activations_in", "router_logits", "expert_weights_up", "expert_scales_up", "expert_weights_down")
    call = dict(zip(names, (x, torch.randn(TOKENS, E), w1, s1, w2), strict=True))
    call |= {"expert_scales_down": s2, "top_k": K}
    for wrong in (
        {"activations_in": x.half()}, {"router_logits": torch.randn(TOKENS, E + 1)},
        {"router_logits": torch.randn(TOKENS, E).double()},
        {"expert_weights_up": w1[:, :128]}, {"expert_scales_up": s1[:, :1]}, {"expert_weights_down": w2.mT},
        {"expert_scales_down": s2.double()}, {"top_k": 0}, {"scoring_func": "relu"}, {"out": x[:, :8]},
        {"scratchpad": torch.zeros(16)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
            fused_moe.mono_moe(**call | wrong)

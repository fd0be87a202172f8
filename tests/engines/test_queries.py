"""What upstream's functions answer about backends and chips, and the keyword that they all take."""

import inspect

import pytest
import torch

import flashinfer
from flashinfer import fused_moe, gemm, grouped_mm, norm, quantization, utils
from flashinfer.testing.compare import assert_bitwise

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CHOICES = {
    gemm.mm_bf16: "cutlass", gemm.bmm_bf16: "cudnn", gemm.bmm_fp8: "cublas", gemm.mm_fp8: "trtllm_low_latency",
    gemm.mm_fp4: "trtllm", gemm.mm_mxfp8: "cutlass", gemm.bmm_mxfp8: "cudnn", gemm.mm_bf16_fp4: "cute-dsl",
    gemm.prepare_bf16_fp4_weights: "cudnn", gemm.gemm_fp8_nt_groupwise: "trtllm",
    gemm.group_gemm_fp8_nt_groupwise: "cutlass", gemm.batch_deepgemm_fp8_nt_groupwise: "deepgemm",
    gemm.gemm_alpha_beta: "cutile", gemm.masked_bmm: "cutile", gemm.ragged_bmm: "cutile",
    flashinfer.grouped_mm_bf16: "cudnn", flashinfer.grouped_mm_fp8: "cudnn", flashinfer.grouped_mm_fp4: "cudnn",
    flashinfer.grouped_mm_mxfp8: "cudnn", grouped_mm.moe_gemm_fp8_nt_groupwise: "cute",
    fused_moe.fused_topk_deepseek: "default", flashinfer.top_k_varlen: "radix",
}  # fmt: skip
ALONE = [
    gemm.gemm_fp8_nt_blockscaled, gemm.fp8_blockscale_gemm_sm90, gemm.group_deepgemm_fp8_nt_groupwise,
    gemm.group_gemm_mxfp4_nt_groupwise, gemm.group_gemm_nvfp4_nt_groupwise, gemm.grouped_gemm_nt_masked,
    gemm.tinygemm_bf16, gemm.mm_M1_16_K7168_N256, gemm.tgv_gemm_sm100,
    fused_moe.cute_dsl_fused_moe_nvfp4, norm.fused_rmsnorm_silu, quantization.nvfp4_kv_quantize,
]  # fmt: skip


@pytest.mark.parametrize("function", [*CHOICES, *ALONE], ids=lambda f: f.__name__)
def test_chips(function):
    assert [function.is_compute_capability_supported(cc) for cc in (75, 80, 90, 100, 120)] == [False] + [True] * 4
    assert "skip_check" not in inspect.signature(function).parameters


@pytest.mark.parametrize("function", CHOICES, ids=lambda f: f.__name__)
def test_backends(function):
    backend = CHOICES[function]
    assert function.has_backend_choices() and function.has_backend(backend) and not function.has_backend("no such")
    assert function.is_backend_supported(backend) and function.is_backend_supported(backend, cc=90)
    assert not function.is_backend_supported(backend, 75) and not function.is_backend_supported("no such")


@pytest.mark.parametrize("function", ALONE, ids=lambda f: f.__name__)
def test_without_backends(function):
    assert not function.has_backend_choices() and not function.has_backend("cudnn")
    with pytest.raises(ValueError, match="^backend: got 'cudnn'; allowed: none"):
        function.is_backend_supported("cudnn", 90)


def test_a_denied_backend_is_one_all_the_same():
    denied = {
        gemm.mm_fp4: ["cute-dsl", "cake"], gemm.bmm_bf16: ["cake", "tgv"], gemm.bmm_fp8: ["cute-dsl"],
        gemm.gemm_fp8_nt_groupwise: ["cutile"], gemm.batch_deepgemm_fp8_nt_groupwise: ["cake"],
    }  # fmt: skip
    for function, backends in denied.items():
        for backend in backends:
            assert function.has_backend(backend) and not function.is_backend_supported(backend, 90)


def test_skip_check(device):
    """It is taken, and skips nothing."""
    a, b = torch.randn(3, 64, device=device).to(BF16), torch.randn(32, 64, device=device).to(BF16).T
    assert_bitwise(gemm.mm_bf16(a, b, skip_check=True), gemm.mm_bf16(a, b))
    one = torch.ones(1, device=device)
    given = a.to(E4M3)[None], b.T.to(E4M3)[None].mT, one, one, BF16
    assert_bitwise(gemm.bmm_fp8(*given, skip_check=False), gemm.bmm_fp8(*given))
    logits, lengths = torch.randn(2, 9, device=device), torch.tensor([9, 4], dtype=torch.int32, device=device)
    ours, theirs = (flashinfer.top_k_varlen(logits, lengths, 3, **more)[0] for more in ({"skip_check": True}, {}))
    assert_bitwise(ours, theirs)
    with pytest.raises(ValueError, match="^b: got "):
        gemm.mm_bf16(a, b[:8], skip_check=True)
    with pytest.raises(TypeError, match="skip_checks"):
        gemm.mm_bf16(a, b, skip_checks=True)


def test_unknown_backends_are_upstreams_error():
    a, b = torch.ones(2, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16).T
    assert issubclass(utils.BackendSupportedError, ValueError)
    for call in (
        lambda: gemm.mm_bf16(a, b, backend="no such"),
        lambda: gemm.bmm_bf16(a[None], b[None], backend="no such"),
        lambda: flashinfer.top_k_varlen(a, torch.tensor([4, 4]), 2, backend="no such"),
        lambda: flashinfer.mxfp8_quantize(a, backend="no such"),
    ):
        with pytest.raises(utils.BackendSupportedError, match="no such"):
            call()

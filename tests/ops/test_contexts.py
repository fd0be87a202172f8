"""Calls inside torch.device(...) and set_default_dtype: the same tensors, on the inputs' device."""

import pytest
import torch

import flashinfer
from flashinfer import logits_processor, quantization, sampling
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture


def calls(device):
    """Of each room of tokens, a call of every kind that allocates: functions without arguments."""
    x = torch.randn(3, 64, device=device).bfloat16()
    w, one = torch.ones(64, device=device).bfloat16(), torch.ones(1, device=device)
    logits = torch.randn(2, 70, device=device)
    probs = torch.softmax(logits, -1)
    q, k = torch.randn(3, 2, 64, device=device), torch.randn(3, 1, 64, device=device)
    positions = torch.arange(3, device=device, dtype=torch.int32)
    bits, indptr = torch.ones(20, dtype=torch.bool, device=device), torch.tensor([0, 5, 20], device=device)
    draft, ids = probs[:, None], torch.ones(2, 1, dtype=torch.int32, device=device)
    factors = torch.ones(128, 4, dtype=torch.uint8, device=device)
    seeds = dict(seed=3, offset=4)
    p = logits_processor
    pipe = p.LogitsPipe([p.Temperature(), p.Softmax(), p.TopK(), p.Sample()])
    return {
        "top_k": lambda: flashinfer.top_k(logits, 5, sorted=True),
        "many of top_k": lambda: flashinfer.top_k(logits, 60),
        "sampling": lambda: sampling.sampling_from_probs(probs, **seeds),
        "top-p": lambda: sampling.top_p_sampling_from_probs(probs, 0.5, return_valid=True, **seeds),
        "chain": lambda: sampling.chain_speculative_sampling(draft, ids, draft.repeat(1, 2, 1), **seeds),
        "renorm": lambda: sampling.top_p_renorm_probs(probs, 0.5),
        "mask": lambda: sampling.top_k_mask_logits(logits, 5),
        "softmax": lambda: sampling.softmax(logits, 0.5),
        "pipe": lambda: pipe(logits, temperature=0.5, top_k=3, **seeds),
        "rmsnorm": lambda: flashinfer.rmsnorm(x, w),
        "fp4 norm": lambda: flashinfer.rmsnorm_fp4quant(x, w, global_scale=3.0, is_sf_swizzled_layout=True),
        "silu": lambda: flashinfer.silu_and_mul(x),
        "nvfp4": lambda: flashinfer.nvfp4_quantize(x, 448.0),
        "nvfp4 by rows": lambda: flashinfer.nvfp4_quantize(x, 1 / 2688, per_token_activation=True),
        "global scale": lambda: quantization.make_nvfp4_global_scale(x, True),
        "mxfp4 and back": lambda: flashinfer.mxfp4_dequantize(*flashinfer.mxfp4_quantize(x)),
        "mxfp8": lambda: flashinfer.mxfp8_quantize(x),
        "fp4 to float": lambda: flashinfer.e2m1_and_ufp8sf_scale_to_float(*flashinfer.nvfp4_quantize(x, 2.0), one),
        "bits": lambda: flashinfer.segment_packbits(bits, indptr),
        "shuffle": lambda: flashinfer.shuffle_matrix_sf_a(factors, 128),
        "rope": lambda: flashinfer.apply_rope_pos_ids(q, k, positions),
        "llama 3.1": lambda: flashinfer.apply_llama31_rope_pos_ids(q, k, positions),
    }


def results_of(call):
    results = call()
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("context", ["device", "dtype"])
def test_defaults_of_torch_change_nothing(variant, device, context):
    for name, call in calls(device).items():
        expected = results_of(call)
        try:
            if context == "device":
                with torch.device("meta"):
                    found = results_of(call)
            else:
                torch.set_default_dtype(torch.bfloat16)
                found = results_of(call)
        finally:
            torch.set_default_dtype(torch.float32)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.device == theirs.device, name
            assert_bitwise(ours.view(torch.uint8), theirs.view(torch.uint8), name)

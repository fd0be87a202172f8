"""Numbers of enumerations: callers hand them over as integers, so that each is TensorRT-LLM's."""

import pytest
import torch

from flashinfer import fused_moe, tllm_enums
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise

NUMBERS = {
    "ActivationType": "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity Situ InvalidType "
    "ClampedRelu2",
    "RoutingMethodType": "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid "
    "TopKSigmoid Unspecified",
    "Fp8QuantizationType": "NoneFp8 DeepSeekFp8 MxFp8 PerTensorFp8 PerChannelFp8",
    "WeightLayout": "MajorK MajorMn BlockMajorK",
    "SfLayout": "layout_128x4 layout_8x4 layout_linear",
    "QuantFormat": "BF16 FP16 FP8PerTensor DeepSeekFp8 MXFP8 NVFP4 MXFP4 MXINT4 INT4",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    members = getattr(fused_moe if name == "QuantFormat" else tllm_enums, name)
    assert [(m.name, m.value) for m in members] == [(m, i) for i, m in enumerate(NUMBERS[name].split())]


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "QuantFormat"])
def test_a_member_is_its_number(name):
    """Calls hand members on as integers, and what a configuration shows of one gives it back."""
    kind = getattr(tllm_enums, name)
    for number, member in enumerate(kind):
        assert member == number and int(member) == number and isinstance(member, int)
        assert eval(repr(member), {name: kind}) is member


@pytest.mark.parametrize("number, function", [(6, lambda y: y.clamp(min=0) ** 2), (9, lambda y: y)])
def test_an_integer_names_an_activation(number, function, device):
    """Of experts that are identities, what is left is the activation."""
    x = generate.randn(5, 16, dtype=torch.float32, device=device).round()
    eye = torch.eye(16, device=device)[None]
    experts = torch.zeros(5, 1, dtype=torch.int32, device=device), torch.ones(5, 1, device=device)
    x, eye = x.half(), eye.half()
    (out,) = fused_moe.cutlass_fused_moe(x, *experts, eye, eye, torch.float16, [], activation_type=number)
    assert_bitwise(out, function(x) + 0)  # a sum of zeros is +0

"""SiLU gating into NVFP4, against quantising what silu_and_mul gives."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("batch", "rows", "hidden"),
    [(3, 9, 80), (2, 5, 16), (1, 3, 1040), pytest.param(4, 300, 7168, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("each", [False, True])
def test_has_the_bits_of_both_steps(variant, device, batch, rows, hidden, each):
    """The gated rows are float32 maths in both; at a boundary between two of their dtype the steps may differ."""
    a = generate.randn(batch, rows, 2 * hidden, dtype=torch.bfloat16, device=device) * 2
    gated = flashinfer.silu_and_mul(a)
    counts = torch.tensor([rows, 0, rows // 2, 10 * rows][:batch], dtype=torch.int32, device=device)
    scales = torch.tensor([5.0, 0.3, 40.0, 1.0], device=device)[: batch if each else 1]
    codes, factors = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(a, counts, scales)
    high, wide = -(-rows // 128) * 128, -(-hidden // 64) * 4
    assert codes.shape == (rows, hidden // 2, batch) and codes.permute(2, 0, 1).is_contiguous()
    assert factors.shape == (32, 4, high // 128, 4, wide // 4, batch) and factors.dtype == torch.float8_e4m3fn
    for i, count in enumerate(counts.clamp(max=rows).tolist()):
        nibbles, expected = truth.nvfp4(gated[i, :count], scales[i % len(scales)])
        assert_bitwise(codes[:count, :, i], truth.pack(nibbles))
        # [row in 32, of 4, tile, block of 4, tile] -> [row, block]
        found = factors[..., i].view(torch.uint8).permute(2, 1, 0, 4, 3).reshape(high, wide)
        assert_bitwise(found[:count, : hidden // 16].contiguous(), expected)
        assert not found[:count, hidden // 16 :].any()


def test_strides_and_4over6(variant, device):
    a = generate.randn(2, 4, 64, dtype=torch.float16, device=device)
    counts, scale = torch.tensor([3, 4], dtype=torch.int32, device=device), torch.tensor([20.0], device=device)
    recipe = flashinfer.quantization.NVFP44Over6Config(err_mode="MSE")
    for setting in (None, recipe):
        plain = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(a, counts, scale, setting)
        steps = flashinfer.scaled_fp4_grouped_quantize(flashinfer.silu_and_mul(a), counts, scale, setting)
        for axis in (0, 1, 2):
            given = generate.strided(a, axis)
            strided = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(given, counts, scale, setting)
            for x, y, z in zip(plain, strided, steps):
                for i, count in enumerate((3, 4)):
                    part = [t.view(torch.uint8)[..., i] for t in (x, y, z)]
                    part = [t[:count] if t.dim() == 2 else t.permute(2, 1, 0, 4, 3).reshape(128, -1) for t in part]
                    part = [t[:count, : 16 if t.shape[0] < 128 else 2].contiguous() for t in part]
                    assert_bitwise(part[0], part[2])
                    assert_bitwise(part[1], part[2])


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(a=torch.ones(4, 64).bfloat16()), "a"),
        (dict(a=torch.ones(2, 4, 48).bfloat16()), "a"),
        (dict(a=torch.ones(2, 4, 64)), "a"),
        (dict(mask=torch.ones(3, dtype=torch.int32)), "mask"),
        (dict(mask=torch.ones(2)), "mask"),
        (dict(a_global_sf=torch.ones(3)), "a_global_sf"),
        (dict(a_global_sf=torch.ones(1, device="meta")), "a_global_sf"),
        (dict(nvfp4_4over6=True), "nvfp4_4over6"),
    ],
)
def test_bad_input(changed, argument):
    good = dict(a=torch.ones(2, 4, 64).bfloat16(), mask=torch.ones(2, dtype=torch.int32), a_global_sf=ONE)
    flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(**(good | changed))


def test_is_a_registered_op():
    from flashinfer import activation

    codes, factors = torch.empty(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 512, dtype=torch.uint8)
    counts = torch.tensor([4, 4], dtype=torch.int32)
    given = torch.randn(2, 4, 64).half(), ONE, counts, codes, factors, "nvfp4", "128x4", ""
    torch.library.opcheck(activation.silu_quantised.op, given)


def test_compiles_without_a_break():
    a, counts = torch.randn(2, 4, 64).bfloat16(), torch.tensor([4, 4], dtype=torch.int32)

    def layer(a):
        codes, _ = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(a, counts, ONE)
        return codes, flashinfer.gelu_tanh_and_mul(a)

    for x, y in zip(torch.compile(layer, backend="aot_eager", fullgraph=True)(a), layer(a)):
        assert_bitwise(x, y)

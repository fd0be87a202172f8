"""Keys and values of latent attention in FP8, against the format's specification."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

PACK = flashinfer.concat_mla_kv_quant_fp8


def check(kv, rope, nope, **options):
    key, value = PACK(kv, rope, nope_dim=nope, **options)
    wide = rope.reshape(len(kv), 1, rope.shape[-1]).expand(-1, kv.shape[1], -1)
    assert_bitwise(key.view(torch.uint8), truth.encode("e4m3", torch.cat((kv[..., :nope], wide), -1).double()))
    assert_bitwise(value.view(torch.uint8), truth.encode("e4m3", kv[..., nope:].double()))
    return key, value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(5, 3, 128, 64, 128), (2, 2, 48, 16, 32), (3, 1, 7, 5, 9), (0, 2, 16, 16, 16)], ids=str
)
def test_bits_of_the_format(variant, device, dtype, shape):
    tokens, heads, nope, rope, wide = shape
    kv = (torch.randn(tokens, heads, nope + wide, device=device) * 200).to(dtype)
    k_pe = torch.randn(tokens, 1, rope, device=device).to(dtype)
    if tokens:
        kv[0, 0, 0], kv[0, 0, -1], kv[1, 0, 1], k_pe[0, 0, 1] = torch.inf, -torch.inf, torch.nan, 1e-9
    check(kv, k_pe, nope)
    check(generate.strided(kv, 1, 16), generate.strided(k_pe[:, 0], 0, 16), nope, backend="cake")
    check(generate.strided(kv, 2, 1), k_pe, nope)


def test_results_that_are_given(variant, device):
    kv, rope = torch.randn(4, 2, 64, device=device), torch.randn(4, 16, device=device)
    key = generate.strided(torch.zeros(4, 2, 48, dtype=torch.float8_e4m3fn, device=device), 1, 16)
    value = torch.zeros(4, 2, 32, dtype=torch.float8_e4m3fn, device=device)
    results = check(kv, rope, 32, key=key, value=value)
    assert results[0] is key and results[1] is value


KV, ROPE = torch.ones(3, 2, 64), torch.ones(3, 16)
F8 = torch.empty(3, 2, 48).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(kv_nope=KV[0]), "kv_nope"),
        (dict(kv_nope=KV.double(), k_pe=ROPE.double()), "kv_nope"),
        (dict(k_pe=ROPE[:2]), "k_pe"),
        (dict(k_pe=ROPE[None]), "k_pe"),
        (dict(k_pe=ROPE.half()), "k_pe"),
        (dict(k_pe=ROPE.to("meta")), "k_pe"),
        (dict(nope_dim=64), "nope_dim"),
        (dict(nope_dim=0), "nope_dim"),
        (dict(key=F8[..., :47]), "key"),
        (dict(key=F8.float()), "key"),
        (dict(value=F8), "value"),
        (dict(backend="fast"), "backend"),
    ],
)
def test_bad_input(changed, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*"):
        PACK(**(dict(kv_nope=KV, k_pe=ROPE, nope_dim=32) | changed))


def test_is_a_registered_op():
    from flashinfer import mla_kv_pack

    key, value = (torch.empty(3, 2, n, dtype=torch.uint8) for n in (48, 32))
    torch.library.opcheck(mla_kv_pack._pack.op, (KV, ROPE, key, value, "auto"))

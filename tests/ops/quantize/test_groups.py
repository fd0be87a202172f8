"""Groups of rows to eight bits, against the formats' specifications."""

import pytest
import torch

from flashinfer.quantization import per_token_group_quant_8bit
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

OUT = {torch.float8_e4m3fn: ("e4m3", 448), torch.float8_e5m2: ("e5m2", 57344), torch.int8: ("", 127)}


def expected(x, size, dtype, eps, power_of_two):
    """Codes and scales, every float32 operation done in float64."""
    name, largest = OUT[dtype]
    blocks = x.double().unflatten(-1, (-1, size))
    amax = blocks.abs().amax(-1)
    scale = truth.rounded(amax.where(~(amax < eps), float(torch.tensor(eps))) / largest)
    if power_of_two:
        powers = torch.tensor([2.0**i for i in range(-40, 128)], dtype=torch.float64, device=x.device)
        at = torch.searchsorted(powers, scale.nan_to_num(1, posinf=1).clamp(min=float(torch.tensor(1e-10))))
        scale = powers[at].where(scale.isfinite(), scale)
    y = truth.rounded(blocks / scale[..., None]).flatten(-2)
    if dtype == torch.int8:
        return y.nan_to_num(0).clamp(-128, 127).round().to(torch.int8), scale.float()
    return truth.encode(name, y), scale.float()


def check(x, size, dtype=torch.float8_e4m3fn, eps=1e-10, **options):
    codes, scales = per_token_group_quant_8bit(x, size, eps, None if dtype == torch.float8_e4m3fn else dtype, **options)
    want, factors = expected(x, size, dtype, eps, options.get("scale_ue8m0", False))
    assert codes.dtype == dtype and codes.is_contiguous() and scales.dtype == torch.float32
    assert_bitwise(codes if dtype == torch.int8 else codes.view(torch.uint8), want)
    assert torch.equal(scales.isnan(), factors.isnan())
    assert_bitwise(scales.nan_to_num(7.0).contiguous(), factors.nan_to_num(7.0))
    return scales


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("shape, size", [((5, 256), 128), ((2, 3, 96), 48), ((7,), 7), ((0, 64), 32), ((3, 2048), 512)])
def test_bits(variant, device, dtype, shape, size):
    x = torch.randn(shape, device=device).to(torch.bfloat16 if size == 128 else torch.float32)
    if x.dim() > 1 and len(x):
        x[0, ..., 0], x[-1, ..., :size], x[1, ..., 1] = 1e4, 0, 2.0**-30
    check(x, size, dtype)


def test_layouts_of_scales(variant, device):
    x = torch.randn(6, 256, device=device).half()
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    plain = check(x, 64)
    for options in (dict(), dict(scale_tma_aligned=True), dict(scale_ue8m0=True)):
        scales = check(x, 64, column_major_scales=True, **options)
        assert scales.shape == plain.shape and scales.stride() == (1, 8 if options.get("scale_tma_aligned") else 6)
    check(x, 64, torch.int8, eps=5.0)
    check(generate.strided(x, 1, 3), 32, torch.float8_e5m2)


X = torch.ones(3, 64)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        (dict(group_size=48), "group_size"),
        (dict(group_size=0), "group_size"),
        (dict(x=X.double()), "x"),
        (dict(dst_dtype=torch.float16), "dst_dtype"),
        (dict(eps=0.0), "eps"),
        (dict(scale_ue8m0=True), "scale_ue8m0"),
        (dict(scale_tma_aligned=True), "scale_tma_aligned"),
        (dict(x=X[None], column_major_scales=True), "column_major_scales"),
        (dict(backend="fast"), "backend"),
    ],
)
def test_bad_input(given, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*"):
        per_token_group_quant_8bit(**(dict(x=X, group_size=32) | given))


def test_is_a_registered_op():
    from flashinfer.quantization import _rows

    given = X, 32, 1e-10, torch.empty(3, 64, dtype=torch.uint8), torch.empty(3, 2), "fp8e4nv", False, "auto"
    torch.library.opcheck(_rows.quantize_groups.op, given)

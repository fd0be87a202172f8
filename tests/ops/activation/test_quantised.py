"""SiLU gating into NVFP4 and MXFP8, against the formats' specifications of what silu_and_mul gives."""

import pytest
import torch

import flashinfer
from flashinfer import SfLayout
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

LAYOUTS = {
    "128x4": {},
    "8x4": dict(is_sf_8x4_layout=True),
    "linear": dict(is_sf_swizzled_layout=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 160), (2, 3, 64), (0, 64), pytest.param((1025, 14336), marks=pytest.mark.gpu)])
def test_nvfp4(variant, device, layout, shape):
    x = generate.randn(*shape, dtype=torch.bfloat16, device=device) * 2
    scale = torch.tensor([37.0], device=device)
    codes, factors = flashinfer.silu_and_mul_nvfp4_quantize(x, scale, **LAYOUTS[layout])
    gated = flashinfer.silu_and_mul(x).flatten(0, -2)
    nibbles, expected = truth.nvfp4(gated, scale)
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors.flatten(), truth.arranged(expected, layout))
    if layout == "128x4" and len(gated):
        separate = flashinfer.nvfp4_quantize(gated, scale, SfLayout.layout_128x4)
        assert_bitwise(factors, separate[1])


def test_nvfp4_of_strides_scales_and_recipes(variant, device):
    x = generate.randn(4, 128, dtype=torch.float16, device=device)
    recipe = flashinfer.NVFP44Over6Config(err_mode="MSE")
    gated = flashinfer.silu_and_mul(x)
    for setting in (None, recipe):
        expected = flashinfer.nvfp4_quantize(gated, 20.0, nvfp4_4over6=setting)
        for given, scale in ((x, 20), (generate.strided(x, 1, 3), torch.tensor(20.0).half())):
            found = flashinfer.silu_and_mul_nvfp4_quantize(given, scale, nvfp4_4over6=setting, enable_pdl=True)
            for ours, theirs in zip(found, expected):
                assert_bitwise(ours, theirs)


@pytest.mark.parametrize("which", ["rows", "columns", "both"])
def test_mxfp8(variant, device, which):
    m, k = (128, 128) if which == "both" else (256, 128)
    x = generate.randn(m, 2 * k, dtype=torch.bfloat16, device=device) * 3
    x[3], x[7, 5] = 0, torch.inf
    # None is a flag that is not set.
    rowwise, colwise = which != "columns" or None, which != "rows" or None
    results = flashinfer.silu_and_mul_mxfp8_quantize(x, rowwise=rowwise, colwise=colwise)
    row, column, row_scales, column_scales = results
    assert [t.dtype for t in results] == [torch.float8_e4m3fn] * 2 + [torch.float8_e8m0fnu] * 2
    gated = flashinfer.silu_and_mul(x)
    for wanted, values, factors, axis in ((rowwise, row, row_scales, 0), (colwise, column, column_scales, 1)):
        if not wanted:
            assert values.numel() == factors.numel() == 0
            continue
        codes, expected = truth.mx((gated.T if axis else gated).contiguous(), "e4m3")
        assert_bitwise((values.T if axis else values).view(torch.uint8), codes)
        assert_bitwise(factors.view(torch.uint8).flatten(), truth.arranged(expected, "128x4"))
    assert not rowwise or (row.shape == (m, k) and row_scales.shape == (m, k // 32))
    assert not colwise or (column.stride() == (1, m) and column_scales.shape == (k * m // 32,))


HALF = torch.ones(128, 256).bfloat16()
BAD = [
    (lambda: flashinfer.silu_and_mul_nvfp4_quantize(HALF, 1.0, 32), "sf_vec_size"),
    (lambda: flashinfer.silu_and_mul_nvfp4_quantize(HALF[:, :48], 1.0), "input"),
    (lambda: flashinfer.silu_and_mul_nvfp4_quantize(HALF[0], 1.0), "input"),
    (lambda: flashinfer.silu_and_mul_nvfp4_quantize(HALF.float(), 1.0), "input"),
    (lambda: flashinfer.silu_and_mul_nvfp4_quantize(HALF, torch.ones(2)), "global_scale"),
    (lambda: flashinfer.silu_and_mul_nvfp4_quantize(HALF, 1.0, 16, False, True), "is_sf_8x4_layout"),
    (lambda: flashinfer.silu_and_mul_mxfp8_quantize(HALF, rowwise=False), "rowwise"),
    (lambda: flashinfer.silu_and_mul_mxfp8_quantize(HALF[:64]), "gated_input"),
    (lambda: flashinfer.silu_and_mul_mxfp8_quantize(HALF[:, :128]), "gated_input"),
    (lambda: flashinfer.silu_and_mul_mxfp8_quantize(HALF[None]), "gated_input"),
]


@pytest.mark.parametrize(("call", "argument"), BAD)
def test_bad_input(call, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        call()


@pytest.mark.parametrize("kind", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_rows_of_three_axes(variant, device, kind):
    """Also into a result whose rows have no common stride, and of no rows."""
    function = getattr(flashinfer, kind)
    x = generate.randn(2, 3, 64, dtype=torch.float32, device=device)
    expected = function(x.view(6, 64)).view(2, 3, 32)
    assert_bitwise(function(x), expected)
    out = torch.zeros(3, 2, 32, device=device).transpose(0, 1)
    assert function(x, out) is out
    assert_bitwise(out, expected)
    assert_bitwise(function(generate.strided(x, 1, 5)), expected)
    assert function(x[:, :0]).shape == (2, 0, 32)


def test_backward(device):
    shape = 128, 256
    x = (torch.randn(shape, dtype=torch.float64) * 2).to(torch.bfloat16)
    grad = torch.randn(128, 256, dtype=torch.float64)[:, ::2].to(torch.bfloat16)
    gate, up = x.double().chunk(2, 1)
    silu, step = torch.nn.functional.silu, 1e-5
    slope = (silu(gate + step) - silu(gate - step)) / (2 * step)
    expected = torch.cat((grad.double() * up * slope, grad.double() * silu(gate)), 1)
    given = x.to(device), grad.to(device)
    row, column, row_scales, column_scales = flashinfer.silu_and_mul_mxfp8_quantize_backward(*given, colwise=True)
    for codes, factors, true in ((row, row_scales, expected), (column.T, column_scales, expected.T)):
        rows, columns = true.shape
        tiles = factors.view(torch.uint8).cpu().view(rows // 128, columns // 128, 32, 4, 4)
        powers = 2.0 ** (tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns // 32).double() - 127)
        values = codes.cpu().double() * powers.repeat_interleave(32, 1)
        # Half a step of e4m3 and of bfloat16, and half of e4m3's smallest step.
        most = true.abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
        assert bool(((values - true).abs() <= true.abs() * (1 / 16 + 1 / 128) + most * 2.0**-16).all())
    empty = flashinfer.silu_and_mul_mxfp8_quantize_backward(*given)
    assert_bitwise(empty[0], row)
    assert empty[1].numel() == empty[3].numel() == 0
    with pytest.raises(ValueError, match="grad_output: got"):
        flashinfer.silu_and_mul_mxfp8_quantize_backward(given[0], given[0])
    with pytest.raises(ValueError, match="rowwise: got False"):
        flashinfer.silu_and_mul_mxfp8_quantize_backward(*given, rowwise=False)

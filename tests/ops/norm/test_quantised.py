"""Norms with quantised results.

Where every element of a row is 2 or -2 and eps is 0, the norm is the weight with the row's signs, without rounding:
then codes and scales are those of the formats' specifications, bit for bit. Elsewhere they are as near to the float64
norm as torch comes in the rows' dtype and the same format.
"""

import pytest
import torch

import flashinfer
from flashinfer import norm
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.test_norm import rms_same_dtype, rms_truth, rows, weights
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FP4 = torch.float4_e2m1fn_x2
LAYOUTS = pytest.mark.parametrize("swizzled", [False, True])


def signs(shape, device):
    return torch.where(torch.rand(shape, device=device) < 0.5, -1.0, 1.0)


def wide_weights(hidden, device):
    """Weights of a wide range, with zeros, so that some blocks are small and some elements saturate; of 8 bits, so that
    every dtype of rows has them."""
    w = torch.randn(hidden, device=device) * torch.exp2(torch.randint(-9, 10, (hidden,), device=device).float())
    w[torch.rand(hidden, device=device) < 0.05] = 0
    return w.bfloat16().float()


def nvfp4(y, encode_scale):
    """Codes and block scales of float64 rows, as the room of quantization states them; encode_scale multiplies block
    scales. An element is multiplied by an inverse that is rounded: one that a division puts on a tie may go either way.
    """
    codes, factor = truth.nvfp4(y, torch.tensor(encode_scale, device=y.device))
    return truth.pack(codes), factor


def mxfp4(y):
    blocks = y.unflatten(-1, (-1, 32))
    factor = truth.ue8m0_at_least(truth.divided(blocks.abs().amax(-1), 6))
    return truth.pack(truth.encode("e2m1", blocks / truth.ue8m0(factor)[..., None]).flatten(-2)), factor


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 65), (1, 4096), (0, 64)], ids=str)
@pytest.mark.parametrize("scale", [0.25, torch.float32, torch.float64])
def test_fp8_has_the_bits_of_the_format(variant, device, dtype, shape, scale):
    sign, w = signs(shape, device), wide_weights(shape[-1], device)
    scale = scale if isinstance(scale, float) else torch.full((1,), 0.5, dtype=scale, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    assert flashinfer.rmsnorm_quant(out, 2 * sign.bfloat16(), w, scale, eps=0) is None
    assert_bitwise(out.view(torch.uint8), truth.encode(FP8[dtype], sign.double() * w.double() / float(scale)))

    residual = sign.bfloat16()
    x = residual.clone()
    flashinfer.fused_add_rmsnorm_quant(out, x, residual, w, scale, eps=0)
    assert_bitwise(out.view(torch.uint8), truth.encode(FP8[dtype], sign.double() * w.double() / float(scale)))
    assert_bitwise(residual, 2 * sign.bfloat16())
    assert_bitwise(x, sign.bfloat16())


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25, "tensor"])
@pytest.mark.parametrize("shape", [(3, 40), (2, 2, 128), (0, 64)], ids=str)
def test_layernorm_to_fp8(variant, device, dtype, scale, shape):
    """Rows of as many 3 as 1 have a norm of 1 and -1 without rounding: the factor with signs, and the shift."""
    sign = torch.ones(shape, device=device)
    sign[..., ::2] = -1
    w, shift = (wide_weights(shape[-1], device) for _ in range(2))
    scale = torch.full((1,), 0.5, device=device) if scale == "tensor" else scale
    out = torch.empty(shape, dtype=dtype, device=device)
    x = 2 + sign.bfloat16()
    assert flashinfer.layernorm_quant(out, x, w, shift, scale, eps=0) is None
    y = (sign.double() * w.double() + shift.double()).float().double()
    assert_bitwise(out.view(torch.uint8), truth.encode(FP8[dtype], y / float(scale)))


@pytest.mark.parametrize("axis", [0, 1])
def test_fp8_of_strided_rows(variant, device, axis):
    x = generate.strided(rows((5, 96), torch.float16, device), axis, 16)
    residual = generate.strided(rows((5, 96), torch.float16, device), axis, 24)
    out = generate.strided(torch.zeros(5, 96, dtype=torch.float8_e4m3fn, device=device), axis, 32)
    w, gaps = weights(96, torch.float16, device), int(out._base.isnan().sum())
    scale = torch.tensor([0.02], device=device)
    total, same = x.double() + residual.double(), rms_same_dtype(x + residual, w)
    flashinfer.fused_add_rmsnorm_quant(out, x, residual, w, scale)
    # By torch: rounded to float16, divided, rounded to e4m3.
    same = (same / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert_close(out.float(), same, (rms_truth(total, w) / 0.02).clamp(-448, 448), through=2**-3)
    assert int(out._base.isnan().sum()) == gaps


@pytest.mark.parametrize("shape", [(1, 128), (5, 640), (6, 1024), (0, 128)], ids=str)
def test_fp8_blocks(variant, device, shape):
    n, hidden = shape
    x, residual = (rows(shape, torch.bfloat16, device) for _ in range(2))
    w = wide_weights(hidden, device)
    w[-128:] = 0
    total, same = x.double() + residual.double(), x + residual
    out, normed = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), torch.empty_like(x)
    scale = torch.full((hidden // 128, (n + 3) // 4 * 4), 3.0, device=device)
    norm.fused_add_rmsnorm_fp8_block_quant(out, scale, normed, x, residual, w)
    assert_close(residual, same, total)
    assert_close(normed, rms_same_dtype(same, w), rms_truth(total, w))
    assert (scale[:, n:] == 3).all()
    # From the rounded norm on, everything is determined.
    blocks = normed.float().unflatten(1, (-1, 128))
    expected = truth.divided(blocks.abs().amax(-1), 448).clamp(min=2.0**-126)
    assert torch.equal(scale[:, :n].T, expected)
    codes = truth.encode("e4m3", blocks * (1 / expected)[..., None]).flatten(1)
    assert_bitwise(out.view(torch.uint8), codes)


@LAYOUTS
@pytest.mark.parametrize("shape", [(3, 16), (2, 2, 80), (131, 48), (2, 320), (1, 4096)], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_nvfp4(variant, device, swizzled, shape, add):
    sign, w = signs(shape, device), wide_weights(shape[-1], device)
    global_scale = torch.tensor([2.0**5], device=device)
    codes, factors = nvfp4(sign.double() * w.double(), 2.0**5)
    x = sign.bfloat16() * (1 if add else 2)
    options = dict(global_scale=global_scale, eps=0, is_sf_swizzled_layout=swizzled)
    if add:
        y, scales = flashinfer.add_rmsnorm_fp4quant(x, x.clone(), w, **options)
    else:
        y, scales = flashinfer.rmsnorm_fp4quant(x, w, **options)
    assert y.dtype == FP4 and scales.dtype == torch.float8_e4m3fn
    assert_bitwise(y.view(torch.uint8), codes)
    expected = truth.arranged(factors.flatten(0, -2), "128x4") if swizzled else factors
    assert_bitwise(scales.view(torch.uint8), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("add", [False, True])
def test_fused_is_separate(variant, device, dtype, how, add):
    """The norm, then the quantisation of what it wrote: the same bytes."""
    x, residual = rows((5, 96), dtype, device), rows((5, 96), dtype, device)
    w = weights(96, dtype, device)
    together, apart = residual.clone(), x.clone()
    width = 32 if how == "mxfp4" else 16
    scale = 448 * 6 / rms_truth(x, w).abs().max().float().view(1) if how == "nvfp4" else None
    options = dict(global_scale=scale, block_size=width, is_sf_swizzled_layout=True)
    if add:
        y, factors = flashinfer.add_rmsnorm_fp4quant(x, together, w, **options)
        flashinfer.fused_add_rmsnorm(apart, residual, w)
    else:
        y, factors = flashinfer.rmsnorm_fp4quant(x, w, **options)
        apart = flashinfer.rmsnorm(x, w)
    if how == "nvfp4":
        codes, separate = flashinfer.nvfp4_quantize(apart, scale)
    else:
        codes, separate = flashinfer.mxfp4_quantize(apart)
    assert_bitwise(y.view(torch.uint8), codes)
    assert_bitwise(factors.view(torch.uint8), separate.flatten())


def test_scales_are_numbers_or_one_element(variant, device):
    """In any float dtype, with or without an axis, on the CPU too."""
    x, w = rows((2, 32), torch.bfloat16, device), weights(32, torch.bfloat16, device)
    expected = flashinfer.rmsnorm_fp4quant(x, w, global_scale=torch.tensor([64.0], device=device))
    fp8 = torch.empty(2, 32, dtype=torch.float8_e4m3fn, device=device)
    flashinfer.rmsnorm_quant(fp8, x, w, 0.5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for where, shape in ((device, ()), ("cpu", (1, 1))):
            out = torch.empty_like(fp8)
            result = flashinfer.rmsnorm_fp4quant(x, w, global_scale=torch.full(shape, 64.0, dtype=dtype, device=where))
            flashinfer.rmsnorm_quant(out, x, w, torch.full(shape, 0.5, dtype=dtype, device=where))
            for a, b in zip((*result, out), (*expected, fp8)):
                assert_bitwise(a.view(torch.uint8), b.view(torch.uint8))
    result = flashinfer.rmsnorm_fp4quant(x, w, global_scale=64)
    assert_bitwise(result[0].view(torch.uint8), expected[0].view(torch.uint8))


@LAYOUTS
@pytest.mark.parametrize("shape", [(3, 32), (2, 160), (2, 2, 288)], ids=str)
def test_mxfp4(variant, device, swizzled, shape):
    sign, w = signs(shape, device), wide_weights(shape[-1], device)
    w[:32] = 0
    codes, factors = mxfp4(sign.double() * w.double())
    y, scales = flashinfer.rmsnorm_fp4quant(
        2 * sign.half(), w, eps=0, block_size=32, scale_format="ue8m0", is_sf_swizzled_layout=swizzled
    )
    assert scales.dtype == torch.uint8
    assert_bitwise(y.view(torch.uint8), codes)
    assert_bitwise(scales, truth.arranged(factors.flatten(0, -2), "128x4") if swizzled else factors)


def test_both_layouts_and_the_norm_itself(variant, device):
    shape = (5, 96)
    x, residual = (rows(shape, torch.float16, device) for _ in range(2))
    w = weights(96, torch.float16, device)
    total, same = x.double() + residual.double(), x + residual
    plain = flashinfer.add_rmsnorm_fp4quant(x, residual.clone(), w)
    given = torch.empty(5, 48, dtype=torch.uint8, device=device), torch.empty(128, 8, dtype=torch.uint8, device=device)
    normed = generate.strided(torch.zeros(shape, dtype=torch.float16, device=device), 0)
    linear = torch.empty(5, 6, dtype=torch.float8_e4m3fn, device=device)
    results = flashinfer.add_rmsnorm_fp4quant(
        x, residual, w, *given, output_both_sf_layouts=True, block_scale_unswizzled=linear, y_out=normed
    )
    assert len(results) == 3 and all(a is b for a, b in zip(results, (*given, linear)))
    assert_close(normed, rms_same_dtype(same, w), rms_truth(total, w))
    assert_close(residual, same, total)
    assert_bitwise(given[0], plain[0].view(torch.uint8))
    assert_bitwise(linear.view(torch.uint8), plain[1].view(torch.uint8))
    assert_bitwise(given[1].flatten(), truth.arranged(linear.view(torch.uint8), "128x4"))


@pytest.mark.parametrize("hidden", [64, 100, 1000])
def test_rmsnorm_silu(variant, device, hidden):
    x, w = rows((7, hidden), torch.bfloat16, device), weights(hidden, torch.bfloat16, device)
    y = rms_truth(x, w)
    expected = y / (1 + torch.exp(-y))
    same = torch.nn.functional.silu(rms_same_dtype(x, w))
    assert_close(norm.fused_rmsnorm_silu(x, w), same, expected)
    out = generate.strided(torch.zeros_like(x), 1)
    assert norm.fused_rmsnorm_silu(x, w, out=out) is out
    assert_close(out, same, expected)
    scales = torch.full((7, 3), 9.0, device=device)  # Only NVFP4 has some.
    out = torch.empty(7, hidden, dtype=torch.float8_e4m3fn, device=device)
    out = norm.fused_rmsnorm_silu(x, w, out=out, block_scale=scales)
    assert (scales == 9).all()
    assert_close(out.float(), same.to(torch.float8_e4m3fn).float(), expected, through=2**-3)


def test_rmsnorm_silu_to_nvfp4(variant, device):
    """Codes and scales give back the norm as nearly as those of torch's norm in bfloat16 do."""
    x, w = rows((7, 96), torch.bfloat16, device), weights(96, torch.bfloat16, device)
    y = rms_truth(x, w)
    expected = y / (1 + torch.exp(-y))

    def decode(codes, factors):
        values = truth.decode("e2m1", truth.unpack(codes)).unflatten(-1, (-1, 16))
        return (values * truth.decode("e4m3", factors)[..., None]).flatten(-2).float()

    out = torch.empty(7, 48, dtype=FP4, device=device)
    codes, scales = norm.fused_rmsnorm_silu(x, w, out=out)
    assert codes is out and scales.shape == (7, 6) and scales.dtype == torch.float8_e4m3fn
    same = nvfp4(torch.nn.functional.silu(rms_same_dtype(x, w)).double(), 1.0)
    assert_close(decode(codes.view(torch.uint8), scales.view(torch.uint8)), decode(*same), expected, through=0.5)


def _good(name):
    """Arguments that each function takes."""
    x, w = torch.ones(4, 128), torch.ones(128)
    fp8, scale = torch.empty(4, 128, dtype=torch.float8_e4m3fn), torch.ones(1)
    return {
        "rmsnorm_quant": dict(out=fp8, input=x, weight=w, scale=scale),
        "fused_add_rmsnorm_quant": dict(out=fp8, input=x, residual=x.clone(), weight=w, scale=scale),
        "fused_add_rmsnorm_fp8_block_quant": dict(
            out=fp8, block_scale=torch.empty(1, 4), normed_out=x.clone(), input=x, residual=x.clone(), weight=w
        ),
        "fused_rmsnorm_silu": dict(input=x, weight=w),
        "layernorm_quant": dict(out=fp8, input=x, gemma=w, beta=w.clone(), scale=1.0),
        "rmsnorm_fp4quant": dict(input=x, weight=w),
        "add_rmsnorm_fp4quant": dict(input=x, residual=x.clone(), weight=w),
    }[name]


U8 = torch.uint8
BAD = [
    ("layernorm_quant", dict(out=torch.empty(4, 128)), "out"),
    ("layernorm_quant", dict(out=torch.empty(3, 128, dtype=torch.float8_e5m2)), "out"),
    ("layernorm_quant", dict(scale=-1.0), "scale"),
    ("layernorm_quant", dict(beta=torch.ones(128).half()), "beta"),
    ("rmsnorm_quant", dict(out=torch.empty(4, 128)), "out"),
    ("rmsnorm_quant", dict(out=torch.empty(4, 64, dtype=torch.float8_e5m2)), "out"),
    ("rmsnorm_quant", dict(scale=0.0), "scale"),
    ("rmsnorm_quant", dict(scale=torch.ones(2)), "scale"),
    ("rmsnorm_quant", dict(scale=torch.ones(1, device="meta")), "scale"),
    ("fused_add_rmsnorm_quant", dict(residual=torch.ones(4, 64)), "residual"),
    ("fused_add_rmsnorm_fp8_block_quant", dict(block_scale=torch.empty(4, 1)), "block_scale"),
    ("fused_add_rmsnorm_fp8_block_quant", dict(input=torch.ones(4, 96)), "input"),
    ("fused_add_rmsnorm_fp8_block_quant", dict(normed_out=torch.ones(4, 96)), "normed_out"),
    ("fused_add_rmsnorm_fp8_block_quant", dict(out=torch.empty(4, 128, dtype=torch.float8_e5m2)), "out"),
    ("fused_rmsnorm_silu", dict(out=torch.ones(4, 128, dtype=torch.float16)), "out"),
    ("rmsnorm_fp4quant", dict(block_size=8), "block_size"),
    ("rmsnorm_fp4quant", dict(scale_format="ue8m0"), "scale_format"),
    ("rmsnorm_fp4quant", dict(input=torch.ones(4, 100), weight=torch.ones(100)), "input"),
    ("rmsnorm_fp4quant", dict(block_size=32, global_scale=torch.ones(1)), "global_scale"),
    ("rmsnorm_fp4quant", dict(global_scale=torch.ones(3)), "global_scale"),
    ("rmsnorm_fp4quant", dict(y_fp4=torch.empty(4, 128, dtype=U8)), "y_fp4"),
    ("rmsnorm_fp4quant", dict(block_scale=torch.empty(4, 4, dtype=U8)), "block_scale"),
    ("rmsnorm_fp4quant", dict(block_scale=torch.empty(4, 8)), "block_scale"),
    ("rmsnorm_fp4quant", dict(block_scale=torch.empty(4, 8, dtype=U8), is_sf_swizzled_layout=True), "block_scale"),
    ("add_rmsnorm_fp4quant", dict(block_scale_unswizzled=torch.empty(4, 8, dtype=U8)), "block_scale_unswizzled"),
    ("add_rmsnorm_fp4quant", dict(y_out=torch.empty(4, 64)), "y_out"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "argument"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input(name, changed, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        getattr(norm, name)(**(_good(name) | changed))


def test_are_registered_ops():
    from flashinfer.norm import _quantised, fp8

    x, w = torch.randn(3, 128), torch.randn(128)
    codes, scale = torch.empty(3, 64, dtype=U8), torch.empty(3, 8, dtype=U8)
    fp4 = (x, x.clone(), w, codes, torch.ones(1), scale, None, x.clone(), [1e-6, 1.0], "nvfp4", "linear", "")
    torch.library.opcheck(_quantised.quantised.op, fp4, {"pdl": True})
    torch.library.opcheck(fp8._rmsnorm_silu.op, (x, w, torch.empty_like(x), 1e-6))


def test_compiles_without_a_break():
    def layer(x, residual, w, scale):
        out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
        flashinfer.fused_add_rmsnorm_quant(out, x, residual, w, scale)
        codes, scales = flashinfer.rmsnorm_fp4quant(residual, w, is_sf_swizzled_layout=True)
        return out, codes.view(U8), scales.view(U8), norm.fused_rmsnorm_silu(residual, w)

    x, residual, w, scale = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64), torch.ones(1)
    eager = layer(x, residual.clone(), w, scale)
    for a, b in zip(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, residual, w, scale), eager):
        assert_bitwise(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1025, 5120), (77, 32768), (8, 4096)], ids=str)
def test_real_shapes(device, shape):
    """Codes by the kernel, against those that the specification has for its own norm in float32."""
    sign, w = signs(shape, device), wide_weights(shape[-1], device)
    codes, factors = nvfp4(sign.double() * w.double(), 1.0)
    y, scales = flashinfer.rmsnorm_fp4quant(2 * sign.bfloat16(), w, eps=0, is_sf_swizzled_layout=True)
    assert_bitwise(y.view(U8), codes)
    assert_bitwise(scales.view(U8), truth.arranged(factors, "128x4"))

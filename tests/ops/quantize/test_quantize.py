"""Block-scaled quantisation, bit for bit against the formats' specifications in float64."""

import itertools

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer import quantization
from flashinfer.ops import layouts
from flashinfer.quantization import NVFP44Over6Config, _rows, nvfp4_quantization_utils
from flashinfer.quantization.packbits import _packbits
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.tllm_enums import SfLayout
from flashinfer.utils import FP4Tensor, get_shuffle_matrix_a_row_indices
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

LAYOUTS = {"128x4": SfLayout.layout_128x4, "8x4": SfLayout.layout_8x4, "linear": SfLayout.layout_linear}
SHAPES = [(5, 96), (37, 48), (131, 64), (0, 64)]
LARGE = [(4096, 7168), (257, 2880), (1, 16384), (100003, 128)]
shapes = pytest.mark.parametrize("shape", SHAPES + [pytest.param(s, marks=pytest.mark.gpu) for s in LARGE], ids=str)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def rows(shape, dtype, device):
    """Rows of sizes from tiny to large, with a block of zeros, and for a few rows a NaN and an infinity."""
    x = torch.randn(shape, device=device)
    if x.numel():
        x = x * torch.logspace(-3, 2, shape[-2], device=device)[:, None]
        x[..., 0, :16] = 0
        if shape[-2] > 3 and dtype != torch.float8_e4m3fn:
            x[..., 1, 3], x[..., 2, 5], x[..., 3, 1] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def scale_of(x):
    return torch.tensor([448 * 6 / 300.0], device=x.device)


def blocks_of(columns, width, layout):
    return layouts.padded(1, columns // width, layout)[1]


@shapes
@each_layout
def test_nvfp4(variant, device, shape, layout):
    x = rows(shape, torch.bfloat16, device)
    codes, factors = flashinfer.nvfp4_quantize(x, scale_of(x), LAYOUTS[layout])
    nibbles, expected = truth.nvfp4(x, scale_of(x))
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors, truth.arranged(expected, layout).view(-1, blocks_of(shape[1], 16, layout)))


@pytest.mark.parametrize("shape", [(5, 96), (0, 32), pytest.param((1025, 5120), marks=pytest.mark.gpu)], ids=str)
@each_layout
def test_mxfp4(variant, device, shape, layout):
    x = rows(shape, torch.float16, device)
    codes, factors = flashinfer.mxfp4_quantize(x, sfLayout=LAYOUTS[layout])
    nibbles, expected = truth.mx(x, "e2m1")
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors, truth.arranged(expected, layout).view(-1, blocks_of(shape[1], 32, layout)))
    if x.numel():
        values = flashinfer.mxfp4_dequantize(codes, factors, LAYOUTS[layout])
        wide = truth.ue8m0(expected).repeat_interleave(32, 1)
        # On the host, as upstream's.
        assert_same(values, (truth.decode("e2m1", nibbles) * wide).float().cpu())
        assert_same(flashinfer.mxfp4_dequantize(codes, factors.cpu(), LAYOUTS[layout].value), values)


def test_column_major_rows(variant, device):
    """Upstream's rule: columns that are contiguous are quantised in place of rows, and results lie like the input."""
    x = rows((32, 64), torch.bfloat16, device)
    turned = x.T
    for function, given, width in (
        (flashinfer.fp4_quantize, (scale_of(x),), 16),
        (flashinfer.nvfp4_quantize, (scale_of(x), SfLayout.layout_linear), 16),
        (flashinfer.mxfp4_quantize, (), 32),
    ):
        nibbles, factors = truth.nvfp4(x, scale_of(x)) if width == 16 else truth.mx(x, "e2m1")
        layout = "linear" if SfLayout.layout_linear in given else "128x4"
        codes, found = function(turned, *given)
        assert_bitwise(codes.T, truth.pack(nibbles))
        assert_bitwise(found.T, truth.arranged(factors, layout).view(-1, blocks_of(64, width, layout)))


def test_rows_of_three_axes(variant, device):
    """As [rows, K] of them all, but codes in the shape that came."""
    x = rows((2, 3, 64), torch.float16, device)
    nibbles, factors = truth.nvfp4(x.view(6, 64), scale_of(x))
    for function in (flashinfer.fp4_quantize, flashinfer.nvfp4_quantize):
        codes, found = function(x, scale_of(x))
        assert_bitwise(codes, truth.pack(nibbles).view(2, 3, 32))
        assert_bitwise(found, truth.arranged(factors, "128x4").view(-1, 4))
    nibbles, factors = truth.mx(x.view(6, 64), "e2m1")
    codes, found = flashinfer.mxfp4_quantize(x)
    assert_bitwise(codes, truth.pack(nibbles).view(2, 3, 32))
    assert_bitwise(found, truth.arranged(factors, "128x4").view(-1, 4))
    finite = torch.randn(2, 3, 64, device=device).half()
    codes, _, scales = flashinfer.nvfp4_quantize(finite, 1 / (448 * 6), per_token_activation=True)
    assert codes.shape == (2, 3, 32)
    expected = finite.view(6, 64).double().abs().amax(1) / (448 * 6)
    assert torch.allclose(scales.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("columns", [64, 40, pytest.param(5000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("alignment", [32, 128])
@each_layout
def test_mxfp8(variant, device, columns, alignment, layout):
    x = rows((5, columns), torch.bfloat16, device)
    values, factors = flashinfer.mxfp8_quantize(x, alignment=alignment, sf_swizzle_layout=LAYOUTS[layout])
    padded = -(-columns // alignment) * alignment
    codes, expected = truth.mx(torch.nn.functional.pad(x, (0, padded - columns)), "e4m3")
    assert values.dtype == torch.float8_e4m3fn
    assert_bitwise(values.view(torch.uint8), codes)
    assert_bitwise(factors, truth.arranged(expected, layout))
    back = flashinfer.mxfp8_dequantize_host(values, factors, sf_swizzle_layout=LAYOUTS[layout])
    assert_same(back, (truth.decode("e4m3", codes) * truth.ue8m0(expected).repeat_interleave(32, 1)).float())


def extreme_blocks(device):
    """float32 [9, 64]: blocks of denormals, of the smallest normal values, huge ones, infinities, NaN, zeros."""
    x = torch.randn(9, 64, device=device)
    scale = [2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 2.0**-118, 2.0**120, 1.0, 1.0, 0.0]
    x *= torch.tensor(scale, dtype=torch.float64, device=device)[:, None].float()
    x[5, 3], x[5, 40], x[6, 1], x[7, 33], x[7, 2] = 3.4028234663852886e38, -3e38, torch.inf, torch.nan, -torch.inf
    return x


def test_float32_rows(variant, device):
    """Factors of 2^-127, of 2^127, of NaN: e8m0 has no zero and no infinity. Nothing is rounded on the way."""
    x = extreme_blocks(device)
    values, factors = flashinfer.mxfp8_quantize(x, False)
    codes, expected = truth.mx(x, "e4m3")
    assert_bitwise(values.view(torch.uint8), codes)
    assert_bitwise(factors, expected.flatten())
    assert_same(flashinfer.mxfp8_dequantize_host(values, factors, False).double(),
                (truth.decode("e4m3", codes) * truth.ue8m0(expected).repeat_interleave(32, 1)).float().double())
    codes, factors = flashinfer.mxfp4_quantize(x, sfLayout=LAYOUTS["linear"])
    nibbles, expected = truth.mx(x, "e2m1")
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors, expected)
    x = torch.randn(3, 48, device=device)
    codes, factors = flashinfer.nvfp4_quantize(x, scale_of(x), LAYOUTS["linear"])
    nibbles, expected = truth.nvfp4(x, scale_of(x))
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors, expected)


def test_global_scales_of_any_kind(variant, device):
    """A number, or one element in float32, float16 or bfloat16 on either device."""
    x = rows((3, 32), torch.float16, device)
    nibbles, expected = truth.nvfp4(x, torch.tensor([48.0], device=device))
    given = [48, 48.0]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given += [torch.tensor(48.0, dtype=dtype), torch.full((1, 1), 48.0, dtype=dtype, device=device)]
    for scale in given:
        for codes, factors in (
            flashinfer.nvfp4_quantize(x, scale, LAYOUTS["linear"]),
            flashinfer.fp4_quantize(x, scale, is_sf_swizzled_layout=False),
        ):
            assert_bitwise(codes, truth.pack(nibbles))
            assert_bitwise(factors, expected)


def assert_same(out, expected):
    """Bitwise, but any NaN is a NaN."""
    assert torch.equal(out.isnan(), expected.isnan())
    assert_bitwise(out.nan_to_num(nan=7), expected.nan_to_num(nan=7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_fp4_quantize_takes_what_it_documents(variant, device, dtype):
    """Leading dimensions, row strides, each dtype, an inverse scale; linear layouts are those of swizzling off."""
    x = rows((2, 3, 64), dtype, device)
    gap = torch.zeros(2, 3, 80, dtype=dtype, device=device)
    gap[..., :64] = x
    scale = torch.tensor([3.7], device=device)
    codes, factors = flashinfer.fp4_quantize(
        gap[..., :64], scale, is_sf_swizzled_layout=False, is_global_scale_inversed=True, enable_pdl=True
    )
    nibbles, expected = truth.nvfp4(x.float().view(6, 64), (1 / scale.double()).float())
    assert_bitwise(codes, truth.pack(nibbles).view(2, 3, 32))
    assert_bitwise(factors, expected)
    codes, factors = flashinfer.fp4_quantize(x, None, 32, True, is_sf_8x4_layout=True)
    nibbles, expected = truth.mx(x.float().view(6, 64), "e2m1")
    assert_bitwise(codes, truth.pack(nibbles).view(2, 3, 32))
    assert_bitwise(factors.flatten(), truth.arranged(expected, "8x4"))


def test_batched_and_grouped(variant, device):
    x = rows((3, 9, 80), torch.bfloat16, device)
    scales = torch.tensor([5.0, 0.3, 40.0], device=device)
    for given in (scales, scales[:1], scales.repeat_interleave(2)[::2], scales[:1].expand(3)):
        codes, factors = flashinfer.nvfp4_batched_quantize(x, given)
        for i in range(3):
            nibbles, expected = truth.nvfp4(x[i], given[i % len(given)])
            assert_bitwise(codes[i], truth.pack(nibbles))
            assert_bitwise(factors[i], truth.arranged(expected, "128x4"))

    counts = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    codes, factors = flashinfer.scaled_fp4_grouped_quantize(x, counts, scales)
    assert codes.shape == (9, 40, 3) and factors.shape == (32, 4, 1, 4, 2, 3)
    assert factors.dtype == torch.float8_e4m3fn
    assert codes.permute(2, 0, 1).is_contiguous() and factors.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    for i, count in enumerate(counts.tolist()):
        nibbles, expected = truth.nvfp4(x[i, :count], scales[i])
        assert_bitwise(codes[:count, :, i], truth.pack(nibbles))
        for row in range(count):
            for block in range(8):
                found = factors.view(torch.uint8)[row % 32, row // 32, 0, block % 4, block // 4, i]
                # The last tile has blocks beyond the row.
                assert found == (expected[row, block] if block < 5 else 0)


def test_numbers_for_layouts(variant, device):
    """The names of upstream's CuTe DSL kernels: the same functions, layouts by number, results into what is given."""
    q = flashinfer.quantization
    x = rows((5, 64), torch.bfloat16, device)
    for number, layout in enumerate(("128x4", "8x4", "linear")):
        expected = flashinfer.nvfp4_quantize(x, 7.0, LAYOUTS[layout])
        out = torch.zeros(5, 32, dtype=torch.uint8, device=device), torch.zeros(600, dtype=torch.uint8, device=device)
        found = q.nvfp4_quantize_cute_dsl(x, 7.0, number, out=out)
        assert found[0] is out[0] and found[1].data_ptr() == out[1].data_ptr()
        results = [(found, expected), (q.nvfp4_quantize_cute_dsl(x, 7.0, number), expected)]
        expected = flashinfer.mxfp4_quantize(x, sfLayout=LAYOUTS[layout])
        results.append((q.mxfp4_quantize_cute_dsl(x, number), expected))
        options = (True,), (True, 32, None, True), (False,)
        expected = flashinfer.mxfp8_quantize(x, sf_swizzle_layout=LAYOUTS[layout])
        results.append((q.mxfp8_quantize_cute_dsl(x, *options[number]), expected))
        plain = flashinfer.nvfp4_quantize(x, 1 / 2688, LAYOUTS[layout], per_token_activation=True)
        scaled = q.nvfp4_quantize_per_token_cute_dsl(x, 1 / 2688, number, out_scale=torch.tensor([2.0], device=device))
        results.append((scaled, (*plain[:2], plain[2] * 2)))
        for ours, theirs in results:
            for a, b in zip(ours, theirs, strict=True):
                assert_same(a, b) if a.dtype == torch.float32 else assert_bitwise(
                    a.view(torch.uint8), b.view(torch.uint8)
                )
    with pytest.raises(ValueError, match="^sf_layout: got 3; allowed: "):
        q.nvfp4_quantize_cute_dsl(x, 7.0, 3)
    with pytest.raises(ValueError, match="^out_scale: got .*; allowed: None, without per_token_activation"):
        flashinfer.nvfp4_quantize(x, 1.0, out_scale=torch.ones(1))


def test_mxfp8_of_the_first_rows(variant, device):
    """Columns padded to 128 with zeros; rows that do not count are not written."""
    x = rows((3, 9, 96), torch.bfloat16, device)
    counts = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    values, factors = flashinfer.mxfp8_grouped_quantize(x, counts)
    assert values.shape == (9, 128, 3) and values.dtype == torch.float8_e4m3fn
    assert factors.shape == (32, 4, 1, 4, 1, 3) and factors.dtype == torch.uint8
    for i, count in enumerate(counts.tolist()):
        codes, expected = truth.mx(torch.nn.functional.pad(x[i, :count], (0, 32)), "e4m3")
        assert_bitwise(values[:count, :, i].view(torch.uint8), codes)
        found = factors[..., i].permute(2, 1, 0, 4, 3).reshape(128, 4)
        assert_bitwise(found[:count], expected)


def test_rows_that_routing_names(variant, device):
    """They are quantised where they are, whatever stands between them."""
    x = rows((6, 96), torch.bfloat16, device)
    live = torch.tensor([4, -1, 0, 3, -1], dtype=torch.int32, device=device)
    x[[1, 2, 5]] = torch.nan
    found = flashinfer.nvfp4_quantize(
        x, 1 / 2688, SfLayout.layout_linear, per_token_activation=True, expanded_idx_to_permuted_idx=live
    )
    assert [len(each) for each in found] == [6, 6, 6]
    there = live[live >= 0].long()
    codes, factors, scales = (each[there] for each in found)
    expected = (x[there].double().abs().amax(1) * torch.tensor(1 / 2688).double()).float()
    assert_same(scales, expected)
    nibbles, factor = truth.nvfp4(x[there], (1 / expected.double()).float()[:, None])
    assert_bitwise(factors, factor)
    assert_bitwise(codes, truth.pack(nibbles))


def test_row_scales(variant, device):
    x = rows((6, 96), torch.bfloat16, device)
    x[4] = 0
    for base in (1 / 2688, torch.tensor([1 / 1536], device=device)):
        codes, factors, scales = flashinfer.nvfp4_quantize(
            x, base, SfLayout.layout_linear, per_token_activation=True, nvfp4_4over6=None
        )
        number = torch.tensor(float(base), dtype=torch.float32).double().to(device)
        expected = (x.double().abs().amax(1) * number).float()
        assert_same(scales, expected)
        inverse = torch.where(expected == 0, 0.0, (1 / expected.double()).float())
        nibbles, found = truth.nvfp4(x, inverse[:, None])
        assert_bitwise(factors, found)
        assert_bitwise(codes, truth.pack(nibbles))


@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_four_over_six(variant, device, mode):
    """Each block is one of the two candidates, by float64 the better one; and both are taken somewhere."""
    x = torch.randn(64, 64, device=device).bfloat16()
    scale = quantization.make_nvfp4_global_scale(x, False, nvfp4_4over6_config=NVFP44Over6Config(256))
    assert_bitwise(scale, 256 * 6 / x.float().abs().amax().view(1))
    config = NVFP44Over6Config(256, mode)
    codes, factors = flashinfer.nvfp4_quantize(x, scale, SfLayout.layout_linear, nvfp4_4over6=config)
    found = truth.unpack(codes).unflatten(1, (-1, 16))
    taken = []
    errors = []
    for peak in (6, 4):
        nibbles, factor = truth.nvfp4(x, scale, peak)
        values = truth.decode("e2m1", nibbles).unflatten(1, (-1, 16)) * truth.decode("e4m3", factor)[..., None]
        error = (x.double().unflatten(1, (-1, 16)) - values / scale.double()).abs()
        errors.append((error**2 if mode == "MSE" else error).sum(-1))
        taken.append((factor == factors) & (nibbles.unflatten(1, (-1, 16)) == found).all(-1))
    six, four = taken
    assert (six | four).all() and six.any() and four.any()
    assert not (six & ~four & (errors[1] < errors[0] * (1 - 1e-5))).any()
    assert not (four & ~six & (errors[0] < errors[1] * (1 - 1e-5))).any()


def test_four_over_six_is_the_same_everywhere(device):
    """The reference and the kernel choose alike, to the last bit of every score."""
    x = rows((9, 64), torch.bfloat16, device)
    for mode in ("MAE", "MSE"):
        config = NVFP44Over6Config(448, mode)
        chosen = "portable", "reference"
        a, b = (flashinfer.fp4_quantize(x, scale_of(x), backend=name, nvfp4_4over6=config) for name in chosen)
        assert_bitwise(a[0], b[0])
        assert_bitwise(a[1], b[1])


def test_recipe_of_the_environment(monkeypatch, device):
    resolve, names = quantization.resolve_nvfp4_4over6, nvfp4_quantization_utils
    assert resolve() is None and names.current_nvfp4_4over6_config() is None and resolve(None) is None
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MSE")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "1")
    with pytest.warns(FutureWarning):
        assert resolve() == NVFP44Over6Config(256, "MSE")
    assert resolve(None) is None and resolve(NVFP44Over6Config()).err_mode_name == "MAE"
    x = torch.randn(32, 64, device=device).half()
    with pytest.warns(FutureWarning):
        by_environment = flashinfer.nvfp4_quantize(x, scale_of(x))
    for setting, same in ((NVFP44Over6Config(256, "MSE"), True), (None, False)):
        out = flashinfer.nvfp4_quantize(x, scale_of(x), nvfp4_4over6=setting)
        assert torch.equal(out[0], by_environment[0]) is same
    assert float(quantization.make_nvfp4_global_scale(x, True)) == pytest.approx(1 / 2688, rel=1e-7)
    assert float(quantization.make_nvfp4_global_scale(x, False, global_scale=3.5)) == 3.5
    assert float(quantization.make_nvfp4_global_scale(x, True, 3.5)) == pytest.approx(1 / 2688, rel=1e-7)
    for empty in (torch.zeros_like(x), x[:0]):
        largest = quantization.make_nvfp4_global_scale(empty, False)
        assert_bitwise(largest, torch.full((1,), torch.finfo(torch.float32).max, device=device))
        made = flashinfer.nvfp4_quantize(empty, largest, nvfp4_4over6=None)
        assert not any(part.view(torch.uint8).any() for part in made)
    # Magnitudes below 2688 over the largest float32.
    tiny = torch.zeros(2, 32, device=device).bfloat16()
    tiny[:, ::3] = 3e-38
    scale = quantization.make_nvfp4_global_scale(tiny, False)
    assert_bitwise(scale, torch.full((1,), torch.finfo(torch.float32).max, device=device))
    codes, factors = flashinfer.nvfp4_quantize(tiny, scale, SfLayout.layout_linear, nvfp4_4over6=None)
    values = truth.decode("e2m1", truth.unpack(codes)).view(2, 2, 16) * truth.decode("e4m3", factors)[..., None]
    assert torch.allclose(values.flatten(1) / scale.double(), tiny.double(), rtol=0.1, atol=0)
    assert NVFP44Over6Config(err_mode="mse") == NVFP44Over6Config(err_mode=1)
    for bad in (dict(e4m3_max=300), dict(err_mode="RMS")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            NVFP44Over6Config(**bad)
    with pytest.raises(ValueError, match="^nvfp4_4over6_config: got 256; allowed: "):
        quantization.make_nvfp4_global_scale(x, False, nvfp4_4over6_config=256)


def test_recipes_as_numbers_and_text():
    names = {"NVFP44Over6Config": NVFP44Over6Config, "NVFP44Over6ErrMode": quantization.NVFP44Over6ErrMode}
    codes = set()
    for largest, mode, fast in itertools.product((448, 256), (0, 1), (False, True)):
        recipe = NVFP44Over6Config(largest, mode, fast)
        code = quantization.nvfp4_4over6_code(recipe)
        assert code == 1 + 2 * (largest == 256) + 4 * mode + 16 * fast
        assert quantization.nvfp4_4over6_from_code(code) == recipe == eval(repr(recipe), names)
        codes.add(code)
    assert quantization.nvfp4_4over6_code(None) == 0 and quantization.nvfp4_4over6_from_code(0) is None
    left_out = quantization.nvfp4_4over6_from_code(-1)
    assert left_out is not None and quantization.resolve_nvfp4_4over6(left_out) is None
    assert repr(NVFP44Over6Config()) == "NVFP44Over6Config()"
    for code in set(range(-3, 40)) - codes - {-1}:
        if 0 <= code < 32 and code % 2 == 0:
            assert quantization.nvfp4_4over6_from_code(code) is None
        else:
            with pytest.raises(ValueError, match=f"^code: got {code}; allowed: "):
                quantization.nvfp4_4over6_from_code(code)


@each_layout
@pytest.mark.parametrize(("factor", "width"), [("e4m3", 16), ("ue8m0", 32)])
def test_dequantize(variant, device, layout, factor, width):
    codes = torch.randint(0, 256, (11, 48), dtype=torch.uint8, device=device)
    factors = torch.randint(100, 140, (11, 96 // width), dtype=torch.uint8, device=device) & 0x7F
    scale = torch.tensor([0.37], device=device)
    wide = truth.decode("e4m3", factors) if factor == "e4m3" else truth.ue8m0(factors)
    expected = truth.decode("e2m1", truth.unpack(codes)) * wide.repeat_interleave(width, 1)
    flat = truth.arranged(factors, layout)
    options = dict(
        sf_vec_size=width, ufp8_type=int(factor == "e4m3"), is_sf_swizzled_layout=layout != "linear",
        is_sf_8x4_layout=layout == "8x4",
    )  # fmt: skip
    convert = quantization.e2m1_and_ufp8sf_scale_to_float
    # On the host, as upstream's, from any devices.
    assert_same(convert(codes, flat, **options), expected.float().cpu())
    assert_same(convert(codes, flat.cpu(), scale, **options), (expected * scale.double()).float().cpu())
    if (layout, factor) == ("linear", "ue8m0"):
        assert_same(flashinfer.mxfp4_dequantize_host(codes, factors), expected.float())
        groups = quantization.mxfp4_dequantize_host(codes[:, :32], flat[:11], group_size=64)
        part = truth.decode("e2m1", truth.unpack(codes[:, :32]))
        assert_same(groups, (part * truth.ue8m0(flat[:11])[:, None]).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kv(variant, device, dtype):
    """Rows of heads, quantised with the scale that they are dequantised with."""
    x = torch.randn(7, 128, device=device).to(dtype)
    scale = x.float().abs().amax().view(1) / 2688
    codes, factors = flashinfer.nvfp4_kv_quantize(x, scale)
    nibbles, expected = truth.nvfp4(x, (1 / scale.double()).float())
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors, expected)
    out = flashinfer.nvfp4_kv_dequantize(codes, factors, scale, dtype)
    values = truth.decode("e2m1", nibbles) * truth.decode("e4m3", expected).repeat_interleave(16, 1)
    expected = values * scale.double()
    if variant == "portable" and dtype == torch.bfloat16:
        # Triton's interpreter cuts float32 off to bfloat16, and does not round it.
        assert_close(out, expected.float().to(dtype), expected)
    else:
        assert_bitwise(out, expected.float().to(dtype))
    assert (out - x).abs().max() < x.abs().max() / 6


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_paged_kv_cache(variant, device, kv_layout):
    pages, heads, size, dim = 2, 3, 8, 32
    k, v = (torch.randn(pages, heads, size, dim, device=device).bfloat16() for _ in range(2))
    k_sf = torch.tensor([9.0], device=device)
    give = (lambda x: x) if kv_layout == "HND" else (lambda x: x.transpose(1, 2))
    codes, factors, k_scale, v_scale = flashinfer.nvfp4_quantize_paged_kv_cache(
        give(k).contiguous(), give(v).contiguous(), kv_layout, k_global_sf=k_sf
    )
    v_sf = 448 / v.float().abs().amax().view(1)
    assert (k_scale, v_scale) == (float(1 / k_sf), float(1 / v_sf))
    for found, x, sf in ((0, k, k_sf), (1, v, v_sf)):
        nibbles, expected = truth.nvfp4(x, sf)
        assert_bitwise(give(codes[found]).contiguous(), truth.pack(nibbles))
        assert factors[found].dtype == torch.float8_e4m3fn
        held = give(factors[found]).contiguous().view(torch.uint8)
        if found == 0:
            assert_bitwise(held, expected)
            continue
        for token in range(size):
            for block in range(dim // 16):
                place = 4 * block + token % 4
                row = token // 4 * 4 + place // (dim // 16)
                assert_bitwise(held[:, :, row, place % (dim // 16)], expected[:, :, token, block])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", ["numbers", "tensors"])
@pytest.mark.parametrize("dim", [64, 48])
def test_append(variant, device, kv_layout, scales, dim):
    """Only the slots that are named are written; padding, and slots outside the cache, are passed over."""
    pages, size, heads = 5, 3, 2
    give = (lambda x: x) if kv_layout == "NHD" else (lambda x: x.transpose(1, 2))
    shape = (pages, size, heads)
    if kv_layout == "HND":
        shape = (pages, heads, size)
    caches = torch.full((pages, 2, *shape[1:], dim // 2), 0xEE, dtype=torch.uint8, device=device)
    sf = tuple(torch.full((*shape, dim // 16), 0x11, dtype=torch.uint8, device=device) for _ in range(2))
    qkv = torch.randn(9, 3 * heads, dim, device=device).bfloat16()
    rows = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    slots = torch.tensor([14, -1, 0, 7, 15, 8, 1 << 40], device=device)
    numbers = 0.37, 0.0021
    given = numbers if scales == "numbers" else [torch.tensor([x], device=device) for x in numbers]
    flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        *rows, slots, caches, tuple(f.view(torch.float8_e4m3fn) for f in sf), *given, kv_layout
    )
    for x, scale, cache, factors in zip(rows, numbers, (caches[:, 0], caches[:, 1]), sf):
        nibbles, found = truth.nvfp4(x, (1 / truth.rounded(torch.tensor(scale, dtype=torch.float64))).float())
        expected = torch.full((pages, size, heads, dim // 2), 0xEE, dtype=torch.uint8)
        expected_sf = torch.full((pages, size, heads, dim // 16), 0x11, dtype=torch.uint8)
        for row, slot in enumerate(slots.tolist()):
            if 0 <= slot < pages * size:
                expected[slot // size, slot % size] = truth.pack(nibbles)[row].cpu()
                expected_sf[slot // size, slot % size] = found[row].cpu()
        assert_bitwise(give(cache).contiguous(), expected)
        assert_bitwise(give(factors).contiguous(), expected_sf)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_block_scale_interleave(variant, device, dtype):
    factors = torch.randint(0, 200, (2, 131, 6), device=device).to(dtype)
    strided = generate.strided(factors, 1, 3, fill=7)
    guard = generate.Guarded((2 * 256 * 8,), dtype, device)
    out = flashinfer.block_scale_interleave(strided, out=guard.out)
    guard.check()
    assert out is guard.out
    assert_bitwise(out, torch.cat([truth.arranged(f, "128x4") for f in factors]))
    # An output that begins between multiples of 16 bytes.
    memory = torch.full((len(out) + 2,), 7, dtype=dtype, device=device)
    assert_bitwise(flashinfer.block_scale_interleave(factors, out=memory[1:-1]), out)
    assert_bitwise(memory[1:-1], out)
    assert memory[0] == memory[-1] == 7
    whole = torch.zeros(128 * 8 + 1, dtype=dtype, device=device)
    for given, out in ((whole[1:].view(128, 8), whole[1:]), (whole[:-1].view(128, 8), whole[1:])):
        with pytest.raises(ValueError, match="^out: got some of the memory of unswizzled_sf"):
            flashinfer.block_scale_interleave(given, out=out)
    assert_bitwise(flashinfer.nvfp4_block_scale_interleave(factors[1]), truth.arranged(factors[1], "128x4"))


def test_layouts(device):
    """The host's statement of the layouts, there and back."""
    for layout in LAYOUTS:
        factors = torch.arange(133 * 7, device=device).view(133, 7)
        flat = layouts.arrange(factors, layout)
        assert_bitwise(flat, truth.arranged(factors, layout))
        assert_bitwise(layouts.restore(flat, 133, 7, layout), factors)
        assert flat.numel() == np.prod(layouts.padded(133, 7, layout))


def test_shuffle(device):
    """Blocks of 16 rows hold the even and then the odd ones; of 32, those alike modulo 4."""
    order = get_shuffle_matrix_a_row_indices(torch.empty(32, 1), 64).tolist()
    assert order[:16] == [*range(0, 16, 2), *range(1, 16, 2)] and order[16:] == [i + 16 for i in order[:16]]
    order = get_shuffle_matrix_a_row_indices(torch.empty(32, 1), 128).tolist()
    assert order == [i for j in range(4) for i in range(j, 32, 4)]
    x = rows((128, 64), torch.bfloat16, device)
    order = get_shuffle_matrix_a_row_indices(x, 128)
    plain = flashinfer.nvfp4_quantize(x, scale_of(x), SfLayout.layout_linear)
    codes, factors = flashinfer.nvfp4_quantize(x, scale_of(x), do_shuffle=True)
    assert_bitwise(codes, plain[0][order])
    assert factors.shape == (128, 4)
    assert_bitwise(factors.flatten(), truth.arranged(plain[1][order], "128x4"))
    assert_bitwise(flashinfer.shuffle_matrix_a(x, 64), x[get_shuffle_matrix_a_row_indices(x, 64)])


def test_row_scales_are_shuffled_with_their_rows(device):
    x = rows((128, 64), torch.bfloat16, device)
    expected = (x.double().abs().amax(1) * torch.tensor(1 / 2688).double()).float()
    order = get_shuffle_matrix_a_row_indices(x, 128)
    for given in (x, x.mT):
        scales = flashinfer.nvfp4_quantize(given, 1 / 2688, do_shuffle=True, per_token_activation=True)[2]
        assert_same(scales, expected[order])


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(variant, device, bitorder):
    for n in (0, 1, 8, 4095, 4099):
        x = (torch.rand(n + 3, device=device) < 0.5)[3 * (n % 2) :][:n]
        expected = torch.from_numpy(np.packbits(x.cpu().numpy(), bitorder=bitorder))
        assert_bitwise(flashinfer.packbits(x, bitorder), expected)
    counts = torch.randint(0, 3, (77,), dtype=torch.uint8, device=device)
    expected = torch.from_numpy(np.packbits(counts.cpu().numpy(), bitorder=bitorder))
    assert_bitwise(flashinfer.packbits(counts, bitorder), expected)
    for dtype in (torch.int8, torch.int32, torch.int64):
        assert_bitwise(flashinfer.packbits(counts.to(dtype) * 64, bitorder), expected)


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_segment_packbits(variant, device, bitorder, dtype):
    lengths = [0, 4, 0, 3, 8, 0, 4500, 17, 0]
    indptr = generate.indptr(lengths, device).to(dtype)
    x = torch.rand(sum(lengths), device=device) < 0.5
    packed, starts = flashinfer.segment_packbits(x, indptr, bitorder)
    parts = [np.packbits(part.cpu().numpy(), bitorder=bitorder) for part in x.split(lengths)]
    assert_bitwise(packed, torch.from_numpy(np.concatenate(parts)))
    assert_bitwise(starts, generate.indptr([len(p) for p in parts], device).to(torch.int32))
    empty, starts = flashinfer.segment_packbits(x[:0], indptr[:1], bitorder)
    assert empty.shape == (0,) and starts.tolist() == [0]


def test_fp4_tensor():
    data, scale = torch.zeros(5, 32, dtype=torch.uint8), torch.zeros(128, 4).to(torch.float8_e4m3fn)
    tensor = FP4Tensor(data, scale, 120)
    assert tensor.original_shape == (5, 64) and tensor.scale_start_index == 120
    with pytest.raises(ValueError, match="scale_start_index"):
        FP4Tensor(data, scale, 124)
    with pytest.raises(ValueError, match="original_shape"):
        FP4Tensor(data, scale, 0, (5, 32))


ROWS, SCALE = torch.ones(4, 64).bfloat16(), torch.ones(1)
BITS = torch.ones(4).bool()
APPEND = flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
KEYS, SLOTS = torch.ones(3, 2, 32).half(), torch.arange(3)
CACHE, SF = torch.zeros(4, 2, 2, 2, 16).byte(), torch.zeros(4, 2, 2, 2, 2).byte()
FP4, CUBE = flashinfer.fp4_quantize, ROWS.view(2, 2, 64)
BAD = {
    "float64 rows": (FP4, (ROWS.double(), SCALE), "input"),
    "one dimension": (FP4, (ROWS[0], SCALE), "input"),
    "no columns": (flashinfer.mxfp8_quantize, (ROWS[:, :0],), "input"),
    "a scale elsewhere": (flashinfer.nvfp4_quantize, (ROWS, SCALE.to("meta")), "a_global_sf"),
    "a mask elsewhere": (
        flashinfer.scaled_fp4_grouped_quantize, (CUBE, torch.ones(2, device="meta").int(), SCALE), "mask",
    ),
    "a short block": (FP4, (ROWS[:, :24], SCALE), "input"),
    "columns that are not contiguous": (FP4, (ROWS[:, ::2], SCALE), "input"),
    "no global scale": (FP4, (ROWS,), "global_scale"),
    "a global scale of two": (FP4, (ROWS, torch.ones(2)), "global_scale"),
    "a global scale of text": (FP4, (ROWS, "1"), "global_scale"),
    "a global scale elsewhere": (FP4, (ROWS, SCALE.to("meta")), "global_scale"),
    "NVFP4 of 32": (FP4, (ROWS, SCALE, 32), "sf_vec_size"),
    "MXFP4 of 16": (FP4, (ROWS, SCALE, 16, True), "sf_vec_size"),
    "tiles of a linear layout": (FP4, (ROWS, SCALE, 16, False, False, True), "is_sf_8x4_layout"),
    "an unknown backend": (FP4, (ROWS, SCALE, 16, False, True, False, False, None, "abc"), "backend"),
    "four over six of MXFP4": (
        lambda x: FP4(x, None, 32, True, nvfp4_4over6=NVFP44Over6Config()), (ROWS,), "nvfp4_4over6",
    ),
    "a recipe that is none": (lambda x: FP4(x, SCALE, nvfp4_4over6=1), (ROWS,), "nvfp4_4over6"),
    "a layout that is none": (flashinfer.nvfp4_quantize, (ROWS, SCALE, 3), "sfLayout"),
    "shuffling without tiles": (flashinfer.nvfp4_quantize, (ROWS, SCALE, LAYOUTS["linear"], True), "do_shuffle"),
    "named rows without scales of rows": (
        lambda x: flashinfer.nvfp4_quantize(x, 1.0, expanded_idx_to_permuted_idx=torch.zeros(2).int()),
        (ROWS,), "expanded_idx_to_permuted_idx",
    ),
    "named rows in float32": (
        lambda x: flashinfer.nvfp4_quantize(x, 1.0, per_token_activation=True, expanded_idx_to_permuted_idx=SCALE),
        (ROWS,), "expanded_idx_to_permuted_idx",
    ),
    "a mask of another length": (flashinfer.scaled_fp4_grouped_quantize, (CUBE, torch.ones(3).int(), SCALE), "mask"),
    "a mask of bools": (flashinfer.scaled_fp4_grouped_quantize, (CUBE, torch.ones(2).bool(), SCALE), "mask"),
    "columns of 40": (flashinfer.mxfp8_grouped_quantize, (CUBE[..., :40], torch.ones(2).int()), "a"),
    "a mask of floats": (flashinfer.mxfp8_grouped_quantize, (CUBE, torch.ones(2)), "mask"),
    "an alignment of 16": (flashinfer.mxfp8_quantize, (ROWS, True, 16), "alignment"),
    "too few factors": (flashinfer.mxfp4_dequantize, (torch.zeros(4, 32).byte(), torch.zeros(8).byte()), "a_sf"),
    "factors of columns": (
        flashinfer.e2m1_and_ufp8sf_scale_to_float,
        (torch.zeros(3, 32).byte(), torch.zeros(4, 3).byte(), None, 16, 1, False), "ufp8_scale_tensor",
    ),
    "float32 factors": (flashinfer.block_scale_interleave, (torch.ones(4, 4),), "unswizzled_sf"),
    "a page of 6": (flashinfer.nvfp4_quantize_paged_kv_cache, (torch.ones(1, 1, 6, 16).half(),) * 2, "k_cache"),
    "more slots than rows": (APPEND, (KEYS, KEYS, torch.arange(4), CACHE, SF, 1.0, 1.0), "append_key"),
    "slots in float32": (APPEND, (KEYS, KEYS, SLOTS.float(), CACHE, SF, 1.0, 1.0), "slot_mapping"),
    "values of another dtype": (APPEND, (KEYS, KEYS.bfloat16(), SLOTS, CACHE, SF, 1.0, 1.0), "append_value"),
    "a cache of another head_dim": (APPEND, (KEYS, KEYS, SLOTS, CACHE[..., :8], SF, 1.0, 1.0), "paged_kv_cache"),
    "factors of another dtype": (APPEND, (KEYS, KEYS, SLOTS, CACHE, SF.char(), 1.0, 1.0), "kv_cache_sf"),
    "a layout of pages": (APPEND, (KEYS, KEYS, SLOTS, CACHE, SF, 1.0, 1.0, "NDH"), "kv_layout"),
    "bits of floats": (flashinfer.packbits, (torch.ones(4),), "x"),
    "another bit order": (flashinfer.packbits, (torch.ones(4).bool(), "middle"), "bitorder"),
    "segments that decrease": (flashinfer.segment_packbits, (BITS, torch.tensor([0, 3, 2, 4])), "indptr"),
    "segments that end early": (flashinfer.segment_packbits, (BITS, torch.tensor([0, 3])), "indptr"),
    "rows that are no whole blocks": (flashinfer.shuffle_matrix_a, (torch.ones(20, 4), 64), "input_tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    function, arguments, argument = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        function(*arguments)


def test_are_registered_ops():
    """torch.compile sees ops that write what they say they write."""
    x, check = torch.randn(3, 64).bfloat16(), torch.library.opcheck
    codes, factors = torch.empty(1, 3, 32, dtype=torch.uint8), torch.empty(1, 12, dtype=torch.uint8)
    check(_rows._quantize.op, (x[None], SCALE, None, codes, factors, None, "nvfp4", "linear", "", False, "auto", True))
    check(_rows._dequantize.op, (codes[0], factors[0], SCALE, torch.empty(3, 64), "e2m1", "e4m3", 16, "linear"))
    check(_rows.interleave.op, (factors.view(1, 3, 4), torch.empty(1, 512, dtype=torch.uint8)))
    check(_packbits.op, (x[0] > 0, "little"))


def test_compiles_without_breaks():
    def function(x, scale):
        codes, factors = flashinfer.nvfp4_quantize(x, scale, nvfp4_4over6=None)
        return codes, factors, flashinfer.packbits(x[0] > 0)

    x = torch.randn(3, 64).bfloat16()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for a, b in zip(compiled(x, SCALE), function(x, SCALE)):
        assert_bitwise(a, b)


@pytest.mark.gpu
def test_offsets_beyond_2_31(device):
    x = torch.empty(3, 1 << 30, dtype=torch.bfloat16, device=device)[:, :256]
    x.copy_(rows((3, 256), torch.bfloat16, device))
    codes, factors = flashinfer.nvfp4_quantize(x, scale_of(x), SfLayout.layout_linear)
    nibbles, expected = truth.nvfp4(x, scale_of(x))
    assert_bitwise(codes, truth.pack(nibbles))
    assert_bitwise(factors, expected)


@pytest.mark.gpu
def test_graph(device):
    """A captured graph gives the same bits as an eager call."""
    x = rows((64, 4096), torch.bfloat16, device)
    scale = scale_of(x)
    eager = flashinfer.nvfp4_quantize(x, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashinfer.nvfp4_quantize(x, scale)
    out[0].zero_()
    graph.replay()
    for a, b in zip(out, eager):
        assert_bitwise(a, b)

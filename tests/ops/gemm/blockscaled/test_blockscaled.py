"""Products with block-scaled operands against float64 products of exactly what the codes and factors stand for."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer._core.target import named
from flashinfer.gemm import _launch
from flashinfer.ops.gemm import blockscaled as room
from flashinfer.ops.gemm.blockscaled import config
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.gemm import scaled
from tests.ops.norm.variants import variant  # the fixture

BF16 = torch.bfloat16
gpu = pytest.mark.gpu


def sizes(*small, large):
    """Small shapes (M, N, K) for both suites, and large ones for a GPU."""
    return pytest.mark.parametrize("m, n, k", [*small, *(pytest.param(*s, marks=gpu) for s in large)])


LARGE = [(1, 7168, 2048), (17, 4096, 7168), (64, 2304, 4096), (100, 1160, 1024), (1025, 640, 2048)]


def check(out, a, b, factor=1.0):
    """out against the product of float64 a [.., M, K] and b [.., N, K]."""
    truth = a @ b.mT * factor
    assert_close(out, (scaled.same_dtype(a, b, out.dtype) * factor).to(out.dtype), truth)


@sizes((1, 40, 128), (18, 72, 384), (5, 24, 200), large=LARGE)
@pytest.mark.parametrize("mode, granularity", [("K", (1, 128, 128)), ("MN", (1, 128, 128)), ("MN", (128, 128, 128)),
                                               ("K", (4, 16, 64))])  # fmt: skip
def test_groupwise(variant, device, m, n, k, mode, granularity):
    a, a_scale, a_wide = scaled.groupwise((m, k), "e4m3", granularity[0], granularity[2], device)
    b, b_scale, b_wide = scaled.groupwise((n, k), "e4m3", granularity[1], granularity[2], device)
    scales = [s.mT.contiguous() if mode == "MN" else s for s in (a_scale, b_scale)]
    out = gemm.gemm_fp8_nt_groupwise(a, b, *scales, mode, scale_granularity_mnk=granularity)
    check(out, a_wide, b_wide)
    if granularity == (128, 128, 128):
        assert_bitwise(gemm.gemm_fp8_nt_blockscaled(a, b, *scales, mode), out)


@pytest.mark.parametrize("elements", [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_groupwise_formats(variant, device, elements, dtype):
    a, a_scale, a_wide = scaled.groupwise((19, 256), elements[0], 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((48, 256), elements[1], 128, 128, device)
    out = gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", out_dtype=dtype)
    # What tensor cores sum up over a scale's 128 elements has 14 bits and more.
    assert_close(out.to(BF16), scaled.same_dtype(a_wide, b_wide, BF16), a_wide @ b_wide.mT)
    assert out.dtype == dtype


@pytest.mark.parametrize("m, k", [(1, 256), (7, 384), (3, 384)])
def test_groupwise_scales_of_trtllm(device, m, k):
    """Scales in either shape, and in the memory that says which where both are the same."""
    a, a_scale, a_wide = scaled.groupwise((m, k), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((k, k), "e4m3", 128, 128, device)
    for left in (a_scale.mT.contiguous(), a_scale.mT.contiguous().mT):
        for right in (b_scale, b_scale.mT):
            check(gemm.gemm_fp8_nt_groupwise(a, b, left, right, backend="trtllm"), a_wide, b_wide)


def fp4(m, n, k, device, nvfp4=True):
    factor, width = ("ue4m3", 16) if nvfp4 else ("ue8m0", 32)
    return [scaled.operand((rows, k), "e2m1", factor, width, device) for rows in (m, n)]


@sizes((1, 40, 128), (18, 40, 160), large=LARGE)
@pytest.mark.parametrize("nvfp4", [True, False])
def test_mm_fp4(variant, device, m, n, k, nvfp4):
    a, b = fp4(m, n, k, device, nvfp4)
    options = dict(block_size=16 if nvfp4 else 32, use_nvfp4=nvfp4)
    alpha = torch.tensor([0.37], device=device)
    descales = a.arranged("128x4"), b.arranged("128x4")
    out = flashinfer.mm_fp4(a.codes, b.codes.mT, *descales, alpha, **options)
    check(out, a.values, b.values, alpha.double())
    high, wide = -(-n // 128) * 128, b.arranged("128x4").numel() // (-(-n // 128) * 128)
    transposed = descales[1].view(high, wide).mT
    assert_bitwise(flashinfer.mm_fp4(a.codes, b.codes.mT, descales[0], transposed, alpha, **options), out)
    small = flashinfer.mm_fp4(
        a.codes, b.codes.mT, a.arranged("8x4"), descales[1], alpha, use_8x4_sf_layout=True, **options
    )
    assert_bitwise(small, out)


@sizes((1, 40, 128), (18, 40, 160), large=LARGE)
@pytest.mark.parametrize("nvfp4", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_mm_fp4_with_a_factor_of_each_row(variant, device, monkeypatch, m, n, k, nvfp4, parts):
    """Also where K is split; another number of factors is refused."""
    from flashinfer.ops.gemm.blockscaled import portable

    monkeypatch.setattr(portable, "splits", lambda tiles, blocks, sms: parts)
    a, b = fp4(m, n, k, device, nvfp4)
    options = dict(block_size=16 if nvfp4 else 32, use_nvfp4=nvfp4)
    given = a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4")
    alpha = torch.rand(m, device=device) + 0.1
    out = torch.full((m, n + 8), float("nan"), dtype=BF16, device=device)
    flashinfer.mm_fp4(*given, alpha, out=out[:, :n], **options)
    check(out[:, :n], a.values, b.values, alpha.double()[:, None])
    assert out[:, n:].isnan().all()
    column = flashinfer.mm_fp4(*given, generate.strided(alpha[:, None], gap=3), backend="cake", **options)
    assert_bitwise(column, out[:, :n].contiguous())
    with pytest.raises(ValueError, match="^alpha: got"):
        flashinfer.mm_fp4(*given, torch.ones(m + 1, device=device), **options)


def test_mm_fp4_of_a_shuffled_weight(variant, device):
    a, b = fp4(5, 128, 128, device)
    codes = flashinfer.shuffle_matrix_a(b.codes, 128)
    rows = scaled.layouts.padded(128, 8, "128x4")
    factors = flashinfer.shuffle_matrix_sf_a(b.flat.view(torch.uint8).view(rows), 128)
    out = flashinfer.mm_fp4(a.codes, codes.mT, a.arranged("128x4"), factors, backend="trtllm")
    check(out, a.values, b.values)


@pytest.mark.parametrize("a_element, b_element, width", [
    ("e2m1", "e2m1", 16), ("e2m1", "e2m1", 32), ("e4m3", "e2m1", 32), ("e2m1", "e5m2", 32), ("e4m3", "e4m3", 32),
])  # fmt: skip
def test_tgv(variant, device, a_element, b_element, width):
    """Factors in 128x4 tiles, whose dtype says their format; the bias is added before the one rounding."""
    scale, dtype = ("ue4m3", torch.float8_e4m3fn) if width == 16 else ("ue8m0", torch.float8_e8m0fnu)
    a, b = (scaled.operand((r, 192), e, scale, width, device) for r, e in ((5, a_element), (40, b_element)))
    factors = [x.arranged("128x4").view(torch.uint8).view(dtype) for x in (a, b)]
    given = a.codes, b.codes.mT
    bias = torch.randn(40, device=device).to(torch.float16) * 100
    guard = generate.Guarded((5, 40), torch.float16, device)
    out = flashinfer.tgv_gemm_sm100(*given, bias, False, None, *factors)
    flashinfer.tgv_gemm_sm100(*given, bias, out=guard.out, a_descale=factors[0], b_descale=factors[1])
    guard.check()
    assert out.dtype == bias.dtype
    assert_bitwise(guard.out, out)
    truth = a.values @ b.values.mT + bias.double()
    same = (a.values.float() @ b.values.float().mT + bias.float()).to(out.dtype)
    assert_close(out, same, truth)
    assert flashinfer.tgv_gemm_sm100(*given, None, a_descale=factors[0], b_descale=factors[1]).dtype == BF16
    with pytest.raises(ValueError, match="^b_descale: got torch.float32"):
        flashinfer.tgv_gemm_sm100(*given, bias, a_descale=factors[0], b_descale=torch.ones(1, device=device))
    if width == 32 and a_element != b_element:
        with pytest.raises(ValueError, match="^[ab]: got torch.float8"):
            narrow = [x.view(torch.uint8).view(torch.float8_e4m3fn) for x in factors]
            flashinfer.tgv_gemm_sm100(*given, bias, a_descale=narrow[0], b_descale=narrow[1])


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "mxfp4"])
def test_padding_of_factors_is_not_read(variant, device, kind):
    """Tiles of a layout are padded to four blocks; what lies there may be NaN."""
    element, factor, width = {"mxfp8": ("e4m3", "ue8m0", 32), "nvfp4": ("e2m1", "ue4m3", 16)}.get(
        kind, ("e2m1", "ue8m0", 32)
    )
    k = 5 * width + (0 if kind == "mxfp8" else width)
    a, b = (scaled.operand((rows, k), element, factor, width, device) for rows in (5, 40))
    tiles = []
    for x, rows in ((a, 5), (b, 40)):
        tile = x.arranged("128x4").view(torch.uint8).flatten().clone()
        padding = torch.ones_like(tile, dtype=torch.bool)
        padding[scaled.layouts.offsets(rows, k // width, "128x4", device).flatten()] = False
        tiles.append(tile.masked_fill(padding, 0xFF))
    if kind == "mxfp8":
        out = flashinfer.mm_mxfp8(a.codes, b.codes.mT, *tiles)
    else:
        out = flashinfer.mm_fp4(a.codes, b.codes.mT, *tiles, block_size=width, use_nvfp4=kind == "nvfp4")
    check(out, a.values, b.values)


@sizes((1, 40, 128), (18, 40, 160), large=LARGE)
@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_mm_mxfp8(variant, device, m, n, k, elements):
    a, b = (scaled.operand((r, k), e, "ue8m0", 32, device) for r, e in zip((m, n), elements))
    out = flashinfer.mm_mxfp8(a.codes, b.codes.mT, a.flat, b.flat.mT)
    check(out, a.values, b.values)
    tiled = flashinfer.mm_mxfp8(a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4"))
    assert_bitwise(tiled, out)
    small = flashinfer.mm_mxfp8(
        a.codes, b.codes.mT, a.arranged("8x4"), b.arranged("128x4"), use_8x4_sf_layout=True
    )
    assert_bitwise(small, out)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_bmm_mxfp8(variant, device, batch):
    a, b = (scaled.operand((batch, r, 128), "e4m3", "ue8m0", 32, device) for r in (5, 40))
    out = flashinfer.bmm_mxfp8(a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4"), torch.float16)
    check(out, a.values, b.values)


@sizes((1, 40, 128), (18, 40, 144), large=LARGE)
def test_mm_bf16_fp4(variant, device, m, n, k):
    a = generate.randn(m, k, dtype=BF16, device=device)
    b = scaled.operand((n, k), "e2m1", "ue4m3", 16, device)
    alpha = torch.tensor([1.5], device=device)
    for given in (None, alpha):
        prepared = flashinfer.prepare_bf16_fp4_weights(b.codes, b.arranged("128x4"), given, backend="cudnn")
        out = flashinfer.mm_bf16_fp4(a, *prepared, backend="cudnn")
        check(out, a.double(), b.values, 1.0 if given is None else 1.5)
    for backend in ("cute-dsl", "cute-dsl-native", "blackwell-native", "blackwell-tiled"):
        same = flashinfer.prepare_bf16_fp4_weights(b.codes, b.arranged("128x4"), alpha, backend=backend)
        assert_bitwise(flashinfer.mm_bf16_fp4(a, *same, backend=backend), out)


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_blockscale(variant, device, per_row):
    """Given FP8 it is the groupwise product; bfloat16 is quantised as the docstring says."""
    high = 1 if per_row else 128
    a, a_scale, a_wide = scaled.groupwise((9, 256), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((136, 256), "e4m3", high, 128, device)
    check(gemm.fp8_blockscale_gemm_sm90(a, b, a_scale, b_scale), a_wide, b_wide)
    x, weight = (generate.randn(rows, 256, dtype=BF16, device=device) for rows in (9, 136))
    if device.type == "cuda":
        # There torch divides by a number as it multiplies by its inverse, and a scale may be a last bit off: that of a
        # largest magnitude of 448 / 64 is a power of two either way.
        x[:, ::128] = weight[::128, ::128] = 7
    check(gemm.fp8_blockscale_gemm_sm90(x, b, None, b_scale), quantised(x, 1), b_wide)
    check(gemm.fp8_blockscale_gemm_sm90(x, weight, out_dtype=torch.float32).to(BF16), quantised(x, 1),
          quantised(weight, 128))  # fmt: skip


def quantised(x, high):
    """float64 of x with blocks of `high` x 128 in e4m3 times a float32 scale."""
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for top in range(0, x.shape[0], high):
        for left in range(0, x.shape[1], 128):
            block = x[top : top + high, left : left + 128].float()
            scale = block.abs().max() / 448
            codes = (block * (1 / scale)).to(torch.float8_e4m3fn)
            out[top : top + high, left : left + 128] = codes.double() * scale.double()
    return out


@pytest.mark.parametrize("m, n, k", [(5, 40, 640), (3, 24, 200)])
def test_parts_of_k(device, monkeypatch, m, n, k):
    """A product that is split along K, also where parts are empty."""
    from flashinfer.ops.gemm.blockscaled import portable

    monkeypatch.setattr(portable, "splits", lambda tiles, blocks, sms: 7)
    a, a_scale, a_wide = scaled.groupwise((m, k), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((n, k), "e4m3", 128, 128, device)
    check(gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", backend="portable"), a_wide, b_wide)
    a, b = fp4(m, n, k // 16 * 16, device)
    alpha = torch.tensor([3.0], device=device)
    descales = a.arranged("128x4"), b.arranged("128x4")
    out = flashinfer.mm_fp4(a.codes, b.codes.mT, *descales, alpha, torch.float16, backend="portable")
    check(out, a.values, b.values, 3.0)


@pytest.mark.parametrize(
    "element, factor, width, k",
    [("e2m1", "ue4m3", 16, 320), ("e4m3", "ue8m0", 32, 96), ("e2m1", "ue8m0", 32, 512), ("e5m2", "ue8m0", 32, 256)],
)
@pytest.mark.parametrize("layout", ["128x4", "8x4", "linear"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_widen(variant, device, element, factor, width, k, layout, shuffled):
    """Codes times factors are in bfloat16 what they are, and rows of a shuffled weight are in order."""
    x = scaled.operand((2, 64 if shuffled else 21, k), element, factor, width, device)
    codes, flat = x.codes, x.flat
    if shuffled:
        # Row 4 j + i of 32 is stored as row 8 i + j.
        codes, flat = _stored(codes), _stored(flat)
    encoding = {"e2m1": "e2m1", "e4m3": "fp8e4nv", "e5m2": "fp8e5"}[element]
    aligned = codes.shape[2] % 16 == 0 and (layout != "linear" or k // width % 4 == 0)
    problem = room.Widen(encoding, factor, width, layout, shuffled, aligned, whole=k % 256 == 0)
    guard = generate.Guarded((2, codes.shape[1], k), BF16, device)
    room.widen(problem, codes.device).run(codes, scaled.Operand(codes, flat, x.values).arranged(layout), guard.out)
    guard.check()
    assert_bitwise(guard.out, x.values.to(BF16))


def test_nvfp4_is_float16_exactly(variant, device):
    """A product of an e2m1 and an e4m3, of all of them, is a float16."""
    factors = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    codes = (torch.arange(8, device=device) * 0x22 + 0x10).to(torch.uint8).expand(1, 128, 8)
    flat = torch.cat([factors, factors[:1]]).view(torch.uint8)[None]
    guard = generate.Guarded((1, 128, 16), torch.float16, device)
    problem = room.Widen("e2m1", "ue4m3", 16, "linear", aligned=False, whole=False, half=True)
    room.widen(problem, device).run(codes.contiguous(), flat, guard.out)
    guard.check()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=device)
    values = torch.cat([magnitudes, -magnitudes])
    nibbles = torch.stack([codes[0].long() & 15, codes[0].long() >> 4], -1).flatten(1)
    truth = values[nibbles] * flat[0].view(torch.float8_e4m3fn).double()[:, None]
    assert_bitwise(guard.out[0].double(), truth)


@pytest.mark.parametrize("element", ["bf16", "e2m1"])
@pytest.mark.parametrize("apart", [1, 4])
def test_columns_in_the_order_of_fragments(device, variant, element, apart):
    """Of 128 columns, a row's thread c has 32 c to 32 c + 31; wgmma reads pairs 2 c and 2 c + 8 of each 16 from it. Its
    registers have neighbours, or the columns j and j + 4 of eight."""
    k = 384
    x = scaled.operand((2, 5, k), "e2m1", "ue4m3", 16, device)
    values = x.values.to(BF16)
    given = (x.codes, x.arranged("128x4")) if element == "e2m1" else (values, None)
    scale = ("ue4m3", 16, "128x4") if element == "e2m1" else ("", 16, "")
    guard = generate.Guarded((2, 5, k), BF16, device)
    room.widen(room.Widen(element, *scale, whole=False, arranged=apart), device).run(*given, guard.out)
    guard.check()
    for block in range(0, k, 128):
        for c, register, e in itertools.product(range(4), range(16), range(2)):
            found = guard.out[:, :, block + 8 * register + 2 * c + e]
            column = 2 * register + e if apart == 1 else register // 4 * 8 + register % 4 + 4 * e
            assert_bitwise(found, values[:, :, block + 32 * c + column])


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_plain_rows(variant, device, element):
    """Rows without factors, by a weight that has them."""
    x = torch.randn(1, 21, 256, device=device).to(BF16)
    w = scaled.operand((1, 40, 256), element, "ue8m0", 32, device)
    code = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}.get(element, element)
    problem = room.Problem("bf16", code, "ue8m0", 32, "fp32", 32, b_layout="128x4")
    guard = generate.Guarded((1, 21, 40), torch.float32, device)
    room.blockscaled(problem, device).run(x, w.codes, None, w.arranged("128x4"), None, guard.out)
    guard.check()
    check(guard.out, x.double(), w.values)


@pytest.mark.parametrize("arch, least", [("90a", 129), ("80", 512), ("89", 512), ("100a", None), ("120a", None)])
def test_where_operands_are_widened_first(arch, least):
    """From some number of tokens on, where tensor cores do not take the codes."""
    problem = room.Problem("e2m1", "e2m1", "ue4m3", 16, "bf16", 256, a_layout="128x4", b_layout="128x4")
    found = [config.widens_first(problem, tokens, named(arch), False) for tokens in (1, 128, 129, 511, 512, 4096)]
    assert found == [least is not None and tokens >= least for tokens in (1, 128, 129, 511, 512, 4096)]
    fp8 = replace(problem, a="fp8e4nv", b="fp8e4nv", scale="fp32", width=128)
    assert not config.widens_first(fp8, 4096, named(arch), False)


@pytest.mark.parametrize("which", ["a", "b", "row"])
def test_entries_that_are_one(device, which):
    """A matrix that is every entry of the batch, or a row that is every row: no tensor map may step by 0."""
    a, b = (scaled.operand((2, r, 256), "e4m3", "ue8m0", 32, device) for r in (40, 64))
    codes = {"a": a.codes, "b": b.codes}
    values = {"a": a.values, "b": b.values}
    flat = {"a": a, "b": b}
    if which == "row":
        one = scaled.operand((2, 1, 256), "e4m3", "ue8m0", 32, device)
        factors = scaled.Operand(one.codes.repeat(1, 40, 1), one.flat.repeat(1, 40, 1), one.values.repeat(1, 40, 1))
        codes["a"], values["a"], flat["a"] = one.codes.expand(2, 40, 256), factors.values, factors
    else:
        x = flat[which]
        codes[which], values[which] = x.codes[:1].expand_as(x.codes), x.values[:1].expand_as(x.values)
        flat[which] = scaled.Operand(x.codes, x.flat[:1].repeat(2, 1, 1), values[which])
    assert not _launch._rows_aligned(codes["a"], codes["b"], torch.empty(2, 40, 64, dtype=BF16, device=device))
    given = codes["a"], codes["b"].mT, flat["a"].arranged("128x4"), flat["b"].arranged("128x4")
    check(flashinfer.bmm_mxfp8(*given, BF16), values["a"], values["b"])


def test_hopper_widens_weights_by_itself():
    """The kernel that widens in registers takes all but few tokens of a small weight, and many that are not FP4."""
    problem = room.Problem("e2m1", "e2m1", "ue4m3", 16, "bf16", 256, a_layout="128x4", b_layout="128x4")
    plain = replace(problem, a="bf16", a_layout="")
    tokens = (129, 512, 4096)
    assert not any(config.widens_first(problem, m, named("90a"), True) for m in tokens)
    eight = replace(problem, a="fp8e4nv", b="fp8e4nv", scale="ue8m0", width=32)
    for many in (plain, eight):
        assert [config.widens_first(many, m, named("90a"), True) for m in tokens] == [False, False, True]
    assert [config.is_small(m, 4096 * 4096) for m in (1, 16, 17, 64)] == [True, True, False, False]
    assert [config.is_small(m, 2048 * 2048) for m in (1, 64, 65)] == [True, True, False]
    assert not config.is_small(1, 7168 * 16384)


@pytest.fixture
def widened_first(monkeypatch):
    monkeypatch.setattr("flashinfer.gemm._launch.widens_first", lambda problem, tokens, target, alone: True)


@pytest.mark.parametrize("m, n, k", [(5, 40, 320), (17, 24, 96)])
def test_products_of_widened_operands(device, widened_first, m, n, k):
    """Every format, by the dense product; strides of the result, and an alpha, as otherwise."""
    a, b = fp4(m, n, k, device)
    alpha = torch.tensor([3.0], device=device)
    out = torch.full((m, n + 8), float("nan"), dtype=BF16, device=device)
    given = a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4")
    flashinfer.mm_fp4(*given, alpha, out=out[:, :n])
    check(out[:, :n], a.values, b.values, 3.0)
    assert out[:, n:].isnan().all()
    rows = torch.rand(m, device=device) + 0.1
    flashinfer.mm_fp4(*given, rows, out=out[:, :n])
    check(out[:, :n], a.values, b.values, rows.double()[:, None])
    a, b = (scaled.operand((2, r, k), "e4m3", "ue8m0", 32, device) for r in (m, n))
    out = flashinfer.bmm_mxfp8(a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4"), torch.float32)
    check(out, a.values, b.values)
    x = torch.randn(m, k, device=device).to(BF16)
    b = scaled.operand((n, k), "e2m1", "ue4m3", 16, device)
    weight = flashinfer.prepare_bf16_fp4_weights(b.codes, b.arranged("128x4"), backend="cudnn")
    check(flashinfer.mm_bf16_fp4(x, *weight, backend="cudnn"), x.double(), b.values)


def test_a_shuffled_weight_is_widened_in_order(device, widened_first):
    a, b = fp4(4, 128, 64, device)
    given = _stored(b.codes[None])[0], scaled.Operand(b.codes, _stored(b.flat[None])[0], b.values).arranged("128x4")
    out = flashinfer.mm_fp4(a.codes, given[0].mT, a.arranged("128x4"), given[1], backend="trtllm")
    check(out, a.values, b.values)


def _stored(rows):
    """[batch, rows, .] as TensorRT-LLM's kernels want a weight: row 4 j + i of each 32 becomes row 8 i + j."""
    return rows.unflatten(1, (-1, 8, 4)).transpose(2, 3).flatten(1, 3).contiguous()


def test_strides_and_neighbours(variant, device):
    """Rows with gaps are read where they are, and nothing beside the result is written."""
    a, a_scale, a_wide = scaled.groupwise((11, 128), "e4m3", 1, 128, device)
    b, b_scale, b_wide = scaled.groupwise((40, 128), "e4m3", 128, 128, device)
    a, b = generate.strided(a, gap=16), generate.strided(b, gap=5)
    guard = generate.Guarded((11, 40), BF16, device)
    gemm.gemm_fp8_nt_groupwise(a, b, a_scale.mT, b_scale.mT, "MN", out=guard.out)
    guard.check()
    check(guard.out, a_wide, b_wide)
    out = torch.full((11, 64), float("nan"), dtype=BF16, device=device)
    gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", out=out[:, :40])
    assert_bitwise(out[:, :40].contiguous(), guard.out)
    assert out[:, 40:].isnan().all()


def test_specials(variant, device):
    """A NaN in a code or a factor spoils its row or column alone."""
    a, b = (scaled.operand((r, 64), "e4m3", "ue8m0", 32, device) for r in (4, 24))
    a.codes.view(torch.uint8)[1, 3], b.flat[2, 1] = 0x7F, 255
    out = flashinfer.mm_mxfp8(a.codes, b.codes.mT, a.flat, b.flat.mT)
    wrong = out.isnan()
    assert wrong[1].all() and wrong[:, 2].all() and int(wrong.sum()) == 24 + 4 - 1


def test_a_factor_of_any_float_on_either_device(variant, device):
    a, b = fp4(4, 16, 64, device)
    given = a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4")
    expected = flashinfer.mm_fp4(*given, torch.tensor([0.25], device=device))
    for alpha in (torch.tensor(0.25), torch.tensor([[0.25]], dtype=torch.float16), torch.tensor([0.25]).to(BF16)):
        assert_bitwise(flashinfer.mm_fp4(*given, alpha), expected)


@pytest.mark.parametrize("m, n", [(0, 16), (3, 0)])
def test_nothing_to_do(variant, device, m, n):
    a, b = fp4(m, n, 64, device)
    out = flashinfer.mm_fp4(a.codes, b.codes.mT, a.arranged("128x4"), b.arranged("128x4"))
    assert out.shape == (m, n)


def good():
    a, b = fp4(4, 128, 64, "cpu")
    return dict(a=a.codes, b=b.codes.mT, a_descale=a.arranged("128x4"), b_descale=b.arranged("128x4"))


BAD_FP4 = {
    "a": dict(a=torch.zeros(4, 32)),
    "a of one dimension": dict(a=torch.zeros(4, dtype=torch.uint8)),
    "b": dict(b=torch.zeros(16, 128, dtype=torch.uint8).mT.contiguous().mT),
    "b of rows": dict(b=torch.zeros(32, 128, dtype=torch.uint8)),
    "a_descale": dict(a_descale=torch.zeros(16, dtype=torch.uint8)),
    "a_descale in 8x4": dict(use_8x4_sf_layout=True),
    "b_descale": dict(b_descale=torch.zeros(128, 4)),
    "alpha": dict(alpha=torch.ones(2)),
    "out": dict(out=torch.empty(4, 127, dtype=BF16)),
    "out of another dtype": dict(out=torch.empty(4, 128, dtype=torch.float16)),
    "out_dtype": dict(out_dtype=torch.int32),
    "block_size": dict(block_size=32),
    "backend": dict(backend="nothing"),
}


@pytest.mark.parametrize("name", BAD_FP4)
def test_bad_input_of_mm_fp4(name):
    with pytest.raises(ValueError, match=f"^{name.split()[0]}: got .*allowed: "):
        flashinfer.mm_fp4(**good() | BAD_FP4[name])


BAD_GROUPWISE = {
    "b": dict(b=torch.zeros(8, 64).to(torch.float8_e4m3fn)),
    "a_scale": dict(a_scale=torch.ones(1, 4)),
    "b_scale": dict(b_scale=torch.ones(1, 1, dtype=torch.float16)),
    "scale_major_mode": dict(scale_major_mode=None),
    "scale_major_mode of trtllm": dict(backend="trtllm"),
    "mma_sm": dict(mma_sm=3),
    "scale_granularity_mnk": dict(scale_granularity_mnk=(1, 128, 48)),
}


@pytest.mark.parametrize("name", BAD_GROUPWISE)
def test_bad_input_of_groupwise(name):
    a, a_scale, _ = scaled.groupwise((4, 128), "e4m3", 1, 128, "cpu")
    b, b_scale, _ = scaled.groupwise((8, 128), "e4m3", 128, 128, "cpu")
    given = dict(a=a, b=b, a_scale=a_scale, b_scale=b_scale, scale_major_mode="K")
    with pytest.raises(ValueError, match=f"^{name.split()[0]}: got .*allowed: "):
        gemm.gemm_fp8_nt_groupwise(**given | BAD_GROUPWISE[name])


def test_bad_input_of_the_others():
    x, w = torch.zeros(4, 128, dtype=BF16), torch.zeros(8, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="^weight_scale: got None"):
        gemm.fp8_blockscale_gemm_sm90(x, w)
    with pytest.raises(ValueError, match="^input_scale: got a tensor"):
        gemm.fp8_blockscale_gemm_sm90(x, w, torch.ones(4, 1), torch.ones(1, 1))
    a, b = (scaled.operand((r, 64), "e4m3", "ue8m0", 32, "cpu") for r in (4, 24))
    with pytest.raises(ValueError, match="^b_descale: got"):
        flashinfer.mm_mxfp8(a.codes, b.codes.mT, a.flat, b.flat)
    with pytest.raises(ValueError, match="^a_descale: got"):
        flashinfer.mm_mxfp8(a.codes, b.codes.mT, a.flat, b.flat.mT, use_8x4_sf_layout=True)
    with pytest.raises(ValueError, match="^backend: got 'cutlass'"):
        flashinfer.prepare_bf16_fp4_weights(b.codes.view(torch.uint8), b.flat, backend="cutlass")


def test_is_a_registered_op():
    from flashinfer.gemm import _launch

    a, b = fp4(4, 16, 64, "cpu")
    flat = a.arranged("128x4")[None], b.arranged("128x4")[None]
    args = a.codes[None], b.codes[None], *flat, None, torch.empty(1, 4, 16), "ue4m3", "128x4", "128x4"
    torch.library.opcheck(_launch.gemm.op, args, dict(width=16))




# Prints, for each architecture and format, the instructions that multiply.
PROGRAM = """
import re
from dataclasses import replace
from flashinfer._core import compiler
from flashinfer._core.target import named
from flashinfer.gemm import _launch
from flashinfer.ops.gemm.blockscaled import Problem, blockscaled, config, portable

INSTRUCTION = r"(?:tcgen05[.]mma|wgmma[.]mma_async|mma[.]sync)[\\w.:]*"
tiled = dict(tokens=128, out="bf16", a_layout="128x4", b_layout="128x4")
nvfp4 = Problem("e2m1", "e2m1", "ue4m3", 16, **tiled)
mxfp4, mxfp8 = replace(nvfp4, scale="ue8m0", width=32), Problem("fp8e4nv", "fp8e4nv", "ue8m0", 32, **tiled)
for arch in ("100a", "120a"):
    for name, problem in (("nvfp4", nvfp4), ("mxfp4", mxfp4), ("mxfp8", mxfp8)):
        compiler._describe = lambda arch, ptx, *rest: print(arch, name, *sorted(set(re.findall(INSTRUCTION, ptx))))
        compiler.compile_kernel(portable.build(problem, config.portable(problem, named(arch))), arch)
"""


@pytest.mark.matrix
def test_tensor_cores_that_take_factors_are_given_them():
    """PTX ISA: tcgen05.mma of kind mxf8f6f4, mxf4 and mxf4nvf4; mma.sync with .block_scale."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        arch, number_format, *instructions = line.split()
        assert instructions, line
        for instruction in instructions:
            if arch == "100a":
                kind = {"nvfp4": "kind::mxf4nvf4", "mxfp4": "kind::mxf4", "mxfp8": "kind::mxf8f6f4"}[number_format]
                assert instruction.startswith("tcgen05.mma") and f"{kind}.block_scale" in instruction, line
            else:
                assert instruction.startswith("mma.sync") and ".block_scale" in instruction, line
    assert len(done.stdout.splitlines()) == 6

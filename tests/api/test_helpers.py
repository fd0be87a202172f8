"""Helpers that callers import from flashinfer.utils and flashinfer.testing.utils."""

import pytest
import torch

from flashinfer import utils
from flashinfer.testing.compare import assert_bitwise
from flashinfer.testing.utils import dequantize_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8, quantize_fp8


def numbers(kind):
    return {member.name: member.value for member in kind}


def test_enumerations():
    assert numbers(utils.PosEncodingMode) == dict(NONE=0, ROPE_LLAMA=1, ALIBI=2)
    assert numbers(utils.MaskMode) == dict(NON_CAUSAL=0, CAUSAL=1, CUSTOM=2, MULTIITEMSCORING=3)
    assert numbers(utils.TensorLayout) == dict(NHD=0, HND=1)


def test_arithmetic():
    assert [utils.last_positive_power_of_2(x) for x in (1, 2, 3, 4, 7, 8, 1000)] == [1, 2, 2, 4, 4, 8, 512]
    assert [utils.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [utils.round_up(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
    with pytest.raises(ValueError, match="^x: got 0; allowed: 1 or more"):
        utils.last_positive_power_of_2(0)


def test_tensors_and_dtypes(device):
    lengths = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)
    assert_bitwise(utils.get_indptr(lengths), torch.tensor([0, 3, 3, 5], device=device))
    # The paper's: 8 heads have 1/2 ... 1/256; of 12, the last four lie between the first of 16.
    eight = 2.0 ** -torch.arange(1, 9, device=device).float()
    assert_bitwise(utils.get_alibi_slopes(8, device), eight)
    assert_bitwise(utils.get_alibi_slopes(12, device), torch.cat([eight, 2.0 ** -torch.arange(0.5, 4).to(device)]))
    assert utils.canonicalize_torch_dtype("float16") is utils.canonicalize_torch_dtype(torch.float16) is torch.float16
    for bad in ("half_float", 16, "Tensor"):
        with pytest.raises(ValueError, match="^dtype: got "):
            utils.canonicalize_torch_dtype(bad)
    assert utils.is_float8(torch.empty(1, dtype=torch.float8_e5m2)) and not utils.is_float8(lengths)
    assert utils.get_native_fp4_dtype().itemsize == 1


@pytest.mark.parametrize("shape, tile", [((6, 256), (1, 128)), ((256, 384), (128, 128)), ((2, 6, 256), (1, 1, 128))])
@pytest.mark.parametrize("mode", ["K", "MN"])
def test_tiles_in_fp8(shape, tile, mode, device):
    x = torch.randn(shape, device=device)
    x[..., :128] = 0
    tiles = [n // t for n, t in zip(shape, tile)]
    given = (*tiles[:-2], tiles[-1], tiles[-2]) if mode == "MN" else tuple(tiles)
    codes, scales = quantize_fp8(x, given, tile, mode)
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and tuple(scales.shape) == given
    each = scales.transpose(-1, -2) if mode == "MN" else scales
    for axis, t in enumerate(tile):
        each = each.repeat_interleave(t, axis)
    assert_bitwise(dequantize_fp8(codes, scales, mode), codes.float() * each)
    # Half a unit in the last place of e4m3: 2^-4 of the value, or 2^-10 of the scale where codes are subnormal.
    assert ((codes.float() * each - x).abs() <= (x.abs() * 2.0**-4).maximum(each * 2.0**-10)).all()
    assert ((torch.log2(scales) % 1) == 0).all() and (x.abs() <= 448 * each).all()
    largest = codes.float().abs().amax()
    assert 224 < largest <= 448
    with pytest.raises(ValueError, match="^scale_shape: got "):
        quantize_fp8(x, [n + 1 for n in given], tile, mode)
    with pytest.raises(ValueError, match="^scale_major_mode: got "):
        quantize_fp8(x, given, tile, "N")


def test_operands_of_deepgemm(device):
    x = torch.randn(130, 256, device=device)
    codes, scales = per_token_cast_to_fp8(x)
    again = quantize_fp8(x, (130, 2), (1, 128), "K")
    assert_bitwise(codes, again[0])
    assert_bitwise(scales, again[1])
    codes, scales = per_block_cast_to_fp8(x[:, :200])
    assert tuple(codes.shape) == (130, 200) and tuple(scales.shape) == (2, 2)
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert ((codes.float() * each - x[:, :200]).abs() <= (x[:, :200].abs() * 2.0**-4).maximum(each * 2.0**-10)).all()

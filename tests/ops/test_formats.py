"""The table of number formats says what the formats' specifications and torch say, and what the functions make."""

import pytest
import torch

import flashinfer
from flashinfer.ops.formats import ELEMENTS, FORMATS
from tests.ops.quantize import truth

QUANTISE = {"nvfp4": lambda x: flashinfer.nvfp4_quantize(x, torch.ones(1)), "mxfp4": flashinfer.mxfp4_quantize}
QUANTISE["mxfp8"] = lambda x: flashinfer.mxfp8_quantize(x, False)


def test_largest_values_are_those_of_the_specification():
    assert ELEMENTS["e2m1"].largest == float(truth.decode("e2m1", torch.arange(16, dtype=torch.uint8)).max())
    assert ELEMENTS["ue4m3"].largest == float(truth.decode("e4m3", torch.arange(0x7F, dtype=torch.uint8)).max())
    # 255 is NaN, and the bias is 127.
    assert ELEMENTS["ue8m0"].largest == 2.0 ** (254 - 127)


def test_elements_are_torchs():
    for name, element in ELEMENTS.items():
        if element.dtype != torch.uint8:
            info = torch.finfo(element.dtype) if element.dtype.is_floating_point else torch.iinfo(element.dtype)
            assert (element.bits, element.largest, element.per_byte) == (info.bits, info.max, 1), name
    assert ELEMENTS["ue4m3"].largest == torch.finfo(torch.float8_e4m3fn).max


@pytest.mark.parametrize("name", QUANTISE)
def test_sizes_are_those_that_functions_make(name):
    rows, columns = 128, 256
    codes, factors = QUANTISE[name](torch.randn(rows, columns).bfloat16())
    known = FORMATS[name]
    assert codes.numel() * codes.element_size() == rows * known.code_bytes(columns)
    assert 8 * factors.element_size() == ELEMENTS[known.factor].bits
    assert columns // known.width * rows == factors.numel()
    assert all(ELEMENTS[x].per_byte * ELEMENTS[x].bits <= 32 for x in (known.element, known.factor))

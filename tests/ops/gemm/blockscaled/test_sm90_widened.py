"""bfloat16 times codes with factors on Hopper, widened on their way to the tensor cores."""

from dataclasses import replace

import pytest
import torch

from flashinfer.ops.gemm.blockscaled import Problem, blockscaled
from flashinfer.ops.gemm.operands import bucket
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.gemm import scaled

BF16 = torch.bfloat16
SIZES = ((1, 136, 1024), (17, 136, 1024), (33, 264, 256), (100, 264, 384), (130, 264, 128), (300, 648, 1152),
         (512, 1032, 4096))  # fmt: skip
FORMATS = {"nvfp4": ("e2m1", "ue4m3", 16), "mxfp4": ("e2m1", "ue8m0", 32), "mxfp8": ("e4m3", "ue8m0", 32),
           "e5m2": ("e5m2", "ue8m0", 32)}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["128x4", "8x4", "linear"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m, n, k", SIZES)
def test_shapes(device, m, n, k, name, layout):
    check(device, m, n, k, name, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m, slices", [(200, 1), (200, 3), (25, 1), (64, 4), (1, 5), (17, 2), (520, 3)])
def test_shuffled_weights_and_slices(device, name, m, slices):
    check(device, m, 256, 640, name, shuffled=True, alpha=3.0, slices=slices, out_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("m, n, k", SIZES)
def test_both_are_codes(device, m, n, k, name):
    check(device, m, n, k, name, both=True)


@pytest.mark.gpu
def test_large(device):
    check(device, 4096, 7168, 2048, "nvfp4", alpha=0.5)
    check(device, 1000, 2056, 7168, "mxfp8", batch=1)
    for m in (1, 16, 40):
        check(device, m, 7168, 16384, "nvfp4", alpha=0.5, batch=1)
        check(device, m, 2056, 7168, "mxfp8", batch=1)


def check(
    device, m, n, k, name, layout="128x4", batch=2, shuffled=False, alpha=None, out_dtype=BF16, slices=0, both=False,
):  # fmt: skip
    """both : the tokens too are codes with factors."""
    element, factor, width = FORMATS[name]
    b = scaled.operand((batch, n, k), element, factor, width, device)
    codes, flat = b.codes, b.flat
    if shuffled:
        # Row 4 j + i of 32 is stored as row 8 i + j.
        codes, flat = (x.unflatten(1, (-1, 8, 4)).transpose(2, 3).flatten(1, 3).contiguous() for x in (codes, flat))
    factors = scaled.Operand(codes, flat, b.values).arranged(layout)
    if both:
        operand = scaled.operand((batch, m, k), element, factor, width, device)
        a, a_factors, truth = operand.codes, operand.arranged("128x4"), operand.values
    else:
        truth = a = generate.randn(batch, m, k + 8, device=device).to(BF16)[:, :, :k]
        a_factors = None
    encoding = {"e2m1": "e2m1", "e4m3": "fp8e4nv", "e5m2": "fp8e5"}[element]
    out_name = {BF16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[out_dtype]
    problem = Problem(
        encoding if both else "bf16", encoding, factor, width, out_name, bucket(m), a_layout="128x4" if both else "",
        b_layout=layout, shuffled=shuffled, alpha="one" if alpha else "",
    )  # fmt: skip
    choice = blockscaled(problem, device)
    assert choice.variant.name == "sm90_widened"
    for changed in (dict(alpha="rows"), dict(whole=False), dict(aligned=False)):
        assert blockscaled(replace(problem, **changed), device).variant.name != "sm90_widened"
    guard = generate.Guarded((batch, m, n), out_dtype, device)
    given = None if alpha is None else torch.tensor([alpha], device=device)
    choice.variant.load().run(problem, choice.config, a, codes, a_factors, factors, given, guard.out, slices=slices)
    guard.check()
    a = truth
    truth = a.double() @ b.values.double().mT * (alpha or 1.0)
    same = (a.float() @ b.values.float().mT * (alpha or 1.0)).to(out_dtype)
    assert_close(guard.out, same, truth, name)

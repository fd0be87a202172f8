"""Gluon under our names: the Hopper building blocks compile here, and compute on a Hopper GPU."""

import re
import struct
import subprocess

import pytest
import torch


def compiled():
    from triton import knobs

    from flashinfer._core.compiler import compile_kernel
    from flashinfer._core.launch import Layout
    from tests.core.samples_gluon import Config, Problem, build, product

    entry = product.entry(Problem(), Config(), "90a")
    again, kernel = compile_kernel(build(Problem(), Config()), "90a")
    assert again == entry.cubin and kernel == entry.kernel
    layout = Layout("product", build(Problem(), Config()), entry.kernel)
    tool = [knobs.nvidia.cuobjdump.path, "-sass", str(entry.path.with_suffix(".cubin"))]
    sass = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return entry, sass, layout.struct.format, layout.offsets


def test_hopper_building_blocks_compile(in_triton):
    entry, sass, packing, offsets = in_triton(compiled)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS"):
        assert re.search(rf"\b{instruction}", sass), instruction
    assert entry.kernel["threads"] >= 4 * 32 + 32
    assert entry.kernel["shared"] >= (64 * 128 + 64 * 128 + 64 * 64) * 2
    assert [wish["block_size"] for wish in entry.kernel["tensor_maps"]] == [[64, 64], [64, 64], [64, 64]]
    # three maps, each with two sizes and two strides
    assert struct.calcsize(packing) >= 3 * (128 + 2 * 4 + 2 * 8)
    assert [offset % 64 for offset in offsets[:15:5]] == [0, 0, 0]


def types():
    from flashinfer._core.gluon_compat import gl, tensordesc

    narrow = tensordesc("fp16", (64, 16))
    stated = tensordesc("fp16", (64, 16), gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2))
    return narrow, stated, tensordesc("fp8e4nv", (128, 128)), tensordesc("u8", (8, 4, 64))


def test_type_of_a_tensor_map(in_triton):
    narrow, stated, fp8, bytes3 = in_triton(types)
    assert narrow.startswith(
        "tensordesc<fp16[64, 16],NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2"
    )
    assert "swizzle_byte_width=0" in stated
    assert fp8.startswith("tensordesc<fp8e4nv[128, 128],") and "swizzle_byte_width=128, element_bitwidth=8" in fp8
    assert bytes3.startswith("tensordesc<u8[8, 4, 64],") and "rank=3" in bytes3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_hopper_building_blocks_compute(dtype, device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU, which has wgmma")
    from flashinfer._core.checks import torch_dtype
    from flashinfer._core.launch import TensorMap
    from tests.core.samples_gluon import Config, Problem, product

    a, b = (torch.randn(64, 128, device=device).to(torch_dtype(dtype)) for _ in range(2))
    c = torch.full((64, 64), float("nan"), dtype=a.dtype, device=device)
    maps = TensorMap(a, (64, 128)), TensorMap(b, (64, 128)), TensorMap(c, (64, 64))
    product(Problem(dtype), Config(), (1, 1, 1), *maps)
    truth = a.double() @ b.double().T
    torch.testing.assert_close(c.double(), truth, rtol=2**-7, atol=2**-7)

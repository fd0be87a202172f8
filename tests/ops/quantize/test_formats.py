"""The device leaves for narrow formats and scale factors, bit for bit against the formats' specifications."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops import narrow
from flashinfer.ops._device import formats, scales
from flashinfer.testing.compare import assert_bitwise
from tests.ops.quantize import truth

OCP = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}


@dataclass(frozen=True)
class Problem:
    what: str
    name: str = ""
    block: int = 64
    capability: int = 0


@triton.jit
def leaf_kernel(x, code, factor, n, WHAT: tl.constexpr, NAME: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr):
    """The leaf WHAT on row program_id(0) of x [rows, n], n <= BLOCK; what it gives goes to rows of code and factor."""
    column = tl.arange(0, BLOCK)[None, :]
    half = tl.arange(0, BLOCK // 2)[None, :]
    row = tl.program_id(0)
    y = tl.load(x + row * n + column, column < n, other=0)
    if WHAT == "to_fp8":
        tl.store(code + row * n + column, formats.to_fp8(y, NAME, CAP), column < n)
    elif WHAT == "from_fp8":
        tl.store(code + row * n + column, formats.from_fp8(y, NAME, CAP), column < n)
    elif WHAT == "to_e2m1":
        tl.store(code + row * (n // 2) + half, formats.to_e2m1(y, CAP), half < n // 2)
    elif WHAT == "from_e2m1":
        twice = tl.arange(0, BLOCK * 2)[None, :]
        tl.store(code + row * n * 2 + twice, formats.from_e2m1(y), twice < n * 2)
    elif WHAT == "to_ue8m0":
        PEAK: tl.constexpr = 448 if NAME == "e4m3" else 6
        tl.store(code + row * n + column, formats.to_ue8m0(y.to(tl.int32, bitcast=True), PEAK), column < n)
    elif WHAT == "from_ue8m0":
        tl.store(code + row * n + column, formats.from_ue8m0(y), column < n)
        tl.store(factor + row * n + column, formats.inverse_ue8m0(y), column < n)
    else:
        if WHAT == "nvfp4":
            V: tl.constexpr = 16
            c, f = scales.quantize_nvfp4(y, tl.load(factor), CAP)
        elif WHAT == "mxfp4":
            V: tl.constexpr = 32
            c, f = scales.quantize_mxfp4(y, CAP)
        elif WHAT == "mxfp8":
            V: tl.constexpr = 32
            c, f = scales.quantize_mxfp8(y, CAP)
        elif WHAT == "fp8_row":
            V: tl.constexpr = BLOCK
            c, f = scales.quantize_fp8(y, V, NAME, False, CAP)
        else:
            V: tl.constexpr = 128
            c, f = scales.quantize_fp8(y, V, NAME, WHAT == "fp8_block_power", CAP)
        at = tl.arange(0, c.shape[1])[None, :]
        tl.store(code + row * c.shape[1] + at, c)
        block = tl.arange(0, BLOCK // V)[None, :]
        # The first element of factor is the global scale.
        tl.store(factor + 4 + row * (BLOCK // V) + block, f)


@triton.jit
def offset_kernel(out, blocks, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.arange(0, 128)[:, None] + tl.program_id(0) * 128, tl.arange(0, BLOCK)[None, :]
    tl.store(out + row * blocks + block, scales.scale_offset(row, block, blocks, LAYOUT), block < blocks)


_IN = {"from_fp8": "u8", "from_e2m1": "u8", "from_ue8m0": "u8"}
_OUT = {"from_fp8": "fp32", "from_e2m1": "fp32", "from_ue8m0": "fp32"}


def _build(problem, config):
    what = problem.what
    if what == "offset":
        return Build(offset_kernel, {"out": "*i64", "blocks": "i32"}, {"LAYOUT": problem.name, "BLOCK": problem.block})
    types = {"x": f"*{_IN.get(what, 'fp32')}", "code": f"*{_OUT.get(what, 'u8')}", "factor": "*fp32", "n": "i32"}
    constants = {"WHAT": what, "NAME": problem.name, "BLOCK": problem.block, "CAP": problem.capability}
    return Build(leaf_kernel, types, constants)


launch = Launcher("leaf", _build)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.gpu)], ids=["arithmetic", "native"])
def capability(request, device):
    """0, by which integer arithmetic converts, and on a GPU what it has."""
    return target_of(device).capability if request.param else 0


def each(what, x, capability, name="", out=torch.uint8, ratio=1.0):
    """A leaf that treats columns alike, on a flat x."""
    block = 1024
    width = -(-x.numel() // block) * block
    padded = torch.zeros(width, dtype=x.dtype, device=x.device)
    padded[: x.numel()] = x
    code = torch.zeros(int(width * ratio), dtype=out, device=x.device)
    second = torch.zeros(width + 4, dtype=torch.float32, device=x.device)
    launch(Problem(what, name, block, capability), None, (width // block, 1, 1), padded, code, second, block)
    return code[: int(x.numel() * ratio)], second[: x.numel()]


@pytest.mark.parametrize("name", OCP)
def test_to_fp8(device, capability, name):
    x = truth.hard_floats(name).to(device)
    out, _ = each("to_fp8", x, capability, OCP[name])
    assert_bitwise(out, truth.encode(name, x))
    # torch does not saturate: where the largest value is not exceeded, it agrees, and so the truth is right.
    dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    inside = x.abs() <= float(truth.values(name)[-1])
    assert_bitwise(out[inside], x[inside].to(dtype).view(torch.uint8))


@pytest.mark.parametrize("name", OCP)
def test_from_fp8(device, capability, name):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out, _ = each("from_fp8", codes, capability, OCP[name], torch.float32)
    expected = truth.decode(name, codes).float()
    assert torch.equal(out.isnan(), expected.isnan())
    assert_bitwise(out.nan_to_num(nan=9), expected.nan_to_num(nan=9))


def test_to_e2m1(device, capability):
    x = truth.hard_floats("e2m1").to(device)
    for shift in (0, 1):  # each number in a low half and in a high one
        moved = torch.cat((x[:shift], x))
        moved = moved[: moved.numel() // 2 * 2]
        out, _ = each("to_e2m1", moved, capability, ratio=0.5)
        assert_bitwise(out, truth.pack(truth.encode("e2m1", moved)))


def test_from_e2m1(device, capability):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out, _ = each("from_e2m1", codes, capability, out=torch.float32, ratio=2)
    assert_bitwise(out, truth.decode("e2m1", truth.unpack(codes)).float())


@pytest.mark.parametrize(("name", "peak"), [("e2m1", 6), ("e4m3", 448)])
def test_to_ue8m0(device, capability, name, peak):
    powers = torch.pow(2.0, torch.arange(-149, 128, dtype=torch.float64)).to(device)
    exact = torch.cat((powers, powers * 1.5, powers * 1.75, powers * 1.25)).clamp(max=3.4e38).float()
    infinity = torch.tensor(float("inf"), device=device)
    specials = torch.tensor([0, float("inf"), 3.4028234663852886e38], device=device)
    x = torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity), specials)).abs()
    x = torch.cat((x, torch.tensor([float("nan")], device=device)))
    out, _ = each("to_ue8m0", x, capability, name)
    assert_bitwise(out, truth.ue8m0_at_least(truth.divided(x.double(), peak)))


def test_from_ue8m0(device, capability):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out, inverse = each("from_ue8m0", codes, capability, out=torch.float32)
    assert_bitwise(out[:255], truth.ue8m0(codes).float()[:255])
    assert_bitwise(inverse[:255], (1 / truth.ue8m0(codes)).float()[:255])
    assert out[255].isnan() and inverse[255].isnan()


def rows(device, block=256):
    """Rows with blocks of every kind: ordinary, large, tiny, zero, with an infinity, with a NaN."""
    x = torch.randn(9, block, device=device) * torch.logspace(-30, 30, 9, device=device)[:, None]
    x[1, :16], x[2, 16:48], x[3] = 0, 1e-40, 0
    x[4, 5], x[5, 200], x[6, 100] = float("inf"), float("nan"), -448.0
    x[7] = torch.randn(block, device=device).bfloat16().float()
    x[8] = torch.randint(-12, 13, (block,), device=device) / 2
    return x


def quantized(what, x, capability, name="", global_scale=0.0):
    v = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8_row": x.shape[1]}.get(what, 128)
    blocks = x.shape[1] // v
    code = torch.zeros(x.shape[0], x.shape[1] // (2 if "fp4" in what else 1), dtype=torch.uint8, device=x.device)
    factor = torch.zeros(4 + x.shape[0] * blocks, dtype=torch.float32, device=x.device)
    factor[0] = global_scale
    launch(Problem(what, name, x.shape[1], capability), None, (x.shape[0], 1, 1), x, code, factor, x.shape[1])
    return code, factor[4:].view(x.shape[0], blocks)


@pytest.mark.parametrize("what", ["mxfp4", "mxfp8"])
def test_mx(device, capability, what):
    element = "e2m1" if what == "mxfp4" else "e4m3"
    x = rows(device)
    code, factor = quantized(what, x, capability)
    codes, expected = truth.mx(x, element)
    assert_bitwise(factor.to(torch.uint8), expected)
    assert_bitwise(code, truth.pack(codes) if what == "mxfp4" else codes)


@pytest.mark.parametrize("global_scale", [1.0, 448 * 6 / 3.7, 1e-20, 3e30])
def test_nvfp4(device, capability, global_scale):
    x = rows(device)
    code, factor = quantized("nvfp4", x, capability, global_scale=global_scale)
    codes, expected = truth.nvfp4(x, torch.tensor(global_scale, device=device))
    assert_bitwise(factor.to(torch.uint8), expected)
    assert_bitwise(code, truth.pack(codes))


@pytest.mark.parametrize("what", ["fp8_row", "fp8_block", "fp8_block_power"])
@pytest.mark.parametrize("name", OCP)
def test_fp8_scaled(device, capability, what, name):
    x = rows(device)
    code, scale = quantized(what, x, capability, OCP[name])
    blocks = x.double().unflatten(1, (scale.shape[1], -1))
    expected = truth.divided(blocks.abs().amax(-1), float(truth.values(name)[-1])).float()
    expected = torch.where(expected < 2.0**-126, 2.0**-126, expected)
    if what == "fp8_block_power":
        finite = expected.isfinite()
        expected[finite] = truth.ue8m0(truth.ue8m0_at_least(expected[finite])).float()
    assert torch.equal(scale.isnan(), expected.isnan())
    assert_bitwise(scale.nan_to_num(nan=0), expected.nan_to_num(nan=0))
    inverse = (1 / expected.double()).float().double()
    codes = truth.encode(name, (blocks * inverse[..., None]).float().flatten(1))
    assert_bitwise(code, codes)


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_scale_offset(device, layout):
    rows, blocks = 384, 12
    out = torch.zeros(rows * blocks, dtype=torch.int64, device=device)
    launch(Problem("offset", layout, 16), None, (rows // 128, 1, 1), out, blocks)
    memory = torch.empty_like(out)
    memory[out] = torch.arange(rows * blocks, device=device)
    plain = torch.arange(rows * blocks, device=device).view(rows, blocks)
    assert_bitwise(memory, truth.arranged(plain, layout))


@pytest.mark.parametrize("name", OCP)
def test_torch_saturates(name):
    """What the references of rooms round with, at both ends of the range."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    largest = torch.finfo(dtype).max
    x = torch.tensor([1.0, 1.001, 1.1, 2.0, 1e6, torch.inf], dtype=torch.float32) * largest
    x = torch.cat((x, -x, torch.tensor([torch.nan, 0.0, -0.0, 2.0**-10])))
    assert_bitwise(narrow.to_fp8(x, dtype).view(torch.uint8), truth.encode(name, x.double()))

"""The gated activations against their definitions in float64."""

import math

import pytest
import torch
from torch.nn import functional

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import in_turn, variant  # variant is a fixture

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(40, 2), (3, 14), (5, 256), (2, 3, 48), (2, 2, 2, 6), (0, 64), (4, 0, 8), (7, 2 * 1025), (34,), (70, 12)]
LARGE = [(1024, 28672), (1023, 2 * 5461), (100003, 32), (3, 2 * 70001)]
shapes = pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES, LARGE), ids=str)


def silu(x):
    return x / (1 + torch.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# name -> (ours, definition, torch's)
KINDS = {
    "silu": (flashinfer.silu_and_mul, silu, functional.silu),
    "gelu": (flashinfer.gelu_and_mul, gelu, functional.gelu),
    "gelu_tanh": (flashinfer.gelu_tanh_and_mul, gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def expected(kind, x):
    """The result in float64, and computed by torch in the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    _, definition, torchs = KINDS[kind]
    return definition(gate.double()) * up.double(), torchs(gate) * up


@shapes
@kinds
def test_act_and_mul(variant, device, shape, kind, dtype):
    x = generate.randn(*shape, dtype=dtype, device=device) * 3
    before = x.clone()
    out = KINDS[kind][0](x)
    truth, same = expected(kind, x)
    assert_close(out, same, truth)
    assert_bitwise(x, before)


@kinds
def test_far_from_zero(variant, device, kind):
    """Where exponentials overflow, the result is still 0 on the left and the product on the right."""
    gate = torch.tensor([-3e38, -1e5, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e5, 1e18], device=device)
    x = torch.cat([gate, torch.full_like(gate, 1.5)]).expand(2, -1)
    out = KINDS[kind][0](x)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :3], torch.zeros_like(out[:, :3]))
    torch.testing.assert_close(out[:, -5:], 1.5 * gate[-5:].expand(2, -1))


@kinds
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides(variant, device, kind, axis):
    x = generate.strided(generate.randn(3, 4, 32, dtype=torch.float16, device=device), axis)
    out = generate.strided(torch.zeros(3, 4, 16, dtype=torch.float16, device=device), axis)
    gaps = int(out._base.isnan().sum())
    assert KINDS[kind][0](x, out=out) is out
    truth, same = expected(kind, x)
    assert_close(out, same, truth)
    assert int(out._base.isnan().sum()) == gaps


@pytest.mark.parametrize("hidden", [16, 17, 24])
def test_writes_only_out(variant, device, hidden):
    x = generate.randn(3, 2 * hidden, dtype=torch.bfloat16, device=device)
    guard = generate.Guarded((3, hidden), torch.bfloat16, device)
    flashinfer.silu_and_mul(x, out=guard.out)
    guard.check()
    truth, same = expected("silu", x)
    assert_close(guard.out, same, truth)


@kinds
def test_pdl_changes_no_bit(variant, device, kind):
    x = generate.randn(3, 32, device=device)
    plain = KINDS[kind][0](x)
    for enable_pdl in (True, False):
        assert_bitwise(KINDS[kind][0](x, enable_pdl=enable_pdl), plain)


@kinds
@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(input=torch.ones(2, 9)), "input"),
        (dict(input=torch.tensor(1.0)), "input"),
        (dict(input=torch.ones(2, 8, dtype=torch.int32)), "input"),
        (dict(input=torch.ones(2, 8, dtype=torch.float64)), "input"),
        (dict(out=torch.ones(2, 8)), "out"),
        (dict(out=torch.ones(2, 4, dtype=torch.float16)), "out"),
        (dict(out=torch.ones(2, 4, device="meta")), "out"),
    ],
)
def test_bad_input(kind, changed, argument):
    good = dict(input=torch.ones(2, 8), out=torch.empty(2, 4))
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        KINDS[kind][0](**(good | changed))


def test_is_a_registered_op():
    """torch.compile sees one op that writes what it says it writes."""
    from flashinfer import activation

    torch.library.opcheck(activation._act_and_mul.op, (torch.randn(3, 16), torch.empty(3, 8), "gelu", True))


@pytest.mark.gpu
def test_offsets_beyond_2_31(device):
    x = torch.empty(3, 1 << 30, dtype=torch.bfloat16, device=device)[:, :512]
    x.copy_(generate.randn(3, 512, dtype=torch.bfloat16, device=device))
    truth, same = expected("silu", x)
    assert_close(flashinfer.silu_and_mul(x), same, truth)


@pytest.mark.gpu
def test_graph_and_stream(device):
    """A captured graph and a side stream give the same bits as an eager call."""
    x = generate.randn(64, 4096, dtype=torch.bfloat16, device=device)
    eager = flashinfer.silu_and_mul(x)
    out, graph = torch.full_like(eager, float("nan")), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.silu_and_mul(x, out=out)
    graph.replay()
    assert_bitwise(out, eager)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        aside = flashinfer.silu_and_mul(x)
    stream.synchronize()
    assert_bitwise(aside, eager)

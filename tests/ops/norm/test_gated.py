"""Norms with gates, against their definitions in float64."""

import pytest
import torch

from flashinfer import norm
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.test_norm import DTYPES, rms_truth, rows, weights
from tests.ops.norm.variants import variant  # the fixture


def rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 64), (2, 3, 40), (7, 33), (0, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rmsnorm_sigmoid_gate(variant, device, shape, dtype):
    x, gate = rows(shape, dtype, device), rows(shape, dtype, device)
    truth = rms_truth(x, torch.ones(shape[-1], device=device), 1e-5) / (1 + torch.exp(-gate.double()))
    same = rms(x, 1e-5) * gate.sigmoid()
    before = gate.clone()
    assert norm.rmsnorm_sigmoid_gate(x, gate) is None
    assert_close(x, same, truth)
    assert_bitwise(gate, before)


def test_sigmoid_gate_of_slices(variant, device):
    """Heads and gates as slices of one projection; what lies between stays."""
    both = generate.randn(6, 2, 2 * 64, dtype=torch.float16, device=device)
    before = both.clone()
    x, gate = both[..., :64], both[..., 64:]
    truth = rms_truth(x, torch.ones(64, device=device), 0.5) / (1 + torch.exp(-gate.double()))
    same = rms(x, 0.5) * gate.sigmoid()
    norm.rmsnorm_sigmoid_gate(x, gate, 0.5, enable_pdl=False)
    assert_close(x, same, truth)
    assert_bitwise(both[..., 64:], before[..., 64:])


def test_gates_far_from_zero(variant, device):
    gate = torch.tensor([[-3e38, -1e4, -100.0, 0.0, 100.0, 3e38]], device=device)
    x = torch.ones_like(gate)
    norm.rmsnorm_sigmoid_gate(x, gate, 0.0)
    assert_close(x, gate.sigmoid(), gate.double().sigmoid())


def residual_inputs(shape, dtype, device):
    branch, residual = rows(shape, dtype, device), torch.randn(shape, device=device)
    alpha, beta = torch.randn(2, shape[-1], device=device).unbind()
    return branch, residual, alpha, beta


def stream_truth(branch, residual, weight, alpha, beta, eps, center):
    x = branch.double() if weight is None else branch.double() * (weight.double() + center)
    return alpha * residual.double() + beta.double() * rms(x, eps)


SHAPES = pytest.mark.parametrize(
    "shape", [(3, 256), (2, 100), (5, 1), (0, 64), pytest.param((513, 8192), marks=pytest.mark.gpu)], ids=str
)


@SHAPES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_gated_residual(variant, device, shape, dtype, weighted):
    branch, residual, alpha, beta = residual_inputs(shape, dtype, device)
    weight = weights(shape[-1], dtype, device) if weighted else None
    truth = stream_truth(branch, residual, weight, alpha.double(), beta, 1e-6, 0.5)
    x = branch.float() * (weight.float() + 0.5) if weighted else branch.float()
    same = alpha * residual + beta * rms(x, 1e-6)
    before = residual.clone()
    out = norm.gated_residual_rmsnorm(branch, residual, weight, alpha, beta, gain_center=0.5)
    assert out.dtype == torch.float32
    assert_close(out, same, truth)
    assert_bitwise(residual, before)
    assert norm.gated_residual_rmsnorm(branch, residual, weight, alpha, beta, 1e-6, 0.5, out=residual) is residual
    assert_bitwise(residual, out)


@SHAPES
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gated_residual_next(variant, device, shape, vector, weighted):
    branch, residual, alpha, beta = residual_inputs(shape, torch.bfloat16, device)
    alpha = alpha if vector else 0.75
    post, following = (weights(shape[-1], torch.bfloat16, device) for _ in range(2))
    post = post if weighted else None
    truth = stream_truth(branch, residual, post, alpha.double() if vector else alpha, beta, 1e-3, 1.0)
    x = branch.float() * (post.float() + 1) if weighted else branch.float()
    same = alpha * residual + beta * rms(x, 1e-3)
    stream, ffn = norm.gated_residual_next_rmsnorm(
        branch, residual, following, alpha, beta, 1e-3, 1e-2, 2.0, post_weight=post, post_gain_center=1.0
    )
    assert_close(stream, same, truth, "residual_out")
    next_truth = rms(truth, 1e-2) * (following.double() + 2)
    next_same = rms(same, 1e-2).bfloat16() * (following + 2)
    assert ffn.dtype == torch.bfloat16
    assert_close(ffn, next_same, next_truth, "ffn_input")


def test_gated_residual_of_strided_rows(variant, device):
    branch, residual, alpha, beta = residual_inputs((4, 64), torch.float16, device)
    w = weights(64, torch.float16, device)
    plain = norm.gated_residual_next_rmsnorm(branch, residual, w, alpha, beta)
    for axis in (0, 1):
        given = [generate.strided(t, axis, gap) for t, gap in zip((branch, residual), (8, 16))]
        outs = [generate.strided(torch.zeros_like(t), axis, 24) for t in plain]
        gaps = [int(t._base.isnan().sum()) for t in outs]
        got = norm.gated_residual_next_rmsnorm(*given, w, alpha, beta, residual_out=outs[0], ffn_input=outs[1])
        assert got[0] is outs[0] and got[1] is outs[1]
        for a, b in zip(outs, plain):
            torch.testing.assert_close(a, b)
        assert [int(t._base.isnan().sum()) for t in outs] == gaps


BAD = [
    (dict(branch=torch.ones(8)), "branch"),
    (dict(branch=torch.ones(2, 8, dtype=torch.int32)), "branch"),
    (dict(residual=torch.ones(2, 8, dtype=torch.float16)), "residual"),
    (dict(residual=torch.ones(3, 8)), "residual"),
    (dict(alpha=torch.ones(8, dtype=torch.bfloat16)), "alpha"),
    (dict(beta=torch.ones(7)), "beta"),
    (dict(beta=torch.ones(8, device="meta")), "beta"),
    (dict(weight=torch.ones(7)), "weight"),
    (dict(weight=1.0), "weight"),
    (dict(branch=None), "branch"),
    (dict(alpha=None), "alpha"),
    (dict(alpha="1"), "alpha"),
]


@pytest.mark.parametrize(("changed", "argument"), BAD)
def test_what_is_refused_is_not_supported(changed, argument):
    x = torch.ones(2, 8)
    good = dict(branch=x, residual=x.clone(), weight=torch.ones(8), alpha=torch.ones(8), beta=torch.ones(8))
    assert norm.supports_gated_residual_rmsnorm(**good)
    given = good | changed
    assert not norm.supports_gated_residual_rmsnorm(**given)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        norm.gated_residual_rmsnorm(**given)
    given["post_weight"] = given.pop("weight")
    argument = "post_weight" if argument == "weight" else argument
    assert not norm.supports_gated_residual_next_rmsnorm(**given, next_weight=torch.ones(8))
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        norm.gated_residual_next_rmsnorm(**given, next_weight=torch.ones(8))


def test_supports():
    assert norm.supports_rmsnorm_sigmoid_gate(torch.bfloat16, 64)
    assert norm.supports_rmsnorm_sigmoid_gate(torch.float32, 40000, "cpu")
    assert norm.supports_rmsnorm_sigmoid_gate(torch.float32, 40000, "cuda")
    assert not norm.supports_rmsnorm_sigmoid_gate(torch.float8_e4m3fn, 64)
    assert not norm.supports_rmsnorm_sigmoid_gate(torch.float32, None)
    with pytest.raises(ValueError, match="^gate: got"):
        norm.rmsnorm_sigmoid_gate(torch.ones(2, 8), torch.ones(2, 4))
    x, w = torch.ones(2, 8), torch.ones(8)
    assert norm.supports_gated_residual_next_rmsnorm(x, x, w, 1.0, w)
    assert not norm.supports_gated_residual_next_rmsnorm(x, x, None, 1.0, w)
    with pytest.raises(ValueError, match="^residual_out: got"):
        norm.gated_residual_next_rmsnorm(x, x, w, 1.0, w, residual_out=torch.ones(2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="^ffn_input: got"):
        norm.gated_residual_next_rmsnorm(x, x, w, 1.0, w, ffn_input=torch.ones(2, 4))


def test_are_registered_ops():
    from flashinfer.norm import gated

    x, w = torch.randn(3, 16), torch.randn(16)
    torch.library.opcheck(gated._rmsnorm_sigmoid_gate.op, (x.clone(), x, 1e-5, True))
    numbers = [1e-6, 0.0, 1e-6, 0.0]
    arguments = (x, x.clone(), w, None, 0.5, w, torch.empty_like(x), w, torch.empty_like(x), numbers, True)
    torch.library.opcheck(gated._gated_residual.op, arguments)


def test_compiles_without_a_break():
    def layer(x, gate, w):
        x = x.clone()
        norm.rmsnorm_sigmoid_gate(x, gate)
        return norm.gated_residual_next_rmsnorm(x, gate, w, 0.5, w)

    x, gate, w = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    for a, b in zip(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, gate, w), layer(x, gate, w)):
        assert_bitwise(a, b)

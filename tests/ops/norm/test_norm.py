"""The norms against their definitions in float64."""

import pytest
import torch
from torch.nn import functional

import flashinfer
from flashinfer import norm
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.target import named
from flashinfer.ops import norm as room
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import in_turn, variant  # variant is a fixture

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 1), (3, 7), (5, 640), (2, 3, 128), (33, 64), (0, 64), (2, 0, 64), (4, 255), (3, 5, 40), (1, 32768)]
SHAPES += [(2, 40000), (2, 1, 32769), (1, 49152)]  # Rows that registers do not hold.
LARGE = [(4096, 8192), (1025, 5120), (513, 32768), (77, 32767), (257, 40, 128), (100003, 96), (65, 131080), (9, 99999)]
shapes = pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES, LARGE), ids=str)
eps = 1e-6


def rows(shape, dtype, device):
    return generate.randn(*shape, dtype=dtype, device=device) * 3


def weights(hidden, dtype, device):
    return generate.randn(hidden, dtype=dtype, device=device)


def rms_truth(x, weight, eps=eps):
    x = x.double()
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight.double()


def rms_same_dtype(x, weight, eps=eps):
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@shapes
@pytest.mark.parametrize("gemma", [False, True])
def test_rmsnorm(variant, device, shape, dtype, gemma):
    x, w = rows(shape, dtype, device), weights(shape[-1], dtype, device)
    before = x.clone()
    out = (flashinfer.gemma_rmsnorm if gemma else flashinfer.rmsnorm)(x, w, eps)
    shift = 1 if gemma else 0
    assert_close(out, rms_same_dtype(x, w + shift), rms_truth(x, w.double() + shift))
    assert_bitwise(x, before)


@shapes
@pytest.mark.parametrize("gemma", [False, True])
def test_fused_add_rmsnorm(variant, device, shape, dtype, gemma):
    x, residual, w = rows(shape, dtype, device), rows(shape, dtype, device), weights(shape[-1], dtype, device)
    shift = 1 if gemma else 0
    total = x.double() + residual.double()
    same = x + residual
    truth = rms_truth(total, w.double() + shift)
    result = (flashinfer.gemma_fused_add_rmsnorm if gemma else flashinfer.fused_add_rmsnorm)(x, residual, w, eps)
    assert result is None
    assert_close(residual, same, total, "residual")
    assert_close(x, rms_same_dtype(same, w + shift), truth, "input")


@shapes
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layernorm(variant, device, shape, dtype, weight_dtype):
    x = rows(shape, dtype, device) + 2
    gamma, beta = weights(shape[-1], weight_dtype, device), weights(shape[-1], weight_dtype, device)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    truth = rms_truth(centred, gamma) + beta.double()
    same = functional.layer_norm(x, gamma.shape, gamma.to(dtype), beta.to(dtype), eps)
    assert_close(flashinfer.layernorm(x, gamma, beta, eps), same, truth)


def test_weight_of_another_dtype(variant, device):
    x, w = rows((5, 96), torch.bfloat16, device), weights(96, torch.float32, device)
    assert_close(flashinfer.rmsnorm(x, w), rms_same_dtype(x, w), rms_truth(x, w))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides(variant, device, axis):
    """Other gaps in each tensor, behind each batch, each head, each element: they stay, and results stand between."""
    shape, dtype = (3, 5, 64), torch.float16
    x, residual, out = (generate.strided(rows(shape, dtype, device), axis, gap) for gap in (8, 16, 24))
    w = weights(64, dtype, device)
    buffer = out._base.clone()
    given = rms_truth(x, w), rms_same_dtype(x, w)
    assert flashinfer.rmsnorm(x, w, eps, out=out) is out
    assert_close(out, given[1], given[0])
    assert int(out._base.isnan().sum()) == int(buffer.isnan().sum())

    total, same = x.double() + residual.double(), x + residual
    gaps = [int(t._base.isnan().sum()) for t in (x, residual)]
    flashinfer.fused_add_rmsnorm(x, residual, w, eps)
    assert_close(residual, same, total)
    assert_close(x, rms_same_dtype(same, w), rms_truth(total, w))
    assert [int(t._base.isnan().sum()) for t in (x, residual)] == gaps


def test_heads_of_a_fused_projection(variant, device):
    """QK-norm as engines call it: heads of one slice of a fused projection, written in place."""
    qkv = generate.randn(7, (4 + 1 + 1) * 32, dtype=torch.bfloat16, device=device)
    before = qkv.clone()
    w = weights(32, torch.bfloat16, device)
    q = qkv[:, : 4 * 32].view(7, 4, 32)
    truth, same = rms_truth(q, w), rms_same_dtype(q, w)
    flashinfer.rmsnorm(q, w, eps, out=q)
    assert_close(q, same, truth)
    assert_bitwise(qkv[:, 4 * 32 :], before[:, 4 * 32 :])


@pytest.mark.parametrize("hidden", [40, 41])
def test_writes_only_out(variant, device, hidden):
    x, w = rows((3, hidden), torch.float16, device), weights(hidden, torch.float16, device)
    guard = generate.Guarded((3, hidden), torch.float16, device)
    flashinfer.rmsnorm(x, w, eps, out=guard.out)
    guard.check()
    assert_close(guard.out, rms_same_dtype(x, w), rms_truth(x, w))


def test_rows_are_independent(variant, device):
    """A row with NaN or inf spoils itself alone."""
    x, w = rows((4, 48), torch.float32, device), weights(48, torch.float32, device)
    clean = flashinfer.rmsnorm(x, w)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out = flashinfer.rmsnorm(x, w)
    assert_bitwise(out[[0, 3]], clean[[0, 3]])
    assert_close(out, rms_same_dtype(x, w), rms_truth(x, w))


def test_arguments_are_honoured(variant, device):
    x, w = rows((2, 32), torch.float32, device), weights(32, torch.float32, device)
    plain = flashinfer.rmsnorm(x, w)
    assert_close(flashinfer.rmsnorm(x, w, eps=2.5), rms_same_dtype(x, w, 2.5), rms_truth(x, w, 2.5))
    for enable_pdl in (True, False):
        assert_bitwise(flashinfer.rmsnorm(x, w, enable_pdl=enable_pdl), plain)
        assert_bitwise(flashinfer.gemma_rmsnorm(x, w - 1, enable_pdl=enable_pdl), flashinfer.gemma_rmsnorm(x, w - 1))
    summed, residual = x.clone(), torch.ones_like(x)
    flashinfer.fused_add_rmsnorm(summed, residual, w, eps=2.5, enable_pdl=True)
    assert_close(summed, rms_same_dtype(x + 1, w, 2.5), rms_truth(x + 1, w, 2.5))
    shifted = functional.layer_norm(x, (32,), w, w, 2.5)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    assert_close(flashinfer.layernorm(x, w, w, eps=2.5), shifted, rms_truth(centred, w, 2.5) + w.double())


BAD = {
    "input of one dimension": (dict(input=torch.ones(8)), "input"),
    "input of four dimensions": (dict(input=torch.ones(1, 1, 1, 8)), "input"),
    "input of integers": (dict(input=torch.ones(2, 8, dtype=torch.int32)), "input"),
    "input of float64": (dict(input=torch.ones(2, 8, dtype=torch.float64)), "input"),
    "weight of another length": (dict(weight=torch.ones(4)), "weight"),
    "weight of two dimensions": (dict(weight=torch.ones(1, 8)), "weight"),
    "weight of integers": (dict(weight=torch.ones(8, dtype=torch.int8)), "weight"),
    "weight elsewhere": (dict(weight=torch.ones(8, device="meta")), "weight"),
    "out of another shape": (dict(out=torch.ones(2, 7)), "out"),
    "out of another dtype": (dict(out=torch.ones(2, 8, dtype=torch.float16)), "out"),
    "out elsewhere": (dict(out=torch.ones(2, 8, device="meta")), "out"),
}


def test_heads_by_the_name_of_another_kernel(variant, device):
    x = rows((3, 2, 64), torch.bfloat16, device)
    w, out = weights(64, torch.bfloat16, device), torch.empty_like(x)
    for bias, function in ((0.0, norm.rmsnorm), (1.0, norm.gemma_rmsnorm)):
        assert norm.qk_rmsnorm_cute(x, w, out, 1e-5, bias) is None
        assert_bitwise(out, function(x, w, 1e-5))
    for changed, argument in ((dict(weight_bias=0.5), "weight_bias"), (dict(input=x[0]), "input")):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            norm.qk_rmsnorm_cute(**(dict(input=x, weight=w, output=out) | changed))


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, argument = BAD[name]
    good = dict(input=torch.ones(2, 8), weight=torch.ones(8), out=torch.empty(2, 8))
    for function in (flashinfer.rmsnorm, flashinfer.gemma_rmsnorm):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            function(**(good | changed))
    changed = {"residual" if k == "out" else k: v for k, v in changed.items()}
    argument = "residual" if argument == "out" else argument
    for function in (flashinfer.fused_add_rmsnorm, flashinfer.gemma_fused_add_rmsnorm):
        arguments = dict(input=torch.ones(2, 8), weight=torch.ones(8), residual=torch.ones(2, 8)) | changed
        untouched = arguments["input"].clone()
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            function(**arguments)
        assert_bitwise(arguments["input"], untouched)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(input=torch.ones(8)), "input"),
        (dict(gemma=torch.ones(4)), "gemma"),
        (dict(beta=torch.ones(4)), "beta"),
        (dict(beta=torch.ones(8, dtype=torch.float16)), "beta"),
        (dict(beta=torch.ones(8, device="meta")), "beta"),
    ],
)
def test_bad_input_of_layernorm(changed, argument):
    good = dict(input=torch.ones(2, 8), gemma=torch.ones(8), beta=torch.ones(8))
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        flashinfer.layernorm(**(good | changed))


def test_rows_too_long_for_block_scales_are_refused_on_a_gpu_and_computed_on_the_cpu():
    problem = room.Problem("rmsnorm", "bf16", "bf16", block=65536, format="nvfp4", layout="linear")
    with pytest.raises(UnsupportedConfig, match="longer than 32768"):
        room.rmsnorm.select(problem, named("90a"))
    codes, scales = norm.rmsnorm_fp4quant(torch.randn(1, 40000).bfloat16(), torch.ones(40000).bfloat16())
    assert codes.shape == (1, 20000) and scales.shape == (1, 2500)


@pytest.mark.parametrize("hidden", [32776, 32777])
def test_gate_silu_and_fp8_of_rows_that_registers_do_not_hold(variant, device, hidden):
    x, gate = (rows((2, hidden), torch.bfloat16, device) for _ in range(2))
    w, beta = weights(hidden, torch.bfloat16, device), weights(hidden, torch.bfloat16, device)
    truth, same = rms_truth(x, w), rms_same_dtype(x, w)
    assert_close(norm.fused_rmsnorm_silu(x, w, eps), functional.silu(same), functional.silu(truth))
    gated = generate.strided(x.clone(), 0)
    norm.rmsnorm_sigmoid_gate(gated, gate, eps)
    ones = torch.ones_like(w)
    exact = rms_truth(x, ones) * gate.double().sigmoid()
    assert_close(gated, rms_same_dtype(x, ones) * gate.sigmoid(), exact)
    residual, total = gate.clone(), x.double() + gate.double()
    summed = rms_truth(total, w)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    guard = generate.Guarded((2, hidden), torch.float8_e4m3fn, device)
    for call, exact in (
        (lambda: norm.rmsnorm_quant(guard.out, x, w, 0.5, eps), truth),
        (lambda: norm.fused_add_rmsnorm_quant(guard.out, x, residual, w, torch.tensor([0.5]), eps), summed),
        (lambda: norm.layernorm_quant(guard.out, x, w, beta, 0.5, eps), rms_truth(centred, w) + beta.double()),
    ):
        call()
        guard.check()
        by_torch = (exact.float() * 2).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert_close(guard.out.float(), by_torch, (exact * 2).clamp(-448, 448), through=2**-3)
    assert_close(residual, x + gate, total, "residual")


def test_are_registered_ops():
    """torch.compile sees one op that writes what it says it writes."""
    from flashinfer.norm import plain as norm

    x, w = torch.randn(3, 16), torch.randn(16)
    torch.library.opcheck(norm._rmsnorm.op, (x, w, torch.empty_like(x), eps, True, False))
    torch.library.opcheck(norm._fused_add_rmsnorm.op, (x.clone(), x.clone(), w, eps, False, True))
    torch.library.opcheck(norm._layernorm.op, (x, w, w, torch.empty_like(x), eps))


@pytest.mark.gpu
def test_offsets_beyond_2_31(device):
    x = torch.empty(3, 1 << 30, dtype=torch.bfloat16, device=device)[:, :256]
    x.copy_(rows((3, 256), torch.bfloat16, device))
    w = weights(256, torch.bfloat16, device)
    truth, same = rms_truth(x, w), rms_same_dtype(x, w)
    flashinfer.rmsnorm(x, w, eps, out=x)
    assert_close(x, same, truth)


@pytest.mark.gpu
def test_graph_and_stream(device):
    """A captured graph and a side stream give the same bits as an eager call."""
    x, w = rows((64, 4096), torch.bfloat16, device), weights(4096, torch.bfloat16, device)
    eager = flashinfer.rmsnorm(x, w)
    out, graph = torch.full_like(x, float("nan")), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.rmsnorm(x, w, eps, out=out)
    graph.replay()
    assert_bitwise(out, eager)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        aside = flashinfer.rmsnorm(x, w)
    stream.synchronize()
    assert_bitwise(aside, eager)

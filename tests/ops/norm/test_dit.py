"""LayerNorms of diffusion transformers against float64, and their codes against the formats' specifications."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

GAMMA = flashinfer.fused_dit_gate_residual_layernorm_gamma_beta
GATED = flashinfer.fused_dit_gate_residual_layernorm_scale_shift
PLAIN = flashinfer.fused_dit_residual_layernorm_scale_shift


def formula(dtype, x, residual, gate, factor, shift, biases, one, scale=1.0, eps=1e-6):
    """The stream and its norm, in `dtype`."""
    x, residual, gate, factor, shift = (t if t is None else t.to(dtype) for t in (x, residual, gate, factor, shift))
    gate_bias, factor_bias, shift_bias = (0 if b is None else b.to(dtype) for b in biases)
    stream = x * scale if gate is None else x * ((gate + gate_bias) * scale)
    stream = stream if residual is None else stream + residual
    y = stream - stream.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return stream, y * (one + factor + factor_bias) + shift + shift_bias


def check(results, given, **options):
    for out, same, true in zip(results, formula(torch.float32, *given, **options),
                               formula(torch.float64, *given, **options), strict=True):  # fmt: skip
        assert_close(out, same.to(out.dtype), true)


def sixths(batch, rows, hidden, dtype, device):
    """Gate, scale and shift as a model has them: parts of one tensor, six rows apart."""
    parts = torch.randn(batch, rows, 6, hidden, device=device).to(dtype).chunk(6, dim=2)
    return [part.squeeze(2) for part in parts[:3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 96), (1, 5, 40), pytest.param((2, 1000, 3072), marks=pytest.mark.gpu)], ids=str
)
def test_against_float64(variant, device, dtype, shape):
    hidden = shape[-1]
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    gate, scale, shift = sixths(*shape, dtype, device)
    biases = [torch.randn(hidden, device=device) for _ in range(3)]
    names = dict(zip(("gate_bias", "scale_bias", "shift_bias"), (biases[0], biases[1][None], biases[2])))
    check(GATED(x, residual, gate, scale, shift, **names), (x, residual, gate, scale, shift, biases, 1))
    none = None, None, None
    check(GATED(x, residual, gate, scale, shift), (x, residual, gate, scale, shift, none, 1))
    check(PLAIN(x, scale, shift, residual=residual, shift_bias=biases[2]),
          (x, residual, None, scale, shift, (None, None, biases[2]), 1))  # fmt: skip
    check(PLAIN(x, scale, shift), (x, None, None, scale, shift, none, 1))
    gamma, beta = (torch.randn(hidden, device=device) for _ in range(2))
    check(GAMMA(x, residual, gate, gamma, beta, gate_bias=biases[0]),
          (x, residual, gate, gamma, beta, (biases[0], None, None), 0))  # fmt: skip
    check(GAMMA(x, residual, gate, gamma, beta, input_global_scaling_factor=torch.tensor([0.5]), epsilon=1e-3),
          (x, residual, gate, gamma, beta, none, 0), scale=0.5, eps=1e-3)  # fmt: skip
    check(PLAIN(x, scale, shift, residual=residual, input_global_scaling_factor=2.0),
          (x, residual, None, scale, shift, none, 1), scale=2.0)  # fmt: skip


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_quantised(variant, device, format):
    """The bits of the format for the norm as it is written without; each batch entry has tiles of its own."""
    batch, rows, hidden = 2, 5, 96
    x, residual = (torch.randn(batch, rows, hidden, device=device).bfloat16() for _ in range(2))
    gate, scale, shift = sixths(batch, rows, hidden, torch.bfloat16, device)
    stream, norm = GATED(x, residual, gate, scale, shift)
    nvfp4 = format == "nvfp4"
    factor = torch.tensor([100.0], device=device) if nvfp4 else None
    sf = torch.full((batch, 1, 2 if nvfp4 else 1, 32, 4, 4), 77, dtype=torch.uint8, device=device)
    out = torch.empty(batch, rows, hidden // (8 if nvfp4 else 4), dtype=torch.int32, device=device)
    results = GATED(x, residual, gate, scale, shift, use_nvfp4=nvfp4, use_mxfp8=not nvfp4, residual_out=residual,
                    global_scaling_factor=factor, norm_out=out, sf_out=sf)  # fmt: skip
    assert results[0] is residual and results[1] is out
    assert_bitwise(residual, stream)
    for i in range(batch):
        codes, expected = truth.nvfp4(norm[i], factor) if nvfp4 else truth.mx(norm[i], "e4m3")
        assert_bitwise(out[i].view(torch.uint8), truth.pack(codes) if nvfp4 else codes)
        assert_bitwise(sf[i].flatten(), truth.arranged(expected, "128x4"))


def test_strides_and_what_all_tokens_share(variant, device):
    x, residual = (torch.randn(2, 3, 64, device=device).bfloat16() for _ in range(2))
    shared = torch.randn(3, 2, 1, 64, device=device).bfloat16()
    expected = GATED(x, residual, *(t.expand(2, 3, 64).contiguous() for t in shared))
    strided = [generate.strided(t, axis, 8) for t, axis in ((x, 0), (residual, 2))]
    for given in ((x, residual, *shared), (*strided, *(t.expand(2, 3, 64).reshape(6, 64) for t in shared))):
        for ours, theirs in zip(GATED(*given), expected):
            assert_bitwise(ours, theirs)
    assert [t.shape for t in GATED(x[:, :0], x[:, :0], *(t[:, :0] for t in (x, x, x)))] == [(2, 0, 64)] * 2


X, ROW = torch.ones(2, 3, 64).bfloat16(), torch.ones(64)
BAD = [
    (dict(input=X[0]), "input"),
    (dict(input=X.double()), "input"),
    (dict(residual=X[:1]), "residual"),
    (dict(residual=X.float()), "residual"),
    (dict(gate=X[:, :2]), "gate"),
    (dict(gate=X.float()), "gate"),
    (dict(scale=X[..., :32]), "scale"),
    (dict(shift=X.to("meta")), "shift"),
    (dict(gate_bias=ROW[:3]), "gate_bias"),
    (dict(scale_bias=ROW.half()), "scale_bias"),
    (dict(use_nvfp4=True), "global_scaling_factor"),
    (dict(use_nvfp4=True, use_mxfp8=True, global_scaling_factor=ROW[:1]), "use_mxfp8"),
    (dict(use_nvfp4=True, global_scaling_factor=ROW), "global_scaling_factor"),
    (dict(input_global_scaling_factor=ROW), "input_global_scaling_factor"),
    (dict(residual_out=X[0]), "residual_out"),
    (dict(norm_out=X.float()), "norm_out"),
    (dict(norm_out=X, use_mxfp8=True), "norm_out"),
    (dict(sf_out=X), "sf_out"),
]


@pytest.mark.parametrize(("changed", "argument"), BAD)
def test_bad_input(changed, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        GATED(**(dict(input=X, residual=X, gate=X, scale=X, shift=X) | changed))


def test_bad_vectors():
    for vectors, argument in (((ROW[:3], ROW), "gamma"), ((ROW, ROW[:3]), "beta"), ((ROW, ROW.bfloat16()), "beta")):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            GAMMA(X, X, X, *vectors)


def test_is_a_registered_op():
    from flashinfer.norm import dit

    x = torch.randn(1, 2, 32)
    given = [x, None, x, x, x], [None, torch.ones(32), None], [None, None], torch.empty_like(x), torch.empty_like(x)
    torch.library.opcheck(dit._run.op, (*given, None, 1e-6, True, ""))
    compiled = torch.compile(lambda x: PLAIN(x, x, x)[1] + 1, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x), PLAIN(x, x, x)[1] + 1)


def test_names():
    from flashinfer import diffusion_ops, norm

    for name in diffusion_ops.__all__:
        assert getattr(diffusion_ops, name) is getattr(norm, name) is getattr(flashinfer, name)

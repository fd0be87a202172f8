"""Norm and rotation of video patches, against float64 by the definition: loops over the axes, complex products."""

import inspect

import pytest
import torch

from flashinfer import norm
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.quantize import truth

# patches along frame, height and width; heads of queries, keys and values; channels of each axis
SMALL = [((2, 2, 3), (3, 1, 2), (4, 6, 6)), ((1, 4, 1), (1, 2, 1), (0, 2, 8)), ((3, 1, 2), (4, 4, 4), (24, 20, 20))]
LARGE = [
    ((5, 12, 32), (12, 12, 12), (44, 42, 42)),
    ((3, 17, 9), (40, 40, 40), (44, 42, 42)),
    ((2, 8, 8), (32, 8, 8), (96, 80, 80)),
]
sizes = pytest.mark.parametrize("size", SMALL + [pytest.param(s, marks=pytest.mark.gpu) for s in LARGE], ids=str)
interleaves = pytest.mark.parametrize("interleave", [False, True], ids=["halves", "pairs"])


def arguments(size, interleave, **more):
    patches, heads, channels = size
    named = dict(zip(("ppf", "pph", "ppw"), patches)) | dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), heads))
    named |= dict(zip(("num_frame_channels", "num_height_channels", "num_width_channels"), channels))
    return named | {"head_dim": sum(channels), "interleave": interleave} | more


def inputs(size, videos, dtype, device):
    patches, heads, channels = size
    width = sum(channels)
    tokens = videos * patches[0] * patches[1] * patches[2]
    qkv = generate.randn(tokens, sum(heads) * width, dtype=dtype, device=device)
    weights = (torch.rand(count * width, device=device, dtype=torch.float64) + 0.5 for count in heads[:2])
    return qkv, *(weight.to(dtype) for weight in weights)


def frequency(i, count, base, factor, low, high):
    """Of pair i of an axis of `count` channels, by YaRN."""
    plain = base ** (-2 * i / count)
    share = min(max((i - low) / (high - low), 0), 1)
    return plain * (1 - share) + plain / factor * share


def turns(size, base, yarn=(1.0, 0.0, 1.0)):
    """Unit complex numbers [patches, head_dim / 2]."""
    patches, _, channels = size
    rows = []
    for f in range(patches[0]):
        for h in range(patches[1]):
            for w in range(patches[2]):
                at = zip((f, h, w), channels)
                rows.append(
                    [place * frequency(i, count, base, *yarn) for place, count in at for i in range(count // 2)]
                )
    angle = torch.tensor(rows, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)


def rotated(x, turn, interleave):
    """x [tokens, heads, dim], in its own dtype where that is not float64."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
    cos, sin = turn.real.to(x.dtype)[:, None], turn.imag.to(x.dtype)[:, None]
    pairs = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pairs, -1).flatten(-2) if interleave else torch.cat(pairs, -1)


def expected(size, qkv, weights, dtype, interleave, base=1e4, eps=1e-6, normed=True, yarn=(1.0, 0.0, 1.0), length=1):
    _, heads, channels = size
    turn = length * turns(size, base, yarn).repeat(len(qkv) // (size[0][0] * size[0][1] * size[0][2]), 1).to(qkv.device)
    results = []
    for x, weight, count in zip(qkv.to(dtype).split([n * sum(channels) for n in heads], 1), (*weights, None), heads):
        if normed and weight is not None:
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight.to(dtype)
        x = x.unflatten(1, (count, -1))
        results.append(x if weight is None else rotated(x, turn, interleave))
    return results


@sizes
@interleaves
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_and_rotation(variant, device, size, interleave, dtype):
    qkv, *weights = inputs(size, 1 if size is SMALL[0] else 2, dtype, device)
    results = norm.fused_qk_rmsnorm_rope(qkv, *weights, **arguments(size, interleave, base=500.0))
    exact = expected(size, qkv, weights, torch.float64, interleave, 500.0)
    same = expected(size, qkv, weights, dtype, interleave, 500.0)
    for name, out, by_torch, true in zip(("q", "k"), results, same, exact):
        assert_close(out, by_torch, true, name)
    assert_bitwise(results[2], same[2])


@interleaves
def test_into_fp8_and_given_outputs(variant, device, interleave):
    """Values have the bits of the format; queries and keys are as near as torch's in bfloat16 are."""
    size = SMALL[1]
    qkv, *weights = inputs(size, 3, torch.bfloat16, device)
    outs = {
        f"{name}_out": torch.empty(3, 4, count, 10, dtype=torch.float8_e4m3fn, device=device)
        for name, count in zip("qkv", size[1])
    }
    more = dict(output_fp8=True, output_quant_scale=16.0, v_quant_scale=0.5, **outs)
    results = norm.fused_qk_rmsnorm_rope(qkv.view(3, 4, -1), *weights, **arguments(size, interleave, **more))
    assert all(out is given for out, given in zip(results, outs.values()))
    exact = expected(size, qkv, weights, torch.float64, interleave)
    same = expected(size, qkv, weights, torch.bfloat16, interleave)
    for out, by_torch, true in zip(results[:2], same, exact):
        by_torch = (by_torch * 16).to(torch.float8_e4m3fn).float()
        assert_close(out.view(true.shape).float(), by_torch, true * 16, through=2**-3)
    codes = truth.encode("e4m3", exact[2] * 0.5)
    assert_bitwise(results[2].view(torch.uint8).view(codes.shape), codes)


@interleaves
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.5), (2.0, 2.0)])
def test_yarn(variant, device, interleave, low, high):
    """Weights have a row for each head, as some checkpoints do. Equal bounds are a step behind the pair."""
    size = SMALL[2]
    qkv, *weights = inputs(size, 1, torch.float32, device)
    rows = (weight.view(4, -1) for weight in weights)
    more = dict(base=100.0, factor=8.0, low=low, high=high, attention_factor=1.25)
    results = norm.fused_qk_rmsnorm_rope(qkv, *rows, **arguments(size, interleave, **more))
    yarn = 8.0, low, high if high > low else low + 1e-3
    exact, same = (
        expected(size, qkv, weights, dtype, interleave, 100.0, yarn=yarn, length=1.25)
        for dtype in (torch.float64, torch.float32)
    )
    for name, out, by_torch, true in zip(("q", "k"), results, same, exact):
        assert_close(out, by_torch, true, name)
    assert_bitwise(results[2], same[2])


def test_without_a_norm_of_strided_rows(variant, device):
    size = SMALL[2]
    qkv, *weights = inputs(size, 1, torch.float16, device)
    same, exact = (expected(size, qkv, weights, d, True, normed=False) for d in (torch.float16, torch.float64))
    for axis in (0, 1):
        options = arguments(size, True, is_qk_norm=False)
        results = norm.fused_qk_rmsnorm_rope(generate.strided(qkv, axis), *weights, **options)
        for out, by_torch, true in zip(results, same, exact):
            assert_close(out, by_torch, true)


def test_no_tokens(variant, device):
    qkv, *weights = inputs(SMALL[0], 0, torch.bfloat16, device)
    results = norm.fused_qk_rmsnorm_rope(qkv, *weights, **arguments(SMALL[0], True))
    assert [tuple(out.shape) for out in results] == [(0, 3, 16), (0, 1, 16), (0, 2, 16)]


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(qkv=torch.ones(7, 96)), "qkv"), (dict(qkv=torch.ones(1, 7, 96)), "qkv"),
        (dict(qkv=torch.ones(12, 96, dtype=torch.float64)), "qkv"), (dict(ppf=0), "ppf"),
        (dict(num_frame_channels=3, num_height_channels=7), "num_frame_channels"),
        (dict(head_dim=18), "head_dim"), (dict(num_heads_k=0), "num_heads_k"),
        (dict(q_weight=torch.ones(16)), "q_weight"), (dict(k_weight=torch.ones(16).half()), "k_weight"),
        (dict(q_out=torch.ones(12, 3, 16, dtype=torch.float16)), "q_out"), (dict(v_out=torch.ones(2)), "v_out"),
        (dict(k_out=torch.ones(12, 1, 32)[..., ::2]), "k_out"), (dict(factor=0.0), "factor"),
        (dict(base=-1.0), "base"),
        (dict(attention_factor=1.1), "attention_factor"),
    ],
)  # fmt: skip
def test_bad_input(changed, argument):
    good = dict(qkv=torch.ones(12, 96), q_weight=torch.ones(48), k_weight=torch.ones(16)) | arguments(SMALL[0], True)
    norm.fused_qk_rmsnorm_rope(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        norm.fused_qk_rmsnorm_rope(**(good | changed))


def test_takes_what_upstream_documents():
    parameters = inspect.signature(norm.fused_qk_rmsnorm_rope).parameters
    assert list(parameters)[:7] == ["qkv", "q_weight", "k_weight", "ppf", "pph", "ppw", "num_frame_channels"]
    assert [p.name for p in parameters.values() if p.default is p.empty] == list(parameters)[:13]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(parameters)[3:])


def test_is_a_registered_op():
    from flashinfer.norm import video

    size = SMALL[0]
    qkv, *weights = inputs(size, 1, torch.float32, "cpu")
    outs = [torch.empty(12, count, 16) for count in size[1]]
    args = qkv, *weights, *outs, [*size[0], *size[2]], [1e-6, 1e4, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0], True
    torch.library.opcheck(video._video.op, args)

"""Hyper-connections against their formulas in float64, token by token."""

import pytest
import torch

from flashinfer import mhc
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from tests.ops.norm.variants import variant  # the fixture

gpu = pytest.mark.gpu
BF16 = torch.bfloat16
shapes = pytest.mark.parametrize(
    "outer, hidden", [((3,), 40), ((2, 2), 1100), ((0,), 64), pytest.param((4097,), 7168, marks=gpu)]
)


def mixes(dot_mix, sqrsum, k, scale, base, rms_eps, pre_eps, eps, mult, repeat):
    """(pre, post, comb) of one token, in the dtype of dot_mix."""
    logits = dot_mix / (sqrsum / k + rms_eps).sqrt()
    pre = 1 / (1 + torch.exp(-(logits[:4] * scale[0] + base[:4]))) + pre_eps
    post = mult / (1 + torch.exp(-(logits[4:8] * scale[1] + base[4:8])))
    comb = torch.softmax((logits[8:] * scale[2] + base[8:]).view(4, 4), 1) + eps
    for turn in range(repeat):
        if turn:
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return pre, post, comb


def expected(dtype, dot_mix, sqrsum, residual, scale, base, **numbers):
    """Results of all tokens, computed in `dtype`."""
    tokens = residual.flatten(0, -3).to(dtype)
    rows = zip(dot_mix.reshape(-1, 24).to(dtype), sqrsum.reshape(-1).to(dtype), tokens, strict=True)
    found = []
    for mix, square, streams in rows:
        pre, post, comb = mixes(mix, square, scale=scale.to(dtype), base=base.to(dtype), **numbers)
        found.append((post[:, None], comb, (pre[:, None] * streams).sum(0)))
    shapes = (4, 1), (4, 4), residual.shape[-1:]
    return [
        torch.stack([row[i] for row in found]).view(*residual.shape[:-2], *shape)
        if found else torch.empty(*residual.shape[:-2], *shape, dtype=dtype, device=residual.device)
        for i, shape in enumerate(shapes)
    ]  # fmt: skip


def check(found, residual, given, numbers):
    truth, same = (expected(dtype, *given, **numbers) for dtype in (torch.float64, torch.float32))
    for name, out, exact, peer in zip(("post", "comb", "layer_input"), found, truth, same, strict=True):
        assert out.dtype == (residual.dtype if name == "layer_input" else torch.float32)
        assert_close(out, peer.to(out.dtype), exact, name)


def inputs(outer, hidden, device, dtype=BF16):
    residual = generate.randn(*outer, 4, hidden, dtype=dtype, device=device)
    dot_mix = generate.randn(*outer, 24, device=device) * 30
    return residual, dot_mix, torch.tensor([0.5, 1.0, 2.0], device=device), generate.randn(24, device=device)


@shapes
@pytest.mark.parametrize("splits", [1, 4])
def test_pre(variant, device, outer, hidden, splits):
    residual, dot_mix, scale, base = inputs(outer, hidden, device)
    sqrsum = residual.float().square().sum((-1, -2))
    parts = dot_mix, sqrsum
    if splits > 1:
        weight = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device)
        parts = [torch.stack([x * w for w in weight]) for x in parts]
        dot_mix, sqrsum = (part.double().sum(0) for part in parts)
    found = mhc.mhc_pre_big_fuse(*parts, residual, scale, base, 4 * hidden, num_splits=splits, mhc_post_mult_value=2.0)
    numbers = dict(k=4 * hidden, rms_eps=1e-6, pre_eps=1e-6, eps=1e-6, mult=2.0, repeat=20)
    check(found, residual, (dot_mix, sqrsum, residual, scale, base), numbers)
    if residual.numel():
        # Columns were normalised last.
        assert (found[1].sum(-2) - 1).abs().max() < 1e-3


@shapes
def test_pre_with_its_own_sum(variant, device, outer, hidden):
    residual, dot_mix, scale, base = inputs(outer, hidden, device, torch.float16)
    numbers = dict(rms_eps=1e-5, pre_eps=1e-4, eps=1e-3, mult=1.0, repeat=3)
    ours = dict(rms_eps=1e-5, mhc_pre_eps=1e-4, mhc_sinkhorn_eps=1e-3, sinkhorn_repeat=3)
    found = mhc.mhc_pre_big_fuse_with_prenorm(dot_mix[None], residual, scale, base, **ours)
    sqrsum = residual.double().square().sum((-1, -2))
    check(found, residual, (dot_mix, sqrsum, residual, scale, base), {"k": 4 * hidden, **numbers})


@shapes
@pytest.mark.parametrize("mix_dtype", [torch.float32, BF16])
def test_post(variant, device, outer, hidden, mix_dtype):
    x, residual = (generate.randn(*outer, *s, dtype=BF16, device=device) for s in ((hidden,), (4, hidden)))
    post, comb = (generate.randn(*outer, *s, dtype=mix_dtype, device=device) for s in ((4, 1), (4, 4)))
    out = mhc.mhc_post(x, residual, post, comb)
    results = []
    for dtype in (torch.float64, torch.float32):
        wide, streams, p, c = (t.to(dtype) for t in (x, residual, post, comb))
        mixed = sum(streams[..., i, None, :] * c[..., i, :, None] for i in range(4))
        results.append(wide[..., None, :] * p + mixed)
    assert out.dtype == BF16 and out.shape == residual.shape
    assert_close(out, results[1].to(BF16), results[0])


def test_strided_streams(variant, device):
    """Streams that are a slice of wider rows, and tokens that are every other one."""
    wide = generate.randn(6, 5, 4, 72, dtype=BF16, device=device)
    residual = wide[::2, 1, :, 3:67]
    x = generate.randn(3, 2, 64, dtype=BF16, device=device)[:, 1]
    post, comb = torch.rand(3, 4, device=device), torch.rand(3, 4, 4, device=device)
    out = mhc.mhc_post(x, residual, post, comb)
    truth = x.double()[:, None] * post.double()[..., None] + comb.double().mT @ residual.double()
    assert_close(out, truth.to(BF16), truth)
    dot_mix = generate.randn(3, 24, device=device)
    found = mhc.mhc_pre_big_fuse_with_prenorm(dot_mix, residual, torch.ones(3, device=device), dot_mix[0])
    numbers = dict(k=256, rms_eps=1e-6, pre_eps=1e-6, eps=1e-6, mult=1.0, repeat=20)
    squares = residual.double().square().sum((-1, -2))
    check(found, residual, (dot_mix, squares, residual, torch.ones(3, device=device), dot_mix[0]), numbers)


ONE = dict(dot_mix=torch.ones(2, 24), sqrsum=torch.ones(2), residual=torch.ones(2, 4, 8), mhc_scale=torch.ones(3),
           mhc_base=torch.ones(24), k=32)  # fmt: skip


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(residual=torch.ones(2, 3, 8)), "residual"), (dict(residual=torch.ones(2, 4, 8).int()), "residual"),
        (dict(dot_mix=torch.ones(2, 23)), "dot_mix"), (dict(dot_mix=torch.ones(2, 24).half()), "dot_mix"),
        (dict(sqrsum=torch.ones(3)), "sqrsum"), (dict(mhc_scale=torch.ones(4)), "mhc_scale"),
        (dict(mhc_base=torch.ones(3)), "mhc_base"), (dict(num_splits=3), "num_splits"), (dict(k=0), "k"),
        (dict(rms_eps=0.0), "rms_eps"), (dict(mhc_sinkhorn_eps=-1.0), "mhc_sinkhorn_eps"),
        (dict(mhc_pre_eps=float("nan")), "mhc_pre_eps"), (dict(sinkhorn_repeat=0), "sinkhorn_repeat"),
    ],
)  # fmt: skip
def test_bad_input(changed, name):
    with pytest.raises(ValueError, match=f"^{name}: got "):
        mhc.mhc_pre_big_fuse(**ONE | changed)


def test_inside_other_defaults(device):
    residual, dot_mix, scale, base = inputs((2,), 24, device)
    expected = mhc.mhc_pre_big_fuse_with_prenorm(dot_mix, residual, scale, base)
    with torch.device("meta"):
        found = mhc.mhc_pre_big_fuse_with_prenorm(dot_mix, residual, scale, base)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

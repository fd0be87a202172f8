"""The triangular systems of Hopper's prefill in the emulator, against float64."""

from itertools import pairwise

import pytest
import torch

from flashinfer.ops.recurrent.delta import CHUNK, Chunks, sm90_prepare
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import Hazard, emulate

SEEDS = (0, 1, 2)
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def raw_decays(gate, a_log, bias, kind, lower):
    """Decays of raw gates in float64, by the layers' formulas: Kimi Team, Kimi Linear, 2025; Yang et al., 2024."""
    gate = gate.double()
    if kind == "linear":
        return gate
    if kind == "log":
        return gate.exp()
    groups = gate.shape[-1]
    gate = gate + bias.double().repeat_interleave(groups // bias.numel())
    rate = a_log.double().exp().repeat_interleave(groups // a_log.numel())
    if kind == "softplus":
        return (-rate * torch.nn.functional.softplus(gate)).exp()
    return (lower * torch.sigmoid(rate * gate)).exp()


def system(k, q, decay, beta, scale, normalize, dtype):
    """(1 + L)^-1 diag(beta), P and the factors of one chunk and head, in `dtype`; rows of k and q are tokens."""
    k, q, beta = k.to(dtype), q.to(dtype), beta.to(dtype)
    if normalize:
        k = k * (k.square().sum(1, keepdim=True) + 1e-6).rsqrt()
        q = q * (q.square().sum(1, keepdim=True) + 1e-6).rsqrt()
    sums = decay.clamp_min(torch.exp(torch.tensor(-64.0, dtype=torch.float64))).log().to(dtype).cumsum(0)
    between = (sums[:, None] - sums[None, :]).exp().tril()
    lower = beta[:, None] * (k @ k.mT * between).tril(-1)
    solved = torch.linalg.solve_triangular(lower + torch.eye(len(k), dtype=dtype), beta.diag(), upper=False)
    return solved, (q @ k.mT) * between * scale, sums


def check(lengths=(65, 0, 130), heads=4, q_heads=1, k_heads=1, dim=128, normalize=True, gate="linear", gate_dtype=None,
          beta="value", beta_dtype=torch.float32, stride=CHUNK, packed=True, seed=0, keys="random", decays=None,
          betas=None, watch=None, index=torch.int32, poison=True):  # fmt: skip
    gate_dtype = gate_dtype or (torch.float32 if gate == "linear" else torch.bfloat16)
    n, rows = len(lengths), 1 if packed else len(lengths)
    # Neighbours' tokens lie right in front and behind, and are NaN.
    pad = 3
    starts = [pad]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1] + CHUNK if packed else lengths[0]
    q, k = (generate.randn(rows, total, h, dim).to(torch.bfloat16) for h in (q_heads, k_heads))
    if keys == "repeated":
        k = k[:, :1].expand(-1, total, -1, -1).contiguous()
    raw = generate.randn(rows, total, heads)
    raw = torch.sigmoid(raw + 2) if gate == "linear" else -raw.abs() if gate == "log" else raw
    raw = (raw if decays is None else torch.full_like(raw, decays)).to(gate_dtype)
    strength = torch.rand(rows, total, heads) if betas is None else torch.full((rows, total, heads), float(betas))
    strength = strength.to(beta_dtype)
    a_log = generate.randn(heads) if gate in ("softplus", "bounded") else None
    bias = generate.randn(heads) if a_log is not None else None
    offsets = torch.tensor(starts, dtype=index) if packed else None
    if packed and poison:
        for x in (q, k, raw, strength):
            x[:, :pad] = float("nan")
            x[:, starts[-1] :] = float("nan")

    problem = Chunks(
        dim, dim, "bf16", "bf16", gate=gate, gate_dtype=NAMES[gate_dtype] if gate else "", beta=beta,
        beta_dtype=NAMES[beta_dtype] if beta else "", bias_dtype="fp32" if bias is not None else "",
        packed=packed, normalize=normalize, stride=stride, index="i64" if index == torch.int64 else "i32",
    )  # fmt: skip
    chunks = -(-total // stride)
    places = total // stride + n if packed else rows * chunks
    made = [torch.full((places, heads, *shape), float("nan"), dtype=dtype) for shape, dtype in (
        ((CHUNK, CHUNK), torch.bfloat16), ((CHUNK, CHUNK), torch.bfloat16), ((4, CHUNK), torch.float32))]  # fmt: skip
    given = (q, k, raw if gate else None, strength if beta else None, a_log, bias, offsets)
    given = [x for x in given if x is not None]
    strides = [s for x in (q, k, raw, strength) for s in x.stride()[:3]]
    groups = [heads // q_heads, heads // k_heads, 1, 1, 1, 1]
    scale, lower = 0.3, -5.0
    with emulate("90a", seed=seed, watch=watch):
        sm90_prepare.launch(
            problem, places, given, made, strides, (n, total, chunks, heads, dim), groups, (scale, lower, 1.0, 20.0)
        )

    seen = torch.zeros(places, dtype=torch.bool)
    spans = list(pairwise(starts)) if packed else [(0, total)] * n
    for s, (begin, end) in enumerate(spans):
        for c in range(-(-(end - begin) // stride)):
            place = begin // stride + s + c if packed else s * chunks + c
            seen[place] = True
            first = begin + c * stride
            count = min(end - first, stride)
            here = slice(first, first + count)
            row = 0 if packed else s
            for h in range(heads):
                kh, qh = k[row, here, h * k_heads // heads], q[row, here, h * q_heads // heads]
                decay = torch.ones(count, dtype=torch.float64)
                if gate:
                    decay = raw_decays(raw[row, here], a_log, bias, gate, lower)[:, h]
                b = strength[row, here, h].double() if beta else torch.ones(count, dtype=torch.float64)
                b = torch.sigmoid(b) if beta == "logit" else b
                truth = system(kh, qh, decay, b, scale, normalize, torch.float64)
                same = system(kh, qh, decay, b, scale, normalize, torch.float32)
                for out, peer, exact, what in zip(made[:2], same, truth, ("solved", "scores"), strict=False):
                    whole = out[place, h]
                    assert (whole[count:] == 0).all() and (whole[:, count:] == 0).all(), what
                    assert (whole.triu(1) == 0).all(), what
                    assert_close(whole[:count, :count], peer.to(torch.bfloat16), exact, what)
                check_factors(made[2][place, h], kh, qh, truth[2], scale, normalize, count)
    for out in made:
        assert out[~seen].isnan().all()


def check_factors(factors, k, q, sums, scale, normalize, count):
    assert factors.isfinite().all()
    k_norm = (k.double().square().sum(1) + 1e-6).rsqrt() if normalize else 1.0
    q_norm = (q.double().square().sum(1) + 1e-6).rsqrt() if normalize else 1.0
    truth = (sums.exp() * k_norm, sums.exp() * q_norm * scale, (sums[-1] - sums).exp() * k_norm)
    # 8 ulp of a sum of logarithms are the relative error of its exponential; a float32 below its range is 0.
    rtol, atol = 8 * 2**-23 * (1 + sums.abs().max().item()), 2.0**-126
    for row, exact in enumerate(truth):
        torch.testing.assert_close(factors[row, :count].double(), exact, rtol=rtol, atol=atol)
    torch.testing.assert_close(factors[3].double(), sums[-1].exp().expand(CHUNK), rtol=rtol, atol=atol)


def test_quickly():
    check()


CASES = (
    dict(lengths=(0, 1, 63, 64, 65), heads=2),
    dict(lengths=(64, 130), heads=4, q_heads=2, k_heads=4),
    dict(lengths=(70,), heads=8, q_heads=1, k_heads=2, normalize=False, index=torch.int64, dim=64),
    dict(lengths=(100, 33), heads=2, gate="softplus", beta="logit", beta_dtype=torch.bfloat16),
    dict(lengths=(129, 1), heads=2, gate="bounded", beta="", stride=32),
    dict(lengths=(100, 100, 100), heads=2, gate="log", packed=False),
    dict(lengths=(64, 5), heads=1, gate="", normalize=False, dim=64),
    dict(lengths=(64, 40), heads=2, keys="repeated", betas=1, decays=1),
    dict(lengths=(64, 40), heads=2, keys="repeated", betas=1),
    dict(lengths=(64, 40), heads=2, decays=0, betas=1),
    dict(lengths=(64, 40), heads=4, decays=1, betas=0),
)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all(case, seed):
    check(seed=seed, **case)


@pytest.mark.matrix
@pytest.mark.parametrize("operation", ["fence", "product wait"])
def test_what_is_left_out_is_seen(operation):
    with pytest.raises(Hazard):
        check((65,), watch=lambda what, place: "skip" if what == operation else None)

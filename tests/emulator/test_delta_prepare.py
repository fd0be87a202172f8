"""The triangular systems of Hopper's prefill in the emulator, against float64."""

from itertools import pairwise

import pytest
import torch

from flashinfer.ops.recurrent.delta import CHUNK, Chunks, sm90_prepare, sm90_prepare_channels
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import Hazard, emulate

CPU = torch.device("cpu")
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


def launched(launch, device, seed, watch, problem, places, given, made, *numbers):
    """The workspace, from the emulator or from a GPU."""
    if device == CPU:
        with emulate("90a", seed=seed, watch=watch):
            launch(problem, places, given, made, *numbers)
        return made
    made = [x.to(device) for x in made]
    launch(problem, places, [x.to(device) for x in given], made, *numbers)
    return [x.cpu() for x in made]


def check(lengths=(65, 0, 130), heads=4, q_heads=1, k_heads=1, dim=128, normalize=True, gate="linear", gate_dtype=None,
          beta="value", beta_dtype=torch.float32, stride=CHUNK, packed=True, seed=0, keys="random", decays=None,
          betas=None, watch=None, index=torch.int32, device=CPU):  # fmt: skip
    gate_dtype = gate_dtype or (torch.float32 if gate == "linear" else torch.bfloat16)
    n, rows = len(lengths), 1 if packed else len(lengths)
    # Neighbours' tokens lie right in front and behind, and are NaN.
    pad = 3
    starts = [pad]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1] + CHUNK if packed else lengths[0]
    # Where nothing normalizes keys theirs is a norm of about 1: with beta |k|^2 above 2 the recurrence itself diverges.
    size = 1.0 if normalize else dim**-0.5
    q, k = ((size * generate.randn(rows, total, h, dim)).to(torch.bfloat16) for h in (q_heads, k_heads))
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
    if packed:
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
    sizes, numbers = (n, total, chunks, heads, dim), (scale, lower, 1.0, 20.0)
    launch = sm90_prepare.launch
    made = launched(launch, device, seed, watch, problem, places, given, made, strides, sizes, groups, numbers)

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


def check_channels(lengths=(65, 0, 130), heads=2, dim=128, normalize=True, gate="bounded", beta="logit", stride=CHUNK,
                   gate_dtype=torch.bfloat16, seed=0, keys="random", logs=None, betas=None, watch=None,
                   device=CPU):  # fmt: skip
    n, pad, scale, lower = len(lengths), 3, 0.3, -5.0
    starts = [pad]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1] + CHUNK
    q, k = (generate.randn(1, total, heads, dim).to(torch.bfloat16) for _ in range(2))
    if not normalize:
        k = (k.float() * dim**-0.5).to(torch.bfloat16)
    if keys == "repeated":
        k = k[:, :1].expand(-1, total, -1, -1).contiguous()
    raw = generate.randn(1, total, heads, dim)
    if gate == "log":
        raw = -5 * torch.rand(1, total, heads, dim) if logs is None else torch.full_like(raw, logs)
    raw = raw.to(gate_dtype)
    strength = generate.randn(1, total, heads, *[dim] * (beta == "channels")).to(torch.bfloat16)
    strength = torch.full_like(strength, betas) if betas is not None else strength
    a_log = generate.randn(heads) if gate == "bounded" else None
    bias = generate.randn(heads * dim) if gate == "bounded" else None
    offsets = torch.tensor(starts, dtype=torch.int32)
    for x in (q, k, raw, strength):
        x[:, :pad] = float("nan")
        x[:, starts[-1] :] = float("nan")
    problem = Chunks(
        dim, dim, "bf16", "bf16", gate=gate, gate_dtype=NAMES[gate_dtype], beta=beta, beta_dtype="bf16" if beta else "",
        bias_dtype="fp32" if bias is not None else "", channels=True, bounded=True, normalize=normalize, stride=stride,
    )  # fmt: skip
    places = total // stride + n
    shapes = ((CHUNK, CHUNK), (CHUNK, CHUNK), (dim,), *[(CHUNK, dim)] * 3)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32, *[torch.bfloat16] * 3)
    made = [torch.full((places, heads, *s), float("nan"), dtype=t) for s, t in zip(shapes, dtypes, strict=True)]
    given = [x for x in (q, k, raw, strength if beta else None, a_log, bias, offsets) if x is not None]
    strides = [s for x in (q, k, raw, strength) for s in x.stride()[:3]]
    sizes, groups, numbers = (n, total, 0, heads, dim), [1] * 6, (scale, lower, 1.0, 20.0)
    launch = sm90_prepare_channels.launch
    made = launched(launch, device, seed, watch, problem, places, given, made, strides, sizes, groups, numbers)

    # Errors of a product are as large as its operands, of which it may have nothing left: all are judged as one row.
    found = {name: [] for name in ("solved", "scores", "decay", "rows_k", "rows_q", "rows_last")}
    seen = torch.zeros(places, dtype=torch.bool)
    for s, (begin, end) in enumerate(pairwise(starts)):
        for c in range(-(-(end - begin) // stride)):
            place = begin // stride + s + c
            seen[place] = True
            here = slice(begin + c * stride, min(begin + (c + 1) * stride, end))
            count = here.stop - here.start
            for h in range(heads):
                log = raw[0, here, h].double()
                if gate == "bounded":
                    shifted = log + bias.double().view(heads, dim)[h]
                    log = lower * torch.sigmoid(a_log[h].double().exp() * shifted)
                b = strength[0, here, h].double() if beta else torch.ones(count, dtype=torch.float64)
                b = torch.sigmoid(b) if beta == "logit" else b
                given = (k[0, here, h], q[0, here, h], log, b, scale, normalize)
                truth = system_of_channels(*given, torch.float64, torch.float64)
                same = system_of_channels(*given, torch.float32, torch.bfloat16)
                for name, out, peer, exact in zip(found, made, same, truth, strict=True):
                    whole = out[place, h]
                    if name != "decay":
                        assert (whole[count:] == 0).all(), name
                        whole = whole[:count]
                    if name in ("solved", "scores"):
                        assert (whole[:, count:] == 0).all() and (whole.triu(1) == 0).all(), name
                        whole = whole[:, :count]
                    found[name].append([x.reshape(-1) for x in (whole, peer.to(out.dtype), exact)])
    for name, parts in found.items():
        assert_close(*(torch.cat(x) for x in zip(*parts, strict=True)), name, terms=float(name == "decay"))
    for out in made:
        assert out[~seen].isnan().all()


def system_of_channels(k, q, log, beta, scale, normalize, dtype, operand):
    """As `system`, with logarithms of decays [tokens, K]: also the whole decay, and rows of k, q, and k to the end. In
    blocks of 16, since no quotient of decays is in range over 64 tokens; `operand` is what products multiply."""
    k, q, beta, log = k.to(dtype), q.to(dtype), beta.to(dtype), log.to(dtype)
    if normalize:
        k = k * (k.square().sum(1, keepdim=True) + 1e-6).rsqrt()
        q = q * (q.square().sum(1, keepdim=True) + 1e-6).rsqrt()
    erase = k * beta if beta.ndim == 2 else k
    sums = log.cumsum(0)
    kk, qk = (torch.zeros(len(k), len(k), dtype=dtype) for _ in range(2))
    for first in range(0, len(k), 16):
        block = slice(first, min(first + 16, len(k)))
        within = log[block].cumsum(0)
        right = (k[block] * (within[-1] - within).exp()).to(operand).to(dtype).mT
        since = log[block.stop :].cumsum(0)
        since = torch.cat((within - within[-1], since)).exp()
        kk[first:, block] = (erase[first:] * since).to(operand).to(dtype) @ right
        qk[first:, block] = (q[first:] * since).to(operand).to(dtype) @ right
    lower = kk.tril(-1) * (beta[:, None] if beta.ndim == 1 else 1)
    each = beta if beta.ndim == 1 else torch.ones(len(k), dtype=dtype)
    solved = torch.linalg.solve_triangular(lower + torch.eye(len(k), dtype=dtype), each.diag(), upper=False)
    last = k * (sums[-1] - sums).exp()
    return solved, qk.tril() * scale, sums[-1].exp(), erase * sums.exp(), q * sums.exp() * scale, last


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


def test_channels_quickly():
    check_channels()


def test_a_gate_of_nan_does_not_pass_for_one_that_forgets(monkeypatch):
    factors = []
    monkeypatch.setitem(globals(), "assert_close", lambda *ignored: None)
    monkeypatch.setitem(globals(), "check_factors", lambda found, *ignored: factors.append(found))
    for gate in ("linear", "log", "softplus"):
        check(lengths=(64,), heads=1, gate=gate, decays=float("nan"))
    assert len(factors) == 3 and all(found.isnan().all() for found in factors)


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


CHANNELS = (
    dict(lengths=(0, 1, 63, 64, 65)),
    dict(lengths=(70, 130), heads=1, dim=64, normalize=False, beta="", gate="log", gate_dtype=torch.float32),
    dict(lengths=(64, 40), heads=1, gate="log", logs=-5.0),
    dict(lengths=(64, 40), heads=1, gate="log", logs=0.0, keys="repeated", betas=1.0, beta="value"),
    dict(lengths=(64, 40), heads=1, beta="channels", gate="log"),
    dict(lengths=(100, 17), heads=1, stride=32),
)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CHANNELS, ids=str)
def test_channels(case, seed):
    check_channels(seed=seed, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("of, case", [(check, case) for case in CASES] + [(check_channels, case) for case in CHANNELS])
def test_on_a_gpu(of, case):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    of(device=torch.device("cuda"), **case)


@pytest.mark.matrix
@pytest.mark.parametrize("of", [check, check_channels])
@pytest.mark.parametrize("operation", ["fence", "product wait"])
def test_what_is_left_out_is_seen(operation, of):
    with pytest.raises(Hazard):
        of((65,), watch=lambda what, place: "skip" if what == operation else None)

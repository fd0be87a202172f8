"""Logits that are wide, infinite, all alike or NaN; scales of zero; sinks and caps of any size.

The truth is the softmax's definition in float64. What it is compared with has logits and softmax in float32, and rounds
the result to the type of the output.
"""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flashinfer.ops.attention._device.logits import NEAR, near_zero
from flashinfer.ops.attention._device.logits import _tanh as capped
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention.cases import backends, run_decode, run_paged, run_ragged
from tests.ops.attention.oracle import Options

INF = math.inf


def dtypes(device):
    """The interpreter's dot takes no bfloat16."""
    return (torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float16,)


def definition(x, o: Options, dtype, sinks=None):
    """out and base-2 lse of a batch, in `dtype`: no key, or logits of -inf alone, gives 0 and -inf."""
    outs, lses = [], []
    scale = 1 / math.sqrt(x.q.shape[2]) if o.sm_scale is None else o.sm_scale
    for i in range(len(x.qo_indptr) - 1):
        q, k, v = (t.to(dtype) for t in x.request(i))
        group = q.shape[1] // k.shape[1]
        s = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(group, 1)) * scale
        if o.logits_soft_cap:
            s = o.logits_soft_cap * torch.tanh(s / o.logits_soft_cap)
        place = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
        key = torch.arange(k.shape[0], device=q.device)[None]
        hidden = (key > place) & o.causal
        if o.window_left >= 0:
            hidden = hidden | (key < place - o.window_left)
        s = s.masked_fill(hidden[:, None], -INF)
        sink = torch.full(s.shape[1:2], -INF, dtype=dtype, device=q.device) if sinks is None else sinks.to(dtype)
        s = torch.cat((s, sink[None, :, None].expand(s.shape[0], -1, 1)), -1)
        top = s.amax(-1, keepdim=True)
        p = torch.exp(s - torch.where(top == -INF, 0.0, top))
        total = p.sum(-1)
        outs.append(torch.einsum("qhk,khd->qhd", p[..., :-1], v.repeat_interleave(group, 1)))
        outs[-1] = torch.where(total[..., None] == 0, 0.0, outs[-1] / total[..., None])
        lses.append((torch.where(top == -INF, 0.0, top)[..., 0] + total.log()) / math.log(2))
    return torch.cat(outs), torch.cat(lses)


def check(result, x, o: Options, sinks=None, at=...):
    out, lse = result
    truth, truth_lse = definition(x, o, torch.float64, sinks)
    same, same_lse = definition(x, o, torch.float32, sinks)
    if out.is_cuda:
        # A chip's exponential is 0 where it would be subnormal, so sums of such weights are right up to those.
        tiny = (truth.abs() < 2.0**-118) & (out.abs() < 2.0**-118)
        out = torch.where(tiny, same.to(out.dtype), out)
    assert_close(out[at], same.to(out.dtype)[at], truth[at], "out")
    assert_close(lse[at], same_lse[at], truth_lse[at], "lse")


def batch(device, qo=(40, 1, 0, 17), kv=(140, 70, 33, 0), dtype=torch.float16, dim=64, **kwargs):
    return generate.ragged_batch(list(qo), list(kv), 4, 2, dim, dtype=dtype, device=device, **kwargs)


def every_prefill(x, o, device, **given):
    for backend in backends(device):
        # The ragged wrapper's run takes no sinks.
        if "run" not in given:
            yield run_ragged(x, o, backend, **given)
        yield run_paged(x, o, backend, page_size=16, **given)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("scale", (0.0, -0.0, 1e-45, 1e-39, 1e-30, -1e-39, -0.1))
def test_scales_of_zero_and_near_it(scale, causal, device):
    for dtype in dtypes(device):
        x = batch(device, dtype=dtype)
        o = Options(causal=causal, sm_scale=scale)
        for result in every_prefill(x, o, device):
            check(result, x, o)


def test_scale_zero_with_sinks_and_windows(device):
    sinks = torch.tensor([0.5, -3.0, 40.0, -INF], device=device)
    for dtype in dtypes(device):
        x = batch(device, dtype=dtype)
        for o in (Options(causal=True, sm_scale=0.0, window_left=20), Options(sm_scale=0.0)):
            for result in every_prefill(x, o, device, run=dict(sinks=sinks)):
                check(result, x, o, sinks)


def test_scale_zero_in_decode(device):
    x = batch(device, (1, 1, 1), (70, 1, 0))
    for backend in backends(device):
        check(run_decode(x, Options(sm_scale=0.0), backend), x, Options(sm_scale=0.0))


def minus_infinite(x, keys, column=3):
    """Keys [first, last) of every request have logits of -inf for all queries."""
    q, k = x.q.clone(), x.k.clone()
    q[..., column] = 1
    for begin, end in zip(x.kv_indptr.tolist(), x.kv_indptr.tolist()[1:]):
        k[begin + keys[0] : min(begin + keys[1], end), :, column] = -INF
    return generate.Ragged(q, k, x.v, x.qo_indptr, x.kv_indptr)


@pytest.mark.parametrize("keys", ((0, 100), (100, 140), (0, 140)))
@pytest.mark.parametrize("causal", (False, True))
def test_keys_of_minus_infinity(causal, keys, device):
    """In the blocks that are met first, from either end, or in all: then out is 0 and lse -inf."""
    for dtype in dtypes(device):
        x = minus_infinite(batch(device, dtype=dtype), keys)
        for result in every_prefill(x, Options(causal=causal), device):
            check(result, x, Options(causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_keys_of_minus_infinity_over_many_blocks(dim, device):
    for dtype in dtypes(device):
        for keys in ((0, 600), (300, 900), (0, 900)):
            x = minus_infinite(batch(device, (300, 129), (900, 900), dtype, dim), keys)
            for o in (Options(causal=True), Options(), Options(window_left=100)):
                for result in every_prefill(x, o, device):
                    check(result, x, o)


def test_keys_of_minus_infinity_in_decode(device):
    for keys in ((0, 60), (60, 90), (0, 90)):
        x = minus_infinite(batch(device, (1, 1, 1), (90, 64, 1)), keys)
        for backend in backends(device):
            for plan in (None, dict(fixed_split_size=32)):
                check(run_decode(x, Options(), backend, plan=plan), x, Options())


@pytest.mark.parametrize("number", (INF, math.nan))
def test_infinity_and_nan_touch_no_other_request(number, device):
    for dtype in dtypes(device):
        clean = batch(device, (20, 30, 9), (20, 100, 40), dtype)
        k = clean.k.clone()
        k[int(clean.kv_indptr[1]) + 5] = number
        x = generate.Ragged(clean.q, k, clean.v, clean.qo_indptr, clean.kv_indptr)
        ends = clean.qo_indptr.tolist()
        for got, wanted in zip(every_prefill(x, Options(), device), every_prefill(clean, Options(), device)):
            for a, b in zip(got, wanted):
                assert_bitwise(a[: ends[1]], b[: ends[1]])
                assert_bitwise(a[ends[2] :], b[ends[2] :])
                assert a[ends[1] : ends[2]].isnan().all()


def scaled_keys(x, factor):
    return generate.Ragged(x.q, (x.k.float() * factor).to(x.k.dtype), x.v, x.qo_indptr, x.kv_indptr)


def test_wide_logits(device):
    """Up to 300 nats and more."""
    for dtype in dtypes(device):
        x = scaled_keys(batch(device, dtype=dtype), 80)
        for o in (Options(), Options(causal=True, window_left=30), Options(logits_soft_cap=300.0)):
            for result in every_prefill(x, o, device):
                check(result, x, o)


def test_a_first_key_far_above(device):
    """An attention sink: 40 nats above all others."""
    x = batch(device, (70,), (300,))
    q, k = x.q.clone(), x.k.clone()
    q[..., 0], k[..., 0] = 8, 0
    k[0, :, 0] = 40.0
    x = generate.Ragged(q, k, x.v, x.qo_indptr, x.kv_indptr)
    for result in every_prefill(x, Options(causal=True), device):
        check(result, x, Options(causal=True))


def test_denormals(device):
    x = batch(device)
    x = generate.Ragged(x.q * 2**-20, x.k * 2**-20, x.v * 2**-18, x.qo_indptr, x.kv_indptr)
    o = Options(sm_scale=2.0**40)
    for result in every_prefill(x, o, device):
        check(result, x, o)


SINKS = ((3e38, -3e38, -INF, 0.0), (INF, 1e30, -1e30, 89.0), (2.36e38, 2.35e38, -2.36e38, 1e4))


@pytest.mark.parametrize("sinks", SINKS)
def test_sinks_of_any_size(sinks, device):
    """A sink of 3e38 is inf in base 2, and takes all the weight: out is 0, and lse inf."""
    given = torch.tensor(sinks, device=device)
    truth_of = torch.where(given == INF, 3e38, given)
    for dtype in dtypes(device):
        x = batch(device, dtype=dtype)
        for plan in (None, dict(fixed_split_size=32)):
            for result in every_prefill(x, Options(causal=True), device, plan=plan, run=dict(sinks=given)):
                check(result, x, Options(causal=True), truth_of)
    x = batch(device, (1, 1, 1), (90, 0, 5))
    for backend in backends(device):
        for plan in (None, dict(fixed_split_size=32)):
            check(run_decode(x, Options(), backend, plan=plan, run=dict(sinks=given)), x, Options(), truth_of)


@pytest.mark.parametrize("lean", (2.0**-25, -(2.0**-25)), ids=("above", "below"))
@pytest.mark.parametrize("sinks", SINKS)
def test_sinks_of_any_size_in_fused_differences(sinks, lean, monkeypatch):
    """A compiler fuses a product into the difference that it enters, which then sees it as it was before its rounding.

    On a CPU nothing does, so every difference sees its first term half an ulp off.
    """
    from triton.runtime import interpreter

    def fused(builder, first, second):
        if first.data.dtype != np.float32:
            return exact(builder, first, second)
        with np.errstate(over="ignore", invalid="ignore"):
            data = (first.data.astype(np.float64) * (1 + lean) - second.data).astype(np.float32)
        return interpreter.TensorHandle(data, first.dtype.scalar)

    exact = interpreter.InterpreterBuilder.create_fsub
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fsub", fused)
    cpu = torch.device("cpu")
    given = torch.tensor(sinks)
    truth_of = torch.where(given == INF, 3e38, given)
    x = batch(cpu, (7, 1, 2), (9, 3, 0))
    for plan in (None, dict(fixed_split_size=4)):
        result = run_paged(x, Options(causal=True), "portable", plan=plan, run=dict(sinks=given))
        check(result, x, Options(causal=True), truth_of)


def test_no_keys_beside_few(device):
    """A request without keys reads nothing, though the free pages of the cache are NaN; its sinks are all it has."""
    x = batch(device, (1, 1, 7), (64, 0, 0))
    sinks = torch.tensor([0.5, -3.0, 40.0, -INF], device=device)
    for o in (Options(window_left=1), Options(), Options(causal=True)):
        for given in ({}, dict(run=dict(sinks=sinks))):
            for result in every_prefill(x, o, device, **given):
                check(result, x, o, sinks if given else None)


@pytest.mark.parametrize("cap", (0.01, 1.5, 30.0, 1e3, 1e5, 1e8, 1e30))
def test_soft_caps_of_any_size(cap, device):
    """A cap that is far above the logits leaves them as they are; one that is far below makes them one another's."""
    o = Options(causal=True, logits_soft_cap=cap)
    for dtype in dtypes(device):
        for factor in (1e-3, 1, 40):
            x = scaled_keys(batch(device, (20, 9, 1), (70, 9, 33), dtype), factor)
            for result in every_prefill(x, o, device):
                check(result, x, o)


@pytest.mark.parametrize("cap", (0.01, 30.0, 1e5, 1e8))
def test_soft_caps_in_float32(cap, device):
    """To a few ulp of the largest logit."""
    o = Options(causal=True, logits_soft_cap=cap)
    for factor in (1e-3, 1, 40):
        x = scaled_keys(batch(device, (20, 9, 1), (70, 9, 33), torch.float32), factor)
        truth, truth_lse = definition(x, o, torch.float64)
        most = min(cap, float(x.q.norm(dim=-1).max() * x.k.norm(dim=-1).max() / 8))
        for out, lse in every_prefill(x, o, device):
            assert (lse - truth_lse).abs().max() <= 2**-20 * (1 + most)
            assert (out - truth).abs().max() <= 2**-20 * (1 + most) * x.v.abs().max()


def test_soft_caps_in_decode(device):
    for dtype in dtypes(device):
        for cap in (1e-2, 1e5, 1e8):
            x = scaled_keys(batch(device, (1, 1, 1), (70, 9, 33), dtype), 10)
            for backend in backends(device):
                o = Options(logits_soft_cap=cap)
                check(run_decode(x, o, backend), x, o)


@triton.jit
def tanh_kernel(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, capped(tl.load(x + at)))


@triton.jit
def near_zero_kernel(x, out, ratio, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, near_zero(tl.load(x + at), ratio))


@pytest.mark.parametrize("cap", (0.5, 50.0, 1e8))
def test_the_polynomial_of_tanh(cap, device):
    """Its relative error is below 2^-22 for logits of up to NEAR times the cap, the smallest ones included."""
    x = torch.cat((torch.exp2(torch.linspace(-100, 0, 1 << 14, dtype=torch.float64)), torch.linspace(1e-3, 1, 1 << 14)))
    x = (x * NEAR.value * cap * (1 - 2**-20)).float().to(device)
    x, out = torch.cat((x, -x)), x.new_empty(2 * len(x))
    near_zero_kernel[(len(x) // 4096,)](x, out, 1 / cap, 4096)
    truth = cap * torch.tanh(x.double() / cap)
    assert ((out.double() - truth).abs() <= 2**-22 * truth.abs()).all()


def test_the_tanh_of_soft_caps(device):
    """Its relative error is below 2^-20.5 from the smallest float32 to the largest."""
    x = torch.exp2(torch.linspace(-149, 127.9, 1 << 15, dtype=torch.float64)).float()
    near = torch.linspace(1e-3, 10, 1 << 15)
    x = torch.cat((x, near, -near, -x)).to(device)
    out = torch.empty_like(x)
    tanh_kernel[(x.shape[0] // 4096,)](x, out, 4096)
    truth = torch.tanh(x.double())
    assert ((out.double() - truth).abs() <= 2**-20.5 * truth.abs() + 2.0**-149).all()
    special = torch.tensor([INF, -INF, math.nan, 0.0], device=device)
    out = torch.empty_like(special)
    tanh_kernel[(1,)](special, out, 4)
    assert out[:2].tolist() == pytest.approx([1, -1], abs=3e-7) and out[2].isnan() and out[3] == 0

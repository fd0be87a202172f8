"""Attention of e4m3 queries, keys and values where all products are e4m3: the Hopper prefill kernel.

Its weights are rounded to e4m3, 2^8 times as large as a softmax has them, so that is what the same computation in plain
torch does. Its products cut what they add: LSE is judged by a model of that.
"""

import math

import pytest
import torch

from flashinfer._core.target import named
from flashinfer.ops.attention.prefill import config, prefill
from flashinfer.ops.attention.problem import Problem
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.attention import oracle
from tests.ops.attention.cases import run_paged, run_ragged
from tests.ops.attention.oracle import Extras, Options
from tests.ops.tensor_cores import fp8_product

E4M3 = torch.float8_e4m3fn
OUT = dict(o_data_type=torch.bfloat16)


def same_dtype(ragged, o: Options, extras: Extras):
    """out and base-2 lse with e4m3 weights and truncated scores, a request and a head at a time."""
    outs, lses = [], []
    for i in range(len(ragged.qo_indptr) - 1):
        q, k, v = ragged.request(i)
        (q_len, heads, dim), (kv_len, kv_heads, _) = q.shape, k.shape
        out = torch.zeros(q_len, heads, v.shape[2], device=q.device)
        lse = torch.full((q_len, heads), -math.inf, device=q.device)
        q_pos = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len
        k_pos = torch.arange(kv_len, device=q.device)[None]
        seen = (k_pos <= q_pos) | (not o.causal)
        if extras.masks:
            seen = extras.masks[i].view(q_len, kv_len)
        if o.window_left >= 0:
            seen = seen & (k_pos >= q_pos - o.window_left)
        for h in range(heads if kv_len else 0):
            kv_head = h * kv_heads // heads
            scale = 1 / math.sqrt(dim) if o.sm_scale is None else o.sm_scale
            s = fp8_product(q[:, h], k[:, kv_head].T) * (scale * extras.q_scale * extras.k_scale)
            if o.pos_encoding_mode == "ALIBI":
                s = s + oracle.slope(h, heads) * (k_pos - q_pos)
            if o.logits_soft_cap:
                s = o.logits_soft_cap * torch.tanh(s / o.logits_soft_cap)
            s = s.masked_fill(~seen, -math.inf)
            top = s.amax(1, keepdim=True).clamp(min=-1e30)
            p = torch.exp(s - top)
            total = p.sum(1, keepdim=True)
            if extras.sinks is not None:
                total = total + torch.exp(extras.sinks[h].double() - top)
            rounded = (p * 256).float().to(E4M3).double() / 256
            out[:, h] = (rounded @ v[:, kv_head].double() / total).nan_to_num(0).float() * extras.v_scale
            lse[:, h] = ((total.log() + top) / math.log(2)).float()[:, 0]
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def check(result, ragged, options, extras=None):
    out, lse = result
    truth, truth_lse = oracle.batch(ragged, options, torch.float64, extras)
    same, same_lse = same_dtype(ragged, options, extras or Extras())
    assert_close(out, same.to(out.dtype), truth, "out", through=2**-3)
    assert_close(lse, same_lse, truth_lse, "lse")


def check_bound(out, ragged, causal=True):
    """Assert that every element is within the bound of docs/rooms/attention-prefill.md, which zeros are not.

    Weights are rounded by up to 2^-4 of themselves or 2^-18 of the largest; P V of 128 keys is cut four times, by 33 x
    2^-13 of it; scores are off by as much as their model says, or by nothing.
    """
    for i in range(len(ragged.qo_indptr) - 1):
        q, k, v = (part.double() for part in ragged.request(i))
        first = int(ragged.qo_indptr[i])
        for h in range(q.shape[1]):
            kv_head = h * k.shape[1] // q.shape[1]
            values = v[:, kv_head]
            scale = 1 / math.sqrt(q.shape[2])
            s = q[:, h] @ k[:, kv_head].T * scale
            off = (fp8_product(q[:, h], k[:, kv_head].T) * scale - s).abs()
            if causal:
                hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
                s, off = s.masked_fill(hidden, -math.inf), off.masked_fill(hidden, 0)
            w = torch.exp(s - s.amax(1, keepdim=True))
            truth = w @ values / w.sum(1, keepdim=True)
            error = torch.where(w > 0, (w * 2**-4).clamp(min=2**-18), 0.0)
            error = error + w * (132 * 2**-13) + 2 * w * torch.expm1(off.amax(1, keepdim=True))
            bound = error @ values.abs() / w.sum(1, keepdim=True) + 2**-8 * truth.abs()
            found = out[first : first + len(truth), h].double()
            assert ((found - truth).abs() <= bound).all()
            if (values > 0).all():
                assert (truth > bound).all(), "zeros would pass"


def positive(x):
    return generate.Ragged(x.q, x.k, (x.v.float().abs() + 2**-4).to(E4M3), x.qo_indptr, x.kv_indptr)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True))
def test_the_bound_of_the_format(causal, device):
    x = positive(batch(device, (130, 70), (300, 1500)))
    check_bound(run_ragged(x, Options(causal=causal), "fa3", plan=OUT)[0], x, causal)


def batch(device, qo, kv=None, heads=(4, 2), dim=128, v_dim=None):
    return generate.ragged_batch(list(qo), list(kv or qo), *heads, dim, head_dim_vo=v_dim, dtype=E4M3, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
def test_ragged(causal, dim, device):
    for qo, kv in (((128,), (128,)), ((300, 1, 0, 129, 257), (300, 1, 64, 127, 700)), ((64, 129), (1025, 0))):
        x = batch(device, qo, kv, dim=dim)
        check(run_ragged(x, Options(causal=causal), "fa3", plan=OUT), x, Options(causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size, layout", ((16, "NHD"), (16, "HND"), (64, "NHD"), (128, "NHD"), (256, "HND")))
def test_pages(page_size, layout, device):
    """What lies in the pages past the end, and in pages of others, is NaN."""
    x = batch(device, (257, 0, 65, 400), (300, 33, 65, 1023))
    for causal in (False, True):
        result = run_paged(x, Options(causal=causal), "fa3", page_size=page_size, kv_layout=layout, plan=OUT)
        check(result, x, Options(causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("options", (
    Options(causal=True, window_left=100), Options(window_left=31), Options(causal=True, logits_soft_cap=5.0),
    Options(causal=True, pos_encoding_mode="ALIBI"), Options(causal=True, sm_scale=-0.05),
    Options(causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=5.0), Options(causal=True, sm_scale=0.0),
))  # fmt: skip
def test_options(options, device):
    x = batch(device, (300, 129), (500, 129))
    sinks = torch.tensor([0.3, -2.0, 5.0, 1.0], device=device)
    for given in ({}, dict(sinks=sinks)):
        check(run_paged(x, options, "fa3", plan=OUT, run=given), x, options, Extras(**given))


@pytest.mark.gpu
def test_custom_masks(device):
    x = batch(device, (140, 200), (150, 333))
    masks = [torch.rand(140, 150, device=device) < 0.5, torch.rand(200, 333, device=device) < 0.1]
    flat = torch.cat([m.flatten() for m in masks])
    check(run_ragged(x, Options(), "fa3", mask=flat, plan=OUT), x, Options(), Extras(masks=masks))


@pytest.mark.gpu
@pytest.mark.parametrize("count", (0, 1, 2))
def test_scales(count, device):
    x = batch(device, (300, 129), (500, 129))
    number = dict(q_scale=0.5, k_scale=1.7, v_scale=3.0)
    given = {n: v if not count else torch.full((count,), v, device=device) for n, v in number.items()}
    check(run_ragged(x, Options(causal=True), "fa3", plan=OUT, run=given), x, Options(causal=True), Extras(**number))


@pytest.mark.gpu
@pytest.mark.parametrize("split", (dict(fixed_split_size=256), dict(disable_split_kv=True), {}))
def test_split(split, device):
    x = batch(device, (129, 40), (5000, 2000), heads=(8, 1))
    sinks = torch.linspace(-2, 5, 8, device=device)
    for given in ({}, dict(sinks=sinks)):
        result = run_paged(x, Options(causal=True), "fa3", plan=OUT | split, run=given)
        check(result, x, Options(causal=True), Extras(**given))


@pytest.mark.gpu
def test_runs_are_bitwise_alike(device):
    x = batch(device, (700, 300), (2000, 300), heads=(8, 2))
    first, second = (run_ragged(x, Options(causal=True), "fa3", plan=OUT) for _ in range(2))
    assert_bitwise(first[0], second[0])
    assert_bitwise(first[1], second[1])


@pytest.mark.gpu
def test_weights_far_below_the_largest_count(device):
    """One key stands out by 2^14, and 16384 others make up as much: e4m3 has to hold their weights."""
    n, dim = 16385, 128
    q, k, v = (torch.zeros(m, 1, dim, device=device) for m in (128, n, n))
    q[..., 0], k[0, ..., 0] = 16, 16
    v[1:] = 1
    x = generate.Ragged(q.to(E4M3), k.to(E4M3), v.to(E4M3), *(generate.indptr([m], device) for m in (128, n)))
    scale = 14 * math.log(2) / 256
    out, lse = run_ragged(x, Options(sm_scale=scale), "fa3", plan=OUT)
    assert (out.float() - 0.5).abs().max() < 0.01
    assert (lse - 15).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", (64, 128))
def test_sums_over_many_keys_lose_little(dim, device):
    """Of positive values. One sum on the tensor cores throughout loses 0.7 % of 16384 keys."""
    x = batch(device, (128,), (16384,), (1, 1), dim)
    x = generate.Ragged(x.q, x.k, x.v.float().abs().to(E4M3), x.qo_indptr, x.kv_indptr)
    out, _ = run_ragged(x, Options(), "fa3", plan=OUT | dict(disable_split_kv=True))
    truth, _ = oracle.batch(x, Options(), torch.float64)
    assert ((out.double() - truth) / truth).mean().abs() < 2**-8


def test_what_it_refuses():
    target = named("90a")
    p = Problem("ragged", "fp8e4nv", "fp8e4nv", "bf16", 128, 128, 4)
    assert not config.refuses(p, target)
    for field, value, reason in (
        ("q_dtype", "fp8e5", "fp8e5 with k and v fp8e4nv"), ("head_dim_vo", 256, "head_dim 128 / 256"),
        ("kv_dtype", "fp8e5", "fp8e5"), ("o_dtype", "fp8e4nv", "output fp8e4nv"), ("page_size", 1, "page"),
        ("matrix", False, "boxes"), ("softmax", False, "softmax"),
    ):  # fmt: skip
        assert reason in config.refuses(Problem(**{**p.__dict__, field: value}), target)
    variants = {variant.name: variant for variant in prefill.variants}
    assert not variants["portable"].refuses(Problem(**{**p.__dict__, "page_size": 1}), target)

"""Hopper's prefill with FP8 caches under bf16 and fp16 queries, in the emulator, against attention in float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from flashinfer._core.target import named
from flashinfer.ops.attention.prefill import config
from flashinfer.ops.attention.problem import Problem
from flashinfer.testing import generate
from flashinfer.testing.emulator import EmulationError, Hazard, emulate
from tests.emulator.test_faults import FAULTS
from tests.emulator.test_prefill import LENGTHS, OPTIONS
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.oracle import Extras, Options
from tests.pairs import pairs

BF16, HALF, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = tuple(itertools.product((BF16, HALF), (E4M3, E5M2)))
SEEDS = (0, 1, 2)


def batch(q=BF16, kv=E4M3, dim=64, heads=(2, 1), lengths=LENGTHS):
    return generate.ragged_batch(*map(list, lengths), *heads, dim, dtype=q, kv_dtype=kv)


def run(x, options, seed, page_size=0, kv_layout="NHD", watch=None, **given):
    with emulate("90a", seed=seed, watch=watch) as launched:
        if page_size:
            result = run_paged(x, options, "sm90", page_size=page_size, kv_layout=kv_layout, **given)
        else:
            result = run_ragged(x, options, "sm90", **given)
    assert "attend_sm90_kernel" in launched
    return result


@pytest.mark.parametrize("q, kv, page_size", ((BF16, E4M3, 0), (HALF, E5M2, 24)))
def test_quickly(q, kv, page_size):
    x = batch(q, kv)
    result = run(x, Options(causal=True), 1, page_size, "HND", run=dict(k_scale=0.5, v_scale=3.0))
    check(result, x, Options(causal=True), Extras(k_scale=0.5, v_scale=3.0))


@pytest.mark.parametrize("q, kv", PAIRS)
def test_every_code_is_exact(q, kv):
    """A request's only key gives its value: all 256 codes, those of subnormal, infinite and NaN values too."""
    v = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kv).view(4, 1, 64)
    queries, keys = generate.randn(4 * 129, 1, 64, dtype=q), generate.randn(4, 1, 64, dtype=kv)
    x = generate.Ragged(queries, keys, v, generate.indptr([129] * 4), generate.indptr([1] * 4))
    out, _ = run(x, Options(), 0)
    expected = v.to(q).repeat_interleave(129, 0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.matrix
@pytest.mark.parametrize("name, dtypes, seed", pairs(list(OPTIONS), PAIRS, SEEDS), ids=str)
def test_options(name, dtypes, seed):
    q, kv = dtypes
    x = batch(q, kv, dim=128 if seed == 1 and q == BF16 else 64)
    check(run(x, OPTIONS[name], seed), x, OPTIONS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("page_size, dtypes, seed, kv_layout", pairs(
    (1, 16, 24, 64), ((BF16, E4M3, 128), (BF16, E5M2, 128), *((*pair, 64) for pair in PAIRS)), SEEDS, ("NHD", "HND"),
), ids=str)  # fmt: skip
def test_pages(page_size, dtypes, seed, kv_layout):
    """What lies behind each end, and in pages of others, is NaN."""
    q, kv, dim = dtypes
    x = batch(q, kv, dim, (4, 2))
    check(run(x, Options(causal=True), seed, page_size, kv_layout), x, Options(causal=True))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("group", (1, 4, 8))
def test_groups(group, seed):
    x = batch(heads=(2 * group, 2), lengths=((70, 33), (130, 40)))
    check(run(x, Options(causal=True), seed, 16), x, Options(causal=True))


@pytest.mark.matrix
@pytest.mark.parametrize("kv_len, page_size, seed", pairs(
    (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257), (0, 16), SEEDS
))  # fmt: skip
def test_lengths(kv_len, page_size, seed):
    x = batch(lengths=((130, 1, 129), (kv_len, 0, 200)))
    for options in (Options(), Options(causal=True)):
        check(run(x, options, seed, page_size), x, options)


@pytest.mark.matrix
@pytest.mark.parametrize("case, plan, seed", pairs(
    ((BF16, E4M3, 128, 16), (HALF, E5M2, 64, 1)), ({}, dict(disable_split_kv=True), dict(fixed_split_size=256)), SEEDS
), ids=str)  # fmt: skip
def test_chunks_on_long_keys(case, plan, seed):
    q, kv, dim, page_size = case
    x = batch(q, kv, dim, (4, 1), ((40, 3), (1900, 900)))
    check(run(x, Options(causal=True), seed, page_size, plan=plan), x, Options(causal=True))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("q, kv", PAIRS)
def test_custom_masks(q, kv, seed):
    x = batch(q, kv)
    mask = generate.random_mask(*LENGTHS)
    masks = [part.view(n, m) for part, n, m in zip(mask.split([n * m for n, m in zip(*LENGTHS)]), *LENGTHS)]
    check(run(x, Options(), seed, mask=mask), x, Options(), Extras(masks=masks))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ("causal", "window", "soft cap"))
def test_sinks(name, seed):
    x = batch(heads=(4, 2))
    sinks = torch.tensor([0.3, -2.0, 5.0, -float("inf")])
    check(run(x, OPTIONS[name], seed, 16, run=dict(sinks=sinks)), x, OPTIONS[name], Extras(sinks=sinks))


@pytest.mark.matrix
@pytest.mark.parametrize("dtypes, count, seed", pairs(PAIRS, (0, 1, 2, 4), SEEDS), ids=str)
def test_scales(dtypes, count, seed):
    """Numbers, and tensors of an element, of one for each KV head, of one for each query head."""
    q, kv = dtypes
    x = batch(q, kv, heads=(4, 2))
    number = dict(k_scale=1.7, v_scale=0.3)
    given = {n: v if not count else torch.full((count,), v) for n, v in number.items()}
    check(run(x, Options(causal=True), seed, 16, run=given), x, Options(causal=True), Extras(**number))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ("causal", "window"))
def test_wide_logits(name, seed):
    """What a fixed shift does not serve is made again, with a maximum of each block."""
    x = batch(lengths=((200, 130), (600, 500)))
    x.k[:300] = (x.k[:300].float() * 40).to(E4M3)
    check(run(x, OPTIONS[name], seed, 16), x, OPTIONS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("q, kv", PAIRS)
def test_nan_codes(q, kv, seed):
    """NaN in a key reaches the rows that see it and no others; in a value, its column of the rows that see it."""
    x, causal = batch(q, kv, lengths=((200,), (200,))), Options(causal=True)
    x.k.view(torch.uint8)[150, 0, 3] = 0x7F
    out, lse = run(x, causal, seed, 24)
    assert out[150:].isnan().all() and lse[150:].isnan().all()
    assert out[:150].isfinite().all() and lse[:150].isfinite().all()
    x = batch(q, kv, lengths=((200,), (200,)))
    x.v.view(torch.uint8)[70, 0, 3] = 0x7F
    out, lse = run(x, causal, seed, 24)
    assert out[70:, :, 3].isnan().all() and out[..., 4:].isfinite().all() and lse.isfinite().all()


def test_missing_fences_are_found():
    """Those that order what was widened before the products of consumers."""
    with pytest.raises(Hazard):
        run(batch(), Options(), 0, watch=lambda operation, place: "skip" if "wait_full" in place else None)


@pytest.mark.matrix
def test_faults_of_producers_are_found():
    """A wait for an empty stage that is left out or is for another phase, a full stage announced never or twice."""
    x, sites = batch(lengths=((130, 3), (700, 70))), set()
    run(x, Options(), 0, watch=lambda *site: sites.add(site))
    mine = [site for site in sorted(sites) if "sm90_widen.py" in site[1] and site[0] in FAULTS]
    faults = [(fault, site) for site in mine for fault in FAULTS[site[0]]]
    assert {operation for _, (operation, _) in faults} == {"wait", "arrive"} and len(faults) == 4
    for fault, site in faults:
        with pytest.raises((EmulationError, AssertionError)):
            for seed in range(5):
                check(run(x, Options(), seed, watch=lambda *at: fault if at == site else None), x, Options())


@pytest.mark.parametrize("field, value, reason", (
    ("q_dtype", "fp32", "q fp32 with k and v fp8e4nv"), ("q_dtype", "fp8e5", "q fp8e5 with k and v fp8e4nv"),
    ("kv_dtype", "nvfp4", "q bf16 with k and v nvfp4"), ("kv_dtype", "fp16", "q bf16 with k and v fp16"),
    ("head_dim_vo", 64, "head_dim 128 / 64"), ("head_dim_qk", 192, "head_dim 192 / 128"), ("rows", 64, "64 rows"),
    ("o_dtype", "fp8e4nv", "output fp8e4nv"), ("pos_encoding", "ROPE_LLAMA", "rotate"), ("aligned", False, "aligned"),
    ("q_dtype", "fp16", "head_dim 128 / 128: it takes 64 / 64"),
))  # fmt: skip
def test_what_it_refuses(field, value, reason):
    p = Problem("paged", "bf16", "fp8e4nv", "bf16", 128, 128, 4, page_size=24)
    assert not config.refuses(p, named("90a"))
    assert reason in config.refuses(replace(p, **{field: value}), named("90a"))

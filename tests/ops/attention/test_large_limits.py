"""Windows and splits near the largest int32, as callers write for "no limit", change nothing."""

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.emulator import emulate
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.oracle import Options

LIMITS = pytest.mark.parametrize("window", ((1 << 30) + 1, (1 << 31) - 1, 1 << 31, 1 << 40))


def batch(dtype=torch.bfloat16):
    return generate.ragged_batch([9, 3], [70, 40], 2, 1, 64, dtype=dtype)


@LIMITS
@pytest.mark.parametrize("backend", ("reference", "portable"))
def test_a_plan(window, backend):
    x = batch(torch.float16)
    asked = Options(causal=True, window_left=window)
    for result in (run_ragged(x, asked, backend), run_paged(x, asked, backend, page_size=16)):
        check(result, x, Options(causal=True))


@LIMITS
def test_hopper(window):
    x = generate.ragged_batch([130], [200], 2, 1, 64, dtype=torch.bfloat16)
    with emulate("90a"):
        result = run_ragged(x, Options(causal=True, window_left=window), "sm90")
    check(result, x, Options(causal=True))


@LIMITS
def test_one_request(window):
    x = batch()
    q, k, v = x.q[:9], x.k[:70], x.v[:70]
    plain = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    assert torch.equal(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=window), plain)
    with emulate("90a"):
        out = flashinfer.single_decode_with_kv_cache(q[0], k, v, window_left=window)
    assert torch.allclose(out.float(), flashinfer.single_decode_with_kv_cache(q[0], k, v).float(), atol=2e-2)


@LIMITS
@pytest.mark.parametrize("backend", ("reference", "portable"))
def test_a_split(window, backend):
    x = batch(torch.float16)
    result = run_ragged(x, Options(causal=True), backend, plan=dict(fixed_split_size=window))
    check(result, x, Options(causal=True))

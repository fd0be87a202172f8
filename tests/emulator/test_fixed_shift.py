"""Weights with a fixed shift on Hopper, in the emulator: sums of values that overflow, and attention sinks."""

from functools import partial

import pytest
import torch

from flashinfer.testing import generate
from flashinfer.testing.emulator import emulate
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.mla import latents
from tests.ops.attention.mla import test_leaps as mla
from tests.ops.attention.oracle import Options
from tests.ops.attention.test_leaps import rising
from tests.pairs import pairs


def times_values(x, factor):
    return generate.Ragged(x.q, x.k, x.v * factor, x.qo_indptr, x.kv_indptr)


@pytest.mark.parametrize("leap", (30.0, 0.0))
def test_large_values(leap):
    """Weights of 2^43 are fair, their products with values of 2^100 are not finite, and the result is 2^100."""
    x = times_values(rising("cpu", (130,), (400,), leap, dim=64, heads=(1, 1)), 2.0**100)
    with emulate("90a", seed=1):
        result = run_ragged(x, Options(causal=True), "sm90")
    assert result[0].isfinite().all()
    check(result, x, Options(causal=True))


@pytest.mark.parametrize("leap", (30.0, 0.0))
def test_large_latents(leap):
    x = mla.rising("cpu", [2], [400], 16, leap)
    x.q[..., : mla.CKV] = 0
    for rows in (x.cache, *x.keys):
        rows[..., : mla.CKV] *= 2.0**100
    with emulate("90a", seed=1) as launched:
        result = mla.attend(x, 16, backend="fa3")
    assert "attend_latent_sm90_kernel" in launched and result[0].isfinite().all()
    latents.check(result, x, mla.SCALE)


def products(x, options=Options(causal=True)):
    """How many products of tiles a causal prefill waits for."""
    waits = []
    with emulate("90a", seed=1, watch=lambda operation, _: waits.append(operation)):
        result = run_ragged(x, options, "sm90")
    check(result, x, options)
    return waits.count("product wait")


def test_first_keys_that_outweigh_all_others_are_not_retried():
    """Attention sinks are ordinary: a key 60 nats above the others costs no product, first or in the middle. One that
    is 90 nats above does."""
    plain, first, middle, far = (products(rising("cpu", (130,), (1300,), leap, at, heads=(1, 1)))
                                 for leap, at in ((0.0, [0]), (60.0, [0]), (60.0, [700]), (90.0, [0])))  # fmt: skip
    assert plain == first == middle < far


def test_keys_at_a_windows_end_have_the_shift_of_those_before():
    """Of 20 queries at 380 to 399 with a window of 100 keys, the first six see key 285. 60 nats above the others it
    costs no product, 90 nats above it costs the task again."""
    row = partial(rising, "cpu", (20,), (400,), dim=64, heads=(8, 1))
    plain, near, far = (products(row(leap, [285]), Options(causal=True, window_left=100)) for leap in (0.0, 60.0, 90.0))
    assert plain == near < far


def test_logits_near_a_soft_cap_are_retried():
    """The short form of tanh takes logits of 0.8 of the cap. A key in a block without a mask that is past it costs the
    task again; the same key in the first block costs nothing, and no logit is past a cap of 1e8."""
    row, cap = partial(rising, "cpu", (130,), (700,), heads=(1, 1)), partial(Options, causal=True, logits_soft_cap=50.0)
    plain, first, far = (products(row(leap, at), cap()) for leap, at in ((0.0, [0]), (45.0, [0]), (45.0, [300])))
    assert plain == first < far
    assert products(row(45.0, [300]), cap(logits_soft_cap=1e8)) == plain


@pytest.mark.matrix
@pytest.mark.parametrize("at, causal, pages", pairs(
    ((0,), (700,), (0, 700), (1400,)), (False, True),
    ((0, 1.0), (0, 2.0**100), (1, 1.0), (16, 2.0**100), (128, 1.0)),
), ids=str)  # fmt: skip
def test_leaps(at, causal, pages):
    """Keys that stand out in the first block, in one without a mask, in both, and in one with a mask."""
    page_size, factor = pages
    x = times_values(rising("cpu", (130, 200), (1500, 1300), 90.0, [k for k in at if k < 1300], heads=(1, 1)), factor)
    with emulate("90a", seed=sum(at) + page_size):
        if page_size:
            result = run_paged(x, Options(causal=causal), "sm90", page_size=page_size)
        else:
            result = run_ragged(x, Options(causal=causal), "sm90")
    check(result, x, Options(causal=causal))

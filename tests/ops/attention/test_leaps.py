"""Logits that leap: keys that outweigh by far all that a kernel has seen before it meets them, or none that do.

A kernel may scale its weights by what it met first, and has to notice where that does not carry.
"""

import math

import pytest
import torch

from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.oracle import Extras, Options

BF16 = torch.bfloat16
# Base-e logits above the others': within what weights of a fixed shift can be, about its end, and far beyond.
LEAPS = (20.0, 34.0, 90.0, 3000.0)


def rising(device, qo, kv, leap, at=(0,), rows=None, dim=128, heads=(4, 2)):
    """A random batch in which the keys `at` of each request have logits `leap` above the others', for the query `rows`
    (all of them, if None)."""
    x = generate.ragged_batch(list(qo), list(kv), *heads, dim, head_dim_vo=min(dim, 128) if dim == 192 else dim,
                              dtype=BF16, device=device)  # fmt: skip
    q, k = x.q.clone(), x.k.clone()
    q[..., 0], k[..., 0] = 0, 0
    for i in range(len(qo)):
        first = int(x.qo_indptr[i])
        q[first : first + qo[i]][slice(None) if rows is None else rows, :, 0] = 8
        for key in at:
            k[int(x.kv_indptr[i]) + key, :, 0] = leap * math.sqrt(dim) / 8
    return generate.Ragged(q, k, x.v, x.qo_indptr, x.kv_indptr)


@pytest.mark.gpu
@pytest.mark.parametrize("leap", LEAPS)
@pytest.mark.parametrize("causal", (False, True))
def test_at_the_keys_that_are_met_last(causal, leap, device):
    """Of every row, of one row of either half of a tile, of rows of a single request."""
    for qo, rows in (((300, 129), None), ((300, 129), [70]), ((300, 129), [3, 128]), ((1, 700), [0])):
        x = rising(device, qo, (900, 1300), leap, rows=rows)
        check(run_ragged(x, Options(causal=causal), "auto"), x, Options(causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("options", (
    Options(window_left=400), Options(causal=True, window_left=700), Options(causal=True, logits_soft_cap=60.0),
    Options(causal=True, pos_encoding_mode="ALIBI"), Options(causal=True, sm_scale=0.5), Options(sm_scale=-0.5),
))  # fmt: skip
def test_options(options, device):
    x = rising(device, (300, 129), (1100, 900), 40.0, at=(0, 300, 301, 650))
    sinks = torch.tensor([0.3, -2.0, 5.0, 300.0], device=device)
    for given in ({}, dict(sinks=sinks)):
        check(run_paged(x, options, "auto", run=given), x, options, Extras(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size, dim", ((1, 128), (5, 128), (64, 128), (16, 64), (16, 96), (16, 256), (0, 192)))
def test_pages_and_head_dims(page_size, dim, device):
    for leap in (10.0, 60.0):
        x = rising(device, (257, 0, 65, 400), (300, 33, 65, 1023), leap, dim=dim)
        o = Options(causal=True)
        check(run_paged(x, o, "auto", page_size=page_size) if page_size else run_ragged(x, o, "auto"), x, o)


@pytest.mark.gpu
@pytest.mark.parametrize("split", (dict(fixed_split_size=512), dict(disable_split_kv=True), {}))
def test_split(split, device):
    """Splits in which keys stand out, and splits in which none do, make up one row; twice the same, bit by bit."""
    x = rising(device, (129, 40), (5000, 2000), 80.0, at=(0, 1400, 1900), heads=(8, 1))
    first, second = (run_paged(x, Options(causal=True), "auto", plan=split) for _ in range(2))
    check(first, x, Options(causal=True))
    for one, two in zip(first, second):
        assert_bitwise(one, two)


@pytest.mark.gpu
def test_many_work_items_in_a_row(device):
    """Blocks of threads take work item after work item, every one of which has to be made again, or every third."""
    for rows in (None, slice(0, None, 3 * 128)):
        x = rising(device, (4000, 5000), (4000, 5000), 70.0, heads=(32, 4), rows=rows)
        wanted = run_ragged(x, Options(causal=True), "portable")
        out, lse = run_ragged(x, Options(causal=True), "auto")
        # float64 of all rows takes too long: these are some, and the portable kernel's are all.
        assert (out.float() - wanted[0].float()).abs().max() < 0.05
        assert (lse - wanted[1]).abs().max() < 1e-3
        few = generate.Ragged(
            x.q[3700:4000], x.k[:4000], x.v[:4000], generate.indptr([300], device), generate.indptr([4000], device)
        )
        check((out[3700:4000], lse[3700:4000]), few, Options(causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("window", (-1, 300))
@pytest.mark.parametrize("level", (-300.0, -40.0, 40.0, 300.0))
def test_rows_that_see_nothing_of_the_keys_met_first(level, window, device):
    """Logits are far from zero throughout, and with 127 keys more than queries a tile's first row sees none of the
    last 128."""
    x = rising(device, (129, 256), (256, 895), 0.0)
    q, k = x.q.clone(), x.k.clone()
    q[..., 0], k[..., 0] = 8, level * math.sqrt(128) / 8
    x = generate.Ragged(q, k, x.v, x.qo_indptr, x.kv_indptr)
    o = Options(causal=True, window_left=window)
    sinks = torch.tensor([level - 1, level + 1, 0.0, -500.0], device=device)
    for given in ({}, dict(sinks=sinks)):
        check(run_paged(x, o, "auto", run=given), x, o, Extras(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("slope", (-0.5, 0.5))
def test_logits_that_rise_from_block_to_block(slope, device):
    """From the last key to the first, or the other way round."""
    x = rising(device, (200, 300), (200, 1500), 0.0)
    q, k = x.q.clone(), x.k.clone()
    for i, n in enumerate((200, 1500)):
        logits = torch.arange(n, device=device) * slope
        k[int(x.kv_indptr[i]) :][:n, :, 0] = (logits * math.sqrt(128) / 8)[:, None].to(BF16)
    q[..., 0] = 8
    x = generate.Ragged(q, k, x.v, x.qo_indptr, x.kv_indptr)
    for causal in (False, True):
        check(run_ragged(x, Options(causal=causal), "auto"), x, Options(causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("number", (math.nan, math.inf))
def test_nan_and_infinity_come_out_where_they_are_seen(number, device):
    x = rising(device, (300,), (900,), 0.0)
    k = x.k.clone()
    k[100, 0, 5] = number
    k[700, 0, 5] = number
    x = generate.Ragged(x.q, k, x.v, x.qo_indptr, x.kv_indptr)
    out, lse = run_ragged(x, Options(causal=True), "auto")
    # Key 100 is seen by all queries, of the heads of its KV head. A logit of -inf is one that counts nothing.
    wrong = (x.q[:, :2, 5] >= 0) | math.isnan(number)
    assert out[:, :2][wrong].isnan().all()
    assert out[:, :2][~wrong].isfinite().all()
    other = generate.Ragged(x.q[:, 2:], x.k[:, 1:], x.v[:, 1:], x.qo_indptr, x.kv_indptr)
    check((out[:, 2:], lse[:, 2:]), other, Options(causal=True))

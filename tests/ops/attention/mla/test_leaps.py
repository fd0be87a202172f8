"""Logits that leap, as in tests/ops/attention/test_leaps.py: a kernel that scales weights by what it met first has to
notice where that does not carry."""

import math

import pytest
import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import workspace
from tests.ops.attention.mla.latents import check, latents
from tests.ops.attention.mla.test_unplanned import call, sparse

BF16, E4 = torch.bfloat16, torch.float8_e4m3fn
CKV, SCALE = 512, 0.06
# Base-e logits above the others': within what weights of a fixed shift can be, about its end, and far beyond.
LEAPS = (20.0, 34.0, 90.0, 3000.0)

pytestmark = pytest.mark.gpu


def rising(device, q_lens, kv_lens, heads, leap, at=(0,), chosen=None, page=64, kv_dtype=BF16):
    """A random batch in which the keys `at` of each request have logits `leap` above the others', for the query heads
    `chosen` (all of them, if None)."""
    x = latents(q_lens, kv_lens, heads, CKV, 64, page, dtype=BF16, kv_dtype=kv_dtype, device=device)
    x.q[..., CKV] = 0
    x.q[:, slice(None) if chosen is None else chosen, CKV] = 8
    for i, keys in enumerate(x.keys):
        logits = torch.zeros(len(keys), device=device)
        logits[[key for key in at if key < len(keys)]] = leap
        tell(x, i, logits)
    return x


def tell(x, i, logits):
    """Give the keys of request i these logits, up to what others have, by their first positional column."""
    column = (logits / (8 * SCALE)).to(x.cache.dtype)
    position = torch.arange(len(logits), device=logits.device)
    page_size = x.cache.shape[1]
    pages = x.kv_indices[int(x.kv_indptr[i]) + position // page_size].long()
    # As bytes: not every torch writes float8 by index.
    same = torch.uint8 if column.itemsize == 1 else column.dtype
    x.cache.view(same)[pages, position % page_size, CKV] = column.view(same)
    x.keys[i] = x.keys[i].clone()
    x.keys[i].view(same)[:, CKV] = column.view(same)


def attend(x, heads, causal=False, kv_dtype=BF16, backend="auto", **call):
    wrapper = BatchMLAPagedAttentionWrapper(workspace(x.q.device, 1 << 27), backend=backend)
    wrapper.plan(*x.tables, heads, CKV, 64, x.cache.shape[1], causal, SCALE, BF16, kv_dtype)
    return wrapper.run(*x.parts(), return_lse=True, **call)


@pytest.mark.parametrize("leap", LEAPS)
def test_at_the_keys_that_are_met_last(leap, device):
    """Of every row, of one row of either half of a token's heads, and of keys in the middle."""
    for chosen in (None, [3], [70, 127]):
        for at in ((0,), (130, 700, 1999)):
            x = rising(device, [1] * 4, [1000, 77, 300, 4097], 128, leap, at, chosen)
            first, second = attend(x, 128), attend(x, 128)
            check(first, x, SCALE)
            for one, two in zip(first, second):
                assert_bitwise(one, two)


@pytest.mark.parametrize("kv_dtype", (BF16, E4))
@pytest.mark.parametrize("page", (1, 16))
@pytest.mark.parametrize("leap", (20.0, 90.0))
def test_pages_masks_and_sinks(leap, page, kv_dtype, device):
    x = rising(device, [4, 1, 0, 16], [700, 7, 9, 1025], 16, leap, (0, 300), page=page, kv_dtype=kv_dtype)
    sinks = torch.linspace(-20.0, 60.0, 16, device=device)
    for causal in (False, True):
        check(attend(x, 16, causal, kv_dtype), x, SCALE, causal=causal)
    check(attend(x, 16, True, kv_dtype, sinks=sinks), x, SCALE, causal=True, sinks=sinks)


@pytest.mark.parametrize("leap", (20.0, 90.0))
def test_factors_that_only_the_device_knows(leap, device):
    x = rising(device, [1] * 3, [700, 77, 1025], 128, leap, (0, 300))
    given = dict(bmm1_scale=torch.tensor([SCALE], device=device), bmm2_scale=torch.tensor([3.0], device=device))
    check(attend(x, 128, **given), x, SCALE, out_scale=3.0)


@pytest.mark.parametrize("leap", (20.0, 90.0))
def test_keys_named_one_by_one(leap, device):
    """Rows whose last keys, which are met first, are no keys; and a row of nothing else."""
    q = generate.randn(50, 128, 576, dtype=BF16, device=device)
    cache = generate.randn(100, 64, 576, dtype=BF16, device=device)
    q[..., CKV], cache[..., CKV] = 8, 0
    cache.view(-1, 576)[:5, CKV] = leap / (8 * SCALE)
    tokens = torch.randint(5, 6400, (50, 700), dtype=torch.int32, device=device)
    tokens[::3, 1:300:90] = 4
    tokens[1::2, 400:] = -1
    tokens[7] = -1
    lens = torch.full((50,), 700, dtype=torch.int32, device=device)
    x = sparse(tokens, cache, q, CKV)
    out, lse = trtllm_batch_decode_with_kv_cache_mla(
        **call(x, query=q[:, None], kv_cache=cache, sparse_mla_top_k=700, bmm1_scale=SCALE, return_lse=True,
               block_tables=tokens[:, None], seq_lens=lens, workspace_buffer=workspace(device, 1 << 27))
    )  # fmt: skip
    check((out.flatten(0, 1), lse), x, SCALE)


@pytest.mark.parametrize("level", (-3000.0, -40.0, 40.0, 3000.0))
def test_all_logits_are_far_from_zero(level, device):
    x = rising(device, [1, 3], [900, 512], 64, level, range(900))
    for causal in (False, True):
        check(attend(x, 64, causal), x, SCALE, causal=causal)


@pytest.mark.parametrize("slope", (-0.5, 0.5))
def test_logits_that_rise_from_key_to_key(slope, device):
    """From the last key to the first, or the other way round."""
    x = rising(device, [1, 3], [900, 1512], 64, 0.0)
    for i, n in enumerate((900, 1512)):
        tell(x, i, torch.arange(n, device=device) * slope)
    check(attend(x, 64, True), x, SCALE, causal=True)


@pytest.mark.parametrize("every", (1, 2))
def test_more_work_than_a_block_of_threads_makes_twice(every, device):
    """Of 9000 requests of one head all leap, or every second one."""
    x = rising(device, [1] * 9000, [257] * 9000, 1, 0.0)
    logits = torch.zeros(257, device=device)
    logits[3] = 80.0
    for i in range(0, 9000, every):
        tell(x, i, logits)
    check(attend(x, 1), x, SCALE)


@pytest.mark.parametrize("number", (math.nan, math.inf))
def test_nan_and_infinity_come_out_where_they_are_seen(number, device):
    x = rising(device, [1, 1], [900, 900], 128, 0.0)
    tell(x, 0, torch.zeros(900, device=device).index_fill(0, torch.tensor([100], device=device), number))
    x.q[0, :64, CKV] = -8
    out, lse = attend(x, 128)
    # A logit of -inf is one that counts nothing; its value is a number.
    wrong = slice(64 if math.isinf(number) else 0, 128)
    assert out[0, wrong].isnan().all() and lse[0, wrong].isnan().all()
    assert out[1].isfinite().all()
    if math.isinf(number):
        assert out[0, :64].isfinite().all()

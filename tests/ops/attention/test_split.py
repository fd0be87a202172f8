"""The most work items of a batch, against the rounding of keys to splits as its rule is stated, in exact arithmetic."""

from math import ceil, floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.ops.attention.split import ONE_LEVEL, Limits, SplitKnobs, SplitPolicy, capacity, divides
from flashinfer.testing.compare import assert_close


def made(policy, group, tile_rows, grain, lengths):
    """(items, slots) of requests of (queries, keys): equal splits of the total over `share`, or of `fixed` keys."""
    tiles = [ceil(q * group / tile_rows) for q, _ in lengths]
    total = sum(t * k for t, (_, k) in zip(tiles, lengths))
    items = slots = 0
    for t, (_, keys) in zip(tiles, lengths):
        if policy.fixed:
            splits = max(ceil(keys / policy.fixed), 1)
        elif policy.share:
            length = max(grain * ceil(ceil(total / policy.share) / grain), policy.least_split, 1)
            splits = max(floor(keys / length + 0.5), 1)
            splits = max(ceil(keys / (grain * max(ceil(keys / splits / grain), 1))), 1)
        else:
            splits = 1
        items += t * splits
        slots += t * splits if splits > 1 else 0
    return items, slots


policies = st.one_of(
    st.just(SplitPolicy()),
    st.builds(SplitPolicy, share=st.integers(1, 300), least_split=st.sampled_from((0, 16, 256))),
    st.builds(SplitPolicy, fixed=st.sampled_from((16, 64, 1024))),
)
requests = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 5000)), min_size=1, max_size=12)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(requests, policies, st.sampled_from((1, 3, 16, 128)), st.sampled_from((16, 64, 128)), st.integers(0, 5),
       st.booleans())  # fmt: skip
def test_capacity_is_enough(lengths, policy, group, tile_rows, more, uniform):
    """Of every batch within its limits: fewer requests, rows or keys, one query each or all in one request."""
    if uniform:
        lengths = [(lengths[0][0], keys) for _, keys in lengths]
    longest = lengths[0][0] if uniform else 0
    limits = Limits(len(lengths) + more, sum(q for q, _ in lengths), sum(k for _, k in lengths), longest)
    items, slots = capacity(policy, group, tile_rows, limits)
    assert all(has >= need for has, need in zip((items, slots), made(policy, group, tile_rows, 16, lengths)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(requests, st.integers(1, 300), st.sampled_from((1, 3, 16)), st.sampled_from((1, 50, 10**6)))
def test_without_many_no_tile_has_more_splits_than_one_level_combines(lengths, share, group, longer):
    """What kernels are compiled for: keys of one request that dwarfs the others included."""
    lengths = [*lengths, (1, longer * lengths[0][1])]
    policy = SplitPolicy(share=share)
    slots = made(policy, group, 16, 16, lengths)[1]
    assert slots <= policy.by_share
    assert policy.many or slots <= ONE_LEVEL


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(0, 3), st.integers(1, 5000), policies, st.sampled_from((1, 16, 128)))
def test_equal_requests_that_fill_the_chip_are_not_divided(batch, queries, keys, policy, group):
    limits = Limits(batch, batch * queries, batch * keys, each_kv=keys)
    slots = made(policy, group, 64, 128, [(queries, keys)] * batch)[1]
    divided = divides(policy, group, 64, limits)
    assert divided or slots == 0
    assert divided == (bool(policy.fixed) or 0 < 3 * batch * ceil(queries * group / 64) <= 2 * policy.share)
    # Without that their lengths are equal, any may be.
    assert divides(policy, group, 64, limits._replace(each_kv=0)) == bool(policy.share or policy.fixed)


@pytest.mark.parametrize(
    "programs, kv_heads, fixed, many",
    ((2, 1, None, True), (2, 2, None, False), (2, 8, None, False), (4, 3, None, True), (4, 4, None, False),
     (2, 8, 4096, True)),
)  # fmt: skip
def test_few_heads_and_fixed_lengths_may_make_many_splits(programs, kv_heads, fixed, many):
    assert SplitPolicy.of(SplitKnobs(programs_per_sm=programs), 132, kv_heads, 64, fixed).many is many
    assert not SplitPolicy().many


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 64), st.integers(0, 4000), st.sampled_from((1, 8, 16, 128)), st.sampled_from((64, 1024)))
def test_capacity_of_decode_is_no_more_than_its_keys_make(batch, keys, group, fixed):
    """With one query each: a split for every `fixed` keys and one for the rest of each request, times its tiles."""
    items, slots = capacity(SplitPolicy(fixed=fixed), group, 64, Limits(batch, batch, keys, 1))
    tiles = ceil(group / 64)
    assert slots <= tiles * (keys // fixed + batch)
    assert items - slots <= batch + batch * group // 64


def test_as_many_rows_as_requests_are_not_one_query_each(device):
    """Four requests of [0, 4, 0, 0] queries, cut at every 16 keys: one of them has all tiles."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(4, 32, 64, generator=generator).half().to(device)
    k, v = (torch.randn(160, 1, 64, generator=generator).half().to(device) for _ in range(2))
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="portable")
    qo, kv = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 4, 4, 4], [0, 0, 160, 160, 160]))
    wrapper.plan(qo, kv, 32, 1, 64, fixed_split_size=16)
    out = wrapper.run(q, k, v)
    attend = lambda q, k, v: ((q.transpose(0, 1) @ k.transpose(0, 1).mT / 8).softmax(-1) @ v.transpose(0, 1)).mT
    truth, peer = attend(*(x.double() for x in (q, k, v))), attend(*(x.float() for x in (q, k, v)))
    assert_close(out, peer.permute(2, 0, 1).half(), truth.permute(2, 0, 1))


@pytest.mark.parametrize("sms, programs, kv_heads, share, abreast", ((132, 2, 8, 33, 17), (132, 1, 132, 1, 1)))
def test_policy_of_a_chip(sms, programs, kv_heads, share, abreast):
    policy = SplitKnobs(programs_per_sm=programs, least_split=256, whole=1024)
    on = SplitPolicy.of(policy, sms, kv_heads, 64, None)
    assert (on.share, on.abreast, on.fixed, on.least_split, on.whole) == (share, abreast, 0, 256, 1024)
    fixed = SplitPolicy.of(policy, sms, kv_heads, 64, 100)
    assert (fixed.fixed, fixed.share) == (128, 0)

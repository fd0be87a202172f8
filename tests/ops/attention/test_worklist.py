"""The work list covers each (query row, visible key) once, within its buffers, whatever the lengths."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer._core.target import named
from flashinfer.ops.attention import portable, worklist
from flashinfer.ops.attention._device.schedule import ITEM_TAKEN, item_and_head
from flashinfer.ops.attention.config import Config
from flashinfer.ops.attention.decode.config import choose
from flashinfer.ops.attention.problem import Problem
from flashinfer.ops.attention.split import Limits, SplitPolicy
from flashinfer.ops.attention.tables import Table
from flashinfer.testing import generate

CONFIG = Config(block_m=16, block_n=16, num_warps=4, num_stages=2, native_fp8=False, combine_splits=16, combine_rows=1,
                programs_per_sm=2)  # fmt: skip


def schedule(q_lens, kv_lens, device, *, group=2, page_size=0, window=-1, how=None, encoding=("indptr", "indptr"),
             mixed=False):  # fmt: skip
    problem = Problem("paged" if page_size else "ragged", "fp16", "fp16", "fp16", 64, 64, group, page_size=page_size,
                      split=how != SplitPolicy())  # fmt: skip
    table = Table(generate.indptr(q_lens, device), generate.indptr(kv_lens, device))
    if page_size:
        pages = [-(-n // page_size) for n in kv_lens]
        table.kv_indptr = generate.indptr(pages, device)
        last = [n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages)]
        table.last_page_len = torch.tensor(last, dtype=torch.int32, device=device)
    encode(table, encoding, q_lens, kv_lens, device)
    assert table.batch_size == len(q_lens)
    limits = Limits(len(q_lens), sum(q_lens), sum(kv_lens), max(q_lens))
    scratch = lambda count: torch.empty(count, dtype=torch.uint8, device=device)
    how = how if how.least_split else replace(how, least_split=16)
    made = worklist.WorkList(problem, CONFIG, how, limits, 1, scratch, device, window, mixed)
    made.items.fill_(-7)
    made.arrivals.fill_(-7)
    made.fill(table)
    return made


def encode(table, encoding, q_lens, kv_lens, device):
    """Put lengths of queries and keys where `encoding` says."""
    as_tensor = lambda lens: torch.tensor(lens, dtype=torch.int32, device=device)
    if encoding[0] in ("lens", "packed", "padded"):
        table.q_lens = as_tensor(q_lens)
    if encoding[0] in ("uniform", "padded"):
        table.q_len = q_lens[0] if encoding[0] == "uniform" else 50
    if encoding[0] != "lens" and encoding[0] != "indptr":
        table.qo_indptr = None
    if encoding[1] in ("lens", "padded", "packed"):
        table.kv_lens, table.last_page_len = as_tensor(kv_lens), None
    if encoding[1] == "padded":
        table.kv_stride = 1000
    if encoding[1] in ("padded", "packed"):
        table.kv_indptr = None
    assert table.encoding[0] == encoding[0] and (encoding[1] == "indptr" or table.encoding[1] == encoding[1])


def bases(kv_lens, page_size, encoding):
    if encoding == "padded":
        return [1000 * i for i in range(len(kv_lens))]
    entries = [-(-n // page_size) for n in kv_lens] if page_size and encoding != "packed" else kv_lens
    return [sum(entries[:i]) for i in range(len(entries))]


def check(q_lens, kv_lens, made, group, window, q_starts=None):
    items = int(made.counts)
    assert items <= made.max_items
    records = made.items.view(-1, 16)[:items].tolist()
    q_starts = q_starts or [sum(q_lens[:i]) for i in range(len(q_lens))]
    # No block has taken work yet.
    assert not records or records[0][ITEM_TAKEN.value] == 0
    seen = {}
    slots = []
    for q_row, q_len, _, kv_len, tile_row, begin, end, slot, request, first_slot, count, *_ in records:
        assert (q_row, q_len, kv_len) == (q_starts[request], q_lens[request], kv_lens[request])
        assert tile_row % CONFIG.block_m == 0 and tile_row < q_len * group
        seen.setdefault((request, tile_row), []).append((begin, end, slot, first_slot, count))
        if slot >= 0:
            slots.append(slot)
    # Every tile of every request is there once, and its splits follow one another over all keys it may see.
    tiles = {(i, r) for i, n in enumerate(q_lens) for r in range(0, n * group, CONFIG.block_m)}
    assert set(seen) == tiles
    for (request, _), splits in seen.items():
        splits.sort()
        first = max(kv_lens[request] - q_lens[request] - window, 0) if window >= 0 else 0
        assert splits[0][0] <= first or kv_lens[request] == 0
        assert splits[-1][1] == kv_lens[request]
        assert all(a[1] == b[0] for a, b in zip(splits, splits[1:]))
        assert all(p[4] == len(splits) for p in splits)
        if len(splits) > 1:
            # A split tile's splits have neighbouring slots, and start from a count of none.
            assert [p[2] - p[3] for p in splits] == list(range(len(splits)))
            assert made.arrivals[splits[0][3]] == 0
        else:
            assert splits[0][2] == -1
    assert len(set(slots)) == len(slots) and all(slot < made.max_slots for slot in slots)


lens = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 900)), min_size=1, max_size=9)


@pytest.mark.parametrize("page_size", (0, 5))
@pytest.mark.parametrize("kv", ("lens", "padded", "packed"))
@pytest.mark.parametrize("q", ("indptr", "lens", "uniform", "packed", "padded"))
def test_encodings_of_lengths(q, kv, page_size, device, monkeypatch):
    """Lengths that lie in other tensors give the same work list, over spans that begin where the encoding says."""
    monkeypatch.setattr(worklist, "ScheduleConfig", partial(worklist.ScheduleConfig, block=4, lanes=4))
    q_lens, kv_lens = [7] * 9 if q == "uniform" else [3, 0, 17, 1, 40, 2, 0, 1, 5], [5, 700, 0, 40, 1, 0, 64, 65, 33]
    made = schedule(q_lens, kv_lens, device, page_size=page_size, how=SplitPolicy(share=20), encoding=(q, kv))
    check(q_lens, kv_lens, made, 2, -1, [50 * i for i in range(9)] if q == "padded" else None)
    found = {r[8]: r[2] for r in made.items.view(-1, 16)[: int(made.counts)].tolist()}
    expected = bases(kv_lens, page_size, kv)
    assert all(base == expected[request] for request, base in found.items())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lens, st.sampled_from((1, 2, 5)), st.sampled_from((0, 1, 5, 16)), st.sampled_from((-1, 0, 40)),
       st.sampled_from((SplitPolicy(), SplitPolicy(share=1), SplitPolicy(share=7), SplitPolicy(share=64),
                        SplitPolicy(share=64, whole=300, abreast=4), SplitPolicy(fixed=33))))  # fmt: skip
def test_covers_each_key_once(lengths, group, page_size, window, how):
    q_lens, kv_lens = map(list, zip(*lengths))
    device = torch.device("cpu")
    made = schedule(q_lens, kv_lens, device, group=group, page_size=page_size, window=window, how=how)
    check(q_lens, kv_lens, made, group, window)


@pytest.mark.parametrize("share", (0, 33))
@pytest.mark.parametrize("batch", (1, 2, 9, 10))
def test_first_and_last_requests_take_turns(batch, share, device, monkeypatch):
    monkeypatch.setattr(worklist, "ScheduleConfig", partial(worklist.ScheduleConfig, block=4, lanes=4))
    q_lens, kv_lens = [40, 1, 0, 1, 17, 1, 1, 0, 1, 3][:batch], [300, 65, 4, 0, 17, 700, 33, 0, 64, 3][:batch]
    made = schedule(q_lens, kv_lens, device, how=SplitPolicy(share=share), mixed=True)
    check(q_lens, kv_lens, made, 2, -1)
    plain = schedule(q_lens, kv_lens, device, how=SplitPolicy(share=share))
    rows = [x.items.view(-1, 16)[: int(x.counts)].tolist() for x in (made, plain)]
    front, back = rows[1], rows[1][::-1]
    assert rows[0] == [(back if i % 2 else front)[i // 2] for i in range(len(front))]


LARGE = [pytest.param(n, marks=pytest.mark.gpu) for n in (1023, 1025, 3000)]


@pytest.mark.parametrize("batch", (1, 3, 7, 8, 9, *LARGE))
def test_batches_around_a_block(batch, device, monkeypatch):
    if batch < 10:
        monkeypatch.setattr(worklist, "ScheduleConfig", partial(worklist.ScheduleConfig, block=4, lanes=4))
    q_lens = [i % 3 * 20 for i in range(batch)]
    kv_lens = [(i * 37) % 400 for i in range(batch)]
    check(q_lens, kv_lens, schedule(q_lens, kv_lens, device, how=SplitPolicy(share=33)), 2, -1)


def test_splits_are_even(device):
    """A long request among short ones is cut so that no split is longer than its share of the work, and a half."""
    kv_lens = [4000, 10, 10, 10]
    made = schedule([1] * 4, kv_lens, device, how=SplitPolicy(share=10))
    items = int(made.counts[0])
    lengths = [r[6] - r[5] for r in made.items.view(-1, 16)[:items].tolist()]
    assert max(lengths) <= 1.5 * sum(kv_lens) / 10
    assert items <= 10 + len(kv_lens)


def stay_whole(kv_lens, whole, abreast):
    """Those of up to `whole` keys, if they would keep two thirds of `abreast` programs as busy as their longest."""
    short = [n for n in kv_lens if n <= whole]
    busy = Fraction(sum(short), max(short, default=0) or 1)
    return set(short) if busy >= Fraction(2 * abreast, 3) else set()


@pytest.mark.parametrize("encoding", (("indptr", "indptr"), ("uniform", "padded"), ("lens", "packed")))
@pytest.mark.parametrize("kv_lens, any_whole", (
    ([100] * 4, True), ([100] * 3, False), ([100] * 3 + [99], False), ([90] * 5, True), ([101] * 4, False),
    ([100] * 4 + [900], True), ([100] * 3 + [900], False), ([100] + [1] * 40, False), ([60, 100, 0, 100, 90, 50], True),
    ([0] * 5, False), ([900], False),
))  # fmt: skip
def test_short_requests_that_fill_the_chip_stay_whole(kv_lens, any_whole, encoding, device, monkeypatch):
    monkeypatch.setattr(worklist, "ScheduleConfig", partial(worklist.ScheduleConfig, block=4, lanes=4))
    how = SplitPolicy(share=60, whole=100, abreast=6)
    made = schedule([1] * len(kv_lens), kv_lens, device, how=how, encoding=encoding)
    check([1] * len(kv_lens), kv_lens, made, 2, -1)
    expected = stay_whole(kv_lens, 100, 6)
    assert bool(expected) == any_whole
    splits = {r[8]: r[10] for r in made.items.view(-1, 16)[: int(made.counts)].tolist()}
    for request, keys in enumerate(kv_lens):
        # What does not stay whole is cut, into splits of 16 keys here, if it has more than one and a half of them.
        assert (splits[request] == 1) == (keys in expected or keys < 24)


def test_whole_requests_leave_fixed_and_whole_batches_alone(device):
    """Splits of a fixed length do not depend on the batch, and without splitting there is nothing to decide."""
    for how in (SplitPolicy(fixed=33), SplitPolicy()):
        plain = schedule([1] * 9, [100] * 9, device, how=how)
        made = schedule([1] * 9, [100] * 9, device, how=replace(how, whole=100, abreast=6))
        assert made.counts.equal(plain.counts)
        items = int(made.counts)
        assert made.items.view(-1, 16)[:items].equal(plain.items.view(-1, 16)[:items])


@pytest.mark.parametrize("sms, kv_heads, batch, whole", (
    (132, 8, 16, True), (132, 8, 12, True), (132, 8, 10, False), (132, 2, 44, True), (132, 2, 43, False),
    (108, 8, 10, True), (108, 8, 9, False), (132, 132, 1, True), (132, 1, 87, False), (132, 1, 88, True),
))  # fmt: skip
def test_decode_leaves_two_thirds_of_the_multiprocessors_busy(sms, kv_heads, batch, whole):
    """The two thirds are of the multiprocessors, whichever the chip."""
    problem = Problem("paged", "bf16", "bf16", "bf16", 128, 128, 4, page_size=16, rows=16)
    chip = replace(named("90a"), sms=sms)
    config = choose(problem, chip)
    how = SplitPolicy.of(config, sms, kv_heads, config.block_n, None)
    assert bool(stay_whole([1024] * batch, how.whole, how.abreast)) == whole
    assert not stay_whole([1025] * batch, how.whole, how.abreast)


@pytest.mark.parametrize("kv_lens, longest", (
    # Six programs fill the chip once and twelve are its share; splits of 64 keys, or of 32 where each is alone.
    ([160], 32), ([192], 32), ([96, 96], 32), ([240], 48), ([384], 64), ([700], 64), ([1200], 112), ([3000, 5], 256),
))  # fmt: skip
def test_splits_are_short_where_each_is_alone_on_a_multiprocessor(kv_lens, longest, device):
    how = SplitPolicy(share=12, abreast=6, least_split=64, least_alone=32)
    made = schedule([1] * len(kv_lens), kv_lens, device, how=how)
    check([1] * len(kv_lens), kv_lens, made, 2, -1)
    items = int(made.counts)
    assert max(r[6] - r[5] for r in made.items.view(-1, 16)[:items].tolist()) == longest


@triton.jit
def deal_kernel(found, num_kv_heads, NEAR: tl.constexpr):
    item, kv_head = item_and_head(num_kv_heads, NEAR)
    tl.atomic_add(found + item * num_kv_heads + kv_head, 1)


@pytest.mark.parametrize(
    "items, kv_heads, rows", [(3, 8, 1), (80, 8, 1), (81, 8, 2), (3, 16, 4), (100, 6, 1), (3, 2, 1)]
)
def test_each_pair_of_item_and_head_is_dealt_once(items, kv_heads, rows, device):
    """Few programs, and heads of up to 2048 bytes, in one row; else four heads of 256 bytes go side by side."""
    problem = Problem("paged", "bf16", "bf16", "bf16", 128, 128, 4, page_size=16)
    grid = portable.grid(problem, items, kv_heads)
    assert grid == (items * kv_heads // rows, rows, 1)
    found = torch.zeros(items, kv_heads, dtype=torch.int32, device=device)
    deal_kernel[grid](found, kv_heads, NEAR=portable.near_heads(problem))
    assert found.eq(1).all()

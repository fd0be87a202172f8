"""The combination of a tile's splits by the programs that arrive last, against float64, in any order of arrival."""

from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.ops.attention._device.combine import TOGETHER, combine_if_last
from flashinfer.ops.attention.split import FEW
from flashinfer.testing.compare import assert_bitwise, assert_close

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
GROUP, HEADS, DIM, BLOCK_M = 3, 2, 24, 16
GROUPS = TOGETHER.value


@triton.jit
def arrive_kernel(
    order, at, given_out, given_lse, arrivals, partial_out, partial_lse, out, lse, sinks, first_slot, splits, tile_row,
    q_row, q_len, o_stride_n, o_stride_h, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, AT_A_TIME: tl.constexpr, MANY: tl.constexpr, SINKS: tl.constexpr,
    SOFTMAX: tl.constexpr, LSE_UNIT: tl.constexpr,
):  # fmt: skip
    """Program (i, head) stores the result of split order[at + i], and counts it."""
    slot = first_slot + tl.load(order + at + tl.program_id(0))
    kv_head = tl.program_id(1)
    row = (slot * HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok = tl.arange(0, BLOCK_M) < q_len * GROUP - tile_row
    d = tl.arange(0, 32)
    there = ok[:, None] & (d < DIM)[None, :]
    x = tl.load(given_out + row[:, None] * DIM + d[None, :], mask=there)
    tl.store(partial_out + row[:, None] * DIM + d[None, :], x, mask=there)
    tl.store(partial_lse + row, tl.load(given_lse + row, mask=ok), mask=ok)
    combine_if_last(
        arrivals, partial_out, partial_lse, out, lse, sinks, slot, first_slot, splits, tl.arange(0, ROWS)[None, :],
        tl.arange(0, AT_A_TIME)[:, None], d[None, None, :], tile_row, q_row, q_len, kv_head, HEADS, o_stride_n,
        o_stride_h, MANY, GROUP, DIM, BLOCK_M, SINKS, True, SOFTMAX, LSE_UNIT,
    )  # fmt: skip


class Tile:
    """A tile of `splits` splits: its second, of 5 tokens of 3 heads a group, so that 15 rows are its 16 and 3 its own.

    Slots before and after it, rows of out that are not its own, and what nobody has stored yet, are NaN.
    """

    FIRST_SLOT, TILE_ROW, Q_ROW = 5, 16, 2

    def __init__(self, splits, device, *, seed=0, q_len=8, rows=8, at_a_time=4, sinks=False, softmax=True, unit=1.0):
        self.splits, self.device, self.q_len, self.unit = splits, device, q_len, unit
        self.rows, self.at_a_time, self.softmax = rows, at_a_time, softmax
        self.count = min(q_len * GROUP - self.TILE_ROW, BLOCK_M)
        generator = torch.Generator().manual_seed(seed)
        slots = splits + self.FIRST_SLOT + 3
        self.given_out = torch.randn(slots, HEADS, BLOCK_M, DIM, generator=generator).to(device)
        self.given_lse = (8 * torch.randn(slots, HEADS, BLOCK_M, generator=generator)).to(device)
        if not softmax:
            self.given_lse.zero_()
        self.sinks = 4 * torch.randn(HEADS * GROUP, generator=generator).to(device) if sinks else None
        self.partial_out, self.partial_lse = (torch.full_like(x, torch.nan) for x in (self.given_out, self.given_lse))
        self.out = torch.full((self.Q_ROW + q_len + 1, HEADS * GROUP, DIM), torch.nan, device=device)
        self.lse = torch.full(self.out.shape[:2], torch.nan, device=device)
        self.arrivals = torch.zeros(slots * HEADS, dtype=torch.int32, device=device)

    def blind(self, slots, rows=slice(None)):
        """Those splits saw no key."""
        slots = torch.as_tensor(slots) + self.FIRST_SLOT
        self.given_lse[slots, :, rows] = -torch.inf
        self.given_out[slots, :, rows] = 0

    def arrive(self, order):
        numbers = torch.tensor(order, dtype=torch.int32, device=self.device)
        arrive_kernel[len(order), HEADS](
            numbers, 0, self.given_out, self.given_lse, self.arrivals, self.partial_out, self.partial_lse, self.out,
            self.lse, self.sinks, self.FIRST_SLOT, self.splits, self.TILE_ROW, self.Q_ROW, self.q_len,
            *self.out.stride()[:2], GROUP=GROUP, HEADS=HEADS, DIM=DIM, BLOCK_M=BLOCK_M, ROWS=self.rows,
            AT_A_TIME=self.at_a_time, MANY=True, SINKS=self.sinks is not None, SOFTMAX=self.softmax,
            LSE_UNIT=self.unit,
        )  # fmt: skip

    def places(self):
        """Token and head, within a group, of each row."""
        packed = self.TILE_ROW + torch.arange(self.count)
        return self.Q_ROW + packed // GROUP, packed % GROUP

    def truth(self, dtype):
        out, lse = torch.full_like(self.out, torch.nan, dtype=dtype), torch.full_like(self.lse, torch.nan, dtype=dtype)
        token, head = self.places()
        mine = slice(self.FIRST_SLOT, self.FIRST_SLOT + self.splits)
        for kv_head in range(HEADS):
            parts = self.given_lse[mine, kv_head, : self.count].to(dtype) * LN2
            values = self.given_out[mine, kv_head, : self.count].to(dtype)
            heads = kv_head * GROUP + head
            if not self.softmax:
                out[token, heads] = values.sum(0)
                lse[token, heads] = 0
                continue
            every = parts if self.sinks is None else torch.cat((parts, self.sinks[heads].to(dtype)[None]))
            total = torch.logsumexp(every, 0)
            weights = torch.exp(parts - torch.where(total == -torch.inf, 0.0, total))
            out[token, heads] = (weights[..., None] * values).sum(0)
            lse[token, heads] = total * LOG2E * self.unit
        return out, lse

    def check(self):
        (out, lse), (peer, peer_lse) = self.truth(torch.float64), self.truth(torch.float32)
        assert_close(self.out, peer, out)
        assert_close(self.lse, peer_lse, lse, "lse", terms=40.0)
        assert not self.arrivals.any()
        around = torch.ones(len(self.partial_lse), dtype=torch.bool)
        around[self.FIRST_SLOT : self.FIRST_SLOT + self.splits] = False
        assert self.partial_out[around].isnan().all() and self.partial_lse[around].isnan().all()
        assert self.partial_out[:, :, self.count :].isnan().all()


def shuffled(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


COUNTS = (2, 17, FEW - 1, FEW, FEW + 1, FEW + GROUPS, 113, 2 * FEW)


@pytest.mark.parametrize("splits", COUNTS)
def test_any_order_of_arrival(splits, device):
    """Forwards, backwards and at random, on the same counters: the same bits, and counters that are back at zero."""
    tile = Tile(splits, device)
    tile.arrive(list(range(splits)))
    tile.check()
    first = tile.out.clone(), tile.lse.clone()
    for order in (list(range(splits))[::-1], shuffled(splits, 1)):
        for x in (tile.partial_out, tile.partial_lse, tile.out, tile.lse):
            x.fill_(torch.nan)
        tile.arrive(order)
        assert_bitwise(tile.out, first[0])
        assert_bitwise(tile.lse, first[1])
        assert not tile.arrivals.any()


@pytest.mark.parametrize("splits", (FEW, FEW + 1))
@pytest.mark.parametrize("change", (
    dict(sinks=True), dict(unit=LN2), dict(softmax=False), dict(sinks=True, unit=LN2), dict(q_len=7, rows=1),
    dict(q_len=20, rows=8), dict(at_a_time=16), dict(at_a_time=1), dict(at_a_time=32),
))  # fmt: skip
def test_what_is_asked_for(splits, change, device):
    tile = Tile(splits, device, **change)
    tile.arrive(shuffled(splits, 2))
    tile.check()


@pytest.mark.parametrize("sinks", (False, True))
def test_rows_that_saw_no_key(sinks, device):
    """In some splits, in all of a group, and in all splits."""
    tile = Tile(FEW + 20, device, sinks=sinks)
    tile.blind([3, 40, 41], slice(0, 1))
    tile.blind(range(GROUPS, 2 * GROUPS))
    tile.blind(range(FEW + 20), slice(2, 4))
    tile.arrive(shuffled(FEW + 20, 3))
    tile.check()


def test_a_nan_comes_out_of_its_row_alone(device):
    tile = Tile(FEW + 30, device)
    token, head = tile.places()
    for slot, row in ((FEW + 29, 1), (20, 3)):
        tile.given_out[tile.FIRST_SLOT + slot, 0, row] = torch.nan
        tile.given_lse[tile.FIRST_SLOT + slot, 0, row] = torch.nan
    tile.arrive(shuffled(FEW + 30, 4))
    wrong = torch.zeros(tile.lse.shape, dtype=torch.bool)
    wrong[token[[1, 3]], head[[1, 3]]] = True
    written = torch.zeros_like(wrong)
    for kv_head in range(HEADS):
        written[token, kv_head * GROUP + head] = True
    assert_bitwise(tile.lse.isnan().cpu(), wrong | ~written)
    assert_bitwise(tile.out.isnan().any(-1).cpu(), wrong | ~written)


@pytest.mark.parametrize("splits", (FEW + 1, 6 * GROUPS + 7, 10 * GROUPS))
def test_nobody_combines_more_than_a_group_and_the_groups(splits, device):
    """The last program reads its group and one result of each other group: nothing else is there any more."""
    tile = Tile(splits, device)
    order = shuffled(splits, 5)
    last = order.pop()
    tile.arrive(order)
    assert tile.out.isnan().all() and tile.lse.isnan().all()
    of_last = last // GROUPS
    gone = [slot for slot in range(splits) if slot % GROUPS and slot // GROUPS != of_last]
    slots = torch.tensor(gone) + tile.FIRST_SLOT
    tile.partial_out[slots] = tile.partial_lse[slots] = torch.nan
    tile.arrive([last])
    tile.check()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(2, 400), st.integers(0, 99), st.sampled_from((2, 4, 16)), st.lists(st.integers(1, 50), max_size=3))
def test_replays_that_end_anywhere(splits, seed, at_a_time, cuts):
    """Splits that arrive in several launches, as those of a chip that has not room for all, in a random order."""
    tile = Tile(splits, torch.device("cpu"), seed=seed, at_a_time=at_a_time)
    order = shuffled(splits, seed)
    ends = [min(end, splits) for end in accumulate(cuts)] + [splits]
    for begin, end in zip([0, *ends], ends):
        if begin < end:
            tile.arrive(order[begin:end])
    tile.check()

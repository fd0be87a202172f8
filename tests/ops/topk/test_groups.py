"""Top-k where k is small against the groups of a row, and just not: against Python's sorted, and inside the stages."""

import pytest
import torch

from flashinfer import TopKTieBreak, top_k, top_k_ragged_transform
from flashinfer._core.target import CPU
from flashinfer.ops import topk as room
from flashinfer.ops._device import find_prefix, prefix
from flashinfer.ops._device import tiles as tile_sizes
from flashinfer.ops.topk import config, portable
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.topk.test_topk import best, scores

COLUMNS = 300


@pytest.fixture(autouse=True)
def sizes(device, monkeypatch):
    """In the interpreter tiles of 64 and groups of 4, so that short rows have many; a GPU's are what they are."""
    sizes = (64, 4) if device.type == "cpu" else (tile_sizes.TILE, config.GROUP)
    use_sizes(*sizes, monkeypatch)


def use_sizes(tile, group, monkeypatch):
    monkeypatch.setattr(tile_sizes, "TILE", tile)
    monkeypatch.setattr(config, "GROUP", group)
    monkeypatch.setattr(config, "SHORT_K", 0)
    monkeypatch.setattr(room.top_k, "_choices", {})


def limit(columns):
    """The largest k that the groups decide."""
    return -(-columns // config.GROUP) // 4


def use_programs(programs, monkeypatch):
    """Share a row between so many programs, as far as its tiles go."""

    def share(rows, columns, tile, device):
        tiles = -(-columns // tile)
        chunk = -(-tiles // programs)
        return -(-tiles // chunk), chunk, tiles

    monkeypatch.setattr(find_prefix, "share", share)


def check(x, k, last=False, order=True):
    values, indices = top_k(x, k, sorted=order, tie_break=TopKTieBreak.LARGE if last else TopKTieBreak.SMALL)
    expected = [best(row, k, last) for row in x.float()]
    assert indices.tolist() == (expected if order else [sorted(row) for row in expected])
    assert_bitwise(values, x.gather(1, indices))


@pytest.mark.parametrize("past", [-1, 0, 1])
def test_around_the_limit(variant, device, past):
    """Values with many ties, both zeros, infinities and NaN."""
    dtype = {-1: torch.bfloat16, 0: torch.float32, 1: torch.float16}[past]
    x = scores(2, COLUMNS, dtype, device)
    if dtype == torch.bfloat16:  # Triton's interpreter changes the bits of its NaN
        x = x.nan_to_num(3)
    check(x, limit(COLUMNS) + past, last=past == 0, order=past != 0)


def hard_rows(columns, device):
    """Rows that groups suit badly: all equal, rising, falling, nearly all -inf, NaN throughout, ties of the k-th."""
    x = torch.empty(6, columns, device=device)
    x[0] = 1
    x[1] = torch.arange(columns)
    x[2] = -torch.arange(columns)
    x[3], x[3, 1] = -torch.inf, 2
    x[4], x[4, ::3] = 1, torch.nan
    x[5] = 0
    x[5, 7::40] = 1
    return x


@pytest.mark.parametrize("last", [False, True])
def test_rows_that_groups_suit_badly(variant, device, last):
    check(hard_rows(COLUMNS, device), min(10, limit(COLUMNS)), last)


def test_strides_and_short_rows(variant, device):
    x = scores(2, 65, device=device)
    for strided in (generate.strided(x, 0, 5), generate.strided(x, 1, 1)):
        check(strided, 4, order=False)
    for columns in (3, 17):
        check(scores(2, columns, device=device), 1, order=False)


def test_windows(variant, device):
    """Groups begin with the window: windows of no, one and a few groups, at any column."""
    lengths = torch.tensor([0, 1, 3, 16, 33, 200], dtype=torch.int32, device=device)
    starts = torch.tensor([9, 299, 5, 63, 1, 7], dtype=torch.int32, device=device)
    x = torch.full((6, COLUMNS), torch.nan, device=device)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        x[i, start : start + length] = (torch.randn(length) * 2).round().to(device)
    for k in (1, 6) if device.type == "cuda" else (2,):
        out = top_k_ragged_transform(x, torch.zeros_like(lengths), lengths, k, row_starts=starts)
        for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
            local = sorted(best(x[i, start : start + length], k))
            assert out[i].tolist() == local + [-1] * (k - len(local))


@pytest.mark.parametrize("programs", [1, 256])
def test_how_many_programs_share_a_row(device, monkeypatch, programs):
    x = scores(2, COLUMNS, device=device)
    use_programs(programs, monkeypatch)
    for k in (3, limit(COLUMNS) + 2):
        check_prefix(x, k)
        check(x, k, order=False)


def check_prefix(x, k):
    """The elements that the stages keep are the k first, and so many."""
    found = stages_of_a_call(x, k)
    pivot, rank, kept = (found.state[:, int(i)].tolist() for i in (prefix.PIVOT, prefix.RANK, prefix.KEPT))
    for i, row in enumerate(x.float()):
        keys = keys_of(row)
        mine = [j for j in range(len(row)) if keys[j] > pivot[i] or (keys[j] == pivot[i] and j <= rank[i])]
        assert mine == sorted(best(row, k)) and kept[i] == k


def keys_of(row):
    """Integers in the order of float32 values, by their definition: bits of the positive, negated bits of the rest."""
    bits = row.where(row != 0, 0).abs().view(torch.int32).long()
    return torch.where(row < 0, -1 - bits, bits).where(~row.isnan(), (1 << 31) - 1).tolist()


def stages_of_a_call(x, k):
    problem = room.TopK("values", {torch.float32: "fp32"}[x.dtype], aligned=False)
    sizes = config.portable(problem, CPU)
    return find_prefix.find_prefix(portable.stages_of(problem), sizes, x, len(x), find_prefix.Filters(k=k))


def test_the_bounds_that_groups_give(device):
    """At least k elements reach the lower bound, and no more than the list holds but for ties; none the upper one."""
    most = limit(COLUMNS)
    x = torch.cat([hard_rows(COLUMNS, device)[1:4], torch.randn(1, COLUMNS, device=device)])
    for k in (most,) if device.type == "cpu" else (1, most):
        state = stages_of_a_call(x, k).state
        for row, high, low in zip(x, state[:, int(prefix.HIGH)].tolist(), state[:, int(prefix.LOW)].tolist()):
            keys = keys_of(row)
            assert high == max(keys) + 1
            reaching = sum(key >= low for key in keys)
            assert reaching >= k
            if low > min(keys):
                assert reaching <= (k + k // 8) * config.GROUP <= COLUMNS // 32 * 9
    # Past the limit bins bound it: edges of four in a power of two.
    low = stages_of_a_call(x, most + 1).state[:, int(prefix.LOW)]
    assert not (low[1:2] & ((1 << 21) - 1)).any() and not (low[3:] & ((1 << 21) - 1)).any()


def test_more_equal_values_than_a_list_holds(device, monkeypatch):
    if device.type == "cpu":
        use_sizes(2048, 8, monkeypatch)
    x = torch.zeros(1, 5000, device=device)
    x[0, 4000] = 1
    check_prefix(x, 3)
    for last in (False, True):
        check(x, 3, last, order=False)

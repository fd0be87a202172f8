"""Filters whose k is small against the groups of a row, and just not, against draws from what a sort keeps."""

import pytest
import torch

from flashinfer import sampling
from flashinfer._core.target import target_of
from flashinfer.ops import sampling as room
from flashinfer.ops._device import find_prefix, prefix
from flashinfer.ops._device import tiles as tile_sizes
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.sampling.test_sampling import backend, kept_columns, rows_of_probs
from tests.ops.topk.test_groups import keys_of


@pytest.fixture
def columns(device, monkeypatch):
    """In the interpreter tiles of 64 and groups of 4, so that 300 columns have many; a GPU's are what they are."""
    if device.type == "cuda":
        return 9000
    monkeypatch.setattr(tile_sizes, "TILE", 64)
    monkeypatch.setattr(tile_sizes, "GROUP", 4)
    monkeypatch.setattr(room.prefix, "_choices", {})
    return 300


def limit(columns):
    """The largest k that the groups decide."""
    return -(-columns // tile_sizes.GROUP) // 4


def mixed_rows(columns, device):
    """Probabilities and a k for each row: hard rows with a small k, plain ones with any, impossible ones last."""
    most = limit(columns)
    ks = [7, 7, 7, 1, most - 1, most, most + 1, columns, columns + 5, 7, 7, 0, -2]
    probs = rows_of_probs(len(ks), columns, device)
    probs[0] = 1 / columns
    probs[1] = 0
    probs[1, [3, 77, 290]] = torch.tensor([0.5, 0.3, 0.2], device=device)
    probs[2] = torch.arange(1, columns + 1, device=device) / (columns * (columns + 1) / 2)
    return probs, torch.tensor(ks, device=device)


@pytest.mark.parametrize(
    "source, dtype, order",
    [
        ("probs", torch.float16, "top_k_first"),
        ("logits", torch.bfloat16, "joint"),
        pytest.param("probs", torch.float32, "joint", marks=pytest.mark.gpu),
        pytest.param("logits", torch.float32, "top_k_first", marks=pytest.mark.gpu),
    ],
)
def test_a_k_of_its_own_for_each_row(variant, device, monkeypatch, columns, source, dtype, order):
    """Each row draws what it would from the columns that a sort keeps alone: the race has the same numbers."""
    probs, ks = mixed_rows(columns, device)
    x = (probs if source == "probs" else probs.log()).to(dtype)
    probs = x.double() if source == "probs" else x.double().softmax(-1)
    ps = torch.linspace(0.35, 0.98, len(ks), device=device)
    seeds = dict(seed=torch.arange(len(ks), device=device) + 5, offset=torch.tensor([3], device=device))
    masked = x.clone()
    for row, k, p, filtered in zip(probs, ks.tolist(), ps.tolist(), masked):
        out = torch.ones(columns, dtype=torch.bool, device=device)
        out[kept_columns(row, max(k, 0), p, order)] = False
        filtered[out] = 0 if source == "probs" else -torch.inf
    with backend("reference", monkeypatch):
        expected = getattr(sampling, f"sampling_from_{source}")(masked, **seeds)
    x[9, 250], x[10, 1] = torch.nan, torch.inf
    function = getattr(sampling, f"top_k_top_p_sampling_from_{source}")
    if source == "probs":
        tokens, valid = function(x, ks, ps, filter_apply_order=order, return_valid=True, **seeds)
        assert valid.tolist() == [True] * 9 + [False] * 4
    else:
        tokens = function(x, ks, ps, filter_apply_order=order, **seeds)
    assert tokens[9:].tolist() == [0] * 4
    assert_bitwise(tokens[:9], expected[:9])


@pytest.mark.parametrize("source, order", [("probs", "joint"), ("logits", "top_k_first")])
def test_what_is_kept(device, columns, source, order):
    """The stages alone: every column with a weight that a sort keeps, no other, and their sum."""
    probs, ks = mixed_rows(columns, device)
    probs, ks = torch.cat([probs[:9], rows_of_probs(9, columns, device, spread=1.5)]), torch.cat([ks[:9], ks[:9]])
    x = probs if source == "probs" else probs.log()
    weights = probs.double() if source == "probs" else (x.double() - x.double().amax(1, keepdim=True)).exp()
    ps = torch.linspace(0.35, 0.98, len(ks), device=device)
    first = order == "top_k_first"
    stages = find_prefix.Stages(source, "fp32", False, "i64", "fp32", first, statistics=True, mass=True, ties=True)
    filters = find_prefix.Filters(ks=ks, ps=ps)
    found = find_prefix.find_prefix(stages, tile_sizes.portable(None, target_of(x.device)), x, len(x), filters)
    pivots, ranks = (found.state[:, int(i)].tolist() for i in (prefix.PIVOT, prefix.RANK))
    sums = found.numbers[:, int(prefix.INSIDE)].tolist()
    for i, row in enumerate(weights):
        keys = keys_of(x[i])
        kept = [j for j in range(columns) if keys[j] > pivots[i] or (keys[j] == pivots[i] and j <= ranks[i])]
        expected = kept_columns(row / row.sum(), int(ks[i]), float(ps[i]), order)
        assert [j for j in kept if row[j] > 0] == sorted(j for j in expected if row[j] > 0), i
        # float32 exponentials are off by their argument's rounding, up to 2^-24 of arguments to 64.
        assert sums[i] == pytest.approx(float(row[expected].sum()), rel=4e-6)


def test_a_scalar_k(variant, device, columns):
    """Kept either side of the limit is what a sort keeps; rows of some -inf and of few that are not."""
    probs, _ = mixed_rows(columns, device)
    logits = probs[[1, 2, 4]].log()
    logits[2, ::2] = -torch.inf
    for k in (limit(columns), limit(columns) + 1):
        masked = sampling.top_k_mask_logits(logits, k)
        for row, out in zip(logits, masked):
            kept = torch.zeros(columns, dtype=torch.bool, device=device)
            kept[kept_columns(row, k)] = True
            assert_bitwise(out, row.where(kept, -torch.inf))


@pytest.mark.matrix
@pytest.mark.parametrize("programs", [1, 256])
@pytest.mark.parametrize("k", ["own", 0, 1])
def test_how_many_programs_share_a_row(device, monkeypatch, columns, programs, k):
    """A k for each row, one that rules in all of them, and the first that does not: where it rules fewer programs share
    the groups that are listed, also where a row is flat and all are."""

    def share(rows, columns, tile, device):
        tiles = -(-columns // tile)
        chunk = -(-tiles // programs)
        return -(-tiles // chunk), chunk, tiles

    probs, ks = mixed_rows(columns, device)
    x = torch.full((8, columns + 3), torch.nan, device=device)[:, 1:-2]  # rows that are not aligned
    x[:], ks = probs[:8], ks[:8] if k == "own" else limit(columns) + k
    seeds = dict(seed=9, offset=2)
    with backend("reference", monkeypatch):
        expected = [sampling.top_k_top_p_sampling_from_probs(x, ks, p, **seeds) for p in (0.9, 1e-3)]
        expected.append(sampling.top_k_top_p_sampling_from_probs(x, ks, 0.9, filter_apply_order="joint", **seeds))
    monkeypatch.setattr(find_prefix, "share", share)
    with backend("portable", monkeypatch):
        found = [sampling.top_k_top_p_sampling_from_probs(x, ks, p, **seeds) for p in (0.9, 1e-3)]
        found.append(sampling.top_k_top_p_sampling_from_probs(x, ks, 0.9, filter_apply_order="joint", **seeds))
    for tokens, others in zip(found, expected):
        assert_bitwise(tokens, others)

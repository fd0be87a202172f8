"""Top-k of a small k: lists that a sample bounds well, badly and not at all, and how programs share a row."""

import pytest
import torch

from flashinfer import TopKTieBreak, top_k
from flashinfer.ops.topk import config, short
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.topk.test_topk import best, scores, small_tiles  # the fixture makes both sizes small on a CPU


def check(x, k, last=False):
    values, indices = top_k(x, k, tie_break=TopKTieBreak.LARGE if last else TopKTieBreak.SMALL)
    assert indices.tolist() == [sorted(best(row, k, last)) for row in x]
    assert_bitwise(values, x.gather(1, indices))


def sampled(length):
    """The columns that bound a row, those of each group's first member first: four neighbours are of four groups."""
    cells = config.GROUPS // 4 * config.MEMBERS
    cell, wide = torch.arange(cells), (1 << 32) // cells
    column = (cell * wide + (cell * 2654435769 & (wide - 1))) * (length - 3) >> 32
    return (column[:, None] // 4 * 4 + torch.arange(4)).flatten()


@pytest.mark.matrix
@pytest.mark.parametrize("last", [False, True])
def test_a_sample_that_misleads(variant, device, last):
    """A bound that fewer than k are above, one that more are above than a list holds, and one with many equal to it."""
    columns = 20000 if device.type == "cuda" else 500
    k = 150 if device.type == "cuda" else 20
    column = sampled(columns).to(device)
    x = torch.randn(4, columns, device=device)
    x[0, column[: config.GROUPS * 3 // 4]] += 100
    x[1] += 100
    x[1, column] -= 100
    x[2] = x[2].clamp(max=0.5)
    x[3] = x[3].round()
    check(x, k, last)


@pytest.mark.parametrize("split", [(2, 3), *(pytest.param((15, n), marks=pytest.mark.gpu) for n in (1, 4, 16))])
def test_how_programs_share_a_row(variant, device, monkeypatch, split):
    """Programs that list, and programs that emit."""
    programs, parts = split

    def share(rows, columns, sizes, device):
        tiles = -(-columns // sizes.short_tile)
        chunk = -(-tiles // programs)
        return -(-tiles // chunk), chunk, parts

    monkeypatch.setattr(short, "share", share)
    check(scores(2, 900 if device.type == "cuda" else 200, device=device), 25)


def test_programs_that_find_the_bound_themselves(variant, device):
    check(scores(1, 128, device=device), 7)


@pytest.mark.gpu
@pytest.mark.parametrize("columns, k", [(65536, 2048), (131072, 2048), (1 << 20, 1000), (4097, 2048)])
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_against_a_sort(device, rows, columns, k):
    for x in (torch.randn(rows, columns, device=device), torch.randn(rows, columns, device=device).mul(4).round()):
        order = x.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values
        values, indices = top_k(x, k)
        assert_bitwise(indices, order)
        assert_bitwise(values, x.gather(1, order))

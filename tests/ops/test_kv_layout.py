"""Keys and values as the rows of a matrix: every element is where the matrix says, for every layout that is one."""

import pytest
import torch

from flashinfer.ops.kv_layout import as_matrix, paged_views


def _numbered(*shape):
    return torch.arange(torch.tensor(shape).prod(), dtype=torch.int32).view(shape)


def _paged():
    nhd, hnd = _numbered(6, 2, 16, 3, 8), _numbered(6, 2, 3, 16, 8)
    layers = _numbered(4, 6, 16, 3, 8)
    return {
        "NHD": paged_views(nhd, "NHD")[0],
        "NHD, v": paged_views(nhd, "NHD")[1],
        "HND": paged_views(hnd, "HND")[0],
        "HND, v": paged_views(hnd, "HND")[1],
        "a layer": layers[2],
        "pages of all layers side by side": layers.transpose(0, 1)[:, 1],
        "some pages": layers[0, 1:4],
        "every other page": layers[0, ::2],
        "some heads": layers[0][:, :, 1:],
        "one head": layers[0][:, :, 2:],
        "one page": layers[0, 3:4],
        "wider rows": _numbered(6, 16, 3, 24)[..., 8:16],
        "pages of one token": _numbered(6, 1, 3, 8),
        "one head of pages of one token": _numbered(6, 1, 3, 8)[:, :, 1:2],
    }


@pytest.mark.parametrize("name", _paged())
def test_paged(name):
    t = _paged()[name]
    m = as_matrix(t, paged=True)
    for page in range(t.shape[0]):
        for head in range(t.shape[2]):
            first = page * m.page_rows + head * m.head_rows
            columns = slice(head * m.head_cols, head * m.head_cols + t.shape[3])
            assert torch.equal(m.rows[first : first + t.shape[1], columns], t[page, :, head])


@pytest.mark.parametrize(
    "t", [_numbered(20, 3, 8), _numbered(3, 20, 8).transpose(0, 1), _numbered(20, 5, 8)[:, 1:3], _numbered(1, 3, 8)]
)
def test_ragged(t):
    m = as_matrix(t, paged=False)
    for head in range(t.shape[1]):
        columns = slice(head * m.head_cols, head * m.head_cols + t.shape[2])
        first = head * m.head_rows
        assert torch.equal(m.rows[first : first + t.shape[0], columns], t[:, head])


@pytest.mark.parametrize(
    "t",
    [
        _numbered(6, 16, 3, 8).expand(6, 16, 3, 8)[:0],
        _numbered(1, 1, 3, 8).expand(6, 16, 3, 8),
        torch.as_strided(_numbered(4000), (6, 16, 3, 8), (600, 32, 8, 1)),
        torch.as_strided(_numbered(4000), (6, 16, 3, 8), (512, 32, 40, 1)),
    ],
    ids=["no pages", "expanded", "pages between rows", "heads between rows"],
)
def test_what_is_no_matrix(t):
    assert as_matrix(t, paged=True) is None

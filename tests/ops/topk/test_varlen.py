"""top_k_varlen: rows as far as their requests go, against a stable sort."""

import pytest
import torch

import flashinfer
from flashinfer import top_k_varlen
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.topk.test_topk import best, scores, small_tiles  # the fixture makes both sizes small on a CPU


def check(x, lengths, k, **options):
    """Indices ascend, -1 follows; values are those there, then 0."""
    indices, values = top_k_varlen(x, top_k=k, return_values=True, **options)
    for i, length in enumerate(lengths):
        length = min(max(length, 0), x.shape[1])
        column = sorted(best(x[i, :length], k))
        none = k - len(column)
        assert indices[i].tolist() == column + [-1] * none
        row = torch.cat([x[i, column], x.new_zeros(none)])
        assert_bitwise(values[i].nan_to_num(5.0), row.nan_to_num(5.0))
    assert indices.dtype == torch.int32 and values.dtype == x.dtype
    only, none = top_k_varlen(x, top_k=k, **options)
    assert none is None
    assert_bitwise(only, indices)


@pytest.mark.parametrize("k", [20, 40])
def test_lengths(variant, device, k):
    """0, 1, k - 1, k, k + 1, all, more than there are, negative; small k and large; ties, NaN, infinities, poison."""
    lengths = [0, 1, k - 1, k, k + 1, 150, 1000, -5]
    x = scores(len(lengths), 150, device=device)
    for row, length in zip(x, lengths):
        row[max(length, 0) :] = torch.nan
    x[5], x[6, ::2] = -torch.inf, torch.nan
    check(x, lengths, k, seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device))


@pytest.mark.parametrize("compress_ratio, next_n", [(1, 3), (4, 1), (4, 2)])
def test_drafts_and_compressed_keys(variant, device, compress_ratio, next_n):
    seq_lens = [0, 1, 2, 30, 97]
    lengths = [(n - next_n + t + 1) // compress_ratio for n in seq_lens for t in range(next_n)]
    x = scores(len(lengths), 90, torch.float16, device)
    for dtype in (torch.int32, torch.int64) if next_n == 2 else (torch.int32,):
        lens = torch.tensor(seq_lens, dtype=dtype, device=device)
        check(x, lengths, 10, seq_lens=lens, compress_ratio=compress_ratio, next_n=next_n)


def test_what_is_given(variant, device):
    """Outputs in one dimension or two; hints, names of backends and strides change nothing."""
    x, lens = scores(3, 80, device=device), torch.tensor([80, 30, 4], dtype=torch.int32, device=device)
    expected = top_k_varlen(x, lens, 9, return_values=True)
    flat = torch.empty(27, dtype=torch.int32, device=device)
    hint = torch.zeros(3, 9, dtype=torch.int32, device=device)
    indices, values = top_k_varlen(generate.strided(x, 1, 1), lens, 9, hint, out_indices=flat, backend="gvr")
    assert indices is flat and values is None
    assert_bitwise(indices.view(3, 9), expected[0])
    for out in (torch.empty(3, 9, device=device), torch.empty(27, device=device)):
        results = top_k_varlen(x, lens, 9, return_values=True, out_values=out, backend="radix", workspace={})
        assert results[1] is out
        for ours, theirs in zip(results, expected):
            assert_bitwise(ours.view(3, 9), theirs)
    with pytest.warns(RuntimeWarning, match="pre_idx"):
        assert_bitwise(top_k_varlen(x, lens, 9, hint[:2])[0], expected[0])
    assert top_k_varlen(x[:0], lens[:0], 9)[0].shape == (0, 9)


def test_bad_input():
    x, lens = torch.ones(4, 8), torch.ones(4, dtype=torch.int32)
    for call, argument in (
        (lambda: top_k_varlen(x[0], lens, 2), "logits"),
        (lambda: top_k_varlen(x, lens[:3], 2), "seq_lens"),
        (lambda: top_k_varlen(x, lens, 2, next_n=2), "seq_lens"),
        (lambda: top_k_varlen(x, lens.float(), 2), "seq_lens"),
        (lambda: top_k_varlen(x, lens, 0), "top_k"),
        (lambda: top_k_varlen(x, lens, 2, compress_ratio=0), "compress_ratio"),
        (lambda: top_k_varlen(x, lens, 2, next_n=0), "next_n"),
        (lambda: top_k_varlen(x, lens, 2, out_indices=torch.empty(2, 4, dtype=torch.int32)), "out_indices"),
        (lambda: top_k_varlen(x, lens, 2, out_indices=torch.empty(4, 2)), "out_indices"),
        (lambda: top_k_varlen(x, lens, 2, return_values=True, out_values=torch.empty(9)), "out_values"),
        (lambda: top_k_varlen(x, lens, 2, backend="fast"), "backend"),
        (lambda: top_k_varlen(x, lens, 2, workspace=3), "workspace"),
        (lambda: top_k_varlen(x, lens.to("meta"), 2), "seq_lens"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: got .*"):
            call()


def test_is_a_registered_op():
    from flashinfer import topk

    x, lens = torch.randn(4, 30), torch.full((2,), 20, dtype=torch.int32)
    indices, values = torch.empty(4, 3, dtype=torch.int32), torch.empty(4, 3)
    torch.library.opcheck(topk._top_k_varlen.op, (x, lens, 3, 1, 2, indices, values, "auto"))
    assert flashinfer.top_k_varlen is topk.top_k_varlen

"""Weighted sums of experts' rows against float64."""

import pytest
import torch

from flashinfer.fused_moe.routing import finalize
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture


def case(tokens, top_k, hidden, dtype, weight_dtype, device):
    """Rows in random places between rows of NaN; some choices without a row, their weight NaN, and a token without."""
    pairs = tokens * top_k
    row = torch.randperm(2 * pairs, device=device)[:pairs].view(tokens, top_k).int()
    weights = torch.randn(tokens, top_k, device=device).to(weight_dtype)
    none = torch.rand(tokens, top_k, device=device) < 0.3
    none[-1] = True
    y = torch.full((2 * pairs, hidden), torch.nan, device=device).to(dtype)
    y[row[~none].long()] = torch.randn(int((~none).sum()), hidden, device=device).to(dtype)
    return y, row.masked_fill(none, -1), weights.masked_fill(none, torch.nan)


def by_torch(y, row, weights, dtype):
    """In `dtype`, choice after choice."""
    total = torch.zeros(len(row), y.shape[1], dtype=dtype, device=y.device)
    for choice in range(row.shape[1]):
        term = y.to(dtype)[row[:, choice].clamp(min=0).long()]
        if weights is not None:
            term = term * weights.to(dtype)[:, choice, None]
        total += term.masked_fill(row[:, choice, None] < 0, 0)
    return total


@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype", "weight_dtype"),
    [
        ((5, 8, 1040), torch.float16, torch.float16, torch.float32),
        ((3, 1, 72), torch.float32, torch.float16, torch.float32),
        ((2, 32, 33), torch.float32, torch.float32, torch.bfloat16),
        ((4, 11, 100), torch.float16, torch.float32, None),
    ],
    ids=str,
)
def test_finalize(variant, device, shape, dtype, out_dtype, weight_dtype):
    y, row, weights = case(*shape, dtype, weight_dtype or torch.float32, device)
    weights = None if weight_dtype is None else weights
    truth, same = by_torch(y, row, weights, torch.float64), by_torch(y, row, weights, torch.float32)
    out = torch.full((shape[0], shape[2]), torch.nan, dtype=out_dtype, device=device)
    finalize(y, row, weights, out)
    assert_close(out, same.to(out_dtype), truth)
    assert (out[-1] == 0).all()
    strided = generate.strided(torch.zeros_like(out), 0)
    wide = None if weights is None else generate.strided(weights, 0)
    finalize(generate.strided(y, 0), generate.strided(row, 0), wide, strided)
    assert_bitwise(strided, out)


def test_nothing_to_sum(variant, device):
    y, weights = torch.empty(0, 16, device=device), torch.ones(2, 3, device=device)
    out = torch.full((2, 16), torch.nan, device=device)
    finalize(y, torch.full((2, 3), -1, dtype=torch.int32, device=device), weights, out)
    assert (out == 0).all()
    finalize(y, torch.empty(0, 3, dtype=torch.int32, device=device), weights[:0], out[:0])


Y, ROW, W = torch.zeros(6, 16), torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(y=Y.double()), "y"),
        (dict(y=Y[:, :8]), "y"),
        (dict(y=torch.zeros(16, 6).T), "y"),
        (dict(pair_row=ROW.long()), "pair_row"),
        (dict(pair_row=ROW[0]), "pair_row"),
        (dict(pair_row=torch.zeros(2, 33, dtype=torch.int32)), "pair_row"),
        (dict(weights=W[:, :2]), "weights"),
        (dict(weights=W.int()), "weights"),
        (dict(weights=W.to("meta")), "weights"),
        (dict(out=torch.zeros(3, 16)), "out"),
        (dict(out=torch.zeros(2, 16, dtype=torch.int8)), "out"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_input(changed, argument):
    good = dict(y=Y, pair_row=ROW, weights=W, out=torch.zeros(2, 16))
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        finalize(**(good | changed))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8, 7168), (513, 8, 7168), (64, 4, 2880), (300, 2, 4096)], ids=str)
def test_real_shapes(device, shape):
    y, row, weights = case(*shape, torch.bfloat16, torch.float32, device)
    out = torch.empty(shape[0], shape[2], dtype=torch.bfloat16, device=device)
    finalize(y, row, weights, out)
    same = by_torch(y, row, weights, torch.float32).bfloat16()
    assert_close(out, same, by_torch(y, row, weights, torch.float64))

"""`like`: what a launch that is kept depends on of a tensor, and no more."""

import pytest
import torch

from flashinfer._core.alike import like

X = torch.zeros(3, 4)
N = torch.zeros(8, dtype=torch.int32)


def test_other_memory_is_alike():
    same = like(X, N)
    assert same(X, N) and same(torch.ones(3, 4), torch.ones(9, dtype=torch.int32)[1:])


@pytest.mark.parametrize(
    "other",
    [X[:2], torch.zeros(4, 3).t(), torch.zeros(3, 8)[:, :4], X.double(), X.to("meta"), X[None],
     torch.nn.Parameter(X, requires_grad=False), None, X.numpy(), N],  # fmt: skip
    ids=["shape", "order", "stride", "dtype", "device", "axes", "class", "none", "array", "another"],
)
def test_others_are_not(other):
    assert not like(X, N)(other, N)
    assert not like(N, X)(N, other)


def test_a_free_length():
    same = like(X, N, free=[1])
    assert same(X, N[:5]) and same(X, N[:0])
    assert not same(X, N[::2]) and not same(X[:2], N) and not same(X, N.long())


def test_tensors_given_twice():
    twice = like(X, N, X)
    assert twice(X, N, X) and not twice(X, N, X.clone())
    y = X.clone()
    assert twice(y, N, y)
    assert not like(X, y)(X, X)

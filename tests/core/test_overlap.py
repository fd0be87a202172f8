"""Tensors that share memory, against the sets of their bytes."""

import itertools
import random

import pytest
import torch

from flashinfer._core.checks import check_apart, overlap


def memory(x):
    """The addresses of all bytes of a tensor."""
    places = itertools.product(*map(range, x.shape))
    starts = [x.data_ptr() + x.element_size() * sum(i * n for i, n in zip(at, x.stride())) for at in places]
    return {start + byte for start in starts for byte in range(x.element_size())}


def drawn(draw, whole):
    """A tensor of any dtype, shape and strides within some memory."""
    while True:
        flat = whole.view(draw.choice((torch.uint8, torch.int16, torch.float32)))
        shape = [draw.randint(0, 4) if draw.random() < 0.05 else draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
        strides = [draw.randint(0, 17) for _ in shape]
        last = sum((n - 1) * step for n, step in zip(shape, strides) if n)
        if last < flat.numel():
            return flat.as_strided(shape, strides, draw.randint(0, flat.numel() - last - 1))


def test_any_two_tensors():
    draw, whole, seen = random.Random(0), torch.empty(600, dtype=torch.uint8), set()
    for _ in range(800):
        x, y = drawn(draw, whole), drawn(draw, whole)
        shared = bool(memory(x) & memory(y))
        assert overlap(x, y) == overlap(y, x) == shared, (x.shape, x.stride(), y.shape, y.stride())
        seen.add(shared)
    assert seen == {True, False}


def test_halves_of_a_cache_are_apart_and_rows_of_one_are_not():
    cache = torch.empty(5, 2, 4, 2, 8)
    check_apart([("k", cache[:, 0]), ("v", cache[:, 1])], [("all", torch.empty(5, 2, 4, 2, 8)), ("none", None)])
    check_apart([("k", cache[0]), ("v", cache[1]), ("empty", cache[:0])], [("same", cache[0].flatten())])
    for one, other in ((cache[:3], cache[2:]), (cache[:, 0], cache[:, :, 3]), (cache, cache[4, 1, 3, 1, 7])):
        with pytest.raises(ValueError, match="^b: got the memory of a; allowed: memory of its own"):
            check_apart([("a", one), ("b", other)])
        with pytest.raises(ValueError, match="^a: got some of the memory of b; allowed: all of it in its place"):
            check_apart([("a", one)], [("b", other)])

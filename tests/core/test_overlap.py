"""Tensors that share memory, against the sets of their bytes."""

import itertools
import random
import sys

import pytest
import torch

from flashinfer._core.checks import _MOST_PLACES, _meet, check_apart, overlap


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


def places(x, y):
    """What overlap() says of two tensors, and the number of places it looked at."""
    seen = 0

    def count(frame, event, _):
        nonlocal seen
        seen += event == "call" and frame.f_code.co_name == "reaches"

    _meet.cache_clear()
    sys.setprofile(count)
    try:
        return overlap(x, y), seen
    finally:
        sys.setprofile(None)


def test_slices_of_large_tensors_take_few_places():
    memory = torch.empty(1 << 30, dtype=torch.uint8)  # Never touched.
    latent = memory[: 8192 * 128 * 576].view(8192, 128, 576)
    pages = memory[: 40000 * 2 * 8 * 16 * 64].view(40000, 2, 8, 16, 64)
    rows = memory[: 8192 * 6144].view(8192, 6144)
    heads = rows[:, :4096].view(8192, 32, 128)
    for x, y, shared in (
        (latent[..., :512], latent[..., 512:], False),
        (latent[1:, :, :512], latent[:-1, :, 512:], False),
        (pages[:, 0], pages[:, 1], False),
        (pages[:, 0, :, 3], pages[:, 1, :, 4], False),
        (heads, rows[:, 4096:5120].view(8192, 8, 128), False),
        (heads[..., :64], heads[..., 64:], False),
        (rows[:, ::2], rows[:, 1::2], False),
        (rows[:, ::2], rows[:, 3::3], True),
        (rows[:6144], rows[:6144].T[1:], True),
    ):
        found, seen = places(x, y)
        assert found == shared and 0 < seen < 100, (x.stride(), y.stride(), seen)


def test_a_search_without_an_end_is_given_up():
    memory = torch.empty(1 << 30, dtype=torch.uint8)
    x = memory.as_strided((500, 500, 50), (200006, 2002, 14))
    y = memory.as_strided((500, 500, 50), (200018, 2006, 22), 1)
    assert places(x, y)[0] is False  # Even and odd addresses.
    x = memory.as_strided((60, 2, 3, 60), (44658, 108276, 8907, 10272))
    y = memory.as_strided((60, 2, 3, 60), (89382, 7582, 18457, 2403), 565830)
    found, seen = places(x, y)
    assert not found and _MOST_PLACES < seen < 2 * _MOST_PLACES

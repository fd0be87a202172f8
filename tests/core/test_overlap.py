"""Tensors that share memory, against the sets of their bytes."""

import itertools
import random
import sys
from inspect import signature

import pytest
import torch

import flashinfer
from flashinfer import chunk_gated_delta_rule, mm_bf16
from flashinfer._core.checks import _MOST_PLACES, _meet, check_apart, overlap
from flashinfer.causal_conv1d import causal_conv1d_fn
from flashinfer.gdn_decode import gated_delta_rule_decode
from flashinfer.grouped_mm import grouped_mm_bf16
from flashinfer.mamba import selective_state_update, ssd_combined_fwd


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


def test_in_place_is_every_element_in_its_place():
    x = torch.empty(2, 8, 8)[1]
    wide = torch.empty(4, 3, 24)[:, :, :16]
    for given in (x, x.view(64), x.view(torch.uint8), x[None]):
        check_apart([("out", given)], [("x", x)])
    check_apart([("out", wide.unflatten(2, (2, 8)))], [("x", wide)])
    for given in (x.T, x.view(2, 4, 8).transpose(0, 1)):
        with pytest.raises(ValueError, match="^out: got some of the memory of x; allowed: all of it in its place"):
            check_apart([("out", given)], [("x", x)])
    check_apart([("out", x)], [("x", x)], in_place=("x",))
    check_apart([("out", x)], [("y", torch.empty(8, 8))], in_place=())
    with pytest.raises(ValueError, match="^out: got some of the memory of x; allowed: memory of its own"):
        check_apart([("out", x)], [("x", x)], in_place=("y",))


def product(a, b, out):
    mm_bf16(a, b.T, out=out)


def segments(a, b, out):
    grouped_mm_bf16(a, b[None], torch.tensor([0, len(a)], dtype=torch.int32), out=out)


def convolution(x, out):
    causal_conv1d_fn(x, torch.ones(x.shape[1], 4), out=out)


def gated_chunks(q, k, v, output):
    chunk_gated_delta_rule(q, k, v, cu_seqlens=torch.tensor([0, len(q)]), output=output)


def gated_step(q, k, v, output):
    gate = torch.zeros(len(q), 1, q.shape[2])
    state, head = torch.zeros(len(q), *q.shape[2:], q.shape[3]), torch.ones(q.shape[2])
    gated_delta_rule_decode(q, k, v, state, head, gate, head, gate, output=output)


def space(x, B, C, out):
    ssd_combined_fwd(x, torch.ones(x.shape[:3]), -torch.ones(x.shape[2]), B, C, out=out)


def space_step(x, B, C, out):
    state, decay = torch.zeros(*x.shape, B.shape[2]), -torch.ones(*x.shape[1:], B.shape[2])
    selective_state_update(state, x, torch.ones_like(x), decay, B, C, None, out=out)


def attention(q, k, v, out):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    rows = torch.tensor([0, len(q)], dtype=torch.int32)
    wrapper.plan(rows, rows, q.shape[1], k.shape[1], q.shape[2], q_data_type=q.dtype)
    wrapper.run(q, k, v, out=out)


@pytest.mark.parametrize(
    ("call", "shape", "dtype", "shared"),
    [
        (product, (64, 64), torch.bfloat16, "a b"),
        (segments, (64, 64), torch.bfloat16, "a b"),
        (convolution, (1, 8, 64), torch.float32, "x"),
        (gated_chunks, (70, 2, 64), torch.bfloat16, "q k v"),
        (gated_step, (2, 1, 2, 128), torch.bfloat16, "q k"),
        (space, (1, 70, 2, 16), torch.float32, "x B C"),
        (space_step, (2, 2, 16), torch.float32, "B C"),
        (attention, (70, 2, 64), torch.float16, "k v"),
    ],
)
def test_an_output_is_not_in_the_place_of_what_other_blocks_read(call, shape, dtype, shared):
    """Some block would write an element before another has read it."""
    for name in shared.split():
        given = {each: torch.ones(shape, dtype=dtype) for each in signature(call).parameters}
        output = list(given)[-1]
        given[output] = given[name]
        message = f"^{output}: got some of the memory of {name}; allowed: memory of its own"
        with pytest.raises(ValueError, match=message):
            call(**given)
        assert bool((given[name] == 1).all()), name


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

"""Held calls: a call like an earlier one launches what it would launch anew, and no other call is taken for one."""

import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import flashinfer


@pytest.fixture(scope="module")
def on_card():
    """Calls a function of this module in a process with a card that is not there; it gets the card."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_insert) as process:
        yield lambda function, *args: process.submit(_with_card, function, *args).result()


def _insert():
    os.environ.pop("TRITON_INTERPRET", None)
    global CARD
    from tests.core import card

    CARD = card.insert()


def _with_card(function, *args):
    return function(CARD, *args)


def rows(count=4, columns=256, dtype=torch.bfloat16):
    return torch.zeros(count, columns, dtype=dtype)


def heads(count=2, tokens=4):
    return torch.zeros(tokens, count, 64, dtype=torch.bfloat16)


def table(*values):
    return torch.tensor(values, dtype=torch.int32)


def pages(kv=None):
    cache = torch.zeros(3, 2, 16, 2, 64, dtype=torch.bfloat16)
    return cache[:, 0], cache[:, 1], table(0, 1, 2), table(0, 3), table(8)


def rope():
    from flashinfer.rope import rotate

    return rotate


def draw():
    from flashinfer.sampling import draw as module

    return module


def norm():
    from flashinfer.norm import plain

    return plain


def samples(count=3):
    return torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.bool)


# For every held op: the op, and a function that makes its arguments, in new memory each time.
CASES = {
    "rmsnorm": (lambda: norm()._rmsnorm, lambda: (rows(), rows(1)[0], rows(), 1e-6, False)),
    "fused_add_rmsnorm": (lambda: norm()._fused_add_rmsnorm, lambda: (rows(), rows(), rows(1)[0], 1e-6, True)),
    "layernorm": (
        lambda: norm()._layernorm,
        lambda: (rows(), rows(1, dtype=torch.float32)[0], rows(1, dtype=torch.float32)[0], rows(), 1e-6),
    ),
    "act_and_mul": (lambda: flashinfer.activation._act_and_mul, lambda: (rows(4, 512), rows(4, 256), "silu")),
    "append_paged_kv_cache": (
        lambda: flashinfer.page._append_paged_kv_cache,
        lambda: (heads(), heads(), table(0, 0, 0, 0), table(4, 5, 6, 7), *pages()),
    ),
    "apply_rope": (
        lambda: rope()._rope,
        lambda: (heads(), heads(1), heads(), heads(1), table(0, 1, 2, 3), None, 64, False, [1.0, 1e4]),
    ),
    "apply_rope_inplace": (
        lambda: rope()._rope_inplace,
        lambda: (heads(), heads(1), table(0, 4), table(5), 64, True, [8.0, 5e5, 1.0, 4.0, 8192.0]),
    ),
    "apply_rope_with_cos_sin_cache": (
        lambda: rope()._rope_cached,
        lambda: (heads(), heads(1), heads(), heads(1), table(0, 1, 2, 3), 64, torch.zeros(9, 64), False),
    ),
    "apply_rope_with_cos_sin_cache_inplace": (
        lambda: rope()._rope_cached_inplace,
        lambda: (heads(), heads(1), table(0, 1, 2, 3), 64, torch.zeros(9, 64), False),
    ),
    "sampling": (
        lambda: draw()._draw,
        lambda: (rows(3, 5000, torch.float32), "probs", None, None, [1, 2], None, None, None, *samples()),
    ),
    "prefix_sampling": (
        lambda: draw()._draw_prefix,
        lambda: (
            rows(3, 5000, torch.float32), "probs joint", 20, None, 0.5, None, [1, 2], None, None, None, *samples(),
        ),
    ),
}  # fmt: skip


def test_every_held_op_has_a_case():
    root = Path(flashinfer.__file__).parent
    found = {
        name
        for path in root.rglob("*.py")
        for name in re.findall(r'@custom_op\(\s*"flashinfer::(\w+)"[^@]*?held=True\s*\)', path.read_text())
    }
    assert found == set(CASES)


def _addresses(args):
    return [x.data_ptr() for x in args if isinstance(x, torch.Tensor)]


def _placed(launches, args):
    """Launches with each address of a tensor in `args` as its number, and any other as the order in which it came."""
    seen, placed = _addresses(args), []
    for symbol, grid, stream, values in launches:
        row = []
        for value in values:
            number = int.from_bytes(value[:8], "little")
            is_address = len(value) in (8, 128) and number > 1 << 32
            if is_address and number not in seen:
                seen.append(number)
            row.append((seen.index(number), value[8:]) if is_address else value)
        placed.append((symbol, grid, stream, row))
    return placed


def repeats(card, name):
    op, make = CASES[name]
    op = op()
    first = make()
    card.made(lambda: op(*first))
    card.made(lambda: op(*first))
    args = make()
    assert not set(_addresses(args)) & set(_addresses(first))
    anew = card.made(lambda: op.__wrapped__(*args))
    calls = []
    op.held._function, kept = lambda *args: calls.append(args), op.held._function
    try:
        again = card.made(lambda: op(*args))
    finally:
        op.held._function = kept
    assert not calls, "it was not held"
    assert anew and _placed(again, args) == _placed(anew, args)
    assert "torch._dynamo" not in sys.modules


@pytest.mark.parametrize("name", CASES)
def test_repeats_what_it_would_launch_anew(name, on_card):
    on_card(repeats, name)


# -- what is not alike ------------------------------------------------------------------------------------------------


def _launched_as_anew(card, op, *args):
    anew = _placed(card.made(lambda: op.__wrapped__(*args)), args)
    for _ in range(3):
        assert _placed(card.made(lambda: op(*args)), args) == anew
    return anew


def warm_calls_that_differ(card):
    op = norm()._rmsnorm
    x, weight, out = rows(), rows(1)[0], rows()
    warm = _launched_as_anew(card, op, x, weight, out, 1e-6, False)
    others = {
        "strides": (rows(4, 512)[:, :256], weight, out, 1e-6, False),
        "shape": (rows(5), weight, rows(5), 1e-6, False),
        "dtypes": (x.half(), weight, out.half(), 1e-6, False),
        "dtype of the weight": (x, weight.float(), out, 1e-6, False),
        "alignment": (x, rows(1, 264)[0][1:257], out, 1e-6, False),
        "eps": (x, weight, out, 1e-5, False),
        "form": (x, weight, out, 1e-6, True),
        "place of the result": (x, weight, x, 1e-6, False),
        "no eps": (x, weight, out, 0.0, False),
    }
    for what, args in others.items():
        assert _launched_as_anew(card, op, *args) != warm, what
    # The alignment of one tensor is not that of another.
    _launched_as_anew(card, op, rows(1, 1040)[0][1:1025].view(4, 256), weight, out, 1e-6, False)
    card.stream = 8
    assert _launched_as_anew(card, op, x, weight, out, 1e-6, False)[0][2] == 8
    card.stream = 7
    assert _launched_as_anew(card, op, x, weight, out, 1e-6, False) == warm


def warm_calls_that_are_wrong(card):
    from tests.core.card import Elsewhere

    op = norm()._rmsnorm
    x, weight, out = rows(), rows(1)[0], rows()
    _launched_as_anew(card, op, x, weight, out, 1e-6, False)
    wrong = {
        "out: got torch.float16": (x, weight, out.half(), 1e-6, False),
        r"out: got \(3, 256\)": (x, weight, out[:3], 1e-6, False),
        r"weight: got \(128,\)": (x, weight[:128], out, 1e-6, False),
        "weight: got torch.int32": (x, torch.zeros(256, dtype=torch.int32), out, 1e-6, False),
        "weight: got a tensor on cuda:1": (x, torch.Tensor._make_subclass(Elsewhere, weight), out, 1e-6, False),
        "input: got torch.float64": (x.double(), weight, out, 1e-6, False),
    }
    for message, args in wrong.items():
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                op(*args)
    card.status = 1
    with pytest.raises(RuntimeError, match="norm: launch of norm_kernel.*CUDA_ERROR_INVALID_VALUE"):
        op(x, weight, out, 1e-6, False)
    card.status = 0


def debug_mode_checks_again(card):
    op = flashinfer.page._append_paged_kv_cache
    k_cache, v_cache, _, indptr, last = pages()
    args = heads(), heads(), table(0, 0, 0, 0), table(4, 5, 6, 7), k_cache, v_cache, table(9, 9, 9), indptr, last
    for _ in range(3):
        op(*args)
    os.environ["FLASHINFER_DEBUG"] = "1"
    try:
        with pytest.raises(ValueError, match="^kv_indices: got"):
            op(*args)
    finally:
        del os.environ["FLASHINFER_DEBUG"]
    assert len(card.made(lambda: op(*args))) == 1


def another_target(card):
    from dataclasses import replace

    from flashinfer._core import target

    op = norm()._rmsnorm
    args = rows(), rows(1)[0], rows(), 1e-6, False
    _launched_as_anew(card, op, *args)
    calls, kept = [], op.held._function
    op.held._function = lambda *args: calls.append(args)
    with target.override(replace(target.NAMED["90a"], sms=7)):
        op(*args)
    op.held._function = kept
    assert len(calls) == 1


# -- what is not kept -------------------------------------------------------------------------------------------------


def _scale(x, out, by):
    from tests.core.samples import Config, Problem, scale

    scale(Problem("bf16"), Config(128), (2, 1, 1), x, None, out, x.shape[0], by)


def held(function):
    from flashinfer._core.held import Held

    return Held(function, ["Tensor", "Tensor", "float"])


def calls_that_do_more(card):
    from flashinfer._core import workspace
    from tests.core.card import ZERO

    def zeroes(x, out, by):
        out.zero_()
        _scale(x, out, by)

    def converts(x, out, by):
        y = torch.empty_like(out)
        _scale(x, y, by)
        out.copy_(y)

    def begins_inside(x, out, by):
        _scale(x[8:], out, by)

    def takes_workspace(x, out, by):
        workspace.take(ZERO, 64)
        _scale(x, out, by)

    def does_nothing(x, out, by):
        return None

    for function in (zeroes, converts, begins_inside, takes_workspace, does_nothing):
        times = []

        def counted(*args, function=function, times=times):
            times.append(1)
            function(*args)

        call, args = held(counted), (torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), 0.5)
        for i in range(5):
            call(*args)
            assert len(times) == i + 1, function.__name__


def calls_within_calls(card):
    inner = held(_scale)

    def twice(x, out, by):
        inner(x, out, by)
        _scale(x, out, by + 1)

    outer, args = held(twice), (torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), 0.5)
    for _ in range(3):
        inner(*args)
    launches = [card.made(lambda: outer(*args)) for _ in range(4)]
    assert len(launches[0]) == 2 and all(made == launches[0] for made in launches)


def what_the_first_call_makes_for_all(card):
    tables, times = [], []

    def with_table(x, out, by):
        from tests.core.samples import Config, Problem, scale

        times.append(1)
        if not tables:
            tables.append(torch.ones(64))
        scale(Problem("bf16", weighted=True), Config(128), (2, 1, 1), x, tables[0], out, x.shape[0], by)

    call = held(with_table)
    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    launches = [card.made(lambda: call(x, out, 0.5)) for _ in range(4)]
    assert len(times) == 2 and all(made == launches[0] for made in launches)
    # It lives as long as the call is kept.
    import gc
    import weakref

    table = weakref.ref(tables.pop())
    gc.collect()
    assert table() is not None


def many_kinds_of_calls(card):
    from flashinfer._core import held as module

    call = held(_scale)
    kept, module._MOST = module._MOST, 4
    x = torch.zeros(64, dtype=torch.bfloat16)
    for n in range(1, 12):
        call(x[:n], torch.zeros(64), 0.5)
        assert len(call._calls) <= 4
    module._MOST = kept


def what_cannot_be_held(card):
    from flashinfer._core.held import Held

    for types in (["float", "Tensor"], ["Tensor", "List[Tensor]"]):
        with pytest.raises(TypeError, match="_scale: of"):
            Held(_scale, types)


@pytest.mark.parametrize(
    "check",
    [
        warm_calls_that_differ, warm_calls_that_are_wrong, debug_mode_checks_again, another_target, calls_that_do_more,
        calls_within_calls, what_the_first_call_makes_for_all, many_kinds_of_calls, what_cannot_be_held,
    ],
)  # fmt: skip
def test_held(check, on_card):
    on_card(check)

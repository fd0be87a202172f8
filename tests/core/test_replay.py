"""Launch replay: a call like an earlier one launches what a first call would, and no other call is taken for one."""

import os
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import flashinfer


def rows(count=4, columns=256, dtype=torch.bfloat16):
    return torch.zeros(count, columns, dtype=dtype)


def heads(count=2, tokens=4):
    return torch.zeros(tokens, count, 64, dtype=torch.bfloat16)


def table(*values):
    return torch.tensor(values, dtype=torch.int32)


def pages():
    cache = torch.zeros(3, 2, 16, 2, 64, dtype=torch.bfloat16)
    return cache, table(0, 1, 2), table(0, 3), table(8)


def scores():
    return rows(3, 5000, torch.float32)


def state():
    return torch.zeros(4, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 2)


def ragged():
    return heads(), heads(1), table(0, 4), table(5)


def draft():
    return scores(), table(0, 1, 2)


def fp8(*shape):
    return torch.zeros(*shape, dtype=torch.float8_e4m3fn)


def halves(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def products(rows=16, many=1):
    """Operands of a product with bfloat16, the second as weights are."""
    return halves(many, rows, 128), halves(many, 256, 128).mT


# Experts: 4 of 256 x 128, two for each of 8 tokens.
CHOSEN = (4, 2, None, None, 128, 0, 4, None)


def experts(dtype=torch.bfloat16):
    return torch.zeros(4, 256, 256, dtype=dtype), torch.zeros(4, 256, 128, dtype=dtype)


def fp8_experts():
    up, down = experts(torch.float8_e4m3fn)
    return fp8(8, 256), torch.ones(2, 8), up, torch.ones(4, 2, 2), down, torch.ones(4, 2, 1)


def choices():
    return torch.zeros(8, 2, dtype=torch.int32)


# For every replayed function: what makes its arguments, in new memory each time. The last may be those by name.
CASES = {
    "rmsnorm": lambda: (rows(), rows(1)[0]),
    "fused_add_rmsnorm": lambda: (rows(), rows(), rows(1)[0]),
    "gemma_fused_add_rmsnorm": lambda: (rows(), rows(), rows(1)[0]),
    "layernorm": lambda: (rows(), *torch.zeros(2, 256)),
    "silu_and_mul": lambda: (rows(4, 512),),
    "append_paged_kv_cache": lambda: (heads(), heads(), table(0, 0, 0, 0), table(4, 5, 6, 7), *pages()),
    "append_paged_mla_kv_cache": lambda: (
        rows(), rows(4, 64), table(0, 0, 0, 0), table(4, 5, 6, 7), torch.zeros(3, 16, 256, dtype=torch.bfloat16),
        torch.zeros(3, 16, 64, dtype=torch.bfloat16), table(0, 1, 2), table(0, 3), table(8),
    ),
    "get_batch_indices_positions": lambda: (table(0, 2, 4), table(9, 9), 4),
    "apply_rope": ragged,
    "apply_rope_inplace": ragged,
    "apply_rope_pos_ids": lambda: (heads(), heads(1), table(0, 1, 2, 3)),
    "apply_rope_pos_ids_inplace": lambda: (heads(), heads(1), table(0, 1, 2, 3), None, True),
    "apply_llama31_rope": ragged,
    "apply_llama31_rope_inplace": ragged,
    "apply_llama31_rope_pos_ids": lambda: (heads(), heads(1), table(0, 1, 2, 3)),
    "apply_llama31_rope_pos_ids_inplace": lambda: (heads(), heads(1), table(0, 1, 2, 3)),
    "apply_rope_with_cos_sin_cache": lambda: (table(0, 1, 2, 3), rows(), rows(4, 64), 64, torch.zeros(9, 64)),
    "apply_rope_with_cos_sin_cache_inplace": lambda: (
        table(0, 1, 2, 3), rows(), rows(4, 64), 64, torch.zeros(9, 64), False,
    ),
    "sampling_from_probs": lambda: (scores(),),
    "sampling_from_logits": lambda: (scores(), {"seed": 1, "offset": 2}),
    "min_p_sampling_from_probs": lambda: (scores(), 0.1, {"return_valid": True}),
    "top_k_top_p_sampling_from_probs": lambda: (scores(), 20, 0.5, table(2, 1, 0)),
    "softmax": lambda: (scores(), 0.5),
    "top_p_renorm_probs": lambda: (scores(), 0.5),
    "top_k": lambda: (scores(), 20),
    "top_k_page_table_transform": lambda: (scores(), torch.zeros(3, 5000, dtype=torch.int32), table(9, 8, 7), 4),
    "top_k_ragged_transform": lambda: (scores(), table(0, 1, 2), table(9, 8, 7), 4),
    "rmsnorm_quant": lambda: (fp8(4, 256), rows(), rows(1)[0], torch.ones(1)),
    "fused_add_rmsnorm_quant": lambda: (fp8(4, 256), rows(), rows(), rows(1)[0], 0.5),
    "mm_bf16": lambda: tuple(x[0] for x in products()),
    "bmm_bf16": lambda: (*products(many=2), halves(2, 16, 256)),
    "mm_fp8": lambda: (fp8(16, 128), fp8(1, 256, 128), torch.ones(1)),
    "gemm_fp8_nt_groupwise": lambda: (fp8(16, 256), fp8(256, 256), torch.ones(16, 2), torch.ones(2, 2), "K"),
    "_product": lambda: (*(x[0] for x in products(4096)), halves(4096, 256), halves(256), None, None, "auto"),
    "gemm": lambda: (
        fp8(1, 16, 256), fp8(1, 256, 256), torch.ones(1, 16, 2), torch.ones(1, 2, 2), None, halves(1, 16, 256),
        "fp32", "", "", {"width": 128, "rows": 1, "columns": 128},
    ),
    "grouped": lambda: (
        fp8(32, 256), fp8(2, 256, 256), torch.ones(32, 2), torch.ones(2, 2, 2), None, halves(32, 256), table(0, 16, 32),
        None, "ragged", "fp32", {"width": 128, "rows": 1, "columns": 128},
    ),
    "cutlass_fused_moe": lambda: (rows(8), choices(), torch.ones(8, 2), *experts(), torch.bfloat16, None),
    "trtllm_bf16_routed_moe": lambda: (choices(), rows(8), *experts(), *CHOSEN, 1, False, 0),
    "trtllm_fp8_block_scale_routed_moe": lambda: (choices(), None, *fp8_experts(), *CHOSEN, 1, {"output": rows(8)}),
    "merge_state": lambda: (*state(), *state()),
    "merge_state_in_place": lambda: (*state(), *state()),
    "merge_states": lambda: (torch.zeros(4, 3, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 3, 2)),
}  # fmt: skip

# One body with a function above, and kernels of their own, which would take seconds to compile.
ALIKE = {
    "gelu_and_mul", "gelu_tanh_and_mul", "gemma_rmsnorm", "top_p_sampling_from_probs", "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits", "top_k_renorm_probs", "top_k_mask_logits", "bmm_fp8",
    "trtllm_fp8_block_scale_moe", "trtllm_bf16_moe",
}  # fmt: skip


def function(name):
    """The replayed function of that name. Where it is the body of an op, compiled graphs call it."""
    bodies = {"_product": "dense", "gemm": "_launch", "grouped": "_launch"}
    if name in bodies:
        return getattr(import_module(f"flashinfer.gemm.{bodies[name]}"), name).__wrapped__
    for module in (flashinfer, flashinfer.sampling, flashinfer.page, flashinfer.topk, flashinfer.gemm, flashinfer.norm,
                   flashinfer.fused_moe):  # fmt: skip
        if callable(getattr(module, name, None)):
            return getattr(module, name)
    raise LookupError(name)


def test_every_held_function_has_a_case():
    root = Path(flashinfer.__file__).parent
    held = re.compile(r"@replayed\n(?:@.+\n)*def (\w+)")
    found = {name for path in root.rglob("*.py") for name in held.findall(path.read_text())}
    assert found == set(CASES) | ALIKE


def _given(args):
    """Arguments by position, and by name."""
    return (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})


def _tensors(args):
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)
        elif isinstance(x, dict):
            yield from _tensors(x.values())


def _placed(launches, args, result=None):
    """Launches and result with each address of a tensor in `args` as its number, any other in the order it came."""
    seen, placed = [x.data_ptr() for x in _tensors(args)], []

    def number(at):
        if at not in seen:
            seen.append(at)
        return seen.index(at)

    for kernel, grid, stream, values in launches:
        numbers = [int.from_bytes(value[:8], "little") if len(value) in (8, 128) else 0 for value in values]
        row = [(number(at), value[8:]) if at > 1 << 32 else value for at, value in zip(numbers, values, strict=True)]
        placed.append((kernel, grid, stream, row))
    facts = [(number(x.data_ptr()), x.shape, x.stride(), x.dtype) for x in _tensors([result])]
    return placed, facts, isinstance(result, tuple)


def _run(card, call, *args):
    """What a call launches and returns, placed."""
    by_position, by_name = _given(args)
    results = []
    launches = card.made(lambda: results.append(call(*by_position, **by_name)))
    return _placed(launches, args, results[0])


def _is_kept(call, *args):
    """Whether a call would be made of launches alone."""
    by_position, by_name = _given(args)
    times = []

    def watched(frame, event, arg):
        if event == "call" and frame.f_code is call.__wrapped__.__code__:
            times.append(1)

    sys.setprofile(watched)
    try:
        call(*by_position, **by_name)
    finally:
        sys.setprofile(None)
    return not times


def repeats(card, name):
    call, make = function(name), CASES[name]
    for first in [make()] * 2:
        _run(card, call, *first)
    args = make()
    assert not {x.data_ptr() for x in _tensors(args)} & {x.data_ptr() for x in _tensors(first)}
    fresh = _run(card, call.__wrapped__, *args)
    assert fresh[0] and _run(card, call, *args) == fresh
    assert _is_kept(call, *args)
    assert "torch._dynamo" not in sys.modules
    # Engines load models with another default dtype: neither way allocates by it.
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert _run(card, call.__wrapped__, *args) == fresh and _run(card, call, *args) == fresh, dtype
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_repeats_what_it_would_launch(name, on_card):
    on_card(repeats, name)


# -- what is not alike ------------------------------------------------------------------------------------------------


def _launched_alike(card, call, *args):
    fresh = _run(card, call.__wrapped__, *args)
    for _ in range(3):
        assert _run(card, call, *args) == fresh
    return fresh


def warm_calls_that_differ(card):
    op = flashinfer.rmsnorm
    x, weight, out = rows(), rows(1)[0], rows()
    warm = _launched_alike(card, op, x, weight, 1e-6, out)
    others = {
        "strides": (rows(4, 512)[:, :256], weight, 1e-6, out),
        "shape": (rows(5), weight, 1e-6, rows(5)),
        "dtypes": (x.half(), weight, 1e-6, out.half()),
        "dtype of the weight": (x, weight.float(), 1e-6, out),
        "alignment": (x, rows(1, 264)[0][1:257], 1e-6, out),
        "eps": (x, weight, 1e-5, out),
        "place of the result": (x, weight, 1e-6, x),
        "no eps": (x, weight, 0.0, out),
    }
    for what, args in others.items():
        assert _launched_alike(card, op, *args) != warm, what
        assert _is_kept(op, *args) == (what != "no eps"), what
    assert _launched_alike(card, op, x, weight, -0.0, out) != _run(card, op, x, weight, 0.0, out)
    _launched_alike(card, op, x, weight)
    # The alignment of one tensor is not that of another.
    _launched_alike(card, op, rows(1, 1040)[0][1:1025].view(4, 256), weight, 1e-6, out)
    assert _launched_alike(card, op, x, weight, {"out": out, "eps": 1e-6}) == warm
    assert _launched_alike(card, op, x, weight, {"eps": 1e-6, "out": out}) == warm
    card.stream = 8
    assert _launched_alike(card, op, x, weight, 1e-6, out)[0][0][2] == 8
    card.stream = 7
    assert _launched_alike(card, op, x, weight, 1e-6, out) == warm
    with pytest.raises(ValueError, match="eps: got '1e-6'; allowed: a number"):
        op(x, weight, "1e-6", out)


def streams_have_their_own_counts(card):
    """Blocks that share a tile of a product count arrivals in memory of their stream: two streams may overlap."""
    from flashinfer.ops.gemm import slices

    a, b, out = halves(16, 8192), halves(256, 8192).mT, halves(16, 256)
    for stream in (7, 8, 7, 8):
        card.stream = stream
        for _ in range(3):
            (launch,) = card.made(lambda: flashinfer.mm_bf16(a, b, out=out))
            given = {int.from_bytes(value, "little") for value in launch[3] if len(value) == 8}
            counts = {key[1]: row.data_ptr() for key, row in slices._row_of.items()}
            assert [at for at in counts.values() if at in given] == [counts[stream]]
    assert len(counts) == 2 and _is_kept(flashinfer.mm_bf16, a, b, {"out": out})


def arguments_that_are_one_tensor(card):
    """Whichever comes first, in place or not, the other is no call like it."""
    op, weight = flashinfer.rmsnorm, rows(1)[0]
    in_place = rows()
    for _ in range(2):
        for x, out in ((in_place, in_place), (rows(), rows()), (in_place, rows()), (in_place, in_place)):
            for _ in range(3):
                (launch,) = card.made(lambda: op(x, weight, 1e-6, out))
                given = [int.from_bytes(value, "little") for value in launch[3] if len(value) == 8]
                assert x.data_ptr() in given and out.data_ptr() in given

    from flashinfer._core.replay import replayed

    @replayed
    def by_identity(x, y, out):
        _scale(x, out, 2.0 if x is y or x.data_ptr() == y.data_ptr() else 3.0)

    x, y, out = (torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64))
    for _ in range(3):
        assert _launched_alike(card, by_identity, x, x, out) != _launched_alike(card, by_identity, x, y, out)
        # Views of one memory at one address are aliases, at another address they are not.
        _launched_alike(card, by_identity, x.view(8, 8).view(64), x, out)


def scalars_of_other_types(card):
    """1, 1.0, True and a tensor of one element are four calls, whatever came before."""
    from flashinfer._core.replay import replayed

    @replayed
    def by_type(x, out, by):
        _scale(x, out, {bool: 2.0, int: 3.0, float: 4.0}.get(type(by), 5.0))

    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    values = (1, 1.0, True, torch.ones(1), torch.ones(()), torch.ones(1, dtype=torch.int32))
    for _ in range(3):
        made = [_launched_alike(card, by_type, x, out, by)[0][0][3] for by in values]
        assert len({str(launch) for launch in made}) == 4

    @replayed
    def by_value(x, out, by):
        _scale(x, out, float(by))

    for _ in range(3):
        for value in (1.0, 2.0, 3.0):
            # What is read on the host decides, so such a call is not replayed.
            one = torch.full((1,), value)
            assert _launched_alike(card, by_value, x, out, one) == _run(card, by_value.__wrapped__, x, out, value)
            assert not _is_kept(by_value, x, out, one)


def calls_that_fail(card):
    """A failing call, the first of its kind or the one that is watched, leaves nothing of it."""
    from flashinfer._core.replay import recording, replayed

    tables, plans = [], []

    @replayed
    def fails(x, out):
        if plans and plans.pop(0):
            _scale(x, out, 9.0)
            raise RuntimeError("no more")
        if not tables:
            tables.append(torch.tensor([1.0] * 64))
        _scale(x, out, 0.5)

    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    for failing in ([True], [False, True], [True, True], [True, False, True]):
        fails.calls.clear()
        tables.clear()
        plans[:] = failing
        for fail in failing:
            if fail:
                with pytest.raises(RuntimeError, match="no more"):
                    fails(x, out)
            else:
                fails(x, out)
        assert recording() is None
        launches = [card.made(lambda: fails(x, out)) for _ in range(4)]
        assert all(len(made) == 1 and made == launches[0] for made in launches)
        assert _is_kept(fails, x, out)


def warm_calls_that_are_wrong(card):
    from tests.core.card import Elsewhere

    op = flashinfer.rmsnorm
    x, weight, out = rows(), rows(1)[0], rows()
    _launched_alike(card, op, x, weight, 1e-6, out)
    wrong = {
        "out: got torch.float16": (x, weight, 1e-6, out.half()),
        r"out: got \(3, 256\)": (x, weight, 1e-6, out[:3]),
        r"weight: got \(128,\)": (x, weight[:128], 1e-6, out),
        "weight: got torch.int32": (x, torch.zeros(256, dtype=torch.int32), 1e-6, out),
        "weight: got a tensor on cuda:1": (x, torch.Tensor._make_subclass(Elsewhere, weight), 1e-6, out),
        "input: got torch.float64": (x.double(), weight, 1e-6, out),
    }
    # In part of another tensor's memory, where warm calls had memory of its own.
    memory = rows(6)
    wrong["out: got some of the memory of input"] = memory[:4], weight, 1e-6, memory[2:]
    merge = flashinfer.merge_state_in_place
    _launched_alike(card, merge, *state(), *state())
    for message, args in wrong.items():
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                op(*args)
    v, s = torch.zeros(6, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 2)
    with pytest.raises(ValueError, match="v: got some of the memory of v_other"):
        merge(v[:4], s, v[2:], torch.zeros(4, 2))
    assert _is_kept(merge, *state(), *state()) and _is_kept(op, x, weight, 1e-6, out)
    card.status = 1
    with pytest.raises(RuntimeError, match="norm: launch of norm_kernel.*CUDA_ERROR_INVALID_VALUE"):
        op(x, weight, 1e-6, out)
    card.status = 0


def debug_mode_checks_again(card):
    op = flashinfer.append_paged_kv_cache
    cache, _, indptr, last = pages()
    args = heads(), heads(), table(0, 0, 0, 0), table(4, 5, 6, 7), cache, table(9, 9, 9), indptr, last
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

    op = flashinfer.rmsnorm
    args = rows(), rows(1)[0], 1e-6, rows()
    _launched_alike(card, op, *args)
    with target.override(replace(target.NAMED["90a"], sms=7)):
        assert not _is_kept(op, *args)
    assert _is_kept(op, *args)


# -- what is not kept -------------------------------------------------------------------------------------------------


def _scale(x, out, by):
    from tests.core.samples import Config, Problem, scale

    scale(Problem("bf16"), Config(128), (2, 1, 1), x, None, out, x.shape[0], by)


def calls_that_do_more(card):
    from flashinfer._core import workspace
    from flashinfer._core.replay import replayed
    from tests.core.card import ZERO

    def zeroes(x, out, by):
        out.zero_()
        _scale(x, out, by)

    def converts(x, out, by):
        y = torch.empty_like(out)
        _scale(x, y, by)
        out.copy_(y)

    def on_the_host(x, out, by):
        torch.empty(3).fill_(1)
        _scale(x, out, by)

    def gives_what_is_no_tensor(x, out, by):
        _scale(x, out, by)
        return out, 3

    def takes_workspace(x, out, by):
        workspace.take(ZERO, 64)
        _scale(x, out, by)

    def does_nothing(x, out, by):
        return None

    for function in (
        zeroes, converts, on_the_host, gives_what_is_no_tensor, takes_workspace, does_nothing,
    ):
        times = []

        def counted(*args, function=function, times=times):
            times.append(1)
            return function(*args)

        call, args = replayed(counted), (torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), 0.5)
        for i in range(5):
            call(*args)
            assert len(times) == i + 1, function.__name__


def calls_within_calls(card):
    from flashinfer._core.replay import replayed

    inner = replayed(_scale)

    def twice(x, out, by):
        inner(x, out, by)
        _scale(x, out, by + 1)

    outer, args = replayed(twice), (torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), 0.5)
    for _ in range(3):
        inner(*args)
    launches = [card.made(lambda: outer(*args)) for _ in range(4)]
    assert len(launches[0]) == 2 and all(made == launches[0] for made in launches)


def what_the_first_call_makes_for_all(card):
    from flashinfer._core.replay import replayed

    tables, times = [], []

    def with_table(x, out, by):
        from tests.core.samples import Config, Problem, scale

        times.append(1)
        if not tables:
            tables.append(torch.ones(64))
        scale(Problem("bf16", weighted=True), Config(128), (2, 1, 1), x, tables[0], out, x.shape[0], by)

    call = replayed(with_table)
    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    launches = [card.made(lambda: call(x, out, 0.5)) for _ in range(4)]
    assert len(times) == 2 and all(made == launches[0] for made in launches)
    # It lives as long as the call is kept.
    import gc
    import weakref

    table = weakref.ref(tables.pop())
    gc.collect()
    assert table() is not None


def parts_of_tensors(card):
    from flashinfer._core.replay import replayed

    @replayed
    def parts(x, out):
        _scale(x[8:], out[8:], 0.5)
        return out

    x, both = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(2, 64)
    for _ in range(3):
        for out in both.clone(), both.clone():
            _launched_alike(card, parts, x, out[0])
    assert _is_kept(parts, x, both[1])

    @replayed
    def halves(x, out):
        _scale(x[8:], out[8:], 0.5)
        return out.view(-1)

    # What shares memory with another tensor, and is no whole one, may be part of either.
    whole = torch.zeros(128, dtype=torch.bfloat16)
    for _ in range(3):
        _launched_alike(card, halves, whole[:64], whole[64:].view(torch.float32))
    assert not _is_kept(halves, whole[:64], whole[64:].view(torch.float32))


def captures_unknown_to_torch(card):
    """Scratch of such a capture outlives its call, however the call is made; in torch's own graphs the pool has it."""
    from flashinfer._core import capture
    from flashinfer._core.replay import replayed

    def with_scratch(x, out, by):
        y = torch.empty(64)
        _scale(x, y, by)
        _scale(x, out, by)

    def alone(x, out, by):
        out.zero_()
        with_scratch(x, out, by)

    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    number = 0
    for function, warm in ((with_scratch, 0), (with_scratch, 1), (with_scratch, 5), (alone, 3)):
        for known in (True, False):
            call = replayed(function)
            for _ in range(warm):
                call(x, out, 0.5)
            number += 1
            card.capture, card.known = number, known
            before = len(capture._kept)
            launches = card.made(lambda: call(x, out, 0.5))
            kept = capture._kept[before:]
            card.capture = None
            assert len(launches) == 2 and len(kept) == (0 if known else 1), (function.__name__, warm, known)
            # The very memory that the captured launch writes, and none of the caller's.
            scratch = [int.from_bytes(value, "little") for value in launches[0][3] if len(value) == 8]
            assert all(any(y.data_ptr() == at for at in scratch) and y.data_ptr() != out.data_ptr() for y in kept)
    before = len(capture._kept)
    call(x, out, 0.5)
    assert len(capture._kept) == before


def many_kinds_of_calls(card):
    from flashinfer._core import replay as module

    call = module.replayed(_scale)
    kept, module._MOST = module._MOST, 4
    x = torch.zeros(64, dtype=torch.bfloat16)
    for n in range(1, 12):
        call(x[:n], torch.zeros(64), 0.5)
        assert len(call.calls) <= 4
    module._MOST = kept


def other_arguments(card):
    """Values that no equal one stands for are not replayed."""
    from flashinfer._core.replay import replayed

    @replayed
    def with_more(x, out, more):
        _scale(x, out, 0.5)

    x, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    for more, kept in ((3, True), ((1, [2.0, "3", None]), True), ({}, False), (object(), False), ((0.0,), False)):
        for _ in range(3):
            with_more(x, out, more)
        assert _is_kept(with_more, x, out, more, {}) == kept, more


@pytest.mark.parametrize(
    "check",
    [
        warm_calls_that_differ, streams_have_their_own_counts, arguments_that_are_one_tensor,
        scalars_of_other_types, calls_that_fail,
        warm_calls_that_are_wrong, debug_mode_checks_again, another_target, calls_that_do_more,
        captures_unknown_to_torch, calls_within_calls, what_the_first_call_makes_for_all, parts_of_tensors,
        many_kinds_of_calls, other_arguments,
    ],
)  # fmt: skip
def test_held(check, on_card):
    on_card(check)

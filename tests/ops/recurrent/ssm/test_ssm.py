"""The state-space recurrence against float64, token by token, with every table and dtype of the pool."""

import pytest
import torch

from flashinfer.mamba import selective_state_update
from flashinfer.ops.recurrent import ssm as room
from flashinfer.ops.recurrent.ssm import philox
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.recurrent import rules
from tests.ops.recurrent.rules import assert_within

BF16 = torch.bfloat16
HEADS, GROUPS, DIM, DSTATE = 4, 2, 24, 16
POISON = 777.0


def inputs(shape, device, dtype=torch.float32, tied=True, heads=HEADS, groups=GROUPS, dstate=DSTATE):
    """x, dt, A, B, C, D, z and the bias of tokens in `shape`; with `tied` repeated as engines have them."""
    x, z = (generate.randn(*shape, heads, DIM, dtype=dtype, device=device) for _ in range(2))
    B, C = (generate.randn(*shape, groups, dstate, dtype=dtype, device=device) for _ in range(2))
    if tied:
        dt = generate.randn(*shape, heads, dtype=dtype, device=device)[..., None].expand(*shape, heads, DIM)
        A = (-torch.rand(heads, device=device))[:, None, None].expand(heads, DIM, dstate)
        assert (*A.stride()[1:], dt.stride(-1)) == (0, 0, 0)
        D, bias = (torch.rand(heads, device=device)[:, None].expand(heads, DIM) for _ in range(2))
    else:
        dt = generate.randn(*shape, heads, DIM, dtype=dtype, device=device)
        A = -torch.rand(heads, DIM, dstate, device=device)
        D, bias = (torch.rand(heads, DIM, device=device) for _ in range(2))
    return dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=bias)


def truth_of(h, given, tokens, softplus=True):
    """Truth of one sequence: `tokens` indexes its tokens, h is its state."""
    x, dt, B, C = (torch.stack([given[name][t] for t in tokens]) for name in ("x", "dt", "B", "C"))
    z = None if given["z"] is None else torch.stack([given["z"][t] for t in tokens])
    return rules.state_space(h, x, dt, given["A"], B, C, given["D"], z, given["dt_bias"], softplus)


def near(out, h, given, tokens, **more):
    """Assert the results of a sequence, and return its truth."""
    truth = truth_of(h, given, tokens, **more)
    assert_within(out, truth.out, truth.out_error)
    return truth


def near_state(state, truth, t=-1):
    """Assert the state after token t."""
    assert_within(state, truth.states[t], truth.state_error[t], f"state after {t}")


def pool(slots, device, dtype=torch.float32, heads=HEADS):
    return generate.randn(slots, heads, DIM, DSTATE, device=device).to(dtype)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_decode_on_a_pool(variant, device, tied, dtype, index):
    """Slots in any order, padding skipped, other slots untouched, result in a part of a larger buffer."""
    given, state = inputs((5,), device, dtype, tied), pool(9, device)
    slots = torch.tensor([4, -1, 0, 12, 7], dtype=index, device=device)
    before, whole = state.clone(), torch.full((7, HEADS, DIM), POISON, dtype=dtype, device=device)
    out = whole[1:6]
    call = dict(dt_softplus=True, state_batch_indices=slots, out=out)
    assert selective_state_update(state, **given, **call) is out
    assert (whole[0] == POISON).all() and (whole[6] == POISON).all()
    for n, slot in enumerate(slots.tolist()):
        if not 0 <= slot < 9:
            assert not out[n].any()
            continue
        near_state(state[slot], near(out[n : n + 1], before[slot], given, [n]))
    others = [slot for slot in range(9) if slot not in (4, 0, 7)]
    assert_bitwise(state[others], before[others])


@pytest.mark.parametrize("dstate, row", [(24, 24), (40, 48), (16, 20)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_of_any_length_and_distance(variant, device, dstate, row, tokens):
    """States of a dstate that is no power of two, and slices of a pool with longer rows, whose rest stays as it is."""
    given = inputs((3, tokens), device, dstate=dstate)
    wide = generate.randn(5, HEADS, DIM, row, device=device)
    wide[..., dstate:] = POISON
    before, state = wide.clone(), wide[..., :dstate]
    slots = torch.tensor([4, 1, 2], device=device)
    out = selective_state_update(state, **given, dt_softplus=True, state_batch_indices=slots)
    for n, slot in enumerate(slots.tolist()):
        each = [(n, t) for t in range(tokens)]
        h = before[slot, ..., :dstate]
        near_state(state[slot], near(out[n], h, given, each))
    assert_bitwise(wide[..., dstate:], before[..., dstate:])
    assert_bitwise(wide[[0, 3]], before[[0, 3]])


def test_the_null_slot_is_the_callers(variant, device):
    """vLLM's padding is slot 0."""
    given, state = inputs((2,), device), pool(3, device)
    before = state.clone()
    slots = torch.tensor([0, 2], device=device)
    out = selective_state_update(state, **given, state_batch_indices=slots, pad_slot_id=0, dt_softplus=True)
    assert not out[0].any() and out[1].any()
    assert_bitwise(state[:2], before[:2])


def test_without_what_is_optional(variant, device):
    given = inputs((3,), device) | dict(D=None, z=None, dt_bias=None)
    state = pool(3, device)
    before = state.clone()
    out = selective_state_update(state, **given, disable_state_update=True)
    assert_bitwise(state, before)
    for n in range(3):
        near(out[n : n + 1], before[n], given, [n], softplus=False)
    # One head without its dimension.
    one = {name: None if t is None else t[:, 0] for name, t in given.items() if name != "A"}
    flat, single = state[:, 0].clone(), inputs((3,), device, heads=1, groups=1)
    one = {name: t[:, 0] if name in ("x", "dt", "B", "C", "z") else t[0] for name, t in single.items()}
    kept = flat.clone()
    out = selective_state_update(flat, **one, dt_softplus=True)
    for n in range(3):
        near(out[n : n + 1, None], kept[n][None], single, [n])


def test_verification_keeps_each_state(variant, device):
    """T drafts: a state after each to a row of the buffer; the pool stays as it is."""
    given, state = inputs((3, 4), device), pool(5, device)
    before = state.clone()
    each = torch.full((4, 6, HEADS, DIM, DSTATE), POISON, device=device)
    rows, slots = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([2, -1, 0], [1, 3, 4]))
    out = selective_state_update(
        state, **given, dt_softplus=True, state_batch_indices=slots, disable_state_update=True, cache_steps=4,
        intermediate_states_buffer=each, intermediate_state_indices=rows,
    )  # fmt: skip
    assert_bitwise(state, before)
    for n, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
        tokens = {name: t[n] if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}
        truth = near(out[n], before[slot], tokens, range(4))
        if row >= 0:
            assert_within(each[row, :4], truth.states, truth.state_error)
    written = torch.zeros(4, 6, dtype=torch.bool)
    written[[0, 2], :4] = True
    assert (each.cpu()[~written] == POISON).all()


@pytest.mark.parametrize("goal", ["same", "other", "one", None])
@pytest.mark.parametrize("speculative", [True, False])
def test_packed_tokens_write_where_the_caller_says(variant, device, goal, speculative):
    """A table of columns has a slot for the state after each token; a column, or no table, takes the last state only.

    Accepted tokens say where the first state is read; without a table it is replaced there. Tables of a larger batch
    than there are sequences, and strided ones, are the same.
    """
    lengths, first = [2, 0, 3], 1
    total = sum(lengths) + first + 1
    given, state = inputs((total,), device), pool(16, device)
    before = state.clone()
    offsets = (first + torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32, device=device)).repeat_interleave(2)[::2][:4]
    read = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, -1], [99, 99, 99]], dtype=torch.int32, device=device)
    table = {"same": read, "other": read + 7, "one": torch.tensor([10, 11, 12, 13], dtype=torch.int32, device=device)}
    table = table.get(goal)
    accepted = torch.tensor([[2, 1, 1, 9], [0, 0, 0, 0]], dtype=torch.int32, device=device).T[:, 0]
    out = selective_state_update(
        state, **given, dt_softplus=True, state_batch_indices=read, cu_seqlens=offsets,
        num_accepted_tokens=accepted if speculative else None, dst_state_batch_indices=table, cache_steps=3,
    )  # fmt: skip
    assert not out[0].any() and not out[-1].any()
    touched = set()
    for n, length in enumerate(lengths):
        if not length:
            continue
        tokens = range(int(offsets[n]), int(offsets[n + 1]))
        start = int(read[n, accepted[n] - 1 if speculative else 0])
        truth = near(out[tokens.start : tokens.stop], before[start], given, tokens)
        goals = [start] if goal is None else table[n, :length].tolist() if goal != "one" else [int(table[n])]
        for slot, t in zip(reversed(goals), range(length - 1, -1, -1)):
            if slot >= 0:
                near_state(state[slot], truth, t)
                touched.add(slot)
    others = sorted(set(range(16)) - touched)
    assert_bitwise(state[others], before[others])


def test_states_of_drafts_are_at_the_slot_where_no_rows_are_given(variant, device):
    given, state = inputs((2, 2), device), pool(4, device)
    before, slots = state.clone(), torch.tensor([3, 1], device=device)
    each = torch.full((4, 2, HEADS, DIM, DSTATE), POISON, device=device)
    selective_state_update(state, **given, dt_softplus=True, state_batch_indices=slots, disable_state_update=True,
                           intermediate_states_buffer=each, cache_steps=2)  # fmt: skip
    for n, slot in enumerate(slots.tolist()):
        tokens = {name: t[n] if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}
        truth = truth_of(before[slot], tokens, range(2))
        assert_within(each[slot], truth.states, truth.state_error)
    assert (each[[0, 2]] == POISON).all()
    assert_bitwise(state, before)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.float8_e4m3fn, torch.float16, BF16])
def test_narrow_states(variant, device, dtype):
    """What is stored is within half a unit of the state in float64; scales are largest magnitudes."""
    given, wide = inputs((2,), device), pool(3, device)
    largest = {torch.int16: 32767, torch.int8: 127, torch.float8_e4m3fn: 448}.get(dtype)
    scale = None
    state = wide.to(dtype)
    if largest:
        scale = wide.abs().amax(-1) / largest
        state = wide / scale[..., None]
        state = (state if dtype == torch.float8_e4m3fn else state.round()).to(dtype)
    untouched = state[2].clone()
    start = state.double() * (1 if scale is None else scale.double()[..., None])
    selective_state_update(state, **given, dt_softplus=True, state_scale=scale)
    for n in range(2):
        exact = truth_of(start[n], given, [n])
        truth, found = exact.states[0], state[n].double()
        if scale is None:
            near_state(state[n], exact)
            continue
        wanted = truth.abs().amax(-1) / largest
        assert_close(scale[n], wanted.float(), wanted)
        error = (found * scale[n].double()[..., None] - truth).abs()
        unit = scale[n].double()[..., None] * (1 if dtype != torch.float8_e4m3fn else 32)
        assert (error <= 0.51 * unit).all()
    assert_bitwise(state[2], untouched)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.float8_e4m3fn])
def test_nan_of_a_row_stays_in_a_narrow_state(variant, device, dtype):
    """Of that row alone, though a code may not be NaN."""
    given, state = inputs((2,), device), torch.zeros(2, HEADS, DIM, DSTATE, device=device).to(dtype)
    call = dict(dt_softplus=True, state_scale=torch.ones(2, HEADS, DIM, device=device))
    given["x"][1, 2, 5] = torch.nan
    selective_state_update(state, **given, **call)
    out = selective_state_update(state, **inputs((2,), device), **call)
    found = out.isnan()
    assert found[1, 2, 5] and found.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.int16])
def test_stochastic_rounding(variant, device, dtype):
    """Each stored value is one of the two neighbours, their mean over seeds is the value, and a seed repeats."""
    given, wide = inputs((1,), device, heads=2, groups=1), pool(1, device, heads=2)
    coded = dtype == torch.int16
    start = (wide * 100).round() if coded else wide.to(dtype)
    ones = torch.ones(1, 2, DIM, device=device)
    truth = truth_of(start[0], given, [0]).states[0]
    stored = []
    for seed in [*range(24), 0]:
        state, scale = start.to(dtype, copy=True), ones.clone() if coded else None
        selective_state_update(
            state, **given, dt_softplus=True, state_scale=scale, rand_seed=torch.tensor([seed], device=device)
        )
        stored.append(state[0].double() * (scale[0].double()[..., None] if coded else 1))
    assert_bitwise(stored[-1], stored[0])
    values = torch.stack(stored[:-1])
    if coded:
        unit = (truth.abs().amax(-1, keepdim=True) / 32767).expand_as(truth)
    else:
        fraction, least = (7, -126) if dtype == BF16 else (10, -14)
        unit = torch.exp2(truth.abs().log2().floor().clamp(min=least) - fraction)
    error = (values - truth) / unit
    assert (error.abs() < 1.01).all() and (values.std(0) > 0).double().mean() > 0.5
    assert error.mean().abs() < 5 * 0.5 / error.numel() ** 0.5


def test_philox_words():
    """The first word of Random123's known answers for philox4x32-10."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    assert philox.words(0, (zero, 0, 0, 0), 10).item() == 0x6627E8D5
    assert philox.words(0xFFFFFFFFFFFFFFFF, (ones, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), 10).item() == 0x408F276D


def test_long_decode_does_not_drift(device):
    """2000 tokens one at a time, in float32, against float64."""
    given, state = inputs((2000,), device, heads=1, groups=1), pool(1, device, heads=1)
    truth, states, _, _ = truth_of(state[0], given, range(2000))
    for t in range(2000):
        token = {name: v[t : t + 1] if name in ("x", "dt", "B", "C", "z") else v for name, v in given.items()}
        out = selective_state_update(state, **token, dt_softplus=True)
    assert (state[0] - states[-1]).norm() / states[-1].norm() < 1e-6
    assert (out[0] - truth[-1]).norm() / truth[-1].norm() < 1e-5


@pytest.mark.parametrize("left_out", ["group", "head of all but the state", "head of the state alone"])
def test_one_group_or_head_that_is_left_out(variant, device, left_out):
    """Of B and C, of everything but the state, or of the state: upstream adds what is missing to each by itself."""
    heads = HEADS if left_out == "group" else 1
    given, state = inputs((2,), device, tied=False, heads=heads, groups=1), pool(2, device, heads=heads)
    other = state.clone()
    expected = selective_state_update(state, **given, dt_softplus=True, algorithm="async_horizontal")
    if left_out == "group":
        less, updated = given | {name: given[name][:, 0] for name in ("B", "C")}, other
    elif left_out == "head of the state alone":
        less, updated = given, other[:, 0]
    else:
        less, updated = {n: t[0] if n in ("A", "D", "dt_bias") else t[:, 0] for n, t in given.items()}, other
    out = selective_state_update(updated, **less, dt_softplus=True)
    assert out.shape == less["x"].shape
    assert_bitwise(out.view(expected.shape), expected)
    assert_bitwise(other, state)


def test_scales_that_keep_their_axis(variant, device):
    given = inputs((2,), device)
    codes = torch.randint(-90, 90, (2, HEADS, DIM, DSTATE), device=device).to(torch.int8)
    scale = torch.rand(2, HEADS, DIM, device=device) + 0.1
    results = []
    for its in (scale.clone(), scale.clone()[..., None]):
        state = codes.clone()
        out = selective_state_update(state, **given, dt_softplus=True, state_scale=its)
        results.append((out, state, its.view(scale.shape)))
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(ours, theirs)
    assert not torch.equal(results[0][2], scale)


def test_nothing_to_do(variant, device):
    given = inputs((0,), device)
    assert selective_state_update(pool(2, device), **given).shape == (0, HEADS, DIM)


BAD = [
    (dict(state=torch.zeros(3, HEADS, DIM)), "x"), (dict(state=torch.zeros(3, HEADS, DIM, 8)), "A"),
    (dict(x=torch.zeros(2, HEADS, DIM - 1)), "x"), (dict(dt=torch.zeros(2, HEADS, 1)), "dt"),
    (dict(B=torch.zeros(2, 3, DSTATE)), "B"), (dict(C=torch.zeros(2, 1, DSTATE)), "C"),
    (dict(z=torch.zeros(2, HEADS, DIM, dtype=BF16)), "z"), (dict(D=torch.zeros(DIM)), "D"),
    (dict(state_scale=torch.ones(3, HEADS, DIM)), "state_scale"),
    (dict(state=torch.zeros(3, HEADS, DIM, DSTATE, dtype=torch.int8)), "state_scale"),
    (dict(state_batch_indices=torch.zeros(1, dtype=torch.int32)), "state_batch_indices"),
    (dict(state_batch_indices=torch.zeros(2)), "state_batch_indices"),
    (dict(num_accepted_tokens=torch.ones(2, dtype=torch.int32)), "state_batch_indices"),
    (dict(intermediate_states_buffer=torch.zeros(2, 1, HEADS, DIM, 8)), "intermediate_states_buffer"),
    (dict(intermediate_states_buffer=torch.zeros(3, 1, HEADS, DIM, DSTATE),
          dst_state_batch_indices=torch.zeros(2, 1, dtype=torch.int32)), "intermediate_states_buffer"),
    (dict(rand_seed=torch.zeros(1)), "rand_seed"), (dict(algorithm="fast"), "algorithm"),
    (dict(backend="triton"), "backend"), (dict(out=torch.zeros(2, HEADS, DIM, dtype=BF16)), "out"),
]  # fmt: skip


@pytest.mark.parametrize("changed, name", BAD)
def test_bad_input(changed, name):
    given = dict(state=torch.zeros(3, HEADS, DIM, DSTATE)) | inputs((2,), "cpu")
    with pytest.raises(ValueError, match=f"^{name}: got "):
        selective_state_update(**given | changed)


def test_inside_other_defaults(device):
    given, state = inputs((2,), device), pool(2, device)
    other = state.clone()
    expected = selective_state_update(state, **given, dt_softplus=True)
    with torch.device("meta"):
        found = selective_state_update(other, **given, dt_softplus=True)
    assert_bitwise(found, expected)
    assert_bitwise(other, state)


def test_packed_tokens_of_no_sequence(variant, device, monkeypatch):
    """Offsets of no sequence: the output is 0, and no kernel looks for a last sequence."""
    monkeypatch.setattr(room, "update", None)
    given = inputs((3,), device)
    out = torch.full((3, HEADS, DIM), POISON, device=device)
    offsets = torch.zeros(1, dtype=torch.int32, device=device)
    state = pool(2, device)
    before = state.clone()
    selective_state_update(state, **given, cu_seqlens=offsets, out=out)
    assert_bitwise(out, torch.zeros_like(out))
    assert_bitwise(state, before)

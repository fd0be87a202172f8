"""Replay from a checkpoint and a ring, call after call, against one recurrence in float64 over the accepted tokens."""

import math

import pytest
import torch

from flashinfer import mamba
from flashinfer.mamba.checkpointing_ssu import CheckpointingSSURunner
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.recurrent.rules import assert_within
from tests.ops.recurrent.ssm.test_ssm import DIM, DSTATE, GROUPS, HEADS, inputs, near_state, pool, truth_of

POISON = 777.0
PER_TOKEN = ("x", "dt", "B", "C", "z")


def ring(slots, length, device, dtype=torch.float32):
    """Rings full of poison: what is not written is not read."""
    caches = [
        torch.full((slots, HEADS, length, DIM), POISON, dtype=dtype, device=device),
        torch.full((slots, GROUPS, length, DSTATE), POISON, dtype=dtype, device=device),
        torch.full((slots, HEADS, length), POISON, device=device),
    ]
    return caches, *(torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))


@pytest.mark.parametrize("packed", [False, True])
def test_steps_of_speculative_decoding(variant, device, packed):
    """Nine calls of T = 2 drafts on rings of 7 rows, some accepted: wraps, checkpoints that wait and that move."""
    T, R, slots = 2, 7, torch.tensor([3, 1], device=device)
    state = pool(5, device)
    before = state.clone()
    caches, start, count = ring(5, R, device)
    history = {n: [] for n in range(2)}
    given = inputs((2, 9 * T), device)
    moved = 0
    for call in range(9):
        now = {k: v[:, call * T : call * T + T] if k in PER_TOKEN else v for k, v in given.items()}
        z, D, bias = now.pop("z"), now.pop("D"), now.pop("dt_bias")
        full = count[slots] + 2 * T > R
        shape = (2, T, HEADS, DIM)
        options = dict(D=D, z=z, dt_bias=bias, dt_softplus=True, state_batch_indices=slots)
        if packed:
            now |= {k: v.flatten(0, 1)[None] for k, v in now.items() if k in PER_TOKEN}
            now["dt"] = now["dt"][..., :1].expand(1, 2 * T, HEADS, DIM)
            offsets = torch.tensor([0, T, 2 * T], dtype=torch.int32, device=device)
            options |= dict(z=z.flatten(0, 1)[None], cu_seqlens=offsets, max_seqlen=T)
            shape = (1, 2 * T, HEADS, DIM)
        out = torch.full(shape, POISON, device=device)
        order = [now[name] for name in ("x", "dt", "A", "B", "C")]
        assert mamba.checkpointing_ssu(state, *caches, start, count, *order, out, **options) is out
        for n, slot in enumerate(slots.tolist()):
            tokens = {k: v[n] if k in PER_TOKEN else v for k, v in given.items()}
            new = [*history[n], *range(call * T, call * T + T)]
            truth = truth_of(before[slot], tokens, new)
            assert_within(out.view(2, T, HEADS, DIM)[n], truth.out[-T:], truth.out_error[-T:])
            if full[n]:
                moved += 1
                start[slot] = (start[slot] + count[slot]) % R
                count[slot] = 0
                if history[n]:
                    near_state(state[slot], truth_of(before[slot], tokens, history[n]))
            accepted = (call + n) % 2 + 1
            count[slot] += accepted
            history[n] += range(call * T, call * T + accepted)
    assert moved
    assert_bitwise(state[[0, 2, 4]], before[[0, 2, 4]])
    assert all((cache[[0, 2, 4]] == POISON).all() for cache in caches)


def test_padding_and_narrow_states(variant, device):
    """A pad slot is neither read nor written; a checkpoint in int8 moves with its scale."""
    T, R = 2, 4
    wide = pool(3, device)
    scale = wide.abs().amax(-1) / 127
    state = (wide / scale[..., None]).round().to(torch.int8)
    caches, start, count = ring(3, R, device)
    given = inputs((2, T), device)
    slots, count[2] = torch.tensor([0, 2], device=device), 1
    for cache, name in zip(caches, ("x", "B", "dt"), strict=True):
        old = given[name][1, 0]
        cache[2][:, 0] = old[:, 0] if name == "dt" else old
    before, kept = state.clone(), scale.clone()
    out = torch.full((2, T, HEADS, DIM), POISON, device=device)
    order = [given[name] for name in ("x", "dt", "A", "B", "C")]
    mamba.checkpointing_ssu(
        state, *caches, start, count, *order, out, dt_softplus=False, state_batch_indices=slots, pad_slot_id=0,
        state_scale=scale,
    )  # fmt: skip
    assert not out[0].any() and (caches[0][0] == POISON).all()
    assert_bitwise(state[:2], before[:2])
    tokens = {k: v[1] if k in PER_TOKEN else v for k, v in given.items()} | dict(z=None, D=None, dt_bias=None)
    start_state = before[2].double() * kept[2].double()[..., None]
    truth = truth_of(start_state, tokens, [0, 0, 1], softplus=False)
    assert_within(out[1], truth.out[1:], truth.out_error[1:])
    error = (state[2].double() * scale[2].double()[..., None] - truth.states[0]).abs()
    assert (error <= 0.51 * scale[2].double()[..., None]).all()


@pytest.mark.parametrize(("dim", "dstate"), [(1, 4), (4, 1), (1, 1)])
def test_axes_of_one_element_repeat_a_value_whatever_their_stride(dim, dstate, device):
    """Torch leaves the stride of such an axis as it was: no stride of 0 says that a head has one value of dt and A."""
    x, B = torch.ones(1, 2, 2, dim, device=device), torch.ones(1, 2, 1, dstate, device=device)
    dt = torch.full((1, 2, 2, 1), 0.5, device=device).expand(1, 2, 2, dim)
    A = torch.full((2, 1, 1), -1.0, device=device).expand(2, dim, dstate)
    caches = [torch.zeros(1, *shape, device=device) for shape in ((2, 4, dim), (1, 4, dstate), (2, 4))]
    start, count = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    out = torch.full_like(x, POISON)
    mamba.checkpointing_ssu(torch.zeros(1, 2, dim, dstate, device=device), *caches, start, count, x, dt, A, B, B, out)
    truth = 0.5 * dstate * torch.tensor([1, 1 + math.exp(-0.5)], dtype=torch.float64, device=device)
    torch.testing.assert_close(out.double(), truth[None, :, None, None].expand(x.shape), rtol=1e-5, atol=0)


def test_scratch_and_runner(device):
    scratch = mamba.allocate_checkpointing_ssu_scratch(2, HEADS, 2, 5, torch.bfloat16, device)
    assert [tuple(t.shape) for t in scratch] == [(2, HEADS, 32, 8), (2, HEADS, 16), (2, HEADS, 32, 4)]
    with pytest.raises(ValueError, match="^max_window"):
        mamba.allocate_checkpointing_ssu_scratch(2, HEADS, 2, 17, torch.bfloat16, device)
    options = dict(requested_algorithm=0, requested_d_split=0, precompute_heads_per_cta=0, heads_per_group=2)
    runner = CheckpointingSSURunner(
        ("bf16",), dt_softplus=True, pad_slot_id=-1, optional_tensor_presence=(False,), **options
    )
    given, state = inputs((1, 2), device), pool(1, device)
    caches, start, count = ring(1, 4, device)
    out, expected = (torch.zeros(1, 2, HEADS, DIM, device=device) for _ in range(2))
    order = [given[name] for name in ("x", "dt", "A", "B", "C")]
    mamba.checkpointing_ssu(state, *caches, start, count, *order, expected, dt_softplus=True)
    assert runner.get_valid_tactics([], None) == [-1] and hash(runner) == hash(runner)
    runner([state, *order, out, *caches, start, count])
    assert_bitwise(out, expected)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(x_cache=torch.zeros(2, HEADS, 3, DIM)), "x_cache"),
        (dict(B_cache=torch.zeros(2, 1, 4, DSTATE)), "B_cache"),
        (dict(dt_cache=torch.zeros(2, HEADS, 4).half()), "dt_cache"), (dict(ring_start=torch.zeros(2)), "ring_start"),
        (dict(prev_num_accepted_tokens=torch.zeros(3, dtype=torch.int32)), "prev_num_accepted_tokens"),
        (dict(dt=torch.zeros(2, 2, HEADS, DIM)), "dt, A, dt_bias"), (dict(max_seqlen=2), "max_seqlen"),
        (dict(algorithm="both"), "algorithm"), (dict(cb_old=torch.zeros(1)), "cb_scaled, cumAdt_vec, cb_old"),
        (dict(out=torch.zeros(2, 2, HEADS, DIM).half()), "out"),
    ],
)  # fmt: skip
def test_bad_input(changed, name):
    given = inputs((2, 2), "cpu")
    caches, start, count = ring(2, 4, "cpu")
    call = dict(zip(("x_cache", "B_cache", "dt_cache"), caches, strict=True))
    call |= {name: given[name] for name in ("x", "dt", "A", "B", "C")}
    call |= dict(state=pool(2, "cpu"), ring_start=start, prev_num_accepted_tokens=count)
    call |= dict(out=torch.zeros(2, 2, HEADS, DIM))
    with pytest.raises(ValueError, match=f"^{name}: got "):
        mamba.checkpointing_ssu(**call | changed)

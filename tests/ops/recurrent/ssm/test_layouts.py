"""State spaces on states, rings and inputs of every layout and dtype."""

import pytest
import torch

from flashinfer import mamba
from flashinfer.mamba import selective_state_update
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.recurrent.rules import assert_within
from tests.ops.recurrent.ssm.test_ssm import DIM, DSTATE, GROUPS, HEADS, inputs, near, near_state, pool, truth_of

BF16 = torch.bfloat16
CODES = {torch.int16: 32767, torch.int8: 127, torch.float8_e4m3fn: 448}
NAN = float("nan")


def encoded(wide, dtype):
    """(states, scales or None, what they mean in float64)."""
    if dtype not in CODES:
        state = wide.to(dtype)
        return state, None, state.double()
    scale = wide.abs().amax(-1) / CODES[dtype]
    codes = wide / scale[..., None]
    state = (codes.round() if dtype != torch.float8_e4m3fn else codes).to(dtype)
    return state, scale, state.double() * scale.double()[..., None]


def near_codes(state, scale, truth, error, units=0.51):
    """States as they are stored: within half a unit of the last place, or one, and what is allowed before."""
    if scale is None:
        return assert_within(state, truth, error, "state")
    largest = truth.abs().amax(-1)
    assert_within(scale, largest / CODES[state.dtype], error.amax(-1) / CODES[state.dtype], "scale")
    unit = scale.double()[..., None]
    found = state.double() * unit
    # Of e4m3, the distance of codes at a value; the smallest is 2^-9.
    last = unit * torch.exp2((truth / unit).abs().clamp(min=2.0**-6).log2().floor() - 3)
    allowed = (last if state.dtype == torch.float8_e4m3fn else unit) * units + error
    assert ((found - truth).abs() <= allowed).all()


@pytest.mark.parametrize("begin", [1, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_rows_that_begin_anywhere(variant, device, begin, tied, dtype):
    """States, B and C are parts of wider rows; A and D come in bfloat16; slots are part of a larger table."""
    given = inputs((3, 2), device, dtype, tied)
    mixed = torch.cat([given["B"][..., :begin], given["B"], given["C"]], -1)
    given["B"], given["C"] = (mixed[..., begin + i * DSTATE : begin + (i + 1) * DSTATE] for i in range(2))
    for name in ("A", "D", "dt_bias"):
        short = given[name][:, :1, :1] if tied and name == "A" else given[name][:, :1] if tied else given[name]
        given[name] = short.to(BF16).expand(given[name].shape)
    wide = torch.full((6, HEADS, DIM, DSTATE + begin + 3), NAN, device=device)
    state = wide[..., begin : begin + DSTATE]
    state.copy_(pool(6, device))
    before = state.clone()
    slots = torch.tensor([99, 5, -1, 0, 99], dtype=torch.int32, device=device)[1:4]
    out = selective_state_update(state, **given, dt_softplus=True, state_batch_indices=slots)
    for n, slot in ((0, 5), (2, 0)):
        tokens = [(n, 0), (n, 1)]
        near_state(state[slot], near(out[n], before[slot], given, tokens))
    assert not out[1].any()
    assert_bitwise(state[1:5].contiguous(), before[1:5].contiguous())
    assert wide[..., :begin].isnan().all() and wide[..., begin + DSTATE :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, *CODES], ids=str)
@pytest.mark.parametrize("into", ["buffer", "pool"])
def test_narrow_states_of_drafts(variant, device, into, dtype):
    """After each token, with their scales; a state goes on in float32 from one token to the next."""
    given = inputs((2, 3), device)
    state, scale, start = encoded(pool(8, device), dtype)
    before, kept = state.clone(), None if scale is None else scale.clone()
    slots = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    each = torch.zeros(4, 3, HEADS, DIM, DSTATE, dtype=dtype, device=device)
    each_scale = None if scale is None else torch.zeros(4, 3, HEADS, DIM, device=device)
    rows = torch.tensor([3, 1], device=device)
    more = dict(state_batch_indices=slots, dst_state_batch_indices=slots)
    if into == "buffer":
        more = dict(state_batch_indices=slots[:, 0], disable_state_update=True, intermediate_states_buffer=each)
        more |= dict(intermediate_state_indices=rows, intermediate_state_scales=each_scale, cache_steps=3)
    out = selective_state_update(state, **given, dt_softplus=True, state_scale=scale, **more)
    for n in range(2):
        truth = near(out[n], start[slots[n, 0]], given, [(n, t) for t in range(3)])
        found, scales = (each, each_scale) if into == "buffer" else (state, scale)
        for t in range(3):
            at = (rows[n], t) if into == "buffer" else slots[n, t]
            near_codes(found[at], None if scales is None else scales[at], truth.states[t], truth.state_error[t])
    others = slice(None) if into == "buffer" else [0, 7]
    assert_bitwise(state[others], before[others])
    if scale is not None:
        assert_bitwise(scale[others], kept[others])
    assert not each[[0, 2] if into == "buffer" else slice(None)].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, *CODES], ids=str)
@pytest.mark.parametrize("gap, dstate, table", [(0, 24, torch.int32), (3, DSTATE, None)])
def test_replay(variant, device, gap, dstate, table, dtype):
    """From rings with old tokens that wrap, which are full for one of two sequences: its state moves."""
    T, R = 2, 6
    given = inputs((2, 5), device, dstate=dstate)
    codes, scale, start = encoded(generate.randn(3, HEADS, DIM, dstate, device=device), dtype)
    wide = torch.zeros(3, HEADS, DIM, dstate + gap, dtype=dtype, device=device)
    state = wide[..., gap:]
    state.copy_(codes)
    kept = None if scale is None else scale.clone()
    slots = [2, 1] if table else [0, 1]
    counts, begins = [3, 1], [4, 5]
    x_cache = torch.full((3, HEADS, R, DIM), NAN, device=device)
    B_cache = torch.full((3, GROUPS, R, dstate + gap), NAN, device=device)[..., gap:]
    dt_cache = torch.full((3, HEADS, R), NAN, device=device)
    start_of, count = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
    for n, slot in enumerate(slots):
        start_of[slot], count[slot] = begins[n], counts[n]
        for t in range(counts[n]):
            at = (begins[n] + t) % R
            x_cache[slot, :, at], B_cache[slot, :, at] = given["x"][n, t], given["B"][n, t]
            dt_cache[slot, :, at] = given["dt"][n, t, :, 0]
    new = {k: torch.stack([given[k][n, c : c + T] for n, c in enumerate(counts)]) for k in ("x", "dt", "B", "C", "z")}
    new["dt"] = new["dt"][..., :1].expand(2, T, HEADS, DIM)
    more = {} if table is None else dict(state_batch_indices=torch.tensor(slots, dtype=table, device=device))
    out = torch.full((2, T, HEADS, DIM), NAN, device=device)
    mamba.checkpointing_ssu(
        state, x_cache, B_cache, dt_cache, start_of, count, *(new[k] for k in ("x", "dt")), given["A"], new["B"],
        new["C"], out, D=given["D"], z=new["z"], dt_softplus=False, state_scale=scale, **more,
    )  # fmt: skip
    for n, slot in enumerate(slots):
        tokens = [(n, t) for t in range(counts[n] + T)]
        truth = truth_of(start[slot], given | dict(dt_bias=None), tokens, softplus=False)
        assert_within(out[n], truth.out[-T:], truth.out_error[-T:])
        old = None if scale is None else scale[slot]
        if counts[n] + 2 * T > R:
            near_codes(state[slot], old, truth.states[counts[n] - 1], truth.state_error[counts[n] - 1])
        else:
            assert_bitwise(state[slot].contiguous(), codes[slot])
            assert scale is None or torch.equal(old, kept[slot])
        ring = [(begins[n] + t) % R for t in range(counts[n] + T)]
        assert_bitwise(B_cache[slot][:, ring], given["B"][n, : counts[n] + T].transpose(0, 1))
        others = [at for at in range(R) if at not in ring]
        assert x_cache[slot][:, others].isnan().all() and dt_cache[slot][:, others].isnan().all()

"""Delta rules on states and inputs of every layout and dtype: rows of any length and alignment, columns first, FP8."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer import gdn_decode
from flashinfer._core.dispatch import Op
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.recurrent.delta.test_delta import Layer
from tests.ops.recurrent.delta.test_kda import Case, every
from tests.ops.recurrent.oracle import bounded_decay, recurrence
from tests.ops.recurrent.rules import assert_near

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
near = partial(assert_near, by=2e-5)
NAN = float("nan")
FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def assert_stored(state, truth):
    """A state in its dtype, which Triton's interpreter cuts to bfloat16."""
    finfo = torch.finfo(state.dtype)
    allowed = finfo.eps * truth.abs() + max(2e-5, finfo.smallest_normal * finfo.eps)
    assert ((state.double() - truth).abs() <= allowed).all()


def laid(pool, layout):
    """The same values in another place: (states, the tensor that holds them, which has NaN in between)."""
    slots, heads, values, keys = pool.shape
    if layout == "wide rows":
        whole = torch.full((slots, heads, values, keys + 16), NAN, dtype=pool.dtype, device=pool.device)
        part = whole[..., :keys]
    elif layout == "unaligned":
        whole = torch.full((slots, heads, values, keys + 3), NAN, dtype=pool.dtype, device=pool.device)
        part = whole[..., 1 : keys + 1]
    elif layout == "columns":
        whole = torch.full((slots, heads, keys, values), NAN, dtype=pool.dtype, device=pool.device)
        part = whole.transpose(-1, -2)
    elif layout == "neither":
        whole = torch.full((slots, heads, values, keys, 2), NAN, dtype=pool.dtype, device=pool.device)
        part = whole[..., 1]
    else:  # Of one buffer, in which slots have other things too.
        whole = torch.full((slots * (heads * values * keys + 64),), NAN, dtype=pool.dtype, device=pool.device)
        part = whole.as_strided(pool.shape, (heads * values * keys + 64, values * keys, keys, 1), 32)
    part.copy_(pool)
    return part, whole


def gaps_are_left(part, whole):
    held = whole.clone()
    torch.as_strided(held, part.shape, part.stride(), part.storage_offset()).fill_(NAN)
    return held.isnan().all()


LAYOUTS = ["wide rows", "unaligned", "columns", "neither", "one buffer"]


def in_turn(*others):
    """Each layout, with one of the others in turn."""
    return [(layout, others[i % len(others)]) for i, layout in enumerate(LAYOUTS)]


@backends
@pytest.mark.parametrize("layout, dtype", [*in_turn(torch.float32), *in_turn(*FP8)], ids=str)
def test_steps(backend, device, layout, dtype):
    case = Case(3, 1, dim=32, dtype=torch.float32, device=device)
    pool = case.states(5, dtype)
    before = pool.clone()
    states, whole = laid(pool, layout)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    out, given = flashinfer.recurrent_kda(
        *case.inputs, initial_state=states, ssm_state_indices=slots, output_final_state=True, backend=backend,
        **case.more,
    )  # fmt: skip
    assert given is states and not out[1].any()
    for i in (0, 2):
        truth, after, _ = case.truth(i, every, before[slots[i]].float())
        near(out[i], truth)
        assert_stored(states[slots[i]], after[0])
    for slot in (1, 2, 3):
        assert_bitwise(states[slot].contiguous(), before[slot])
    assert gaps_are_left(states, whole)


@backends
@pytest.mark.parametrize("layout, dim", in_turn(24, 32))
def test_drafts_in_a_tree(backend, device, layout, dim):
    """States in slots, from gates that are logarithms and keys that are not normalized."""
    tree = [-1, 0, 0, 1, 3]
    case = Case(2, 5, (2, 2), dim=dim, device=device)
    case.k = case.k / 8
    g, beta = -case.g.abs(), case.beta.sigmoid()
    states, whole = laid(case.states(12), layout)
    before = states.clone()
    slots = torch.arange(2, 12, dtype=torch.int32, device=device).view(2, 5)
    out, _ = flashinfer.recurrent_kda(
        case.q, case.k, case.v, g, beta, initial_state=states, ssm_state_indices=slots, num_spec_tokens=4,
        parents=torch.tensor([tree, tree], device=device), scale=0.3, use_qk_l2norm_in_kernel=False, backend=backend,
    )  # fmt: skip
    for i in range(2):
        given = case.q[i], case.k[i], case.v[i], g[i].double().exp(), beta[i], before[slots[i, 0]]
        truth, after, _ = recurrence(*given, 0.3, parents=tree)
        near(out[i], truth)
        near(states[slots[i].long()], after)
    assert_bitwise(states[:2].contiguous(), before[:2].contiguous())
    assert gaps_are_left(states, whole)


@backends
@pytest.mark.parametrize("layout, size", in_turn((20, -5.0), (32, None)))
def test_prompts(backend, device, layout, size):
    """Inputs are slices of one projection, from within 16 bytes on; offsets are those of a larger table."""
    dim, lower = size
    case = Case(1, 80, (2, 2), dim=dim, lower=lower, device=device)
    mixed = torch.cat([case.q[..., :1], case.q, case.k, case.v], -1)
    q, k, v = (mixed[..., 1 + i * dim : 1 + (i + 1) * dim] for i in range(3))
    states, whole = laid(case.states(3), layout)
    before = states.clone()
    offsets = torch.tensor([999, 2, 66, 66, 79, 999], device=device)[1:5]
    out, _ = flashinfer.recurrent_kda(
        q, k, v, case.g, case.beta, initial_state=states, cu_seqlens=offsets, output_final_state=True, backend=backend,
        **case.more,
    )  # fmt: skip
    for i, span in enumerate((slice(2, 66), slice(66, 66), slice(66, 79))):
        truth, after, _ = case.truth(0, span, before[i])
        if len(truth):
            near(out[0, span], truth)
            near(states[i], after[-1])
        else:
            assert_bitwise(states[i].contiguous(), before[i].contiguous())
    assert not out[0, :2].any() and not out[0, 79:].any()
    assert gaps_are_left(states, whole)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim, gap", [(32, 0), (24, 0), (20, 0), (32, 3)])
def test_commits(backend, device, dtype, dim, gap):
    """Replay windows and states of layers in one buffer, of rows that need not be aligned."""
    layer = Layer(2, 3, 1, 2, dim, dim, dtype, device)
    buffer = torch.full((4, 2, dim, dim + gap), NAN, dtype=dtype, device=device)
    states = buffer[None, ..., gap:]
    states.copy_(layer.states(4)[None] * 0.1)
    before = states.clone()
    windows = [torch.full((4, 2, 3, dim), NAN, dtype=dtype, device=device),
               torch.full((4, 1, 3, dim), NAN, dtype=dtype, device=device),
               *(torch.full((4, 2, 3), NAN, device=device) for _ in range(2))]  # fmt: skip
    slots = torch.tensor([3, 1], dtype=torch.int32, device=device)
    names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
    gdn_decode.gated_delta_rule_mtp(
        layer.q, layer.k, layer.v, states[0], slots, *layer.gates, layer.scale, disable_state_update=True,
        cache_replayssm=True, backend=backend, **dict(zip(names, windows)),
    )  # fmt: skip
    accepted = torch.tensor([2, 3], dtype=torch.int32, device=device)
    gdn_decode.gated_delta_rule_replayssm_commit(
        states, *(w[None] for w in windows), slots, accepted, backend=backend
    )
    for i, slot in enumerate(slots.tolist()):
        assert_stored(states[0, slot], layer.truth(i, before[0, slot].float())[1][accepted[i] - 1])
    assert_bitwise(states[0, ::2].contiguous(), before[0, ::2].contiguous())
    assert buffer[..., :gap].isnan().all()


@pytest.mark.parametrize("token", [-1, 3])
def test_a_path_names_tokens_of_the_window(token):
    """Where it is read: behind the accepted tokens, and of padding, it may have anything."""
    states = torch.zeros(1, 4, 2, 16, 16)
    windows = torch.ones(1, 4, 2, 3, 16), torch.ones(1, 4, 1, 3, 16), torch.zeros(1, 4, 2, 3), torch.ones(1, 4, 2, 3)
    path, slots = torch.tensor([[0, 1, token], [token, 0, 0]]), torch.tensor([2, -1])
    gdn_decode.gated_delta_rule_replayssm_commit(states, *windows, slots, torch.tensor([2, 3]), accept_path=path)
    assert states[0, 2].any() and not states[0, [0, 1, 3]].any()
    before = states.clone()
    with pytest.raises(ValueError, match="^accept_path: got"):
        gdn_decode.gated_delta_rule_replayssm_commit(states, *windows, slots, torch.tensor([3, 0]), accept_path=path)
    assert_bitwise(states, before)


def convolved(window, taps):
    """SiLU of windows [channels, width] times taps, in float64."""
    y = (window.double() * taps.double()).sum(-1)
    return y * y.sigmoid()


@pytest.mark.parametrize("layout, dtypes", in_turn((torch.float32, torch.float32), (torch.float16, FP8[0])), ids=str)
@pytest.mark.parametrize("dim", [32, 24])
@backends
def test_a_token_of_a_whole_layer(backend, device, layout, dtypes, dim, monkeypatch):
    """By fused_kda_decode: convolution, gates, recurrence and norm."""
    dtype, state_dtype = dtypes
    select, heads, width = Op.__call__, 2, 3
    monkeypatch.setattr(Op, "__call__", lambda self, problem, device, _="": select(self, problem, device, backend))
    inner = heads * dim

    def randn(*shape):
        return generate.randn(*shape, dtype=dtype, device=device)

    x, weight, conv = randn(3, 3 * inner), randn(3, width, inner), randn(5, 3 * inner, width - 1)
    gate, beta, out_gate = randn(1, 3, heads, dim), randn(1, 3, heads), randn(3, heads, dim)
    A_log, norm = generate.randn(heads, device=device), generate.randn(dim, device=device)
    bias = generate.randn(inner, device=device)
    states, whole = laid(generate.randn(5, heads, dim, dim, device=device).to(state_dtype), layout)
    before, windows = states.clone().float(), conv.clone()
    slots = torch.tensor([4, 0, 2], device=device)
    out = flashinfer.fused_kda_decode(x, weight, conv, gate, beta, A_log, bias, slots, states, out_gate, norm)
    taps = weight.transpose(1, 2).reshape(-1, width)
    for row, slot in ((0, 4), (2, 2)):
        window = torch.cat([windows[slot], x[row][:, None]], 1)
        q, k, v = convolved(window, taps).reshape(3, 1, heads, dim)
        decay = bounded_decay(gate[:, row], A_log, bias.view(heads, dim), -5.0)
        given = q, k, v, decay, beta[:, row].double().sigmoid(), before[slot], dim**-0.5, True
        o, after, _ = recurrence(*given)
        o = o[0] / (o[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
        near(out[0, row], o * out_gate[row].double().sigmoid(), by=3e-5 if dtype == torch.float32 else 1e-3)
        assert_stored(states[slot], after[-1])
        assert_bitwise(conv[slot], window[:, 1:])
    assert not out[0, 1].any()
    assert_bitwise(states[[0, 1, 3]].float().contiguous(), before[[0, 1, 3]])
    assert gaps_are_left(states, whole)

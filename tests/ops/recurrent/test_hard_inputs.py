"""Recurrent layers on hard inputs: decays that forget, states of 1e30, vectors of zeros, NaN in one request or head."""

import copy
import math
from functools import partial

import pytest
import torch

import flashinfer
from flashinfer.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from flashinfer.mamba import selective_state_update
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.norm.variants import variant  # the fixture
from tests.ops.recurrent.delta.test_kda import Case, every
from tests.ops.recurrent.delta.test_prefill import Prompt as DeltaPrompt
from tests.ops.recurrent.oracle import recurrence
from tests.ops.recurrent.rules import assert_near
from tests.ops.recurrent.ssd.test_ssd import Prompt
from tests.ops.recurrent.ssm.test_ssm import inputs, near_state, pool
from tests.ops.recurrent.ssm.test_ssm import near as near_steps

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
near = partial(assert_near, by=2e-5)
INF = math.inf
TREE = [-1, 0, 0, 1, 3, -1]


class Decayed(Case):
    """Kimi's layer with logarithms of decays and beta as they are: recurrent_kda's other form."""

    def __init__(self, rows, tokens, device, beta=1.0, dtype=torch.float32):
        super().__init__(rows, tokens, (2, 2), 16, None, dtype, device)
        self.g, self.beta = -torch.rand_like(self.g), torch.full_like(self.beta, beta)
        self.inputs = self.q, self.k, self.v, self.g, self.beta

    def truth(self, row, span, state, parents=None):
        tensors = (x[row, span] for x in (self.q, self.k, self.v))
        decay = self.g[row, span].double().exp()
        return recurrence(*tensors, decay, self.beta[row, span], state, self.dim**-0.5, True, parents)

    def run(self, backend, **more):
        given = self.q, self.k, self.v, self.g, self.beta
        return flashinfer.recurrent_kda(*given, use_qk_l2norm_in_kernel=True, backend=backend, **more)


def modes(case, mode, backend, state):
    """(results, the state after each token or the last) of a layer's rows by a mode."""
    rows, tokens = case.q.shape[:2]
    if mode == "chunks":
        final = state.clone()
        out, _ = case.run(backend, initial_state=final, output_final_state=True)
        return out, final[:, None]
    pool = torch.cat([state, torch.zeros(rows * tokens, *state.shape[1:], device=state.device)])
    slots = torch.arange(rows, rows * (tokens + 1), dtype=torch.int32, device=state.device).view(rows, tokens)
    pool[slots[:, 0].long()] = state
    more = dict(parents=torch.tensor([TREE] * rows, device=state.device)) if mode == "tree" else {}
    out, _ = case.run(backend, initial_state=pool, ssm_state_indices=slots, num_spec_tokens=tokens - 1, **more)
    return out, pool[slots.long()]


@backends
@pytest.mark.parametrize("mode", ["chain", "tree", "chunks"])
@pytest.mark.parametrize("decay", [-1e30, -INF])
def test_decays_and_betas(backend, device, mode, decay):
    """A token that forgets, all channels or each second one; beta 0, 1 and 2; keys and queries of zeros."""
    case = Decayed(2, 6 if mode != "chunks" else 70, device)
    case.g[0, 2], case.g[1, ::3, :, ::2], case.g[0, 3] = decay, decay, 0
    case.beta[0, :, 1], case.beta[1, 1::3] = 0, 2
    case.k[1, 3], case.q[0, 4] = 0, 0
    state = case.states(2)
    out, states = modes(case, mode, backend, state)
    for i in range(2):
        truth, after, _ = case.truth(i, every, state[i], parents=TREE if mode == "tree" else None)
        by = 2e-6 if backend == "reference" else 2e-5
        near(out[i], truth, f"row {i}", by=by)
        near(states[i], after if mode != "chunks" else after[-1:], f"state {i}", by=by)


@backends
@pytest.mark.parametrize("mode", ["chain", "tree", "chunks"])
def test_large_states(backend, device, mode):
    """1e30, beside which a token is nothing."""
    case = Decayed(1, 6 if mode != "chunks" else 70, device)
    state = case.states(1) * 1e30
    out, states = modes(case, mode, backend, state)
    truth, after, _ = case.truth(0, every, state[0], parents=TREE if mode == "tree" else None)
    near(out[0] / 1e30, truth / 1e30)
    near(states[0, -1] / 1e30, after[-1] / 1e30)


@backends
@pytest.mark.parametrize("mode", ["chain", "tree", "chunks"])
def test_nan_stays_in_its_request_and_head(backend, device, mode, extrema_of_a_gpu):
    case = Decayed(2, 6 if mode != "chunks" else 20, device)
    state = case.states(2)
    out, states = modes(case, mode, backend, state)
    for where in ("q", "k", "v", "g", "beta", "state") if mode != "chunks" else ("k", "g", "state"):
        spoiled, other = state.clone(), copy.copy(case)
        if where == "state":
            spoiled[1, 1, 3, 3] = math.nan
        else:
            setattr(other, where, getattr(case, where).clone())
            getattr(other, where)[1, 2, 1] = math.nan
        found, after = modes(other, mode, backend, spoiled)
        for got, had in ((found, out), (after, states)):
            got, had = (x.transpose(1, 2).contiguous() for x in (got, had))
            assert_bitwise(got[0], had[0], where)
            assert_bitwise(got[1, 0], had[1, 0], where)
        assert found[1, 2, 1].isnan().any(), where
        assert where == "q" or after[1, -1 if mode != "tree" else 2, 1].isnan().any(), where
        if mode != "chunks" and where != "state":
            # A query reaches no other token.
            apart = [0, 1, 3, 4, 5] if where == "q" else [0, 1]
            assert_bitwise(found[1, apart], out[1, apart], where)


@backends
@pytest.mark.parametrize("use_cp", [True, False])
def test_nan_of_one_decay_a_head_stays_there(backend, device, use_cp, extrema_of_a_gpu):
    """Prompts with one decay for each head; in parts that go in parallel too."""
    prompt = DeltaPrompt([20, 70], (2, 2, 2), (16, 16), device=device)
    states = prompt.states()
    out, final = prompt.run(states, backend, use_cp=use_cp)
    for where in ("k", "g", "state"):
        other, spoiled = copy.copy(prompt), states.clone()
        if where == "state":
            spoiled[1, 0, 3, 3] = math.nan
        else:
            setattr(other, where, getattr(prompt, where).clone())
            getattr(other, where)[30, 0] = math.nan
        found, after = other.run(spoiled, backend, use_cp=use_cp)
        assert_bitwise(found[:20], out[:20], where)
        assert_bitwise(found[:, 1].contiguous(), out[:, 1].contiguous(), where)
        assert_bitwise(after[0], final[0], where)
        assert_bitwise(after[1, 1], final[1, 1], where)
        assert found[30, 0].isnan().any() and after[1, 0].isnan().any(), where


# -- state spaces -----------------------------------------------------------------------------------------------------

STEPS = (0.0, -80.0, -1e4, 30.0, 1e4, 1e30)
RATES = (0.0, -1e-30, -1.0, -1e30, -INF)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("softplus", [True, False])
def test_steps_and_rates_of_any_size(variant, device, tied, softplus):
    """A request for each dt, and a head or a row for each rate; 0 times infinity has no value and is left out."""
    given = inputs((len(STEPS),), device, tied=tied, heads=len(RATES), groups=1)
    state = pool(len(STEPS), device, heads=len(RATES))
    state[:, 1] *= 1e30
    before = state.clone()
    steps = torch.tensor(STEPS, device=device)
    steps = steps if softplus else steps.abs()
    given["dt"] = steps[:, None, None].expand_as(given["dt"])
    rates = torch.tensor(RATES, device=device)
    given["A"] = rates[:, None, None].expand_as(given["A"])
    given["dt_bias"] = torch.full_like(given["dt_bias"][:, :1], 1e-3).expand_as(given["dt_bias"])
    given["B"][0], given["C"][1], given["x"][2] = 0, 0, 0
    given["z"][:, :2] *= 1e4
    given["z"] = given["z"].clamp(min=-80)
    out = selective_state_update(state, **given, dt_softplus=softplus)
    for n, step in enumerate(STEPS):
        # exp(-1e4) is 0.
        heads = slice(0, 4 if softplus and step == -1e4 else 5)
        of = {k: t if t.dim() == 3 and k in "BC" else t[:, heads] if k in ("x", "z", "dt") else t[heads]
              for k, t in given.items()}  # fmt: skip
        truth = near_steps(out[n : n + 1, heads], before[n, heads], of, [n], softplus=softplus)
        near_state(state[n, heads], truth)


def test_nan_of_a_step_stays_in_its_request_and_head(variant, device):
    given, state = inputs((3, 2), device, groups=4), pool(3, device)
    after = state.clone()
    out = selective_state_update(after, **given, dt_softplus=True)
    for where in ("x", "dt", "B", "C", "z", "state"):
        spoiled, other = state.clone(), dict(given)
        if where == "state":
            spoiled[1, 2, 3, 3] = math.nan
        else:
            other[where] = other[where].clone() if where != "dt" else other["dt"][..., :1].clone()
            other[where][1, 1, 2] = math.nan
            other["dt"] = other["dt"][..., :1].expand_as(given["dt"])
        found = selective_state_update(spoiled, **other, dt_softplus=True)
        heads = [0, 1, 3]
        for got, had in ((found.transpose(1, 2), out.transpose(1, 2)), (spoiled, after)):
            assert_bitwise(got[[0, 2]].contiguous(), had[[0, 2]].contiguous(), where)
            assert_bitwise(got[1, heads].contiguous(), had[1, heads].contiguous(), where)
        assert found[1, 1, 2].isnan().any(), where
        assert where in "Cz" or spoiled[1, 2].isnan().any(), where


def test_slots_that_several_requests_read(variant, device):
    """A prefix's state, from which each goes on in a slot of its own; the fourth slot of a table is read."""
    given, state = inputs((3, 2), device), pool(6, device)
    before = state.clone()
    read = torch.tensor([[5, 5, 5, 1], [5, 5, 5, 1], [0, 0, 0, 1]], dtype=torch.int32, device=device)[:, 3:]
    write = torch.tensor([2, 0, 5], dtype=torch.int32, device=device)
    out = selective_state_update(
        state, **given, dt_softplus=True, state_batch_indices=read, dst_state_batch_indices=write
    )
    for n, slot in enumerate(write.tolist()):
        near_state(state[slot], near_steps(out[n], before[1], given, [(n, 0), (n, 1)]))
    assert_bitwise(state[[1, 3, 4]], before[[1, 3, 4]])


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_of_steps_of_any_size(backend, device, dtype, extrema_of_a_gpu):
    """dt of one token after another from nothing to 1e4, states of 1e30, a request without decay; exactly a chunk."""
    prompt = Prompt([128, 64, 1], device, heads=3, groups=1, dtype=dtype, around=(1, 2))
    steps = torch.tensor([0.0, -80.0, 2.0, -5.0, 1e4, -3.0, 30.0], device=device)
    prompt.dt[0] = steps.repeat(40)[: prompt.dt.shape[1], None]
    prompt.A = torch.tensor([0.0, -1.0, -1e30], device=device)
    states = prompt.states()
    states[1] *= 1e30
    out, final = prompt.run(states, backend)
    for i in range(3):
        prompt.near(i, states[i], out, final[i], backend)


@backends
def test_nan_of_a_prompt_stays_in_its_request_and_head(backend, device, extrema_of_a_gpu):
    prompt = Prompt([20, 40], device, heads=2, groups=2)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    for where in ("x", "dt", "B", "C", "z", "state"):
        other, spoiled = copy.copy(prompt), states.clone()
        if where == "state":
            spoiled[1, 0, 3, 3] = math.nan
        else:
            setattr(other, where, getattr(prompt, where).clone())
            getattr(other, where)[0, 50, 0] = math.nan
        found, after = other.run(spoiled, backend)
        assert_bitwise(found[:, :20], out[:, :20], where)
        assert_bitwise(found[:, :, 1], out[:, :, 1], where)
        assert_bitwise(after[0], final[0], where)
        assert_bitwise(after[1, 1], final[1, 1], where)
        assert found[0, 50, 0].isnan().any(), where
        assert where in "Cz" or after[1, 0].isnan().any(), where


# -- the convolution in front of them ---------------------------------------------------------------------------------


@backends
def test_nan_of_a_convolution_stays_in_its_request_and_channel(backend, device):
    x, weight = generate.randn(30, 33, device=device).T, generate.randn(33, 4, device=device)
    offsets = torch.tensor([7, 0, 9, 9, 30, 7], dtype=torch.int32, device=device)[1:5]
    states = generate.randn(4, 33, 3, device=device)
    slots = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    fresh = torch.tensor([True, True, False], device=device)
    results = []
    for spoil in (False, True):
        given, state = x.clone(), states.clone()
        if spoil:
            given[5, 12], state[0] = math.nan, math.nan
        out = causal_conv1d_fn(given, weight, None, state, offsets, slots, fresh, "silu", backend=backend)
        one = causal_conv1d_update(given[:, [0, 12]].T.contiguous(), state[[2, 3]].clone(), weight, backend=backend)
        results.append((out, state, one))
    (out, state, one), (found, after, other) = results
    spoiled = torch.zeros_like(out, dtype=torch.bool)
    spoiled[5, 12:16] = True
    assert found[spoiled].isnan().all() and not found[~spoiled].isnan().any()
    assert_bitwise(found[~spoiled], out[~spoiled])
    assert_bitwise(after, state)
    assert other[1, 5].isnan()
    assert_bitwise(other[0], one[0])

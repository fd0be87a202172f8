"""Kimi delta attention in all of its modes against the recurrence in float64."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.recurrent import rules
from tests.ops.recurrent.oracle import bounded_decay, recurrence, softplus_decay

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
NAN = float("nan")
NEAR = 2e-5
assert_near = partial(rules.assert_near, by=NEAR)


class Case:
    """Inputs [rows, tokens, ...] with raw gates, and what they give."""

    def __init__(self, rows, tokens, heads=(1, 2), dim=32, lower=-5.0, dtype=torch.float32, device="cpu", by=1.0):
        def randn(*shape):
            return generate.randn(*shape, dtype=dtype, device=device)

        h, hv = heads
        self.q, self.k, self.v = randn(rows, tokens, h, dim), randn(rows, tokens, h, dim), randn(rows, tokens, hv, dim)
        self.g, self.beta = randn(rows, tokens, hv, dim) * by, 3 * randn(rows, tokens, hv)
        self.A_log, self.dt_bias = generate.randn(h, device=device), generate.randn(h, dim, device=device)
        self.lower, self.scale, self.hv, self.dim = lower, 0.3, hv, dim
        self.inputs = self.q, self.k, self.v, self.g, self.beta
        self.more = {"A_log": self.A_log, "dt_bias": self.dt_bias.reshape(-1), "scale": self.scale,
                     "use_gate_in_kernel": True, "lower_bound": lower, "beta_is_logit": True}  # fmt: skip

    def states(self, slots, dtype=torch.float32):
        return generate.randn(slots, self.hv, self.dim, self.dim, device=self.q.device).to(dtype)

    def decay(self, row, span):
        g = self.g[row, span]
        repeat = self.hv // self.A_log.shape[0]
        a_log, bias = self.A_log.repeat_interleave(repeat), self.dt_bias.repeat_interleave(repeat, 0)
        if self.lower is None:
            return softplus_decay(g, a_log[:, None], bias)
        return bounded_decay(g, a_log, bias, self.lower)

    def truth(self, row, span, state, dtype=torch.float64, parents=None):
        tensors = (x[row, span] for x in (self.q, self.k, self.v))
        beta = self.beta[row, span].double().sigmoid()
        return recurrence(*tensors, self.decay(row, span), beta, state, self.scale, True, parents, dtype)


every = slice(None)


@backends
@pytest.mark.parametrize("lower", [-5.0, None], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode(backend, device, lower, state_dtype):
    case = Case(3, 1, lower=lower, dtype=torch.bfloat16, device=device)
    pool = case.states(5, state_dtype)
    before = pool.clone()
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    output = torch.full_like(case.v, NAN)
    out, given = flashinfer.recurrent_kda(
        *case.inputs, initial_state=pool, ssm_state_indices=slots, output=output, output_final_state=True,
        backend=backend, **case.more,
    )  # fmt: skip
    assert out is output and given is pool and not out[1].any()
    for i in (0, 2):
        truth, states, _ = case.truth(i, every, before[slots[i]])
        same, same_states, _ = case.truth(i, every, before[slots[i]], torch.float32)
        assert_close(out[i], same.bfloat16(), truth)
        if state_dtype == torch.float32:
            assert_near(pool[slots[i]], states[0])
        else:
            assert_close(pool[slots[i]], same_states[0].to(state_dtype), states[0], "state")
    assert_bitwise(pool[1:4], before[1:4])


@backends
def test_gates_that_are_logarithms(backend, device):
    case = Case(2, 1, (2, 2), device=device)
    g = -case.g.abs()
    state = case.states(2)
    before = state.clone()
    beta = case.beta.sigmoid()
    out, final = flashinfer.recurrent_kda(
        case.q, case.k, case.v, g, beta, initial_state=state, use_qk_l2norm_in_kernel=False, backend=backend
    )
    assert final is None
    for i in range(2):
        truth, states, _ = recurrence(
            case.q[i], case.k[i], case.v[i], g[i].double().exp(), beta[i], before[i], 32**-0.5
        )
        assert_near(out[i], truth)
        assert_near(state[i], states[-1])


@backends
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("other_source", [False, True])
def test_drafts(backend, device, packed, other_source):
    """Each draft's state goes to a slot, and the next round begins with that of the last accepted one."""
    case = Case(3, 3, device=device)
    pool = case.states(12)
    before = pool.clone()
    slots = torch.tensor([[3, 4, 5], [-1, -1, -1], [9, 2, -1]], dtype=torch.int32, device=device)
    accepted = torch.tensor([2, 1, 9], dtype=torch.int32, device=device)
    more = {"num_accepted_tokens": accepted, "ssm_state_indices": slots, "num_spec_tokens": 2, **case.more}
    first = before[4], None, None
    if other_source:
        committed = case.states(4)
        more |= {"initial_state_source": committed, "initial_state_indices": accepted.new_tensor([1, -1, 3])}
        first = committed[1], None, committed[3]
    inputs = case.inputs
    if packed:
        inputs = [x.reshape(1, 9, *x.shape[2:]) for x in inputs]
        more["cu_seqlens"] = torch.tensor([0, 3, 6, 9], device=device)
    out, given = flashinfer.recurrent_kda(*inputs, initial_state=pool, output_final_state=True, backend=backend, **more)
    assert given is pool
    out = out.reshape(3, 3, *out.shape[2:])
    assert not out[1].any()
    written = set()
    for i in (0, 2):
        if first[i] is None:
            assert not out[i].any()
            continue
        truth, states, _ = case.truth(i, every, first[i])
        assert_near(out[i], truth)
        for t in range(3):
            if slots[i, t] >= 0:
                assert_near(pool[slots[i, t]], states[t])
                written.add(int(slots[i, t]))
    for slot in set(range(12)) - written:
        assert_bitwise(pool[slot], before[slot], f"slot {slot}")


@backends
@pytest.mark.parametrize("packed", [False, True])
def test_frozen(backend, device, packed):
    """States stay; corrections, keys and gates are kept by slot."""
    case = Case(2, 3, (2, 2), device=device)
    pool = case.states(4)
    before = pool.clone()
    slots = torch.tensor([2, -1], dtype=torch.int32, device=device)
    corrections = torch.full((4, 2, 5, 32), NAN, device=device)
    kg = torch.full((4, 2, 5, 64), NAN, dtype=torch.bfloat16, device=device)
    inputs, more = case.inputs, {}
    if packed:
        inputs = [x.reshape(1, 6, *x.shape[2:]) for x in inputs]
        more["cu_seqlens"] = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    out, final = flashinfer.recurrent_kda(
        *inputs, initial_state_source=pool, initial_state_indices=slots, disable_state_update=True,
        correction_cache=corrections, kg_cache=kg, backend=backend, **case.more, **more,
    )  # fmt: skip
    assert final is None
    assert_bitwise(pool, before)
    length = 2 if packed else 3
    truth, _, change = case.truth(0, slice(0, length), before[2])
    assert_near(out[0, :length], truth)
    assert not out.reshape(6, 2, 32)[length if packed else 3 :].any()
    assert_near(corrections[2, :, :length], change.transpose(0, 1))
    both = torch.cat([case.k[0, :length], case.g[0, :length]], -1).transpose(0, 1)
    # The interpreter cuts what it converts to bfloat16.
    assert ((kg[2, :, :length].float() - both).abs() <= both.abs() / 128).all()
    for cache in (corrections, kg):
        assert cache[2, :, length:].isnan().all() and cache[[0, 1, 3]].isnan().all()


# Two branches from the first token, one from the state.
TREE = [-1, 0, 0, 1, -1, 3]


@backends
@pytest.mark.parametrize("into", ["pool", "caches"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lower", [-5.0, None], ids=str)
def test_a_tree(backend, device, into, packed, lower):
    """Each draft follows its parent: outputs, states in slots, corrections; the first state is as it was."""
    case = Case(3, 6, lower=lower, device=device)
    pool = case.states(20)
    before = pool.clone()
    parents = torch.tensor([TREE, [-1] * 6, TREE], device=device)
    inputs, more, lengths = case.inputs, {"parents": parents, **case.more}, (6, 6, 6)
    if packed:
        # Two tokens of nobody behind, and a sequence whose tree is cut.
        inputs = [torch.cat([x[0], x[1], x[2, :4], x[:2, 0]])[None] for x in inputs]
        lengths, more["cu_seqlens"] = (6, 6, 4), torch.tensor([0, 6, 12, 16], dtype=torch.int32, device=device)
    corrections = torch.full((20, 2, 6, 32), NAN, device=device)
    kg = torch.full((20, 2, 6, 64), NAN, device=device)
    if into == "pool":
        slots = torch.arange(2, 20, dtype=torch.int32, device=device).view(3, 6)
        slots[1], slots[2, 3] = -1, -1
        accepted = torch.tensor([4, 1, 1], dtype=torch.int32, device=device)
        first = before[slots[0, 3]], None, before[slots[2, 0]]
        more |= {"ssm_state_indices": slots, "num_spec_tokens": 5, "num_accepted_tokens": accepted}
    else:
        slots = torch.tensor([7, -1, 3], device=device)
        first = before[7], None, before[3]
        more |= {"disable_state_update": True, "correction_cache": corrections, "kg_cache": kg}
        more["ssm_state_indices"] = slots
    out, _ = flashinfer.recurrent_kda(*inputs, initial_state=pool, backend=backend, **more)
    parts = out[0].split([*lengths, 2]) if packed else out
    assert not parts[1].any() and not (packed and parts[3].any())
    written = []
    for i in (0, 2):
        span = slice(0, lengths[i])
        truth, states, change = case.truth(i, span, first[i], parents=TREE)
        assert_near(parts[i], truth)
        for t in range(lengths[i]) if into == "pool" else ():
            if slots[i, t] >= 0:
                assert_near(pool[slots[i, t]], states[t], f"state {t}")
                written.append(int(slots[i, t]))
        if into == "caches":
            assert_near(corrections[slots[i], :, span], change.transpose(0, 1))
            both = torch.cat([case.k[i, span].expand(-1, 2, -1), case.g[i, span]], -1)
            assert_bitwise(kg[slots[i], :, span], both.transpose(0, 1))
    others = [slot for slot in range(20) if slot not in written]
    assert_bitwise(pool[others], before[others])


def test_a_tree_is_checked():
    case, parents = Case(1, 2), torch.zeros(1, 2, dtype=torch.int32)
    for change in (
        {"parents": parents}, {"parents": parents[:, :1], "num_spec_tokens": 1},
        {"parents": parents.float(), "num_spec_tokens": 1}, {"parents": parents[0], "disable_state_update": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="parents: got"):
            flashinfer.recurrent_kda(*case.inputs, initial_state=case.states(2), **case.more, **change)


@backends
@pytest.mark.parametrize(("lower", "by"), [(-5.0, 1.0), (-20.0, 9.0), (None, 1.0), (None, 40.0)], ids=str)
def test_prefill(backend, device, lower, by):
    """Gates of any size: the quotients of decays are never taken apart where they could overflow."""
    case = Case(1, 91, device=device, lower=lower, by=by)
    states = case.states(3)
    before = states.clone()
    offsets = torch.tensor([1, 66, 66, 90], dtype=torch.int32, device=device)
    out, final = flashinfer.recurrent_kda(
        *case.inputs, initial_state=states, cu_seqlens=offsets, output_final_state=True, backend=backend, **case.more
    )
    assert final is states and not out[0, 0].any() and not out[0, 90].any()
    # Sums of logarithms over a chunk reach thousands, and have that many fewer digits.
    near = NEAR if by == 1.0 else 1e-3
    for i, (begin, end) in enumerate(((1, 66), (66, 66), (66, 90))):
        truth, on_the_way, _ = case.truth(0, slice(begin, end), before[i])
        if begin < end:
            assert_near(out[0, begin:end], truth, f"sequence {i}", by=near)
            assert_near(states[i], on_the_way[-1], f"state {i}", by=near)
        else:
            assert_bitwise(states[i], before[i])


@backends
@pytest.mark.parametrize("indexed", [False, True])
def test_checkpoints(backend, device, indexed):
    case = Case(1, 100, (1, 1), device=device)
    states = case.states(2)
    before = states.clone()
    offsets = torch.tensor([0, 64, 100], device=device)
    more = {}
    if indexed:
        more["state_checkpoints"] = torch.full((6, 1, 32, 32), NAN, device=device)
        more["checkpoint_state_indices"] = torch.tensor([5, 0, 2], dtype=torch.int32, device=device)
    out, _, marks = flashinfer.recurrent_kda(
        *case.inputs, initial_state=states, cu_seqlens=offsets, checkpoint_every_n_tokens=32, backend=backend,
        **case.more, **more,
    )  # fmt: skip
    on_the_way = [case.truth(0, s, before[i])[1] for i, s in enumerate((slice(0, 64), slice(64, 100)))]
    if indexed:
        expected = {5: on_the_way[0][31], 0: on_the_way[0][63], 2: on_the_way[1][31]}
        assert marks[[1, 3, 4]].isnan().all()
    else:
        assert marks.shape[0] == 4
        expected = {0: before[0], 1: on_the_way[0][31], 2: before[1], 3: on_the_way[1][31]}
    for place, truth in expected.items():
        assert_near(marks[place], truth.double(), f"checkpoint {place}")
    assert_near(out[0, :64], case.truth(0, slice(0, 64), before[0])[0])


@backends
def test_bits_of_a_prompt_in_parts(backend, device):
    case = Case(1, 140, (1, 1), device=device)
    state = case.states(1)
    whole = state.clone()
    out, _ = flashinfer.recurrent_kda(*case.inputs, initial_state=whole, backend=backend, **case.more)
    parts = []
    for begin, end in ((0, 128), (128, 140)):
        inputs = [x[:, begin:end] for x in case.inputs]
        parts.append(flashinfer.recurrent_kda(*inputs, initial_state=state, backend=backend, **case.more)[0])
    assert_bitwise(torch.cat(parts, 1), out)
    assert_bitwise(state, whole)


def test_wrapper_and_prepared_calls(device):
    case = Case(1, 70, (2, 2), device=device)
    offsets = torch.tensor([0, 20, 70])
    expected, _ = flashinfer.recurrent_kda(*case.inputs, cu_seqlens=offsets.to(device), **case.more)
    wrapper = flashinfer.RecurrentKDAPrefillWrapper(device)
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(*case.inputs)
    wrapper.plan(offsets)
    assert_bitwise(wrapper.run(*case.inputs, **case.more)[0], expected)
    cache = flashinfer.KDAPrefillPlanCache(capacity=1)
    out = torch.empty_like(case.v)
    given = {"A_log": case.A_log, "dt_bias": case.dt_bias, "scale": case.scale, "lower_bound": case.lower,
             "cu_seqlens": offsets.to(device), "out": out, "sequence_lengths": [20, 50]}  # fmt: skip
    first = flashinfer.prepare_bf16_kda_prefill(*case.inputs, plan_cache=cache, **given)
    assert_bitwise(first.launch(), expected)
    out.zero_()
    again = flashinfer.prepare_bf16_kda_prefill(*case.inputs, plan_cache=cache, **given)
    assert again is first and (cache.hits, cache.misses, len(cache)) == (1, 1, 1)
    again.launch()
    assert_bitwise(out, expected)
    third = flashinfer.prepare_tf32_kda_prefill(*(x[0] for x in case.inputs), **{**given, "out": out[0]})
    assert_bitwise(third.launch()[None], expected)
    assert flashinfer.kda_prefill_supports_fp32_checkpoints()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_bound": 1.0, "use_gate_in_kernel": True, "A_log": torch.zeros(1)}, "lower_bound"),
        ({"lower_bound": -1.0}, "lower_bound"),
        ({"use_gate_in_kernel": True}, "A_log"),
        ({"num_accepted_tokens": torch.ones(1, dtype=torch.int32)}, "num_accepted_tokens"),
        ({"kg_cache": torch.ones(1)}, "kg_cache"),
        ({"num_spec_tokens": 4}, "num_spec_tokens"),
        ({"backend": "fa3"}, "backend"),
        ({"disable_state_update": True}, "initial_state_source"),
        ({"initial_state": torch.zeros(2, 2, 32, 32)}, "initial_state"),
        ({"checkpoint_every_n_tokens": 40}, "checkpoint_every_n_tokens"),
        ({"initial_state": torch.zeros(2, 2, 32, 32), "ssm_state_indices": torch.tensor(1)}, "ssm_state_indices"),
    ],
)
def test_errors_name_the_argument(change, message):
    case = Case(1, 1)
    with pytest.raises(ValueError, match=message):
        flashinfer.recurrent_kda(*case.inputs, **change)


@pytest.mark.parametrize("wrong", ["beta", "cu_seqlens", "lower_bound", "initial_state", "output"])
def test_an_output_state_is_not_written_by_a_refused_call(wrong):
    from flashinfer import cudnn

    case = Case(1, 70, (2, 2))
    given = dict(zip(("q", "k", "v", "g", "beta"), case.inputs), output_state=torch.full_like(case.states(1), 7.0))
    given |= dict(initial_state=case.states(1), **case.more)
    values = dict(beta=given["beta"][:, :3], cu_seqlens=torch.tensor([0.0, 70.0]), lower_bound=1.0)
    values |= dict(initial_state=case.states(2), output=torch.empty(1, 1, 2, 2))
    with pytest.raises(ValueError, match=f"^{wrong}: "):
        cudnn.cudnn_recurrent_kda(**given | {wrong: values[wrong]})
    assert (given["output_state"] == 7).all()


def test_by_the_names_of_bindings(device):
    """An output state leaves the initial one as it is."""
    from flashinfer import cudnn

    case = Case(1, 70, (2, 2), device=device)
    initial = case.states(1)
    before, final = initial.clone(), torch.full_like(initial, NAN)
    more = {name: x for name, x in case.more.items() if name != "beta_is_logit"} | {"beta_is_logit": True}
    out, given = cudnn.cudnn_recurrent_kda(
        *case.inputs, initial_state=initial, output_final_state=True, output_state=final, batch_invariant=True, **more
    )
    assert given is final
    assert_bitwise(initial, before)
    expected, state = flashinfer.recurrent_kda(*case.inputs, initial_state=initial, output_final_state=True, **more)
    assert_bitwise(out, expected)
    assert_bitwise(final, state)
    offsets = torch.tensor([0, 70], device=device)
    q, k, v = (x[0] for x in (case.q, case.k, case.v))
    for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule2", "chunk_gated_delta_product"):
        ours = getattr(flashinfer, name)(q, k, v, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True)
        assert_bitwise(getattr(cudnn, f"cudnn_{name}")(q, k, v, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True), ours)

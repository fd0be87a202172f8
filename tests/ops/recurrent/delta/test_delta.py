"""The gated delta rule token by token against its recurrence in float64."""

import math

import pytest
import torch

from flashinfer import gdn_decode, gdn_kernels
from flashinfer._core.dispatch import Op
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.recurrent.oracle import recurrence, softplus_decay, unit

BACKENDS = ["reference", "portable"]
backends = pytest.mark.parametrize("backend", BACKENDS)
NAN = float("nan")


class Layer:
    """Inputs of a layer of Qwen3-Next's kind, and what they give in float64 and float32."""

    def __init__(self, batch, tokens, heads, value_heads, key_dim, value_dim, dtype=torch.bfloat16, device="cpu"):
        def randn(*shape):
            return generate.randn(*shape, dtype=dtype, device=device)

        self.q, self.k = randn(batch, tokens, heads, key_dim), randn(batch, tokens, heads, key_dim)
        self.v = randn(batch, tokens, value_heads, value_dim)
        self.a, self.b = 4 * randn(batch, tokens, value_heads), 4 * randn(batch, tokens, value_heads)
        self.A_log = generate.randn(value_heads, device=device)
        self.dt_bias = generate.randn(value_heads, device=device)
        self.gates = self.A_log, self.a, self.dt_bias, self.b
        self.scale = 0.3

    def states(self, slots, dtype=torch.float32):
        shape = slots, self.v.shape[2], self.v.shape[3], self.k.shape[3]
        return generate.randn(*shape, device=self.q.device).to(dtype)

    def truth(self, i, state, dtype=torch.float64, normalize=True, parents=None):
        decay = softplus_decay(self.a[i], self.A_log, self.dt_bias)
        beta = self.b[i].double().sigmoid()
        return recurrence(self.q[i], self.k[i], self.v[i], decay, beta, state, self.scale, normalize, parents, dtype)


def assert_like(out, layer, i, state, what="out", normalize=True, parents=None, place=0):
    """`out` is output (place 0) or states (1) of sequence i, within the rule, for the precision of its dtype."""
    truth = layer.truth(i, state, torch.float64, normalize, parents)[place]
    same = layer.truth(i, state, torch.float32, normalize, parents)[place].to(out.dtype)
    # Sums in another order are as right as torch's, and in float32 neither is exact: half an ulp more for each product.
    if out.dtype == torch.float32:
        assert (out.double() - truth).abs().max() <= 4e-6 * max(1.0, float(truth.abs().max())), what
    else:
        assert_close(out, same, truth, what)


def fresh(layer):
    return torch.full_like(layer.v, NAN)


@backends
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 2, 4, 32, 32), (2, 1, 1, 1, 24, 40)], ids=str)
def test_decode(backend, device, shape, state_dtype):
    layer = Layer(*shape, device=device)
    state = layer.states(shape[0], state_dtype)
    before = state.clone()
    arguments = layer.q, layer.k, layer.v, state, *layer.gates, layer.scale
    out, given = gdn_decode.gated_delta_rule_decode_pretranspose(*arguments, backend=backend)
    assert given is state and out.dtype == layer.q.dtype
    for i in range(shape[0]):
        assert_like(out[i], layer, i, before[i])
        truth = layer.truth(i, before[i])[1][-1]
        same = layer.truth(i, before[i], torch.float32)[1][-1].to(state_dtype)
        if state_dtype != torch.float32:
            assert_close(state[i], same, truth, "state")
        else:
            assert (state[i].double() - truth).abs().max() < 4e-6


@backends
def test_decode_with_values_last(backend, device):
    layer = Layer(2, 1, 2, 4, 32, 48, torch.float16, device)
    last = layer.states(2)
    state = last.transpose(-1, -2).contiguous()
    expected, _ = gdn_decode.gated_delta_rule_decode_pretranspose(
        layer.q, layer.k, layer.v, last, *layer.gates, backend=backend
    )
    out = torch.full_like(layer.v, NAN)
    given, same = gdn_decode.gated_delta_rule_decode(
        layer.q, layer.k, layer.v, state, *layer.gates, output=out, backend=backend
    )
    assert given is out and same is state
    assert (out.float() - expected.float()).abs().max() < 2e-3
    assert (state.transpose(-1, -2) - last).abs().max() < 1e-5


@backends
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_a_pool(backend, device, index):
    """Slots out of order; padding gives zeros; rows that nobody named keep their bits; another slot is written."""
    layer = Layer(4, 1, 1, 2, 32, 32, device=device)
    pool = layer.states(9)
    pool[[1, 3, 5, 7]] = NAN
    before = pool.clone()
    read = torch.tensor([8, -1, 2, 6], dtype=index, device=device)
    write = torch.tensor([0, 4, 2, -1], dtype=index, device=device)
    out, given = gdn_decode.gated_delta_rule_decode_pretranspose(
        layer.q, layer.k, layer.v, None, *layer.gates, layer.scale, fresh(layer), initial_state=pool,
        initial_state_indices=read, output_state_indices=write, backend=backend,
    )  # fmt: skip
    assert given is pool
    assert_bitwise(out[1], torch.zeros_like(out[1]))
    for i in (0, 2, 3):
        assert_like(out[i], layer, i, before[read[i]])
    for slot in (1, 3, 4, 5, 6, 7, 8):
        assert_bitwise(pool[slot], before[slot], f"slot {slot}")
    for i in (0, 2):
        assert (pool[write[i]].double() - layer.truth(i, before[read[i]])[1][-1]).abs().max() < 4e-6


@backends
def test_strides(backend, device):
    """Inputs are slices of one projection, the pool has gaps, and the output is a slice."""
    layer = Layer(2, 3, 2, 2, 32, 32, device=device)
    pool = layer.states(4)
    indices = torch.tensor([3, 1], dtype=torch.int32, device=device)
    arguments = indices, *layer.gates, layer.scale
    expected, _ = gdn_decode.gated_delta_rule_mtp(
        layer.q, layer.k, layer.v, pool.clone(), *arguments, disable_state_update=False, backend=backend
    )
    mixed = torch.cat([layer.q, layer.k, layer.v], 2)
    q, k, v = mixed.split(2, 2)
    wide = generate.strided(pool, 0)
    outer = torch.full((2, 3, 2, 40), NAN, dtype=layer.q.dtype, device=device)
    out, _ = gdn_decode.gated_delta_rule_mtp(
        q, k, v, wide, *arguments, outer[..., 3:35], disable_state_update=False, backend=backend
    )
    assert_bitwise(out.contiguous(), expected)
    assert outer[..., :3].isnan().all() and outer[..., 35:].isnan().all()
    assert (wide[0] == pool[0]).all() and (wide[3] != pool[3]).any()


@backends
@pytest.mark.parametrize("into", ["", "buffer", "pool"])
def test_verify(backend, device, into):
    layer = Layer(3, 3, 1, 2, 32, 32, device=device)
    pool = layer.states(13)
    before = pool.clone()
    indices = torch.tensor([2, -1, 0], device=device, dtype=torch.int32)
    buffer = torch.full((4, 5, 2, 32, 32), NAN, device=device)
    rows = torch.tensor([[3, 4, 5], [6, 7, 8], [9, -1, 11]], device=device, dtype=torch.int32)
    more = {"": {"disable_state_update": True}, "pool": {"ssm_state_indices": rows, "disable_state_update": False}}
    more["buffer"] = {"intermediate_states_buffer": buffer, "disable_state_update": True}
    out, _ = gdn_decode.gated_delta_rule_mtp(
        layer.q, layer.k, layer.v, pool, indices, *layer.gates, layer.scale, fresh(layer), backend=backend, **more[into]
    )
    assert not out[1].any()
    written = set()
    for i in (0, 2):
        assert_like(out[i], layer, i, before[indices[i]])
        states = layer.truth(i, before[indices[i]])[1]
        if into == "buffer":
            assert (buffer[i, :3].double() - states).abs().max() < 4e-6
        if into == "pool":
            for t in range(3):
                if rows[i, t] >= 0:
                    assert (pool[rows[i, t]].double() - states[t]).abs().max() < 4e-6
                    written.add(int(rows[i, t]))
    for slot in set(range(13)) - written:
        assert_bitwise(pool[slot], before[slot], f"slot {slot}")
    if into == "buffer":
        assert buffer[1].isnan().all() and buffer[:, 3:].isnan().all() and buffer[3].isnan().all()


@backends
@pytest.mark.parametrize("into", ["buffer", "pool"])
def test_the_last_state_goes_to_its_slot_beside_those_on_the_way(backend, device, into, monkeypatch):
    """disable_state_update alone says that a verification reads only; a table of columns spares the slots it read."""
    layer = Layer(2, 3, 1, 2, 32, 32, torch.bfloat16, device)
    pool = layer.states(9)
    before = pool.clone()
    read, write = torch.tensor([2, 0], device=device), torch.tensor([4, 1], device=device)
    buffer = torch.full((2, 3, 2, 32, 32), NAN, device=device)
    rows = torch.tensor([[3, 5, 6], [7, 8, -1]], device=device)
    states = [layer.truth(i, before[read[i]])[1] for i in range(2)]

    def check(pool, slots, kept):
        for i, slot in enumerate(slots.tolist()):
            assert (pool[slot].double() - states[i][-1]).abs().max() < 4e-6
        for slot in kept:
            assert_bitwise(pool[slot], before[slot], f"slot {slot}")

    each = {"intermediate_states_buffer": buffer} if into == "buffer" else {"ssm_state_indices": rows}
    if into == "buffer":
        gdn_decode.gated_delta_rule_decode_pretranspose(
            layer.q, layer.k, layer.v, None, *layer.gates, initial_state=pool, initial_state_indices=read,
            backend=backend, **each,
        )  # fmt: skip
        check(pool, read, (1, 3, 4, 5, 6, 7, 8))
        assert all((buffer[i].double() - states[i]).abs().max() < 4e-6 for i in range(2))
    select, pool = Op.__call__, before.clone()
    monkeypatch.setattr(Op, "__call__", lambda self, problem, device, _: select(self, problem, device, backend))
    A_log, a, dt_bias, b = layer.gates
    gdn_kernels.gated_delta_rule_mtp(
        A_log, a, dt_bias, 1.0, 20.0, layer.q, layer.k, layer.v, b, pool, read, write, **each
    )
    check(pool, write, (0, 2) if into == "pool" else (0, 2, 3, 5, 6, 7, 8))


def test_what_a_default_means_is_said(device):
    layer = Layer(1, 2, 1, 1, 16, 16, device=device)
    with pytest.warns(DeprecationWarning, match="disable_state_update"):
        pool = layer.states(1)
        before = pool.clone()
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        gdn_decode.gated_delta_rule_mtp(layer.q, layer.k, layer.v, pool, zero, *layer.gates)
    assert_bitwise(pool, before)


@backends
@pytest.mark.parametrize("normalize", [True, False])
def test_replay(backend, device, normalize):
    """Windows of a verification, committed for two layers at once, give the states of the accepted prefix."""
    layers = [Layer(3, 4, 1, 2, 32, 32, device=device) for _ in range(2)]
    states = torch.stack([layer.states(6) for layer in layers]) * 0.1
    before = states.clone()
    shape = (2, 6, 2, 4)
    windows = [torch.full((*shape, 32), NAN, dtype=torch.bfloat16, device=device),
               torch.full((2, 6, 1, 4, 32), NAN, dtype=torch.bfloat16, device=device),
               *(torch.full(shape, NAN, device=device) for _ in range(2))]  # fmt: skip
    slots = torch.tensor([4, -1, 1], dtype=torch.int32, device=device)
    for j, layer in enumerate(layers):
        layer.k = layer.k / 6 if not normalize else layer.k
        names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
        out, _ = gdn_decode.gated_delta_rule_mtp(
            layer.q, layer.k, layer.v, states[j], slots, *layer.gates, layer.scale, disable_state_update=True,
            use_qk_l2norm=normalize, cache_replayssm=True, backend=backend,
            **dict(zip(names, (w[j] for w in windows))),
        )  # fmt: skip
        assert_like(out[0], layer, 0, before[j, 4], normalize=normalize)
    assert_bitwise(states, before)
    assert all(w[:, [0, 2, 3, 5]].isnan().all() for w in windows)
    accepted = torch.tensor([3, 2, 4], dtype=torch.int32, device=device)
    track = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    steps = torch.tensor([1, 0, 7], dtype=torch.int32, device=device)
    gdn_decode.gated_delta_rule_replayssm_commit(
        states, *windows, slots, accepted, track_state_indices=track, track_steps=steps, use_qk_l2norm=normalize,
        backend=backend,
    )  # fmt: skip
    for j, layer in enumerate(layers):
        for i, slot in ((0, 4), (2, 1)):
            truth = layer.truth(i, before[j, slot], normalize=normalize)[1]
            assert (states[j, slot].double() - truth[accepted[i] - 1]).abs().max() < 1e-5
            if i == 0:
                assert (states[j, 0].double() - truth[1]).abs().max() < 1e-5
        for slot in (2, 3, 5):
            assert_bitwise(states[j, slot], before[j, slot])


@backends
@pytest.mark.parametrize("keys, values, begin", [(20, 12, 0), (32, 16, 1)])
def test_a_commit_of_rows_that_begin_anywhere(backend, device, keys, values, begin):
    """Rows and slots that are no multiples of 16 bytes, and tensors that begin between such multiples."""

    def made(*shape, dtype=torch.float32):
        memory = torch.empty(math.prod(shape) + begin, dtype=dtype, device=device)[begin:]
        return memory.view(shape).copy_(torch.randn(shape))

    state, gate, beta = made(1, 3, 1, values, keys), -made(1, 3, 1, 3).abs(), made(1, 3, 1, 3).sigmoid()
    v, k = (made(1, 3, 1, 3, n, dtype=torch.bfloat16) for n in (values, keys))
    slots, accepted = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 1], [3, 2]))
    truth = state.double()
    for slot, count in ((2, 3), (1, 2)):
        for t in range(count):
            s, key = truth[0, slot, 0] * gate[0, slot, 0, t].double().exp(), k[0, slot, 0, t].double() / 8
            change = beta[0, slot, 0, t].double() * (v[0, slot, 0, t].double() - s @ key)
            truth[0, slot, 0] = s + change[:, None] * key
    gdn_decode.gated_delta_rule_replayssm_commit(
        state, v, k.div_(8), gate, beta, slots, accepted, use_qk_l2norm=False, backend=backend
    )
    assert (state.double() - truth).abs().max() < 1e-5


@backends
def test_extreme_gates(backend, device):
    """Decays near 0 and near 1, beta 0 and 1."""
    layer = Layer(2, 3, 1, 2, 16, 16, torch.float32, device)
    layer.a.copy_(torch.tensor([-30.0, 60.0]).expand_as(layer.a))
    layer.b.copy_(torch.tensor([[200.0], [-200.0]])[:, None].expand_as(layer.b))
    pool = layer.states(2)
    before = pool.clone()
    indices = torch.arange(2, device=device)
    out, _ = gdn_decode.gated_delta_rule_mtp(
        layer.q, layer.k, layer.v, pool, indices, *layer.gates, layer.scale, disable_state_update=False, backend=backend
    )
    for i in range(2):
        assert_like(out[i], layer, i, before[i])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "fa3"}, "backend"),
        ({"a": (1, 1, 3)}, "a: got shape"),
        ({"k": (1, 1, 3, 16)}, "heads"),
        ({"state": (2, 2, 16, 16)}, "state"),
        ({"output": (1, 1, 2, 8)}, "output"),
        ({"disable_state_update": True}, "disable_state_update"),
    ],
)
def test_errors_name_the_argument(change, message):
    layer = Layer(1, 1, 1, 2, 16, 16)
    arguments = {"q": layer.q, "k": layer.k, "v": layer.v, "state": layer.states(1)}
    arguments |= dict(zip(("A_log", "a", "dt_bias", "b"), layer.gates))
    for name, value in change.items():
        arguments[name] = torch.zeros(value, dtype=layer.q.dtype) if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=message):
        gdn_decode.gated_delta_rule_decode_pretranspose(**arguments)


def test_unit_is_the_norm_of_engines():
    x = torch.tensor([3.0, 4.0])
    assert torch.allclose(unit(x), x / (25 + 1e-6) ** 0.5)


@backends
def test_the_state_after_the_accepted_token(backend, device, monkeypatch):
    """By upstream's kernel name: each sequence's state stops where it was accepted, and its softplus is another."""
    from flashinfer.gdn_kernels import gdn_decode_bf16_state as kernels

    select = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda self, problem, device, _: select(self, problem, device, backend))
    layer = Layer(2, 4, 1, 2, 32, 32, device=device)
    pool = layer.states(3, torch.bfloat16)
    before = pool.clone()
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    A_log, a, dt_bias, b = layer.gates
    given = {"q": layer.q, "k": layer.k, "v": layer.v, "b": b, "initial_state_source": pool,
             "initial_state_indices": slots, "scale": layer.scale}  # fmt: skip
    accepted = torch.tensor([0, 2], dtype=torch.int32, device=device)
    out = kernels.gated_delta_rule_mtp(A_log, a, dt_bias, accepted_steps=accepted, **given)
    for i in range(2):
        assert_like(out[i], layer, i, before[slots[i]])
        same, truth = (layer.truth(i, before[slots[i]], t)[1][accepted[i]] for t in (torch.float32, torch.float64))
        assert_close(pool[slots[i]], same.bfloat16(), truth, "state")
    assert_bitwise(pool[1], before[1])
    pool.copy_(before)
    kept = torch.full_like(out, 7.0)
    kernels.gated_delta_rule_mtp(A_log, a, dt_bias, recovery_steps=2, disable_output=True, output=kept, **given)
    assert (kept == 7).all()
    same, truth = (layer.truth(0, before[2], t)[1][1] for t in (torch.float32, torch.float64))
    assert_close(pool[2], same.bfloat16(), truth, "state")


TREE = [-1, 0, 0, 1, -1, 4, 3]


@backends
@pytest.mark.parametrize("into", ["", "buffer", "pool", "replay"])
def test_verify_a_tree(backend, device, into):
    """Each draft follows its parent; an accepted path of replayed tokens gives the state of its last one."""
    layer = Layer(2, len(TREE), 1, 2, 32, 32, torch.float32, device)
    layer.a[:, 1] = 60.0
    pool = layer.states(20)
    before = pool.clone()
    slots = torch.tensor([3, -1], device=device, dtype=torch.int32)
    parents = torch.tensor([TREE, TREE], device=device)
    buffer = torch.full((2, 7, 2, 32, 32), NAN, device=device)
    rows = torch.arange(5, 19, device=device, dtype=torch.int32).view(2, 7)
    windows = [torch.full((20, 2, 7, 32), NAN, device=device), torch.full((20, 1, 7, 32), NAN, device=device),
               *(torch.full((20, 2, 7), NAN, device=device) for _ in range(2))]  # fmt: skip
    names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
    more = {"": {}, "buffer": {"intermediate_states_buffer": buffer}, "pool": {"ssm_state_indices": rows}}
    more["replay"] = {"cache_replayssm": True, **dict(zip(names, windows))}
    out, _ = gdn_decode.gated_delta_rule_mtp(
        layer.q, layer.k, layer.v, pool, slots, *layer.gates, layer.scale, parents=parents, backend=backend,
        disable_state_update=into != "pool", **more[into],
    )  # fmt: skip
    assert not out[1].any()
    truth, states, _ = layer.truth(0, before[3], parents=TREE)
    near = 1e-5 * float(truth.abs().max())
    assert (out[0].double() - truth).abs().max() < near
    if into == "buffer":
        assert (buffer[0].double() - states).abs().max() < 2e-5 and buffer[1].isnan().all()
    if into == "pool":
        assert (pool[rows[0].long()].double() - states).abs().max() < 2e-5
        pool[rows[0].long()] = before[rows[0].long()]
    assert_bitwise(pool, before)
    if into == "replay":
        path = torch.tensor([[0, 1, 3, 6, 0, 0, 0], [0] * 7], device=device)
        given = (pool[None], *(w[None] for w in windows), slots, torch.tensor([4, 3], device=device))
        gdn_decode.gated_delta_rule_replayssm_commit(*given, accept_path=path, backend=backend)
        assert (pool[3].double() - states[6]).abs().max() < 2e-5
        pool[3] = before[3]
        assert_bitwise(pool, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"parents": torch.zeros(1, 3)}, "parents"), ({"output_state_indices": torch.zeros(1)}, "output_state_indices")],
)
def test_a_tree_is_checked(change, message):
    layer = Layer(1, 2, 1, 1, 16, 16)
    given = {"parents": torch.zeros(1, 2, dtype=torch.int32), "disable_state_update": True} | change
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        gdn_decode.gated_delta_rule_mtp(layer.q, layer.k, layer.v, layer.states(1), zero, *layer.gates, **given)

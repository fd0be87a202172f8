"""Random calls of recurrent layers: gated delta rules, state spaces, and the convolution in front of them."""

import torch

import flashinfer
from flashinfer import gdn_decode
from flashinfer.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from flashinfer.mamba import selective_state_update
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.fuzz import Call
from tests.ops.recurrent import rules
from tests.ops.recurrent.conv import test_conv as conv
from tests.ops.recurrent.delta import test_delta as delta
from tests.ops.recurrent.delta import test_kda as kda
from tests.ops.recurrent.delta import test_prefill as prefill
from tests.ops.recurrent.oracle import unit
from tests.ops.recurrent.rules import assert_near
from tests.ops.recurrent.ssd import test_ssd as ssd
from tests.ops.recurrent.ssm import test_ssm as ssm

DIMS = (16, 24, 32, 64, 128)
# Around a chunk of 64.
LENGTHS = (0, 1, 2, 15, 63, 64, 65, 130)


def slots_of(draw, batch, pool):
    """A slot of a pool for each sequence, some of them padding."""
    slots = torch.randperm(pool)[:batch].tolist()
    return [-1 if draw.chance(0.2) else slot for slot in slots]


def sequences(draw):
    """Lengths of packed sequences, and the tokens of nobody around them."""
    most = max(n for n in LENGTHS if n * 64 <= draw.largest)
    lengths = [draw.pick(*(n for n in LENGTHS if n <= most)) for _ in range(draw.pick(1, 2, 3))]
    return lengths if sum(lengths) else [*lengths, 1], draw.pick((0, 0), (3, 5))


def gdn_step(draw):
    batch, (heads, value_heads) = draw.pick(1, 2, 3), draw.pick((1, 1), (1, 2), (2, 4), (3, 3))
    layer = delta.Layer(batch, 1, heads, value_heads, draw.pick(*DIMS), draw.pick(*DIMS), draw.half(), draw.device)
    state = layer.states(batch)
    before = state.clone()
    names = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "scale")
    arguments = dict(zip(names, (layer.q, layer.k, layer.v, state, *layer.gates, layer.scale), strict=True))

    def check(result):
        out, given = result
        assert given is state
        for i in range(batch):
            delta.assert_like(out[i], layer, i, before[i])
            truth = layer.truth(i, before[i])[1][-1]
            assert_near(state[i], truth, f"state {i}")

    return Call(gdn_decode.gated_delta_rule_decode_pretranspose, arguments | dict(backend=draw.backend), check)


def gdn_prompt(draw):
    lengths, around = sequences(draw)
    heads, dim = draw.pick((1, 1, 2), (2, 1, 1), (2, 2, 2)), (draw.pick(*DIMS[:4]), draw.pick(*DIMS[:4]))
    prompt = prefill.Prompt(lengths, heads, dim, draw.pick(draw.half(), torch.float32), draw.device, around)
    prompt.offsets = prompt.offsets.to(draw.index())
    states = prompt.states() if draw.chance(0.7) else None
    first = torch.zeros_like(prompt.states()) if states is None else states.clone()
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens")
    given = (prompt.q, prompt.k, prompt.v, prompt.g, prompt.beta, prompt.scale, states, True, prompt.offsets)
    arguments = dict(zip(names, given, strict=True)) | dict(use_qk_l2norm_in_kernel=True, backend=draw.backend)

    def check(result):
        out, final = result
        for i in range(prompt.n):
            truth, on_the_way, _ = prompt.truth(i, first[i])
            if not len(truth):
                assert_bitwise(final[i], first[i])
                continue
            if out.dtype == torch.float32:
                assert_near(out[prompt.span(i)], truth, f"sequence {i}")
            elif draw.backend == "reference":
                same = prompt.truth(i, first[i], torch.float32)[0].to(out.dtype)
                assert_close(out[prompt.span(i)], same, truth, f"sequence {i}")
            else:
                q = unit(prompt.q[prompt.span(i)].double())
                given = out[prompt.span(i)], q, prompt.scale, on_the_way, truth
                rules.assert_delta_results(draw.backend, *given, f"sequence {i}")
            allowed = rules.delta_state_error(draw.backend, out.dtype)
            assert_near(final[i], on_the_way[-1], f"state {i}", allowed)

    return Call(flashinfer.chunk_gated_delta_rule, arguments, check)


def kda_step(draw):
    rows, heads = draw.pick(1, 2, 3), draw.pick((1, 1), (1, 2), (2, 2))
    case = kda.Case(rows, 1, heads, draw.pick(16, 32, 64, 128), draw.pick(-5.0, None), draw.half(), draw.device)
    pool = case.states(rows + 2)
    before, slots = pool.clone(), slots_of(draw, rows, rows + 2)
    names = dict(zip(("q", "k", "v", "g", "beta"), case.inputs, strict=True))
    table = dict(ssm_state_indices=draw.ints(slots, torch.int32), initial_state=pool, output_final_state=True)

    def check(result):
        out, _ = result
        for i, slot in enumerate(slots):
            if slot < 0:
                assert not out[i].any()
                continue
            truth, states, _ = case.truth(i, slice(None), before[slot])
            same, _, _ = case.truth(i, slice(None), before[slot], torch.float32)
            assert_close(out[i], same.to(out.dtype), truth, "out")
            kda.assert_near(pool[slot], states[-1], "state")
        others = [slot for slot in range(len(pool)) if slot not in slots]
        assert_bitwise(pool[others], before[others])

    return Call(flashinfer.recurrent_kda, names | table | case.more | dict(backend=draw.backend), check)


def state_space_step(draw):
    batch, dtype = draw.pick(1, 2, 5), draw.float()
    given, state = ssm.inputs((batch,), draw.device, dtype, draw.chance()), ssm.pool(batch + 2, draw.device)
    before, slots = state.clone(), slots_of(draw, batch, batch + 2)
    for name in ("D", "z", "dt_bias"):
        if draw.chance(0.2):
            given[name] = None
    softplus = draw.chance(0.8)
    table = dict(dt_softplus=softplus, state_batch_indices=draw.ints(slots))

    def check(out):
        for n, slot in enumerate(slots):
            if slot < 0:
                assert not out[n].any()
                continue
            ssm.near_state(state[slot], ssm.near(out[n : n + 1], before[slot], given, [n], softplus=softplus))
        others = [slot for slot in range(len(state)) if slot not in slots]
        assert_bitwise(state[others], before[others])

    return Call(selective_state_update, dict(state=state) | given | table, check)


def state_space_prompt(draw):
    lengths, around = sequences(draw)
    heads, groups = draw.pick((2, 1), (4, 2), (3, 3))
    sizes = heads, groups, draw.pick(8, 16, 24, 64), draw.pick(16, 40, 64)
    prompt = ssd.Prompt(lengths, draw.device, *sizes, draw.pick(draw.half(), torch.float32), around)
    prompt.offsets = prompt.offsets.to(draw.index())
    states = prompt.states()

    def run(chunk_size):
        return prompt.run(states, draw.backend, chunk_size=chunk_size)

    def check(result):
        out, final = result
        for i, n in enumerate(lengths):
            if n:
                prompt.near(i, states[i], out, final[i], draw.backend)
            else:
                assert_bitwise(final[i], states[i])

    return Call(run, dict(chunk_size=draw.pick(64, 128, 256)), check)


def conv_step(draw):
    batch, channels, width = draw.pick(1, 2, 3), draw.pick(8, 24, 40, 130), draw.pick(2, 3, 4)
    x = draw.tensor(batch, channels, dtype=draw.float(), kinds=("normal",))
    weight = draw.values(channels, width, dtype=torch.float32, kinds=("normal",))
    bias = draw.values(channels, dtype=torch.float32, kinds=("normal",)) if draw.chance() else None
    silu = draw.chance()
    state = draw.values(batch + 2, channels, width - 1, dtype=x.dtype, kinds=("normal",))
    state = state.transpose(1, 2).contiguous().transpose(1, 2) if draw.chance() else state
    before, slots = state.clone(), slots_of(draw, batch, batch + 2)
    arguments = dict(x=x, conv_state=state, weight=weight, bias=bias, activation="silu" if silu else None)

    def check(out):
        for i, slot in enumerate(slots):
            if slot < 0:
                assert not out[i].any()
                continue
            conv.assert_like(out[i : i + 1], x[i : i + 1], before[slot], weight, bias, silu)
            expected = conv.last(x[i : i + 1], before[slot], width)
            assert_bitwise(state[slot].contiguous(), expected.contiguous(), "state")
        others = [slot for slot in range(len(state)) if slot not in slots]
        assert_bitwise(state[others].contiguous(), before[others].contiguous())

    arguments |= dict(conv_state_indices=draw.ints(slots), backend=draw.backend)
    return Call(causal_conv1d_update, arguments, check)


def conv_prompt(draw):
    lengths, around = sequences(draw)
    channels, width, dtype = draw.pick(8, 24, 40), draw.pick(2, 3, 4), draw.float()
    offsets = generate.indptr(lengths, draw.device) + around[0]
    x = draw.values(sum(lengths) + sum(around), channels, dtype=dtype, kinds=("normal",)).T
    weight = draw.values(channels, width, dtype=torch.float32, kinds=("normal",))
    states = draw.values(len(lengths), channels, width - 1, dtype=dtype, kinds=("normal",))
    before, reads = states.clone(), torch.rand(len(lengths), device=draw.device) < 0.7
    arguments = dict(x=x, weight=weight, conv_states=states, query_start_loc=offsets.to(draw.index()),
                     has_initial_state=reads, backend=draw.backend)  # fmt: skip

    def check(out):
        for i, n in enumerate(lengths):
            span = slice(int(offsets[i]), int(offsets[i + 1]))
            history = before[i].masked_fill(~reads[i], 0.0)
            if n:
                conv.assert_like(out[:, span].T, x[:, span].T, history, weight, None, True)
            assert_bitwise(states[i].contiguous(), conv.last(x[:, span].T, history, width).contiguous(), "state")

    return Call(causal_conv1d_fn, arguments, check)


FAMILIES = (gdn_step, gdn_prompt, kda_step, state_space_step, state_space_prompt, conv_step, conv_prompt)

"""Prefill by chunks against the recurrence in float64."""

import pytest
import torch

import flashinfer
from flashinfer import gdn_decode
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.recurrent.oracle import recurrence
from tests.ops.recurrent.rules import assert_near

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
NAN = float("nan")


class Prompt:
    """Packed sequences, the first offset not 0, with tokens of nobody in front and behind."""

    def __init__(
        self, lengths, heads=(1, 1, 2), dim=(32, 32), dtype=torch.float32, device="cpu", around=(0, 0), k_by=1
    ):
        count, (key, value) = sum(lengths) + sum(around), dim
        hq, hk, hv = heads
        self.heads = max(heads)

        def randn(*shape):
            return generate.randn(*shape, dtype=dtype, device=device)

        self.q, self.k, self.v = randn(count, hq, key), randn(count, hk, key) * k_by, randn(count, hv, value)
        self.g = torch.rand(count, self.heads, device=device) ** 0.25
        self.beta = torch.rand(count, self.heads, device=device)
        self.offsets = generate.indptr(lengths, device) + around[0]
        self.scale = 0.2
        self.n = len(lengths)

    def states(self, slots=None):
        shape = (slots or self.n, self.heads, self.v.shape[2], self.q.shape[2])
        return generate.randn(*shape, device=self.q.device)

    def run(self, state, backend, **more):
        given = (self.q, self.k, self.v, self.g, self.beta, self.scale, state, True, self.offsets, True)
        return flashinfer.chunk_gated_delta_rule(*given, backend=backend, **more)

    def span(self, i):
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def truth(self, i, state, dtype=torch.float64):
        s = self.span(i)
        tensors = (self.q[s], self.k[s], self.v[s], self.g[s], self.beta[s])
        return recurrence(*tensors, state, self.scale, True, dtype=dtype)


@backends
@pytest.mark.parametrize(
    ("heads", "index"), [((1, 1, 2), torch.int32), ((2, 1, 1), torch.int64), ((2, 2, 2), torch.int32)], ids=str
)
def test_lengths_and_groups(backend, device, heads, index):
    prompt = Prompt([70, 0, 1, 64], heads, (24, 40), device=device, around=(3, 5))
    prompt.offsets = prompt.offsets.to(index)
    states = prompt.states()
    output = torch.full((prompt.q.shape[0], prompt.heads, 40), NAN, device=device)
    out, final = prompt.run(states, backend, output=output)
    assert out is output and final.dtype == torch.float32
    for i in range(prompt.n):
        truth, on_the_way, _ = prompt.truth(i, states[i])
        if len(truth):
            assert_near(out[prompt.span(i)], truth, f"sequence {i}")
            assert_near(final[i], on_the_way[-1], f"state {i}")
        else:
            assert_bitwise(final[i], states[i])
    assert not out[:3].any() and not out[-5:].any()


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding(backend, device, dtype, cut_operands):
    prompt = Prompt([150], dtype=dtype, device=device)
    states = prompt.states()
    out, _ = prompt.run(states, backend)
    same = prompt.truth(0, states[0], torch.float32)[0].to(dtype)
    assert_close(out, same, prompt.truth(0, states[0])[0])


@backends
@pytest.mark.parametrize(("decay", "beta"), [(1e-30, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.5, 0.0)])
def test_extremes(backend, device, decay, beta):
    """Decays of 0 and 1, beta 0 and 1, and keys that repeat, for which powers of the triangular system are large."""
    prompt = Prompt([90], device=device)
    prompt.k[10:] = prompt.k[10]
    prompt.g[::3] = decay
    prompt.beta.fill_(beta)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    truth, on_the_way, _ = prompt.truth(0, states[0])
    assert_near(out, truth, by=2e-4)
    assert_near(final[0], on_the_way[-1], by=2e-4)


@backends
def test_a_pool_in_place(backend, device):
    prompt = Prompt([65, 3, 20], device=device)
    pool = prompt.states(8)
    pool[[0, 2, 4, 6]] = NAN
    before = pool.clone()
    slots = torch.tensor([7, -1, 3], device=device)
    out, given = prompt.run(pool, backend, output_state=pool, state_indices=slots)
    assert given is pool
    for i in (0, 2):
        truth, on_the_way, _ = prompt.truth(i, before[slots[i]])
        assert_near(out[prompt.span(i)], truth)
        assert_near(pool[slots[i]], on_the_way[-1])
    assert not out[prompt.span(1)].any()
    for slot in (0, 1, 2, 4, 5, 6):
        assert_bitwise(pool[slot], before[slot], f"slot {slot}")


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_narrow_states_and_checkpoints(backend, device, dtype):
    prompt = Prompt([200, 63, 64], device=device)
    states = prompt.states().to(dtype)
    marks = torch.full((6, 2, 32, 32), NAN, device=device)
    starts = torch.tensor([0, 3, 3, 4], device=device, dtype=torch.int32)
    final = torch.zeros_like(states)
    more = {"state_checkpoints": marks, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 64}
    out, _ = prompt.run(states, backend, output_state=final, **more)
    for i, places in ((0, range(3)), (1, ()), (2, (3,))):
        truth, on_the_way, _ = prompt.truth(i, states[i].float())
        assert_near(out[prompt.span(i)], truth)
        for j, place in enumerate(places):
            assert_near(marks[place], on_the_way[64 * (j + 1) - 1], f"checkpoint {place}")
        expected = on_the_way[-1].to(dtype).double()
        assert (final[i].double() - expected).abs().max() <= 0.07 * expected.abs().max()
    assert marks[4:].isnan().all()


@backends
def test_bits_depend_on_nothing_else(backend, device):
    """Neither on the rest of the batch, nor on where a prompt is cut at a multiple of 64."""
    prompt = Prompt([30, 200, 5], device=device)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    rows, state = prompt.span(1), states[1:2]
    alone = [x[rows] for x in (prompt.q, prompt.k, prompt.v, prompt.g, prompt.beta)]
    parts = []
    for begin, end in ((0, 64), (64, 192), (192, 200)):
        offsets = torch.tensor([0, end - begin], device=device)
        part, state = flashinfer.chunk_gated_delta_rule(
            *(x[begin:end] for x in alone), prompt.scale, state, True, offsets, True, backend=backend
        )
        parts.append(part)
    assert_bitwise(torch.cat(parts), out[rows])
    assert_bitwise(state[0], final[1])


@backends
def test_then_decode(backend, device):
    """A prompt and one step give what the longer prompt gives."""
    prompt = Prompt([65], (1, 1, 1), device=device)
    a, b = (generate.randn(65, 1, device=device) for _ in range(2))
    zero = torch.zeros(1, device=device)
    prompt.g = torch.exp(-torch.nn.functional.softplus(a))
    prompt.beta = b.sigmoid()
    state = prompt.states()
    out, final = prompt.run(state, backend)
    prompt.offsets = torch.tensor([0, 64], device=device)
    _, before = prompt.run(state, backend)
    last = [x[64:][None] for x in (prompt.q, prompt.k, prompt.v)]
    step, _ = gdn_decode.gated_delta_rule_decode_pretranspose(
        *last, before, zero, a[64:][None], zero, b[64:][None], prompt.scale, backend=backend
    )
    assert_near(step[0, 0], out[64].double())
    assert_near(before, final.double())


@pytest.mark.parametrize(
    "tokens", [6144, pytest.param(24576, marks=pytest.mark.matrix), pytest.param(102400, marks=pytest.mark.gpu)]
)
def test_a_long_prompt_does_not_drift(device, tokens):
    """Slow decays: the state errs as it does after an eighth of the tokens. On a CPU, that of the reference."""
    prompt = Prompt([tokens], (1, 1, 2), (16, 16), device=device)
    prompt.g = 1 - (1 - prompt.g) / 1000
    states, every = prompt.states(), tokens // 8
    marks, starts = torch.zeros(8, 2, 16, 16, device=device), torch.tensor([0, 8], device=device)
    more = {"state_checkpoints": marks, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": every}
    out, final = prompt.run(states, "reference" if device.type == "cpu" else "auto", **more)
    truth, on_the_way, _ = prompt.truth(0, states[0])
    assert_near(out, truth)
    assert_bitwise(marks[7], final[0])
    expected = on_the_way[every - 1 :: every]
    errors = (marks.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert errors.max() < max(2 * errors[0], 2e-6), errors


@backends
def test_defaults(backend, device):
    """No gates, no state, no norm, strided inputs, nothing to do."""
    prompt = Prompt([5, 60], (1, 1, 1), device=device, k_by=0.1)
    q, k, v = torch.cat([prompt.q, prompt.k, prompt.v], 1).split(1, 1)
    out = flashinfer.chunk_gated_delta_rule(q, k, v, cu_seqlens=prompt.offsets, scale=0.0, backend=backend)
    ones, zero = torch.ones(65, 1, device=device), torch.zeros(1, 32, 32, device=device)
    for i in range(2):
        s = prompt.span(i)
        truth = recurrence(prompt.q[s], prompt.k[s], prompt.v[s], ones[s], ones[s], zero, 32**-0.5)[0]
        assert_near(out[s], truth)
    for offsets, count in (([0], 0), ([0, 0], 0), ([2], 5)):
        offsets = torch.tensor(offsets, device=device)
        out = flashinfer.chunk_gated_delta_rule(q[:count], k[:count], v[:count], cu_seqlens=offsets, backend=backend)
        assert out.shape == (count, 1, 32) and not out.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": None}, "cu_seqlens"),
        ({"checkpoint_every_n_tokens": 32}, "checkpoint_every_n_tokens"),
        ({"checkpoint_every_n_tokens": 64}, "state_checkpoints"),
        ({"backend": "fa3"}, "backend"),
        ({"g": torch.ones(5, 3)}, "g: got shape"),
        ({"use_cp": "never"}, "use_cp"),
        ({"max_seqlen": 6}, "max_seqlen"),
        ({"initial_state": torch.zeros(2, 1, 32, 32)}, "initial_state"),
        ({"state_indices": torch.zeros(1, dtype=torch.int32), "output_final_state": True}, "output_state"),
    ],
)
def test_errors_name_the_argument(change, message):
    prompt = Prompt([5], (1, 1, 1))
    given = {"q": prompt.q, "k": prompt.k, "v": prompt.v, "cu_seqlens": prompt.offsets} | change
    with pytest.raises(ValueError, match=message):
        flashinfer.chunk_gated_delta_rule(**given)


@backends
@pytest.mark.parametrize("given", [True, False])
def test_gates_of_channels(backend, device, given):
    """Gated delta rule 2: what is forgotten, erased and written has a gate of each channel."""
    prompt = Prompt([70, 5], (1, 1, 2), device=device, k_by=1 if given else 0.1)
    states = prompt.states()
    g = -generate.randn(75, 2, 32, device=device).abs() if given else None
    beta, w = (torch.rand(75, 2, 32, device=device) if given else None for _ in range(2))
    out, final = flashinfer.chunk_gated_delta_rule2(
        prompt.q, prompt.k, prompt.v, g, beta, w, prompt.scale, states, True, prompt.offsets, given, backend=backend
    )
    for i in range(2):
        s = states[i].double()
        for t in range(prompt.span(i).start, prompt.span(i).stop):
            q, k, v = (x[t].double().expand(2, -1) for x in (prompt.q, prompt.k, prompt.v))
            if given:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
                s, erase, v = s * g[t].double().exp()[:, None], beta[t] * k, w[t] * v
            else:
                erase = k
            s = s + (v - (s * erase[:, None]).sum(-1))[..., None] * k[:, None]
            assert_near(out[t], prompt.scale * (s * q[:, None]).sum(-1), f"token {t}")
        assert_near(final[i], s)


@backends
@pytest.mark.parametrize("n", [1, 3])
def test_products_of_corrections(backend, device, n):
    """Gated DeltaProduct: one decay, n corrections, one readout a token."""
    prompt = Prompt([30, 0, 8], (1, 1, 2), device=device)
    states = prompt.states()
    k, v = (generate.randn(38 * n, x, 32, device=device) for x in (1, 2))
    beta = torch.rand(38 * n, 2, device=device)
    out, final = flashinfer.chunk_gated_delta_product(
        prompt.q, k, v, prompt.g, beta, n, prompt.scale, states, True, prompt.offsets, True, backend=backend
    )
    decay = torch.ones(38, n, 2, dtype=torch.float64, device=device)
    decay[:, 0] = prompt.g
    q = prompt.q.repeat_interleave(n, 0)
    for i in range(3):
        s = prompt.span(i)
        wide = slice(s.start * n, s.stop * n)
        given = q[wide], k[wide], v[wide], decay.flatten(0, 1)[wide], beta[wide]
        truth, on_the_way, _ = recurrence(*given, states[i], prompt.scale, True)
        if len(truth):
            assert_near(out[s], truth[n - 1 :: n])
            assert_near(final[i], on_the_way[-1])
        else:
            assert_bitwise(final[i], states[i])

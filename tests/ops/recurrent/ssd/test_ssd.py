"""Prefill by state-space duality against the recurrence in float64, token by token."""

import pytest
import torch

from flashinfer.mamba import SSDCombined, selective_state_update, ssd_combined_fwd
from flashinfer.ops.recurrent.ssd import portable
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.recurrent import rules
from tests.ops.recurrent.rules import assert_within

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
BF16 = torch.bfloat16
INF, POISON = float("inf"), 777.0


class Prompt:
    """Packed sequences of one layer, with tokens of nobody in front and behind."""

    def __init__(self, lengths, device, heads=2, groups=1, dim=16, dstate=16, dtype=torch.float32, around=(0, 0)):
        count = sum(lengths) + sum(around)

        def randn(*shape, dtype=dtype):
            return generate.randn(*shape, dtype=dtype, device=device)

        self.x, self.z = randn(1, count, heads, dim), randn(1, count, heads, dim)
        self.B, self.C = randn(1, count, groups, dstate), randn(1, count, groups, dstate)
        self.dt, self.bias = randn(1, count, heads), torch.rand(heads, device=device)
        self.A, self.D = -torch.rand(heads, device=device), torch.rand(heads, device=device)
        self.offsets = generate.indptr(lengths, device) + around[0]
        self.n, self.limit = len(lengths), (0.0, INF)

    def states(self, slots=None, dtype=torch.float32):
        shape = (slots or self.n, self.x.shape[2], self.x.shape[3], self.B.shape[3])
        return generate.randn(*shape, device=self.x.device).to(dtype)

    def run(self, states, backend="auto", **more):
        given = dict(z=self.z, dt_bias=self.bias, dt_softplus=True, dt_limit=self.limit, cu_seqlens=self.offsets)
        given |= dict(initial_states=states, backend=backend) | more
        return ssd_combined_fwd(self.x, self.dt, self.A, self.B, self.C, self.D, **given)

    def span(self, i):
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def truth(self, i, h, backend="auto"):
        """Results and states of sequence i, and what a backend may err."""
        x, z, dt, B, C = (m[0, self.span(i)] for m in (self.x, self.z, self.dt, self.B, self.C))
        D = self.D.view(x.shape[1], -1)
        chunks = rules.chunks_of(backend, x.dtype, x.device)
        given = x, dt[..., None], self.A[:, None, None], B, C, D, z, self.bias[:, None]
        return rules.state_space(h, *given, limit=self.limit, chunks=chunks)

    def near(self, i, h, out, final, backend="auto"):
        truth = self.truth(i, h, backend)
        assert_within(out[0, self.span(i)], truth.out, truth.out_error, f"sequence {i}")
        if final is not None:
            assert_within(final, truth.states[-1], truth.state_error[-1], f"state {i}")


@backends
@pytest.mark.parametrize(
    "heads, groups, dim, dstate, index", [(4, 2, 24, 40, torch.int32), (2, 2, 16, 16, torch.int64)]
)
def test_lengths_and_groups(backend, device, heads, groups, dim, dstate, index):
    prompt = Prompt([140, 0, 1, 64], device, heads, groups, dim, dstate, around=(3, 5))
    prompt.D = torch.rand(heads, dim, device=device)
    prompt.offsets = prompt.offsets.to(index)
    states = prompt.states()
    out = torch.full_like(prompt.x, float("nan"))
    found, final = prompt.run(states, backend, out=out)
    assert found is out and final.dtype == torch.float32
    for i in (0, 2, 3):
        prompt.near(i, states[i], out, final[i], backend)
    assert_bitwise(final[1], states[1])
    assert not out[0, :3].any() and not out[0, -5:].any()


@backends
@pytest.mark.parametrize("dim, dstate", [(8, 16), (24, 16), (8, 40), (16, 16)])
def test_tiles_behind_another_of_few_columns(backend, device, dim, dstate):
    """Where ptxas 12.8 reads registers that nothing has written."""
    prompt = Prompt([130, 128], device, 4, 2, dim, dstate, torch.bfloat16, around=(3, 5))
    states = prompt.states()
    out, final = prompt.run(states, backend, chunk_size=128)
    for i in range(2):
        prompt.near(i, states[i], out, final[i], backend)


@backends
@pytest.mark.parametrize("dim, dstate", [(16, 1), (1, 16)])
def test_rows_of_one_element(backend, device, dim, dstate):
    prompt = Prompt([70], device, heads=1, dim=dim, dstate=dstate)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    prompt.near(0, states[0], out, final[0], backend)


@backends
def test_prompts_without_tokens(backend, device):
    """Rows that are not aligned, of no tokens: nothing is promised of them to a kernel, and states stay."""
    prompt = Prompt([0, 0], device, heads=3, dim=1)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    assert out.shape == prompt.x.shape
    assert_bitwise(final, states)


@backends
def test_rounding(backend, device, cut_operands):
    """Products of float16 in tf32 err as those of the states and scores rounded to it do."""
    prompt = Prompt([150], device, dtype=torch.float16)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    prompt.near(0, states[0], out, None, backend)


@backends
def test_bfloat16_and_plain_batches(backend, device):
    """Rows that are sequences, strided, without what is optional; states come in bfloat16."""
    prompt = Prompt([70, 70], device, dtype=BF16)
    x, B, C = (
        torch.cat([m, m], -1).unflatten(1, (2, 70))[0, ..., : m.shape[-1]] for m in (prompt.x, prompt.B, prompt.C)
    )
    dt = prompt.dt.view(2, 70, 2)
    out, final = ssd_combined_fwd(x, dt, prompt.A, B, C, dt_limit=(0.01, 0.5), backend=backend)
    assert final.dtype == BF16
    given = dict(softplus=False, limit=(0.01, 0.5), chunks=rules.chunks_of(backend, BF16, dt.device))
    for i in range(2):
        start = torch.zeros(2, 16, 16, device=device)
        truth = rules.state_space(start, x[i], dt[i, ..., None], prompt.A[:, None, None], B[i], C[i], **given)
        assert_within(out[i], truth.out, truth.out_error)
        assert_within(final[i], truth.states[-1], truth.state_error[-1])


@backends
def test_a_pool_in_place(backend, device):
    prompt = Prompt([65, 3, 20, 2], device)
    pool = prompt.states(8)
    pool[[0, 2, 4, 6]] = float("nan")
    before, slots = pool.clone(), torch.tensor([7, -1, 3, 8], device=device)
    out, given = prompt.run(pool, backend, state_indices=slots)
    assert given is pool
    for i in (0, 2):
        prompt.near(i, before[slots[i]], out, pool[slots[i]], backend)
    assert not out[0, 65:68].any() and not out[0, 88:].any()
    for slot in (0, 1, 2, 4, 5, 6):
        assert_bitwise(pool[slot], before[slot], f"slot {slot}")


@backends
def test_states_on_the_way(backend, device):
    """Before any token, one or several of a sequence, in a pool that is written in the same call."""
    prompt = Prompt([200, 63, 0], device)
    pool = prompt.states()
    before = pool.clone()
    marks = torch.full((9, 2, 16, 16), POISON, device=device)
    tokens = torch.tensor([[0, 64, 130, 200], [200, 201, 263, 150], [263, -1, 264, 263]], dtype=torch.int32)
    places = torch.tensor([[0, 1, 2, 3], [4, -1, 5, 8], [6, 8, 8, 9]], dtype=torch.int32)
    more = dict(checkpoint_token_indices=tokens.to(device), checkpoint_state_slots=places.to(device))
    slots = torch.arange(3, device=device)
    prompt.run(pool, backend, state_indices=slots, checkpoint_states=marks, **more)
    for place, i, token in ((1, 0, 64), (2, 0, 130), (3, 0, 200), (5, 1, 63)):
        truth = prompt.truth(i, before[i], backend)
        assert_within(marks[place], truth.states[token - 1], truth.state_error[token - 1], f"place {place}")
    for place, i in ((0, 0), (4, 1), (6, 2)):
        assert_bitwise(marks[place], before[i])
    assert_bitwise(marks[3], pool[0])
    assert_bitwise(marks[5], pool[1])
    assert (marks[7:] == POISON).all()
    # One for each sequence, as upstream has it; rows that are sequences count from their first token.
    one = marks[:1].clone()
    ssd_combined_fwd(
        prompt.x[:, :100], prompt.dt[:, :100], prompt.A, prompt.B[:, :100], prompt.C[:, :100], prompt.D,
        dt_bias=prompt.bias, dt_softplus=True, initial_states=before[:1], checkpoint_states=one, backend=backend,
        checkpoint_token_indices=tokens[0, 1:2].to(device), checkpoint_state_slots=places[0, :1].to(device),
    )  # fmt: skip
    assert_bitwise(one[0], marks[1])


@backends
@pytest.mark.parametrize("chunk", [64, 128])
def test_bits_depend_on_nothing_else(backend, device, chunk):
    """Neither on the rest of the batch, nor on where a prompt is cut at a multiple of the chunk."""
    prompt = Prompt([30, 2 * chunk + 20, 5], device, heads=1)
    states = prompt.states()
    out, final = prompt.run(states, backend, chunk_size=chunk)
    span, state, parts = prompt.span(1), states[1:2], []
    whole = prompt.x, prompt.z, prompt.B, prompt.C, prompt.dt
    for begin, end in ((0, chunk), (chunk, 2 * chunk), (2 * chunk, 2 * chunk + 20)):
        prompt.x, prompt.z, prompt.B, prompt.C, prompt.dt = (m[:, span.start + begin : span.start + end] for m in whole)
        prompt.offsets = torch.tensor([0, end - begin], device=device)
        part, state = prompt.run(state, backend, chunk_size=chunk)
        parts.append(part)
    assert_bitwise(torch.cat(parts, 1), out[:, span])
    assert_bitwise(state[0], final[1])


@pytest.mark.parametrize("programs", [1, 6])
def test_bits_do_not_depend_on_the_heads_of_a_program(device, monkeypatch, programs):
    """Long batches have several heads of a group in a program, which two heads a time do not divide here."""
    prompt = Prompt([70, 3], device, heads=6, groups=2, dtype=BF16)
    states = prompt.states()
    expected, last = prompt.run(states, "portable")
    monkeypatch.setattr(portable, "PROGRAMS", programs)
    out, final = prompt.run(states, "portable")
    assert_bitwise(out, expected)
    assert_bitwise(final, last)
    for i in range(2):
        prompt.near(i, states[i], out, final[i], "portable")


@backends
def test_sequence_numbers_and_their_segments(backend, device):
    """Upstream's way to say where packed sequences are: the same bits, and its table of segments filled."""
    prompt = Prompt([100, 0, 90, 3], device, heads=1, around=(0, 4))
    states = prompt.states()
    expected, last = prompt.run(states, backend)
    numbers = torch.tensor([0] * 100 + [2] * 90 + [3] * 3 + [4] * 4, device=device)[None]
    # Segments begin at tokens 0, 100, 128, 190 and 193: those of no sequence count behind the others.
    chunks, begins, table = (
        torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 0, 1, 1], [0, 100, 0, 62], [9] * 5)
    )
    more = dict(seq_idx=numbers, chunk_indices=chunks, chunk_offsets=begins, cu_seqlens=None)
    out, final = prompt.run(states, backend, seq_chunk_cumsum=table, update_seq_chunk_cumsum=True, **more)
    assert table.tolist() == [0, 1, 1, 3, 4]
    assert_bitwise(out, expected)
    assert_bitwise(final, last)
    alone, none = prompt.run(None, backend, num_seqs=4, return_final_states=False, **more)
    zeros, _ = prompt.run(torch.zeros_like(states), backend)
    assert none is None
    assert_bitwise(alone, zeros)


@backends
@pytest.mark.parametrize("rate, dt", [(-40.0, 3.0), (-1e-4, 1.0), (-1.0, 0.0), (0.0, 1.0)])
def test_extremes(backend, device, rate, dt):
    """Decays near 0 and 1, and tokens that add nothing."""
    prompt = Prompt([150], device)
    prompt.A.fill_(rate)
    prompt.limit = (dt, dt)
    states = prompt.states()
    out, final = prompt.run(states, backend)
    prompt.near(0, states[0], out, final[0], backend)


@backends
@pytest.mark.parametrize("decay", [-300.0, -1e30, -INF])
@pytest.mark.parametrize("chunk", [64, 256])
def test_a_token_that_forgets(backend, device, decay, chunk):
    """The decays of the tokens behind one that leaves nothing of the state keep their digits."""
    # No token is padded: 0 times -inf is NaN, which the interpreter's maximum keeps.
    prompt = Prompt([192], device)
    prompt.dt[0, [3, 70, 71, 191], 0] = 1e4
    prompt.A[0] = decay
    if decay == -300:
        prompt.dt[0, ::2, 0], prompt.A[0] = -8, -1
    states = prompt.states()
    out, final = prompt.run(states, backend, chunk_size=chunk)
    prompt.near(0, states[0], out, final[0], backend)


@backends
def test_then_decode(backend, device):
    """A prompt and one step give what the longer prompt gives."""
    prompt = Prompt([130], device)
    states = prompt.states()
    prompt.offsets = torch.tensor([0, 129], device=device)
    _, before = prompt.run(states, backend)
    heads, dim, dstate = before.shape[1:]
    wide = [m[:, None].expand(heads, dim) for m in (prompt.dt[0, 129], prompt.D, prompt.bias)]
    rate = prompt.A[:, None, None].expand(heads, dim, dstate)
    x, B, C, z = (m[:, 129] for m in (prompt.x, prompt.B, prompt.C, prompt.z))
    out = torch.zeros_like(prompt.x)
    out[0, 129] = selective_state_update(before, x, wide[0][None], rate, B, C, wide[1], z, wide[2], True)[0]
    prompt.offsets = torch.tensor([0, 130], device=device)
    at_once, final = prompt.run(states, backend)
    truth, on_the_way, _, _ = prompt.truth(0, states[0])
    for result, state in ((out, before), (at_once, final)):
        assert (result[0, 129] - truth[-1]).abs().max() < 1e-5 * truth.abs().max()
        assert (state[0] - on_the_way[-1]).abs().max() < 1e-5 * on_the_way.abs().max()


def test_a_long_prompt_does_not_drift(device):
    """5000 tokens of slow decay: the error of the state does not grow with them."""
    prompt = Prompt([5000], device, heads=1, dim=4, dstate=4)
    prompt.A.fill_(-1e-3)
    states = prompt.states()
    _, final = prompt.run(states, "reference")
    on_the_way = prompt.truth(0, states[0]).states
    assert (final[0] - on_the_way[-1]).norm() / on_the_way[-1].norm() < 1e-5


@backends
@pytest.mark.parametrize("shape", [(0,), (0, 2)])
def test_states_on_the_way_of_no_sequence(backend, device, shape):
    x, rows, dt = (torch.ones(size, device=device) for size in ((1, 3, 1, 2), (1, 3, 1, 4), (1, 3, 1)))
    none = torch.zeros(shape, dtype=torch.int32, device=device)
    marks = torch.full((1, 1, 2, 4), POISON, device=device)
    out, states = ssd_combined_fwd(
        x, dt, torch.zeros(1, device=device), rows, rows, cu_seqlens=torch.zeros(1, dtype=torch.int32, device=device),
        checkpoint_token_indices=none, checkpoint_state_slots=none, checkpoint_states=marks, backend=backend,
    )  # fmt: skip
    assert not out.any() and states.shape == (0, 1, 2, 4) and (marks == POISON).all()


@backends
def test_nothing_to_do(backend, device):
    prompt = Prompt([], device, around=(3, 0))
    out, final = prompt.run(None, backend, out=torch.full_like(prompt.x, POISON))
    assert not out.any() and final.shape == (0, 2, 16, 16)
    empty = Prompt([0, 0], device)
    states = empty.states()
    out, final = empty.run(states, backend)
    assert out.shape == (1, 0, 2, 16)
    assert_bitwise(final, states)


ZEROS = torch.zeros(1, 5, 2, 16)
BAD = [
    (dict(x=ZEROS[0]), "x"), (dict(dt=ZEROS), "dt"), (dict(A=ZEROS[0, 0]), "A"), (dict(B=ZEROS[:, :, :, :8]), "C"),
    (dict(B=torch.zeros(1, 5, 3, 16)), "B"), (dict(D=torch.zeros(16)), "D"), (dict(z=ZEROS.double()), "z"),
    (dict(dt_bias=torch.zeros(3)), "dt_bias"), (dict(dt_limit=(1.0, 0.0)), "dt_limit"),
    (dict(seq_idx=torch.zeros(1, 5)), "seq_idx"), (dict(seq_idx=torch.zeros(1, 5, dtype=torch.int32)), "num_seqs"),
    (dict(chunk_indices=torch.zeros(1, dtype=torch.int32)), "chunk_indices"), (dict(num_seqs=2), "num_seqs"),
    (dict(seq_chunk_cumsum=torch.zeros(2, dtype=torch.int32)), "seq_chunk_cumsum"),
    (dict(update_seq_chunk_cumsum=True), "seq_chunk_cumsum"), (dict(initial_states=ZEROS), "initial_states"),
    (dict(state_indices=torch.zeros(1, dtype=torch.int32)), "initial_states"),
    (dict(checkpoint_states=torch.zeros(1, 2, 16, 16)), "checkpoint_token_indices"),
    (dict(cu_seqlens=torch.zeros(2)), "cu_seqlens"), (dict(chunk_size=100), "chunk_size"),
    (dict(out=ZEROS.half()), "out"), (dict(backend="triton"), "backend"), (dict(state_dtype=torch.int8), "state_dtype"),
]  # fmt: skip


@pytest.mark.parametrize("changed, name", BAD)
def test_bad_input(changed, name):
    given = dict(x=ZEROS, dt=torch.zeros(1, 5, 2), A=torch.zeros(2), B=ZEROS, C=ZEROS) | changed
    with pytest.raises(ValueError, match=f"^{name}: got "):
        ssd_combined_fwd(**given)


def test_inside_other_defaults(device):
    prompt = Prompt([7], device)
    states = prompt.states()
    expected, last = prompt.run(states)
    with torch.device("meta"):
        found, final = prompt.run(states)
    assert_bitwise(found, expected)
    assert_bitwise(final, last)


@pytest.mark.parametrize("kind", ["cute", "cake"])
def test_a_layer_by_upstreams_class(device, kind):
    """Sizes and dtypes are the layer's; "cute" writes chunks of each head, and gives tokens of them."""
    prompt = Prompt([100, 156], device, heads=4, groups=2, dim=16, dstate=32, dtype=BF16)
    of_tokens = torch.repeat_interleave(torch.arange(2, device=device), torch.tensor([100, 156], device=device))[None]
    cut = [torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 0, 1], [0, 100, 0])]
    layer = SSDCombined(128, 4, 16, 32, 2, state_dtype=torch.float32, has_initial_states=True, has_varlen=True,
                        has_z=True, backend=kind)  # fmt: skip
    states = prompt.states()
    out = torch.full((1, 4, 16, 2, 128) if kind == "cute" else prompt.x.shape, POISON, dtype=BF16, device=device)
    more = dict(z=prompt.z, dt_bias=prompt.bias, dt_softplus=True, initial_states=states, seq_idx=of_tokens)
    given = prompt.x, prompt.dt, prompt.A, prompt.B, prompt.C, prompt.D
    found, final = layer.run(*given, chunk_indices=cut[0], chunk_offsets=cut[1], out=out, **more)
    rows = out.permute(0, 3, 4, 1, 2).reshape(prompt.x.shape) if kind == "cute" else out
    assert_bitwise(found, rows)
    assert found.data_ptr() == out.data_ptr() and final.dtype == torch.float32
    for i in range(2):
        prompt.near(i, states[i], found, final[i])
    first = layer.compute_seq_chunk_cumsum(of_tokens, *cut, 128, 2)
    assert first.tolist() == [0, 1, 3] and first.dtype == torch.int32 and layer.tile_state_size(2) == 0
    plain = SSDCombined(64, 4, 16, 32, 2, has_d=False, backend=kind)
    out, final = plain.run(*given[:5], dt_bias=prompt.bias)
    assert out.shape == prompt.x.shape and final.shape == (1, 4, 16, 32) and final.dtype == BF16
    for change, name in (({"D": prompt.D}, "D"), ({"z": prompt.z}, "z"), ({"seq_idx": of_tokens}, "seq_idx"),
                         ({"x": prompt.x.float()}, "x"), ({"out": prompt.x[:, :64]}, "out")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got"):
            plain.run(**dict(zip(("x", "dt", "A", "B", "C"), given)) | change)
    with pytest.raises(ValueError, match="^ngroups: got 3"):
        SSDCombined(128, 4, 16, 32, 3)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("begins", [True, False])
def test_narrow_states_in_rows_that_begin_anywhere(backend, device, dtype, begins):
    """Pools, checkpoints and inputs are parts of wider rows; sequences begin with zeros where no states are given."""
    prompt = Prompt([100, 0, 30], device, heads=4, groups=2, around=(2, 3))
    mixed = torch.cat([prompt.x[..., :1], prompt.x, prompt.B.repeat_interleave(2, 2), prompt.z], -1)
    prompt.x, prompt.z = mixed[..., 1:17], mixed[..., -16:]
    prompt.B = mixed[:, :, ::2, 17:33]
    wide = torch.full((3, 4, 16, 19), POISON, dtype=dtype, device=device)
    pool, marks = wide[..., 2:18], torch.full((4, 4, 16, 16), POISON, dtype=dtype, device=device)
    pool.copy_(prompt.states())
    before = pool.clone().float() if begins else torch.zeros(3, 4, 16, 16, device=device)
    tokens = torch.tensor([[102, 70], [102, -1], [132, 103]], dtype=torch.int32, device=device)
    places = torch.tensor([[3, 0], [1, 2], [2, -1]], dtype=torch.int32, device=device)
    more = dict(checkpoint_token_indices=tokens, checkpoint_state_slots=places, checkpoint_states=marks)
    more |= dict(state_indices=torch.arange(3, device=device)) if begins else dict(state_dtype=dtype)
    out, final = prompt.run(pool if begins else None, backend, **more)
    assert final.dtype == dtype and (not begins or final is pool)
    for i in (0, 2):
        prompt.near(i, before[i], out, final[i], backend)
    assert_bitwise(final[1].float(), before[1])
    assert (wide[..., :2] == POISON).all() and (wide[..., 18:] == POISON).all()
    truth = prompt.truth(0, before[0], backend)
    assert_bitwise(marks[3], final[0].contiguous())
    assert_within(marks[0], truth.states[67], truth.state_error[67], "place 0")
    assert_bitwise(marks[1].float(), before[1])
    assert_bitwise(marks[2], final[2].contiguous())

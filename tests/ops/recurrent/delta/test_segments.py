"""Prefill of sequences in segments that go in parallel, against the recurrence in float64 and by bits."""

import pytest
import torch

from flashinfer.testing.compare import assert_bitwise
from tests.ops.recurrent.delta.test_prefill import NAN, Prompt
from tests.ops.recurrent.rules import assert_near

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
CP = {"use_cp": True, "_cp_chunk_len": 128}


@backends
@pytest.mark.parametrize(
    ("heads", "index"), [((1, 1, 2), torch.int32), ((2, 1, 1), torch.int64), ((2, 2, 2), torch.int32)], ids=str
)
def test_lengths_and_groups(backend, device, heads, index):
    """Whole segments, parts of one, sequences shorter than one and of none; tokens of nobody on both sides."""
    prompt = Prompt([300, 0, 1, 256, 128, 127], heads, (24, 40), device=device, around=(130, 5))
    prompt.offsets = prompt.offsets.to(index)
    states = prompt.states()
    output = torch.full((prompt.q.shape[0], prompt.heads, 40), NAN, device=device)
    out, final = prompt.run(states, backend, output=output, **CP)
    for i in range(prompt.n):
        truth, on_the_way, _ = prompt.truth(i, states[i])
        if len(truth):
            assert_near(out[prompt.span(i)], truth, f"sequence {i}")
            assert_near(final[i], on_the_way[-1], f"state {i}")
        else:
            assert_bitwise(final[i], states[i])
    assert not out[:130].any() and not out[-5:].any()


@backends
def test_a_pool_in_place_with_checkpoints(backend, device):
    prompt = Prompt([256, 3, 200], device=device)
    pool = prompt.states(8)
    pool[[0, 2, 4, 6]] = NAN
    before = pool.clone()
    slots = torch.tensor([7, -1, 3], device=device)
    marks = torch.full((7, 2, 32, 32), NAN, device=device)
    starts = torch.tensor([0, 4, 4, 7], device=device)
    more = {"state_checkpoints": marks, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 64}
    out, _ = prompt.run(pool, backend, output_state=pool, state_indices=slots, **more, **CP)
    for i in (0, 2):
        truth, on_the_way, _ = prompt.truth(i, before[slots[i]])
        assert_near(out[prompt.span(i)], truth)
        assert_near(pool[slots[i]], on_the_way[-1])
        for j in range(len(truth) // 64):
            assert_near(marks[starts[i] + j], on_the_way[64 * (j + 1) - 1], f"checkpoint {j}")
    assert not out[prompt.span(1)].any()
    for slot in (0, 1, 2, 4, 5, 6):
        assert_bitwise(pool[slot], before[slot], f"slot {slot}")


@pytest.mark.matrix
@backends
@pytest.mark.parametrize(("decay", "beta"), [(1e-30, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0)])
def test_extremes(backend, device, decay, beta):
    """Decays of 0 and 1, and keys that repeat: a map of a segment then forgets nothing, or everything."""
    prompt = Prompt([270], device=device)
    prompt.k[10:] = prompt.k[10]
    prompt.g[::3] = decay
    prompt.beta.fill_(beta)
    states = prompt.states()
    out, final = prompt.run(states, backend, **CP)
    truth, on_the_way, _ = prompt.truth(0, states[0])
    assert_near(out, truth, by=2e-4)
    assert_near(final[0], on_the_way[-1], by=2e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bits_do_not_depend_on_the_batch_or_on_cuts(device, dtype):
    """A sequence by itself, in a batch, and cut where segments begin."""
    prompt = Prompt([70, 400], dtype=dtype, device=device)
    states = prompt.states()
    out, final = prompt.run(states, "portable", **CP)
    alone = Prompt([400], dtype=dtype, device=device)
    span = prompt.span(1)
    for name in ("q", "k", "v", "g", "beta"):
        setattr(alone, name, getattr(prompt, name)[span])
    by_itself, state = alone.run(states[1:], "portable", **CP)
    assert_bitwise(by_itself, out[span])
    assert_bitwise(state[0], final[1])
    state = states[1:]
    for first, last in ((0, 256), (256, 384), (384, 400)):
        part = Prompt([last - first], dtype=dtype, device=device)
        for name in ("q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(alone, name)[first:last])
        result, state = part.run(state, "portable", **CP)
        assert_bitwise(result, by_itself[first:last])
    assert_bitwise(state[0], final[1])

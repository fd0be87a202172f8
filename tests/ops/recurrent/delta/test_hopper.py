"""Prefill by chunks on Hopper: when its kernel is chosen, and what long prompts and many sequences give."""

from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer._core.target import named
from flashinfer.ops.recurrent import delta as room
from flashinfer.ops.recurrent.delta.operands import Gates, Pool, Tokens
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.recurrent.delta.test_prefill import NAN, Prompt
from tests.ops.recurrent.oracle import recurrence

CASE = room.Chunks(
    128, 128, "bf16", "bf16", gate="linear", gate_dtype="fp32", beta="value", beta_dtype="fp32", source_dtype="fp32",
    state_dtype="fp32",
)  # fmt: skip


def chosen(problem, arch):
    target = named(arch)
    return next(v.name for v in room.delta_chunks.variants if not v.refuses or not v.refuses(problem, target))


@pytest.mark.parametrize(
    "change",
    [
        dict(key_dim=64),
        dict(value_dim=96),
        dict(dtype="fp16"),
        dict(out_dtype="fp32"),
        dict(stride=32),
        dict(write_dtype="bf16"),
        dict(segments=True),
        dict(aligned=False),
    ],
    ids=str,
)
def test_others_are_refused(change):
    assert chosen(CASE, "90a") == "sm90" and chosen(replace(CASE, channels=True, gate="log"), "90a") == "sm90"
    assert chosen(CASE, "100a") == "portable"
    assert chosen(replace(CASE, **change), "90a") == "portable"


def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")


def check(prompt, out, final, states, sequences):
    for i in sequences:
        if not len(prompt.q[prompt.span(i)]):
            assert_bitwise(final[i], states[i])
            continue
        truth, on_the_way, _ = prompt.truth(i, states[i])
        # Operands of every product are rounded to bfloat16, so a peer in float32 would be nearer.
        error = (out[prompt.span(i)].double() - truth).norm() / truth.norm()
        assert error < 0.01, (i, error)
        assert (final[i].double() - on_the_way[-1]).norm() < 0.01 * on_the_way[-1].norm(), i


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2, 8), (4, 2, 2), (1, 1, 1)], ids=str)
def test_lengths_and_groups(device, heads):
    hopper(device)
    prompt = Prompt([70, 0, 1, 64, 63, 65, 1000], heads, (128, 128), torch.bfloat16, device, (3, 5))
    for x in (prompt.q, prompt.k, prompt.v):
        x[:3], x[-5:] = NAN, NAN
    states = prompt.states()
    out, final = prompt.run(states, "sm90")
    check(prompt, out, final, states, range(prompt.n))
    assert not out[:3].any() and not out[-5:].any()


@pytest.mark.gpu
def test_many_sequences_and_a_long_one(device):
    """32768 tokens in one, and 500 others: the bits of each are those that it has alone."""
    hopper(device)
    lengths = [32768] + [(37 * i) % 200 for i in range(500)]
    prompt = Prompt(lengths, (2, 2, 4), (128, 128), torch.bfloat16, device)
    states = prompt.states()
    out, final = prompt.run(states, "sm90")
    check(prompt, out, final, states, (1, 2, 250, 500))
    for i in (0, 3, 400):
        span = prompt.span(i)
        given = [x[span] for x in (prompt.q, prompt.k, prompt.v, prompt.g, prompt.beta)]
        offsets = torch.tensor([0, lengths[i]], device=device)
        alone, state = flashinfer.chunk_gated_delta_rule(
            *given, prompt.scale, states[i : i + 1], True, offsets, True, backend="sm90"
        )
        assert_bitwise(alone, out[span])
        assert_bitwise(state[0], final[i])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_pool_in_place_with_checkpoints(device, dtype):
    hopper(device)
    prompt = Prompt([200, 64, 9], (1, 1, 2), (128, 128), torch.bfloat16, device)
    pool = prompt.states(5).to(dtype)
    before, slots = pool.clone(), torch.tensor([4, -1, 1], device=device, dtype=torch.int32)
    marks, starts = prompt.states(6).to(dtype), torch.tensor([0, 3, 4, 4], device=device)
    more = {"state_checkpoints": marks, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 64}
    out, _ = prompt.run(pool, "sm90", output_state=pool, state_indices=slots, **more)
    near = 0.01 if dtype != torch.float8_e4m3fn else 0.06
    for i, slot in ((0, 4), (2, 1)):
        truth, on_the_way, _ = prompt.truth(i, before[slot].float())
        assert (out[prompt.span(i)].double() - truth).norm() < 0.01 * truth.norm()
        assert (pool[slot].double() - on_the_way[-1]).norm() < near * on_the_way[-1].norm()
    assert not out[prompt.span(1)].any()
    for slot in (0, 2, 3):
        assert_bitwise(pool[slot].view(torch.uint8), before[slot].view(torch.uint8))
    for j in range(3):
        expected = prompt.truth(0, before[4].float())[1][64 * j + 63]
        assert (marks[j].double() - expected).norm() < near * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_decays_of_channels(device, tokens):
    """Rows of a batch, each a sequence."""
    hopper(device)
    q, k, v = (generate.randn(2, tokens, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    gate = -torch.rand(2, tokens, 2, 128, device=device)
    beta = torch.rand(2, tokens, 2, device=device)
    state, out = generate.randn(2, 2, 128, 128, device=device), torch.full_like(v, NAN)
    final = torch.full_like(state, NAN)
    problem = replace(CASE, channels=True, bounded=True, gate="log", packed=False, normalize=True)
    given = Tokens(q, k, v, gate, beta), Gates(), Pool(source=state, state=final), out, 0.1
    room.delta_chunks(problem, device, "sm90").run(*given, None, None, 0)
    for i in range(2):
        truth, on_the_way, _ = recurrence(q[i], k[i], v[i], gate[i].double().exp(), beta[i], state[i], 0.1, True)
        assert (out[i].double() - truth).norm() < 0.01 * truth.norm()
        assert (final[i].double() - on_the_way[-1]).norm() < 0.01 * on_the_way[-1].norm()

"""The causal convolution against its definition in float64."""

import pytest
import torch

from flashinfer.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close

backends = pytest.mark.parametrize("backend", ["reference", "portable"])
NAN = float("nan")


def truth(x, before, weight, bias, silu, dtype=torch.float64):
    """x [tokens, channels] after `before` [channels, width - 1]."""
    width = weight.shape[1]
    full = torch.cat([before.T.to(dtype), x.to(dtype)])
    out = []
    for t in range(x.shape[0]):
        y = sum(weight[:, j].to(dtype) * full[t + j] for j in range(width))
        y = y if bias is None else y + bias.to(dtype)
        out.append(y * y.sigmoid() if silu else y)
    return torch.stack(out) if out else full[:0]


def assert_like(out, x, before, weight, bias, silu):
    same = truth(x, before, weight, bias, silu, torch.float32).to(out.dtype)
    assert_close(out.contiguous(), same, truth(x, before, weight, bias, silu))


def last(x, before, width):
    return torch.cat([before.T.to(x.dtype), x])[-(width - 1) :].T


@backends
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_update(backend, device, width, layout):
    x, weight = generate.randn(3, 40, dtype=torch.bfloat16, device=device), generate.randn(40, width, device=device)
    bias = generate.randn(40, device=device) if width > 2 else None
    state = generate.randn(6, 40, width - 1, dtype=torch.bfloat16, device=device)
    if layout == "SD":
        state = state.transpose(1, 2).contiguous().transpose(1, 2)
    before = state.clone()
    slots = torch.tensor([5, -1, 2], device=device)
    out = torch.full_like(x, NAN)
    assert causal_conv1d_update(x, state, weight, bias, "silu", slots, out=out, backend=backend) is out
    assert not out[1].any()
    for i in (0, 2):
        assert_like(out[i : i + 1], x[i : i + 1], before[slots[i]], weight, bias, True)
        assert_bitwise(state[slots[i]].contiguous(), last(x[i : i + 1], before[slots[i]], width).contiguous())
    for slot in (0, 1, 3, 4):
        assert_bitwise(state[slot].contiguous(), before[slot].contiguous())


@backends
@pytest.mark.parametrize("packed", [False, True])
def test_drafts(backend, device, packed):
    """Two rounds: the second begins behind what the first had accepted."""
    weight, length = generate.randn(24, 4, device=device), 5
    state = torch.zeros(3, 24, length, device=device)
    slots = torch.tensor([2, 0], device=device, dtype=torch.int32)
    stream = [torch.zeros(3, 24, device=device) for _ in range(2)]
    accepted = torch.tensor([1, 1], device=device, dtype=torch.int32)
    for taken in ((2, 3), (1, 2)):
        x = generate.randn(2, 3, 24, device=device)
        given = x.reshape(6, 24) if packed else x
        offsets = torch.tensor([0, 3, 6], device=device, dtype=torch.int32) if packed else None
        out = causal_conv1d_update(
            given, state, weight, None, None, slots, accepted, offsets, backend=backend
        ).reshape(2, 3, 24)  # fmt: skip
        for i in range(2):
            assert_like(out[i], x[i], stream[i][-3:].T, weight, None, False)
            stream[i] = torch.cat([stream[i], x[i, : taken[i]]])
        accepted = torch.tensor(taken, device=device, dtype=torch.int32)
    assert not state[1].any()


@backends
@pytest.mark.parametrize("width", [2, 4])
def test_prompts(backend, device, width):
    lengths = [40, 0, 1, 2, 70]
    offsets = generate.indptr(lengths, device) + 2
    x = generate.randn(117, 40, device=device).T
    weight, bias = generate.randn(40, width, device=device), generate.randn(40, device=device)
    states = generate.randn(7, 40, width + 1, device=device)
    before = states.clone()
    slots = torch.tensor([6, 3, 0, 5, -1], device=device)
    reads = torch.tensor([True, True, False, True, True], device=device)
    out = causal_conv1d_fn(x, weight, bias, states, offsets, slots, reads, backend=backend)
    assert not out[:, :2].any() and not out[:, 115:].any() and not out[:, 45:115].any()
    for i in range(4):
        s = slice(int(offsets[i]), int(offsets[i + 1]))
        history = before[slots[i], :, : width - 1].masked_fill(~reads[i], 0.0)
        if lengths[i]:
            assert_like(out[:, s].T, x[:, s].T, history, weight, bias, True)
        assert_bitwise(states[slots[i], :, : width - 1].contiguous(), last(x[:, s].T, history, width).contiguous())
        assert_bitwise(states[slots[i], :, width - 1 :], before[slots[i], :, width - 1 :])
    assert_bitwise(states[[1, 2, 4]], before[[1, 2, 4]])


@backends
def test_prompts_without_states(backend, device):
    x, weight = generate.randn(2, 10, 37, device=device), generate.randn(10, 3, device=device)
    out = causal_conv1d_fn(x, weight, activation=None, backend=backend)
    for i in range(2):
        assert_like(out[i].T, x[i].T, torch.zeros(10, 2, device=device), weight, None, False)
    assert causal_conv1d_fn(x[:0], weight).shape == (0, 10, 37)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "activation"),
        ({"weight": torch.zeros(8, 5)}, "weight"),
        ({"conv_state": torch.zeros(2, 8, 2)}, "conv_state"),
        ({"bias": torch.zeros(7)}, "bias"),
        ({"conv_state_indices": torch.zeros(3, dtype=torch.int32)}, "conv_state_indices"),
    ],
)
def test_errors_name_the_argument(change, message):
    given = {"x": torch.zeros(2, 8), "conv_state": torch.zeros(2, 8, 3), "weight": torch.zeros(8, 4)} | change
    with pytest.raises(ValueError, match=message):
        causal_conv1d_update(**given)

"""Steps of whole layers against their parts in float64."""

import pytest
import torch

import flashinfer
from flashinfer._core.dispatch import Op
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.recurrent.oracle import bounded_decay, recurrence, softplus_decay

DIM = 32


@pytest.fixture(params=["reference", "portable"], autouse=True)
def backend(request, monkeypatch):
    """What "auto" is for recurrent ops."""
    select = Op.__call__

    def chosen(self, problem, device, backend="auto"):
        recurrent = self.name.startswith(("delta", "causal"))
        return select(self, problem, device, request.param if recurrent else backend)

    monkeypatch.setattr(Op, "__call__", chosen)


def near(out, truth, by):
    assert (out.double() - truth).abs().max() <= by * max(1.0, float(truth.abs().max()))


def convolved(window, weight):
    """SiLU of the last output of a window [channels, width], rounded as the next kernel reads it."""
    y = (window.double() * weight.double()).sum(-1)
    return y * y.sigmoid()


class Kimi:
    def __init__(self, rows, heads=2, slots=6, longest=1, dtype=torch.float32, state_dtype=torch.float32, device="cpu"):
        def randn(*shape):
            return generate.randn(*shape, dtype=dtype, device=device)

        inner = heads * DIM
        self.heads, self.x, self.weight = heads, randn(rows, 3 * inner), generate.randn(3, 4, inner, device=device)
        self.conv = randn(slots, longest + 2, 3 * inner).transpose(1, 2)
        self.state = generate.randn(slots, heads, DIM, DIM, device=device).to(state_dtype)
        self.gate, self.beta = randn(1, rows, heads, DIM), randn(1, rows, heads)
        self.A_log, self.bias = generate.randn(heads, device=device), generate.randn(inner, device=device)
        self.out_gate, self.norm = randn(rows, heads, DIM), generate.randn(DIM, device=device)

    def arguments(self, slots, conv, state):
        given = self.x, self.weight, conv, self.gate, self.beta, self.A_log, self.bias, slots, state
        return *given, self.out_gate, self.norm

    def truth(self, row, window, state, lower=-5.0):
        """Output [heads, K] and state after a row whose window of inputs [channels, 4] ends with it."""
        taps = self.weight.transpose(1, 2).reshape(-1, 4)
        q, k, v = convolved(window, taps).reshape(3, 1, self.heads, DIM)
        g, bias = self.gate[0, row][None], self.bias.reshape(self.heads, DIM)
        if lower is None:
            decay = softplus_decay(g, self.A_log[:, None], bias)
        else:
            decay = bounded_decay(g, self.A_log, bias, lower)
        beta = self.beta[0, row][None].double().sigmoid()
        o, states, _ = recurrence(q, k, v, decay, beta, state, DIM**-0.5, True)
        o = o[0] / (o[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.norm.double()
        return o * self.out_gate[row].double().sigmoid(), states[-1]


@pytest.mark.parametrize("lower", [-5.0, None], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_kda(device, lower, state_dtype):
    layer = Kimi(4, state_dtype=state_dtype, device=device)
    slots = torch.tensor([3, 0, -1, 5], dtype=torch.int32, device=device)
    conv, state = layer.conv.clone(), layer.state.clone()
    output = torch.full((1, 4, 2, DIM), float("nan"), device=device)
    given = layer.arguments(slots, conv, state)
    out = flashinfer.fused_kda_decode(*given, lower_bound=lower, output=output)
    assert out is output and not out[0, 1:3].any()
    for row in (0, 3):
        window = torch.cat([layer.conv[slots[row]], layer.x[row][:, None]], 1)
        o, s = layer.truth(row, window, layer.state[slots[row]], lower)
        near(out[0, row], o, 3e-5)
        near(state[slots[row]], s, 1e-5 if state_dtype == torch.float32 else 1e-2)
        assert_bitwise(conv[slots[row]].contiguous(), window[:, 1:].contiguous())
    for slot in (0, 1, 2, 4):
        assert_bitwise(state[slot], layer.state[slot])
        assert_bitwise(conv[slot].contiguous(), layer.conv[slot].contiguous())


@pytest.mark.parametrize("longest", [1, 3])
def test_packed_fused_kda(device, longest):
    """Sequences of several lengths, one of them null, and rows that are not used."""
    lengths = [longest, 0, longest, 1]
    offsets = generate.indptr(lengths, device)
    rows = sum(lengths) + 2
    layer = Kimi(rows, 1, 4 * longest + 1, longest, device=device)
    slots = (1 + torch.arange(4 * longest, device=device)).view(4, longest).to(torch.int32)
    slots[2] = 0
    accepted = torch.tensor([longest, 1, 1, 1], dtype=torch.int32, device=device)
    conv, state = layer.conv.clone(), layer.state.clone()
    given = layer.arguments(slots, conv, state)
    out = flashinfer.packed_fused_kda_decode(*given, query_start_loc=offsets, num_accepted_tokens=accepted)
    if longest == 1:
        by_row = torch.tensor([1, 0, 4, 0, 0], dtype=torch.int32, device=device)
        again = flashinfer.packed_fused_kda_decode(
            *layer.arguments(slots, layer.conv.clone(), layer.state.clone()), query_start_loc=offsets,
            num_accepted_tokens=accepted, t1_state_indices=by_row,
        )  # fmt: skip
        near(again, out.double(), 1e-5)
    assert not out[0, offsets[2] : offsets[3]].any() and not out[0, -2:].any()
    for i in (0, 3):
        first = int(accepted[i]) - 1
        window, s = layer.conv[slots[i, 0], :, first : first + 3], layer.state[slots[i, first]]
        for t in range(lengths[i]):
            row = int(offsets[i]) + t
            window = torch.cat([window[:, -3:], layer.x[row][:, None]], 1)
            o, s = layer.truth(row, window, s)
            near(out[0, row], o, 5e-5)
            near(state[slots[i, t]], s, 2e-5)
    assert_bitwise(state[0], layer.state[0])
    assert_bitwise(conv[0].contiguous(), layer.conv[0].contiguous())


@pytest.mark.parametrize("width", [2, 3])
def test_one_token_of_other_widths(device, width):
    """Strided inputs, states with values last, int64 slots, and one launch that is as the chain of two."""
    layer = Kimi(3, device=device)
    weight = generate.randn(3, width, 2 * DIM, device=device)
    conv = generate.randn(6, 6 * DIM, width - 1, device=device)
    state = layer.state.transpose(-1, -2).contiguous().transpose(-1, -2)
    slots = torch.tensor([2, -1, 5], device=device)
    x = torch.cat([layer.x, layer.x], 1)[:, : layer.x.shape[1]]
    before = conv.clone()
    given = (x, weight, conv, layer.gate, layer.beta, layer.A_log, layer.bias, slots, state)
    out = flashinfer.fused_kda_decode(*given, layer.out_gate, layer.norm, norm_eps=1e-5)
    layer.weight = torch.cat([torch.zeros(3, 4 - width, 2 * DIM, device=device), weight], 1)
    for row in (0, 2):
        old = torch.cat([before[slots[row]], layer.x[row][:, None]], 1)
        window = torch.cat([torch.zeros(6 * DIM, 4 - width, device=device), old], 1)
        o, s = layer.truth(row, window, layer.state[slots[row]])
        near(out[0, row], o, 3e-5)
        near(state[slots[row]], s, 1e-5)
        assert_bitwise(conv[slots[row]].contiguous(), old[:, 1:].contiguous())
    assert not out[0, 1].any()


def test_packed_kda(device):
    layer = Kimi(3, device=device)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    state = layer.state.clone()
    gate, beta = layer.gate[0].flatten(1), layer.beta[0]
    out = flashinfer.packed_kda_decode(layer.x, gate, beta, layer.A_log, layer.bias, state, slots)
    assert out.shape == (3, 1, 2, DIM) and not out[1].any()
    for row in (0, 2):
        q, k, v = layer.x[row].reshape(3, 1, 2, DIM)
        decay = bounded_decay(layer.gate[:, row], layer.A_log, layer.bias.reshape(2, DIM), -5.0)
        before = layer.state[slots[row]]
        o, s, _ = recurrence(q, k, v, decay, beta[row][None].sigmoid(), before, DIM**-0.5, True)
        near(out[row], o, 1e-5)
        near(state[slots[row]], s[0], 1e-5)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_fused_gdn(device, layout):
    batch, hidden, hq, hv, slots = 3, 64, 1, 2, 5
    channels = (2 * hq + hv) * DIM

    def randn(*shape):
        return generate.randn(*shape, dtype=torch.bfloat16, device=device)

    x, w_ba, mixed = randn(batch, hidden), randn(hidden, 2 * hv) / 8, randn(batch, channels)
    weight, bias, conv = randn(channels, 4), randn(channels), randn(slots, channels, 3)
    if layout == "SD":
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    A_log, dt_bias = generate.randn(hv, device=device), randn(hv)
    state = generate.randn(slots, hv, DIM, DIM, device=device)
    indices = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    conv_before, before = conv.clone(), state.clone()
    given = (x, w_ba, mixed, weight, bias, conv, A_log, dt_bias, 0.0, state, indices)
    out, same_conv, same_state = flashinfer.gdn_fused_decode_step(*given)
    assert same_conv is conv and same_state is state and out.shape == (batch, 1, hv, DIM) and not out[1].any()
    ba = x.double() @ w_ba.double()
    for row in (0, 2):
        window = torch.cat([conv_before[indices[row]], mixed[row][:, None]], 1)
        y = (window.double() * weight.double()).sum(-1) + bias.double()
        y = (y * y.sigmoid()).to(torch.bfloat16)
        q, k, v = (part.reshape(1, -1, DIM) for part in y.split([DIM * hq, DIM * hq, DIM * hv]))
        decay = softplus_decay(ba[row, hv:].bfloat16(), A_log, dt_bias)[None]
        beta = ba[row, :hv].bfloat16().double().sigmoid()[None]
        o, s, _ = recurrence(q, k, v, decay, beta, before[indices[row]], DIM**-0.5, True)
        near(out[row], o, 2e-2)
        near(state[indices[row]], s[0], 2e-2)
        assert_bitwise(conv[indices[row]].contiguous(), window[:, 1:].contiguous())
    for slot in (1, 2, 3):
        assert_bitwise(state[slot], before[slot])
        assert_bitwise(conv[slot].contiguous(), conv_before[slot].contiguous())
    # Upstream's question is whether there is one kernel for all of it; callers then drop their own.
    assert flashinfer.gdn_fused_decode_step_supported(4) is False


@pytest.mark.parametrize(
    "wrong",
    [
        dict(ssm_state=torch.zeros(5, 2, 32, 0)),
        dict(state_indices=torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)),
        dict(state_indices=torch.tensor([1, 2], dtype=torch.complex64)),
    ],
    ids=str,
)
def test_fused_gdn_refuses(wrong):
    given = dict(hidden_states=torch.zeros(2, 8), w_ba=torch.zeros(8, 4), mixed_qkv=torch.zeros(2, 4 * DIM))
    given |= dict(conv_weight=torch.zeros(4 * DIM, 4), conv_bias=torch.zeros(4 * DIM))
    given |= dict(conv_state=torch.zeros(5, 4 * DIM, 3), A_log=torch.zeros(2), dt_bias=torch.zeros(2), scale=1.0)
    given |= dict(ssm_state=torch.zeros(5, 2, DIM, DIM), state_indices=torch.tensor([1, 2]))
    given = {name: x.bfloat16() if name in ("hidden_states", "w_ba", "mixed_qkv") else x for name, x in given.items()}
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: got "):
        flashinfer.gdn_fused_decode_step(**given | wrong)


def test_fused_gdn_of_no_request(device):
    given = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((0, 8), (8, 4), (0, 4 * DIM))]
    weight, conv = torch.zeros(4 * DIM, 4, device=device), torch.ones(5, 4 * DIM, 3, device=device)
    state, numbers = torch.ones(5, 2, DIM, DIM, device=device), torch.zeros(2, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    given += [weight.bfloat16(), None, conv.bfloat16(), numbers, numbers, 1.0, state, none]
    out, conv, state = flashinfer.gdn_fused_decode_step(*given)
    assert out.shape == (0, 1, 2, DIM) and (conv == 1).all() and (state == 1).all()


def test_a_sequence_longer_than_its_slots_is_refused():
    """Before the convolution writes its state."""
    layer = Kimi(5, 1, 5)
    slots, ones = torch.tensor([[1], [2], [0], [4]]), torch.ones(4, dtype=torch.int32)
    conv, offsets = layer.conv.clone(), torch.tensor([0, 1, 1, 2, 4], dtype=torch.int32)
    given = layer.arguments(slots, conv, layer.state)
    with pytest.raises(ValueError, match="^query_start_loc: got a sequence of 2 tokens"):
        flashinfer.packed_fused_kda_decode(*given, query_start_loc=offsets, num_accepted_tokens=ones)
    for dtype in (torch.float8_e5m2, torch.complex64):
        with pytest.raises(ValueError, match="^query_start_loc: got dtype"):
            flashinfer.packed_fused_kda_decode(*given, query_start_loc=offsets.to(dtype), num_accepted_tokens=ones)
    assert_bitwise(conv, layer.conv)

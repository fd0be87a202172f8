"""Steps of recurrent layers in a compiled program: one op in one graph, with every check of the call."""

import copy

import pytest
import torch

from flashinfer.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from flashinfer.gdn_decode import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
    gated_delta_rule_replayssm_commit,
)
from flashinfer.gdn_kernels.gdn_fused_decode import gdn_fused_decode_step
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.kda import recurrent_kda
from flashinfer.kda_decode import fused_kda_decode, packed_fused_kda_decode, packed_kda_decode
from flashinfer.mamba import checkpointing_ssu, selective_state_update, ssd_combined_fwd
from flashinfer.testing.compare import assert_bitwise

BATCH, SLOTS, HEADS, DIM = 2, 5, 4, 32


def half(*shape, device):
    return torch.randn(*shape, dtype=torch.float32, device=device).half()


def steps(device):
    """{name: (function, tensors)}; states are among the tensors."""
    slots = torch.tensor([3, 1], dtype=torch.int32, device=device)
    states = torch.randn(SLOTS, HEADS, DIM, DIM, dtype=torch.float32, device=device)
    decay = torch.randn(HEADS, dtype=torch.float32, device=device)

    def rows(tokens):
        q, k = half(2, BATCH, tokens, 2, DIM, device=device).unbind()
        return q, k, half(BATCH, tokens, HEADS, DIM, device=device), half(BATCH, tokens, HEADS, device=device)

    def pooled(q, k, v, raw, pool, decay, slots):
        given = dict(initial_state=pool, initial_state_indices=slots)
        return gated_delta_rule_decode_pretranspose(q, k, v * 2, None, decay, raw, decay, raw, **given)

    def drafts(q, k, v, raw, pool, decay, slots):
        return gated_delta_rule_mtp(q, k, v * 2, pool, slots, decay, raw, decay, raw, disable_state_update=False)

    def one_state(q, k, v, raw, state, decay):
        out, state = gated_delta_rule_decode(q, k, v * 2, state, decay, raw, decay, raw, scale=0.5)
        return out + 1, state

    def scanned(state, x, dt, A, B, slots):
        return selective_state_update(state, x * 2, dt, A, B, B, None, dt_softplus=True, state_batch_indices=slots) + 1

    def convolved(x, state, weight, slots):
        return causal_conv1d_update(x * 2, state, weight, activation=True, conv_state_indices=slots) + 1

    def prompts(x, states, weight, offsets):
        return causal_conv1d_fn(x * 2, weight, None, states, offsets) + 1

    def delta(mixed, gate, beta, state, decay, slots):
        return packed_kda_decode(mixed * 2, gate, beta, decay, gate[0].float(), state, slots) + 1

    def layer(x, weight, conv_state, gate, beta, state, decay, slots):
        raw, norm = (gate[None], beta[None], decay, gate[0].flatten().float(), slots, state), gate[0, 0].float()
        return fused_kda_decode(x * 2, weight, conv_state, *raw, gate[None], norm) + 1

    def layers(x, weight, conv_state, gate, beta, state, decay, slots, offsets):
        raw, norm = (gate[None], beta[None], decay, gate[0].flatten().float(), slots, state), gate[0, 0].float()
        packed = dict(query_start_loc=offsets, num_accepted_tokens=torch.ones_like(offsets[1:]))
        return packed_fused_kda_decode(x * 2, weight, conv_state, *raw, gate[None], norm, **packed) + 1

    def chunks(q, v, decay, state, offsets):
        given = dict(initial_state=state, output_final_state=True, cu_seqlens=offsets, use_cp=False)
        out, state = chunk_gated_delta_rule(q, q, v * 2, decay.sigmoid(), **given)
        return out + 1, state

    def kimi(q, v, beta, state, offsets):
        return recurrent_kda(q[None] * 2, q[None], v[None], -v[None].abs(), beta[None].sigmoid(), scale=0.5,
                             initial_state=state, output_final_state=True, cu_seqlens=offsets)  # fmt: skip

    def kimi_drafts(q, v, beta, slots):
        given = dict(num_spec_tokens=2, output_final_state=True, lower_bound=-5.0, use_gate_in_kernel=True)
        return recurrent_kda(q[None], q[None], v[None] * 2, q[None], beta[None], beta[0].float(), **given)

    def mamba(x, dt, A, B, states, offsets):
        given = dict(initial_states=states, cu_seqlens=offsets, chunk_size=64, dt_limit=(0.1, 2.0))
        out, final = ssd_combined_fwd(x[None] * 2, dt[None], A, B[None], B[None], dt_softplus=True, **given)
        return out + 1, final, states * 1

    def pooled_mamba(x, dt, A, B, pool, offsets, slots):
        given = dict(initial_states=pool, cu_seqlens=offsets, chunk_size=64, state_indices=slots)
        return ssd_combined_fwd(x[None], dt[None] * 2, A, B[None], B[None], **given)

    def committed(pool, values, keys, gates, slots):
        counts = torch.full_like(slots, 2)
        return gated_delta_rule_replayssm_commit(pool, values * 2, keys, gates, gates.sigmoid(), slots, counts) + 1

    def in_one_launch(x, weight, channels, conv_state, state, decay, slots):
        mixed = x.new_ones(len(x), len(channels)) * 0.5
        return gdn_fused_decode_step(x * 2, weight, mixed, channels, None, conv_state, decay, decay, None, state, slots)

    def rings(state, x_ring, b_ring, dt_ring, x, dt, A, B, slots):
        start, count = (slots.new_zeros(len(state)) for _ in range(2))
        given = dict(state_batch_indices=slots, dt_softplus=True)
        return checkpointing_ssu(state, x_ring, b_ring, dt_ring, start, count, x * 2, dt, A, B, B, x.clone(), **given)

    gate, beta, wide = half(3, HEADS, DIM, device=device), half(3, HEADS, device=device), 3 * HEADS * DIM
    shapes = (3, wide), (3, 4, HEADS * DIM), (SLOTS, wide, 4)
    mixed, weight, window = (half(*shape, device=device) for shape in shapes)
    drafts_of = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32, device=device)
    offsets = drafts_of.new_tensor([0, 1, 3])
    channels = half(DIM, 4, device=device)
    x, dt = half(2, BATCH, HEADS, DIM, device=device).unbind()
    scan = states[..., :8].contiguous(), x, dt, -decay.abs().view(-1, 1, 1).expand(-1, DIM, 8), x[:, :1, :8], slots
    kept = half(1, SLOTS, HEADS, 2, DIM, device=device)
    ring = (half(SLOTS, HEADS, 2, DIM, device=device), half(SLOTS, 1, 2, 8, device=device),
            torch.zeros(SLOTS, HEADS, 2, device=device))  # fmt: skip
    tied = (-decay.abs())[:, None, None].expand(-1, DIM, 8)
    fused = (half(BATCH, DIM, device=device), half(DIM, 2 * HEADS, device=device), half(6 * DIM, 4, device=device),
             half(SLOTS, 6 * DIM, 3, device=device))  # fmt: skip
    return {
        "committed": (committed, (states[None].clone(), kept, kept[:, :, :2].contiguous(), -kept[..., 0].abs().float(),
                                  slots)),
        "in_one_launch": (in_one_launch, (*fused, states, decay, slots)),
        "rings": (rings, (states[..., :8].contiguous(), *ring, x[:, None], dt[:, None, :, :1].expand(-1, -1, -1, DIM),
                          tied, x[:, None, :1, :8], slots)),
        "pooled": (pooled, (*rows(1), states, decay, slots)),
        "drafts": (drafts, (*rows(3), states, decay, slots)),
        "one_state": (one_state, (*rows(1), states[:BATCH].clone(), decay)),
        "scanned": (scanned, scan),
        "convolved": (convolved, (x[:, 0], half(SLOTS, DIM, 3, device=device), channels, slots)),
        "delta": (delta, (mixed[:2], gate[:2].flatten(1), beta[:2], states, decay, slots)),
        "layer": (layer, (mixed[:2], weight, window[..., :3], gate[:2], beta[:2], states, decay, slots)),
        "layers": (layers, (mixed, weight, window, gate, beta, states, decay, drafts_of, offsets)),
        "chunks": (chunks, (gate, gate.flip(0), beta.float(), states[:2].clone(), offsets)),
        "kimi": (kimi, (gate, gate.flip(0), beta, states[:2].clone(), offsets)),
        "kimi_drafts": (kimi_drafts, (gate, gate.flip(0), beta, slots)),
        "mamba": (mamba, (gate, beta, -decay.abs(), gate[:, :1], states[:2].clone(), offsets)),
        "pooled_mamba": (pooled_mamba, (gate, beta, -decay.abs(), gate[:, :1], states, offsets, slots)),
        "prompts": (prompts, (half(9, DIM, device=device).T, half(2, DIM, 3, device=device), channels,
                              torch.tensor([0, 4, 9], device=device))),
    }  # fmt: skip


NAMES = "pooled", "drafts", "one_state", "scanned", "convolved", "delta", "layer", "layers", "prompts", "chunks", "kimi"
NAMES += "kimi_drafts", "mamba", "pooled_mamba", "committed", "in_one_launch", "rings"


@pytest.mark.parametrize("name", NAMES)
def test_one_graph(name, device):
    """Results, and what is left in the states, are those of the call outside."""
    function, given = steps(device)[name]
    eager, traced = copy.deepcopy(given), copy.deepcopy(given)
    torch._dynamo.reset()
    result, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*traced), function(*eager)
    pairs = [(result, expected)] if isinstance(result, torch.Tensor) else list(zip(result, expected, strict=True))
    for x, y in pairs + list(zip(traced, eager, strict=True)):
        assert x.stride() == y.stride()
        assert_bitwise(x, y)
    changed = any(not torch.equal(x, y) for x, y in zip(traced, given, strict=True))
    assert changed or name in ("chunks", "kimi_drafts", "mamba")


def test_a_refusal(device):
    x, state, weight = (half(*shape, device=device) for shape in ((2, 8), (2, 7, 3), (8, 4)))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="^conv_state: got "):
        torch.compile(lambda x: causal_conv1d_update(x, state, weight), fullgraph=True, backend="eager")(x)

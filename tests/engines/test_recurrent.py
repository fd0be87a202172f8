"""Gated delta rules as vLLM 0.33 and SGLang 0.5.23 call them on Hopper."""

import torch
from torch.nn import functional

import flashinfer
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.recurrent.oracle import recurrence, softplus_decay, unit

HQ, HV, DIM = 1, 2, 64
HALF = torch.bfloat16


def inputs(count, device):
    q, k = (generate.randn(count, HQ, DIM, dtype=HALF, device=device) for _ in range(2))
    return q, k, generate.randn(count, HV, DIM, dtype=HALF, device=device)


def test_vllm_prefill(device):
    """q and k normalized first, g exponentiated, states gathered and cast, int64 offsets, the rest by default."""
    q, k, v = inputs(100, device)
    q, k = (unit(x.float()).to(HALF) for x in (q, k))
    g = -functional.softplus(generate.randn(1, 100, HV, device=device))
    beta = generate.randn(1, 100, HV, device=device).sigmoid()
    cache = generate.randn(5, HV, DIM, DIM, dtype=HALF, device=device)
    indices = torch.tensor([3, 1], device=device)
    initial = cache[indices].contiguous().to(torch.float32)
    offsets = torch.tensor([0, 30, 100], device=device)
    before = initial.clone()
    out, final = flashinfer.gdn_prefill.chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=torch.exp(g.squeeze(0)),
        beta=beta.squeeze(0),
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=offsets,
        backend="flashinfer",
    )
    assert_bitwise(initial, before)
    assert final.dtype == torch.float32
    for i, s in enumerate((slice(0, 30), slice(30, 100))):
        decay = g[0, s].double().exp()
        truth, states, _ = recurrence(q[s], k[s], v[s], decay, beta[0, s], before[i], DIM**-0.5)
        same = recurrence(q[s], k[s], v[s], decay, beta[0, s], before[i], DIM**-0.5, dtype=torch.float32)[0]
        assert_close(out[s], same.to(HALF), truth)
        assert_close(final[i].to(HALF), states[-1].to(HALF), states[-1])
    cache[indices] = final.to(cache.dtype)


def layer(count, device):
    a, b = (generate.randn(count, HV, dtype=HALF, device=device) for _ in range(2))
    return generate.randn(HV, device=device), a, generate.randn(HV, device=device), b


def test_sglang_decode(device):
    """Rows of a float32 pool gathered, stepped and put back."""
    q, k, v = inputs(3, device)
    A_log, a, dt_bias, b = layer(3, device)
    pool = generate.randn(6, HV, DIM, DIM, device=device)
    indices = torch.tensor([5, 0, 2], device=device)
    state = pool[indices]
    before = state.clone()
    out, new = gated_delta_rule_decode_pretranspose(
        q=q[:, None],
        k=k[:, None],
        v=v[:, None],
        state=state,
        A_log=A_log.detach(),
        a=a[:, None],
        dt_bias=dt_bias.detach(),
        b=b[:, None],
        scale=None,
        output=None,
        use_qk_l2norm=True,
    )
    pool[indices] = new
    for i in range(3):
        decay = softplus_decay(a[i : i + 1], A_log, dt_bias)
        given = (
            q[i : i + 1],
            k[i : i + 1],
            v[i : i + 1],
            decay,
            b[i : i + 1].double().sigmoid(),
            before[i],
            DIM**-0.5,
            True,
        )
        truth, states, _ = recurrence(*given)
        assert_close(out[i], recurrence(*given, dtype=torch.float32)[0].to(HALF), truth)
        assert (pool[indices[i]].double() - states[0]).abs().max() < 1e-5


def test_sglang_verify(device):
    """Drafts against the pool, which stays, and states after each of them to a dense buffer of the engine's."""
    q, k, v = (x.view(2, 4, -1, DIM) for x in inputs(8, device))
    A_log, a, dt_bias, b = layer(8, device)
    pool = generate.randn(6, HV, DIM, DIM, device=device)
    before = pool.clone()
    buffer = torch.zeros(5, 4, HV, DIM, DIM, device=device)
    indices = torch.tensor([4, 1], dtype=torch.int32, device=device)
    out, _ = gated_delta_rule_mtp(
        q=q,
        k=k,
        v=v,
        initial_state=pool,
        initial_state_indices=indices,
        A_log=A_log,
        a=a.view(2, 4, HV),
        dt_bias=dt_bias,
        b=b.view(2, 4, HV),
        scale=None,
        output=None,
        intermediate_states_buffer=buffer,
        disable_state_update=True,
        use_qk_l2norm=True,
    )
    assert_bitwise(pool, before)
    assert not buffer[2:].any()
    for i in range(2):
        decay = softplus_decay(a.view(2, 4, HV)[i], A_log, dt_bias)
        beta = b.view(2, 4, HV)[i].double().sigmoid()
        given = q[i], k[i], v[i], decay, beta, before[indices[i]], DIM**-0.5, True
        truth, states, _ = recurrence(*given)
        assert_close(out[i], recurrence(*given, dtype=torch.float32)[0].to(HALF), truth)
        assert (buffer[i].double() - states).abs().max() < 1e-5


def test_under_an_engines_defaults(device):
    """Factories of ours name their device and dtype."""
    q, k, v = inputs(20, device)
    offsets = torch.tensor([0, 20], device=device)
    expected = flashinfer.chunk_gated_delta_rule(q, k, v, cu_seqlens=offsets, output_final_state=True)
    torch.set_default_dtype(HALF)
    try:
        out, state = flashinfer.chunk_gated_delta_rule(q, k, v, cu_seqlens=offsets, output_final_state=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bitwise(out, expected[0])
    assert_bitwise(state, expected[1])

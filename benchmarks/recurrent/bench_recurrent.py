"""Recurrent layers: prefill by chunks, and steps of decode against copy bandwidth of their states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from recurrences import check_first_and_last, delta, states_of_space
from torch.nn.functional import softplus

from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.kda import recurrent_kda
from flashinfer.mamba import selective_state_update, ssd_combined_fwd
from flashinfer.testing.bench import Case, Target, Work

# The lower bound of KDA's gate in Kimi K3.
BOUND = -5.0
DIM = 128
# Sequences of a step that are checked.
_FEW = 4
# heads, head_dim, d_state, groups of Nemotron-3-Nano
_NEMOTRON = (64, 64, 128, 8)


def cases(device: torch.device) -> Iterator[Case]:
    """(sequences, tokens, query heads, heads) of prefill, (batch, state) of steps; small ones on a CPU."""
    if device.type != "cuda":
        yield _row("GDN chunk", _gdn_chunk, 2, 70, 1, 2)
        yield _row("KDA chunk", _kda_chunk, 1, 70, 2, 2)
        yield _row("SSD chunk", _ssd, 1, 70, 4, 64, 32, 2)
        for dtype in (torch.float32, torch.bfloat16):
            yield _row("GDN step", _gdn_step, 2, dtype, 1, 2)
            yield _row("SSU step", _ssu, 2, dtype, 4, 64, 32, 2)
        return
    for sizes in ((1, 8192, 2, 8), (1, 8192, 16, 64), (8, 2048, 16, 32), (1, 65536, 2, 8)):
        yield _row("GDN chunk", _gdn_chunk, *sizes, targets=(Target("fla", 2.0),))
    for heads in (16, 32, 96):
        targets = (Target("flashkda", 1.2), Target("fla", 2.0))
        yield _row("KDA chunk", _kda_chunk, 1, 8192, heads, heads, targets=targets)
    yield _row("SSD chunk", _ssd, 1, 8192, *_NEMOTRON, targets=(Target("vllm-ssm", 1.3),))
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (1, 64, 256):
            targets = (Target("us", 4) if batch == 1 else Target("copy", 0.92),)
            yield _row("GDN step", _gdn_step, batch, dtype, 16, 32, targets=targets)
            yield _row("SSU step", _ssu, batch, dtype, *_NEMOTRON, targets=targets)


def _row(kind: str, make, *sizes, targets=()) -> Case:
    if kind.endswith("step"):
        batch, dtype, *heads = sizes
        label = f"{kind} {batch}, {'/'.join(map(str, heads[:2]))}, {str(dtype).removeprefix('torch.')} state"
    else:
        sequences, tokens, *heads = sizes
        label = f"{kind} {sequences}x{tokens}, {'/'.join(map(str, heads[:2]))}"
    return Case(
        label, partial(make, *sizes), kind.split()[1], targets, "chunk" in kind, problem=kind.lower(), builds=kind
    )


def _normal(*shape: int, device, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _unit(*shape: int, device) -> torch.Tensor:
    """Of norm 1, so that it does not matter whether a library normalises queries and keys itself."""
    return torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1).bfloat16()


def _ends(sequences: int, tokens: int, device) -> torch.Tensor:
    return tokens * torch.arange(sequences + 1, dtype=torch.int32, device=device)


def _gdn_chunk(sequences, tokens, queries, heads, device) -> Work:
    """Decays of exp(-0.3) to 1: what is older than a few hundred tokens is forgotten."""
    count = sequences * tokens
    q, k = (_unit(count, queries, DIM, device=device) for _ in range(2))
    v = _normal(count, heads, DIM, device=device)
    log_decay = -0.3 * torch.rand(count, heads, device=device)
    beta = torch.rand(count, heads, device=device)
    ends = _ends(sequences, tokens, device)

    def run(q, k, v, decay, beta, ends):
        return chunk_gated_delta_rule(
            q, k, v, decay, beta, output_final_state=True, cu_seqlens=ends, use_qk_l2norm_in_kernel=True
        )

    given = {name: x.unflatten(0, (sequences, tokens)) for name, x in
             {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}.items()}  # fmt: skip
    return Work(
        run,
        (q, k, v, log_decay.exp(), beta, ends),
        bytes=sum(x.nbytes for x in (q, k, v, v, beta, beta)) + sequences * heads * DIM * DIM * 4,
        flops=6 * count * heads * DIM * DIM,
        check=partial(check_first_and_last, partial(delta, DIM**-0.5), tuple(given.values())),
        given=given,
    )


def _kda_chunk(sequences, tokens, queries, heads, device) -> Work:
    """Raw gates and raw betas, the gate bounded below."""
    q, k = (_unit(sequences, tokens, queries, DIM, device=device) for _ in range(2))
    v, gate = (_normal(sequences, tokens, heads, DIM, device=device) for _ in range(2))
    beta = _normal(sequences, tokens, heads, device=device)
    a_log, dt_bias = torch.rand(heads, device=device).log(), torch.zeros(heads, DIM, device=device)
    ends = _ends(sequences, tokens, device)

    def run(q, k, v, gate, beta):
        return recurrent_kda(
            q, k, v, gate, beta, a_log, dt_bias, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, lower_bound=BOUND, beta_is_logit=True,
        )[:2]  # fmt: skip

    log_decay = BOUND * torch.sigmoid(a_log.exp()[:, None] * (gate.float() + dt_bias))
    operands = q, k, v, log_decay, beta.float().sigmoid()
    return Work(
        run,
        (q, k, v, gate, beta),
        bytes=sum(x.nbytes for x in (q, k, v, v, gate, beta)) + sequences * heads * DIM * DIM * 4,
        flops=6 * sequences * tokens * heads * DIM * DIM,
        check=partial(check_first_and_last, partial(delta, DIM**-0.5), operands),
        given={
            "q": q, "k": k, "v": v, "gate": gate, "beta": beta, "a_log": a_log, "dt_bias": dt_bias,
            "bound": BOUND, "ends": ends,
        },
    )  # fmt: skip


def _ssd(sequences, tokens, heads, dim, d_state, groups, device) -> Work:
    x = _normal(sequences, tokens, heads, dim, device=device)
    dt = _normal(sequences, tokens, heads, device=device)
    b, c = (0.3 * _normal(sequences, tokens, groups, d_state, device=device) for _ in range(2))
    a = -0.5 - torch.rand(heads, device=device)
    dt_bias, d = (torch.randn(heads, device=device) for _ in range(2))

    def run(x, dt, b, c):
        return ssd_combined_fwd(
            x, dt, a, b, c, d, dt_bias=dt_bias, dt_softplus=True, state_dtype=torch.float32
        )

    step = softplus(dt.float() + dt_bias)
    truth = partial(states_of_space, d)
    return Work(
        run,
        (x, dt, b, c),
        bytes=sum(t.nbytes for t in (x, x, dt, b, c)) + sequences * heads * dim * d_state * 4,
        flops=4 * sequences * tokens * heads * dim * d_state,
        check=partial(check_first_and_last, truth, (c, b, x, step * a, step)),
        given={"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "dt_bias": dt_bias},
    )


def _gdn_step(batch, dtype, queries, heads, device) -> Work:
    q, k = (_unit(batch, 1, queries, DIM, device=device) for _ in range(2))
    v = _normal(batch, 1, heads, DIM, device=device)
    raw, raw_beta = (_normal(batch, 1, heads, device=device) for _ in range(2))
    a_log, dt_bias = torch.rand(heads, device=device).log(), torch.randn(heads, device=device)
    state = _normal(batch, heads, DIM, DIM, device=device, dtype=dtype)
    before = state[:_FEW].clone()

    def run(q, k, v, state, raw, raw_beta):
        return gated_delta_rule_decode_pretranspose(
            q, k, v, state, a_log, raw, dt_bias, raw_beta, use_qk_l2norm=True
        )

    log_decay = -a_log.exp() * softplus(raw.float() + dt_bias)
    beta = raw_beta.float().sigmoid()
    operands = tuple(x[:_FEW] for x in (q, k, v, log_decay, beta))

    def check(result):
        out, after = result
        check_first_and_last(
            partial(delta, DIM**-0.5, state=before), operands, (out[:_FEW], None if after is None else after[:_FEW])
        )

    return Work(
        run,
        (q, k, v, state, raw, raw_beta),
        bytes=2 * state.nbytes + sum(x.nbytes for x in (q, k, v, v, raw, raw_beta)),
        check=check,
        given={
            "q": q, "k": k, "v": v, "state": state, "raw": raw, "raw_beta": raw_beta, "a_log": a_log,
            "dt_bias": dt_bias,
        },
    )  # fmt: skip


def _ssu(batch, dtype, heads, dim, d_state, groups, device) -> Work:
    """Slot 0 of the pool is vLLM's padding."""
    state = _normal(batch + 1, heads, dim, d_state, device=device, dtype=dtype)
    x = _normal(batch, heads, dim, device=device)
    dt = _normal(batch, heads, 1, device=device).expand(-1, -1, dim)
    b, c = (_normal(batch, groups, d_state, device=device) for _ in range(2))
    a = (-torch.rand(heads, 1, 1, device=device)).expand(-1, dim, d_state)
    d, dt_bias = (torch.randn(heads, 1, device=device).expand(-1, dim) for _ in range(2))
    slots = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    out, before = torch.full_like(x, torch.nan), state[1 : 1 + _FEW].clone()

    def run(state, x, b, c, out):
        y = selective_state_update(
            state, x, dt, a, b, c, d, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots, out=out
        )
        return y, state[1:]

    step = softplus(dt[..., 0].float() + dt_bias[:, 0])
    operands = tuple(t[:_FEW, None] for t in (c, b, x, step * a[:, 0, 0], step))

    def check(result):
        y, after = result
        truth = partial(states_of_space, d[:, 0], state=before)
        check_first_and_last(truth, operands, (y[:_FEW, None], None if after is None else after[:_FEW]))

    return Work(
        run,
        (state, x, b, c, out),
        bytes=2 * (state.nbytes - state[0].nbytes) + sum(t.nbytes for t in (x, x, b, c)),
        check=check,
        given={
            "state": state, "x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "dt_bias": dt_bias, "slots": slots,
        },
    )  # fmt: skip

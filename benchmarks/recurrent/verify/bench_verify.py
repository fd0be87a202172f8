"""Drafts of decode: verification with kept states and with replay windows, their commit, and the short convolution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from recurrences import check_first_and_last, delta
from torch.nn.functional import silu, softplus

from flashinfer.causal_conv1d import causal_conv1d_update
from flashinfer.gdn_decode import gated_delta_rule_mtp, gated_delta_rule_replayssm_commit
from flashinfer.testing.bench import Case, Target, Work

DIM, DRAFTS = 128, 4
# Sequences that are checked.
_FEW = 4


def cases(device: torch.device) -> Iterator[Case]:
    """Qwen3-Next's heads: 16 of queries, 32 of values; its convolution has 8192 channels."""
    gpu = device.type == "cuda"
    batch, queries, heads, layers = (64, 16, 32, 48) if gpu else (2, 1, 2, 2)
    shape = f"{batch}x{DRAFTS}, {queries}/{heads}"
    kept = f"GDN verify {shape}, states kept"
    yield Case(kept, partial(_verify, batch, queries, heads, False), "verify")
    targets = (Target(kept, 3.0), Target("copy", 0.92))
    yield Case(f"GDN verify {shape}, replay window", partial(_verify, batch, queries, heads, True), "verify", targets)
    # States of 64 sequences in 48 layers are 6.4 GB; a quarter of the sequences fills the card as well.
    few = max(1, batch // 4)
    label = f"GDN commit {few}x{DRAFTS}, {layers} layers, {queries}/{heads}"
    yield Case(label, partial(_commit, few, queries, heads, layers), "commit", (Target("copy", 1 / 1.2),))
    for tokens in (1, 8) if gpu else (2,):
        channels = 8192 if gpu else 48
        label = f"conv update {tokens}x{channels}"
        yield Case(label, partial(_conv, tokens, channels), "conv", (Target("us", 2.5),))


def _normal(*shape: int, device, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _unit(*shape: int, device) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1).bfloat16()


def _verify(batch, queries, heads, replay, device) -> Work:
    """The pool's states are read only; what follows each draft is written as states, or as raw rows."""
    q, k = (_unit(batch, DRAFTS, queries, DIM, device=device) for _ in range(2))
    v = _normal(batch, DRAFTS, heads, DIM, device=device)
    raw, raw_beta = (_normal(batch, DRAFTS, heads, device=device) for _ in range(2))
    a_log, dt_bias = torch.rand(heads, device=device).log(), torch.randn(heads, device=device)
    pool = _normal(batch, heads, DIM, DIM, device=device, dtype=torch.float32)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    if replay:
        written = _windows(batch, queries, heads, device)
        names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
    else:
        written = (pool.new_empty(batch, DRAFTS, heads, DIM, DIM),)
        names = ("intermediate_states_buffer",)

    def run(q, k, v, pool, raw, raw_beta, *written):
        return gated_delta_rule_mtp(
            q, k, v, pool, slots, a_log, raw, dt_bias, raw_beta, disable_state_update=True, cache_replayssm=replay,
            **dict(zip(names, written, strict=True)),
        )  # fmt: skip

    log_decay = -a_log.exp() * softplus(raw.float() + dt_bias)
    operands = tuple(x[:_FEW] for x in (q, k, v, log_decay, raw_beta.float().sigmoid()))
    truth = partial(delta, DIM**-0.5, state=pool[:_FEW].clone())
    return Work(
        run,
        (q, k, v, pool, raw, raw_beta, *written),
        bytes=pool.nbytes + sum(x.nbytes for x in (q, k, v, v, raw, raw_beta, *written)),
        check=lambda result: check_first_and_last(truth, operands, (result[0][:_FEW], None)),
    )


def _windows(slots, queries, heads, device, *layers) -> tuple[torch.Tensor, ...]:
    v = torch.empty(*layers, slots, heads, DRAFTS, DIM, dtype=torch.bfloat16, device=device)
    k = torch.empty(*layers, slots, queries, DRAFTS, DIM, dtype=torch.bfloat16, device=device)
    numbers = [torch.empty(*layers, slots, heads, DRAFTS, device=device) for _ in range(2)]
    return v, k, *numbers


def _commit(batch, queries, heads, layers, device) -> Work:
    """All drafts are accepted: each state is read and written once."""
    states = _normal(layers, batch, heads, DIM, DIM, device=device, dtype=torch.float32)
    windows = _windows(batch, queries, heads, device, layers)
    v, k, decay, beta = windows
    v.normal_()
    k.copy_(_unit(*k.shape, device=device))
    decay.copy_(-0.3 * torch.rand_like(decay))
    beta.uniform_()
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    accepted = torch.full_like(slots, DRAFTS)
    before = states[-1, :_FEW].clone()

    def run(states, *windows):
        return gated_delta_rule_replayssm_commit(states, *windows, slots, accepted, use_qk_l2norm=False)

    def check(states):
        v, k, decay, beta = (x[-1, :_FEW].transpose(1, 2) for x in windows)
        after = delta(1.0, k, k, v, decay, beta, state=before)[1]
        error = (states[-1, :_FEW].double() - after).norm() / after.norm()
        assert error < 1e-5, f"wrong result: states err by {error:.3g} of their norm"

    return Work(
        run, (states, *windows), bytes=2 * states.nbytes + sum(x.nbytes for x in windows), check=check
    )


def _conv(batch, channels, device) -> Work:
    x = _normal(batch, channels, device=device)
    state, weight = _normal(batch, channels, 3, device=device), _normal(channels, 4, device=device)
    window = torch.cat([state, x[..., None]], -1).double()
    expected = silu((window * weight.double()).sum(-1))

    def check(out):
        torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-6)

    return Work(
        lambda x, state, weight: causal_conv1d_update(x, state, weight, activation="silu"),
        (x, state, weight),
        bytes=2 * x.nbytes + 2 * state.nbytes + weight.nbytes,
        check=check,
    )

"""Recurrences token by token in float64, and the check of a layer's result against them."""

from __future__ import annotations

import torch

# Tokens of a long sequence that are compared at either end.
_SAMPLE = 256
# Allowed error of the norm. What a library rounds to bfloat16 on its way gives a third of it.
_NEAR = 0.02


def delta(scale, q, k, v, log_decay, beta, state=None):
    """[sequences, tokens, heads, V] and the last state [sequences, heads, V, K] of a gated delta rule."""
    heads = v.shape[2]
    q, k = (x.double().repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    v, beta, decay = v.double(), beta.double(), log_decay.double().exp()
    if decay.dim() == 3:
        decay = decay[..., None]
    out = torch.empty_like(v)
    state = _begun(state, (len(v), heads, v.shape[3], k.shape[3]), v)
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None]
        error = v[:, t] - torch.einsum("shvk,shk->shv", state, k[:, t])
        state = state + (beta[:, t, :, None] * error)[..., None] * k[:, t, :, None]
        out[:, t] = scale * torch.einsum("shvk,shk->shv", state, q[:, t])
    return out, state


def states_of_space(skip, c, b, x, log_decay, step, state=None):
    """[sequences, tokens, heads, dim] and the last state [sequences, heads, dim, d_state] of a state space."""
    heads = x.shape[2]
    b, c = (t.double().repeat_interleave(heads // t.shape[2], 2) for t in (b, c))
    x, step, decay, skip = x.double(), step.double(), log_decay.double().exp(), skip.double()
    out = torch.empty_like(x)
    state = _begun(state, (len(x), heads, x.shape[3], b.shape[3]), x)
    for t in range(x.shape[1]):
        state = decay[:, t, :, None, None] * state + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out[:, t] = torch.einsum("shdn,shn->shd", state, c[:, t]) + skip[:, None] * x[:, t]
    return out, state


def _begun(state, shape, like):
    return like.new_zeros(shape) if state is None else state.double()


def check_first_and_last(truth, operands, result) -> None:
    """AssertionError unless the first and the last tokens of the first and the last sequence are right.

    Short sequences, which may have states before them, are checked in whole and all of them.
    The last ones are computed from a zero state some hundred tokens before them: operands forget what is older. So is
    the last state, where the result has one.
    """
    out, state = result
    sequences, tokens = operands[0].shape[:2]
    long = tokens > 3 * _SAMPLE
    ends = [0, -1] if long and sequences > 1 else list(range(sequences))
    chosen = [x[ends] for x in operands]
    out = out.reshape(sequences, tokens, *out.shape[-2:])[ends]
    if long:
        _near("first tokens", out[:, :_SAMPLE], truth(*(x[:, :_SAMPLE] for x in chosen))[0])
        chosen = [x[:, -2 * _SAMPLE :] for x in chosen]
        expected, last = truth(*chosen)
        _near("last tokens", out[:, -_SAMPLE:], expected[:, -_SAMPLE:])
    else:
        expected, last = truth(*chosen)
        _near("tokens", out, expected)
    if state is not None:
        _near("state", state[ends], last)


def _near(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((got.double() - expected).norm() / expected.norm()).nan_to_num(torch.inf).item()
    assert error <= _NEAR, f"wrong result: {what} err by {error:.3g} of their norm, allowed {_NEAR}"

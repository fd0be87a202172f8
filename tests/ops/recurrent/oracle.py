"""The gated delta rule in float64, one sequence, one head and one token at a time, from its definition."""

import torch
from torch.nn import functional


def unit(x):
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def softplus_decay(a, a_log, bias):
    """exp(-exp(A_log) softplus(a + bias)), float64."""
    return torch.exp(-a_log.double().exp() * functional.softplus(a.double() + bias.double(), threshold=1e9))


def bounded_decay(g, a_log, bias, lower):
    """exp(lower sigmoid(exp(A_log) (g + bias))) of g [..., heads, K], float64."""
    return torch.exp(lower * torch.sigmoid(a_log.double().exp()[:, None] * (g.double() + bias.double())))


def recurrence(q, k, v, decay, beta, state, scale, normalize=False, parents=None, dtype=torch.float64):
    """Outputs [T, heads, V], states after each token [T, heads, V, K], and corrections [T, heads, V].

    q, k, v : [T, any heads, dim]; decay : [T, heads] or [T, heads, K]; beta : [T, heads]; state : [heads, V, K].
    """
    heads = state.shape[0]
    q, k, v = (x.to(dtype).repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    decay, beta = decay.to(dtype), beta.to(dtype)
    if normalize:
        q, k = unit(q), unit(k)
    if decay.dim() == 2:
        decay = decay[..., None]
    first = s = state.to(dtype)
    outputs, states, corrections = [], [], []
    for t in range(q.shape[0]):
        if parents is not None:
            s = first if parents[t] < 0 else states[parents[t]]
        s = s * decay[t][:, None, :]
        correction = beta[t][:, None] * (v[t] - (s * k[t][:, None, :]).sum(-1))
        s = s + correction[..., None] * k[t][:, None, :]
        outputs.append(scale * (s * q[t][:, None, :]).sum(-1))
        states.append(s)
        corrections.append(correction)
    if not outputs:
        empty = torch.zeros(0, *first.shape, dtype=dtype)
        return empty[..., 0], empty, empty[..., 0]
    return torch.stack(outputs), torch.stack(states), torch.stack(corrections)

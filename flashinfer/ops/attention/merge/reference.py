"""Merging of attention states in torch: the CPU backend, and the plainest statement of the op."""

from __future__ import annotations

import torch

from flashinfer._core.implementation import Implementation

from . import PairProblem, StackProblem


def _pair(problem, v_a, s_a, v_b, s_b, mask, out, lse) -> None:
    weights, merged = _softmax(torch.stack((s_a, s_b), 1))
    v = weights[:, 0, :, None] * _seen(v_a, s_a) + weights[:, 1, :, None] * _seen(v_b, s_b)
    v = v.to(out.dtype)
    if mask is not None:
        v = torch.where(mask[:, None, None], v, out)
        merged = torch.where(mask[:, None], merged, lse)
    out.copy_(v)
    lse.copy_(merged)


def _stack(problem, v, s, out, lse, indptr=None) -> None:
    if indptr is not None:
        for token, (begin, end) in enumerate(zip(indptr.tolist(), indptr[1:].tolist())):
            _stack(problem, v[None, begin:end], s[None, begin:end], out[token : token + 1], lse[token : token + 1])
        return
    weights, merged = _softmax(s)
    out.copy_((weights[..., None] * _seen(v, s)).sum(1))
    lse.copy_(merged)


def _seen(v, s):
    """v in float32, 0 where the state saw no key: an empty state's v may be anything."""
    return v.float().masked_fill((s == -torch.inf)[..., None], 0.0)


def _softmax(s):
    """Weights of the states along dimension 1, and their merged log-sum-exp; no state with a key: 0 and -inf."""
    if s.shape[1] == 0:
        return s, s.new_full((s.shape[0], s.shape[2]), -torch.inf)
    top = s.amax(1)
    base = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp2(s - base[:, None])
    total = weights.sum(1)
    return weights / torch.where(total == 0, 1.0, total)[:, None], base + torch.log2(total)


IMPLEMENTATION = Implementation({PairProblem: _pair, StackProblem: _stack})

"""Hyper-connections in torch."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.mhc import STREAMS, Post, Pre


def _pre(problem, dot_mix, sqrsum, residual, scale, base, numbers, post, comb, layer_input):
    """dot_mix float32 [splits, tokens, 24], sqrsum [splits, tokens] or None, residual [tokens, 4, hidden].

    numbers : k, rms_eps, pre_eps, sinkhorn_eps, mult, repeat. Writes post [tokens, 4], comb [tokens, 16] and
    layer_input [tokens, hidden].
    """
    k, rms_eps, pre_eps, sinkhorn_eps, mult, repeat = numbers
    wide = residual.float()
    total = wide.square().sum((1, 2)) if problem.prenorm else sqrsum.sum(0)
    per_logit = scale.repeat_interleave(torch.tensor([4, 4, 16], dtype=torch.int64, device=scale.device))
    logits = dot_mix.sum(0) * (total / k + rms_eps).rsqrt()[:, None] * per_logit + base
    mix = logits[:, :STREAMS].sigmoid() + pre_eps
    post.copy_(logits[:, STREAMS : 2 * STREAMS].sigmoid() * mult)
    square = logits[:, 2 * STREAMS :].view(-1, STREAMS, STREAMS).softmax(2) + sinkhorn_eps
    square = square / (square.sum(1, keepdim=True) + sinkhorn_eps)
    for _ in range(repeat - 1):
        square = square / (square.sum(2, keepdim=True) + sinkhorn_eps)
        square = square / (square.sum(1, keepdim=True) + sinkhorn_eps)
    comb.copy_(square.flatten(1))
    layer_input.copy_((wide * mix[:, :, None]).sum(1))


def _post(problem, x, residual, post, comb, out):
    """x [tokens, hidden], residual and out [tokens, 4, hidden], post [tokens, 4], comb [tokens, 4, 4]."""
    mixed = torch.einsum("tih,tij->tjh", residual.float(), comb.float())
    out.copy_(x.float()[:, None] * post.float()[:, :, None] + mixed)


IMPLEMENTATION = Implementation({Pre: _pre, Post: _post})

"""A gated residual with a norm, in torch: float32 maths, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation


def run(problem, config, branch, residual, weight, alpha, beta, out, eps, center, following=(None, None, 0.0, 0.0)):
    """out = alpha * residual + beta * rmsnorm(branch * (weight + center)).

    following : weight, result, eps and center of the norm of `out` that comes next, where the problem has one.
    """
    branch = branch.float()
    if problem.weighted:
        branch = branch * (weight.float() + center)
    stream = alpha * residual + beta * branch * torch.rsqrt(branch.square().mean(-1, keepdim=True) + eps)
    out.copy_(stream)
    if problem.next:
        next_weight, next_out, next_eps, next_center = following
        y = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + next_eps)
        next_out.copy_(y * (next_weight.float() + next_center))


IMPLEMENTATION = Implementation(run)

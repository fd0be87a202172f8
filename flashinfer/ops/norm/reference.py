"""The norms in torch: float32 maths, one rounding at the end."""

import torch


def run(problem, config, x, residual, weight, bias, out, eps):
    """Normalise the rows of x (of x + residual, which then becomes the residual) into out."""
    x = x.float()
    if residual is not None:
        x = x + residual
        residual.copy_(x)
    if problem.kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    weight = weight.float() + 1 if problem.gemma else weight.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if bias is None:
        torch.mul(y, weight, out=out)
    else:
        torch.addcmul(bias.float(), y, weight, out=out)

"""The norms in torch: float32 maths, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow


def run(problem, config, x, residual, weight, bias, out, eps, quantised=None):
    """Normalise the rows of x (of x + residual, which then becomes the residual) into out.

    With a sigmoid gate, `residual` is the gate, and only read. quantised : Quantised, where the problem has a format.
    """
    dtype, x = x.dtype, x.float()
    if problem.kind == "fused_add_rmsnorm":
        x = x + residual
        residual.copy_(x)
    if problem.kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if problem.after == "sigmoid_gate":
        factor = residual.float().sigmoid()
    else:
        factor = weight.float() + 1 if problem.gemma else weight.float()
    if quantised is not None or problem.after == "silu":
        y = y * factor if bias is None else y * factor + bias.float()
        y = torch.nn.functional.silu(y) if problem.after == "silu" else y
        if quantised is None:
            out.copy_(y)
        else:
            # What the norm alone would have written goes to FP4.
            _quantise(problem, y.to(dtype).float() if problem.layout else y, out, quantised)
    elif bias is None:
        torch.mul(y, factor, out=out)
    else:
        torch.addcmul(bias.float(), y, factor, out=out)


def _quantise(problem, y, out, given) -> None:
    if problem.normed:
        given.normed.copy_(y)
    scale = 1.0 if given.scale is None else given.scale
    if problem.format == "fp8_block":
        codes, scales = narrow.quantize_fp8(given.normed.float(), 128, out.dtype)
        out.copy_(codes)
        given.block_scale[:, : len(scales)] = scales.T
    elif problem.layout:
        if problem.format == "nvfp4":
            codes, factors = narrow.quantize_nvfp4(y, torch.as_tensor(scale, dtype=torch.float32, device=y.device))
        else:
            codes, factors = narrow.quantize_mxfp4(y)
        out.copy_(codes)
        factors = factors.view(torch.uint8).flatten(0, -2)
        linear = given.block_scale if problem.layout == "linear" else given.linear_scale
        if linear is not None:
            linear.view(factors.shape).copy_(factors)
        if problem.layout != "linear":
            given.block_scale.view(-1).copy_(layouts.arrange(factors, "128x4"))
    else:
        inverse = 1 / torch.as_tensor(scale, dtype=torch.float32, device=y.device)
        out.copy_(narrow.to_fp8(y * inverse, out.dtype))


IMPLEMENTATION = Implementation(run)

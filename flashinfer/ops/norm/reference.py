"""The norms in torch: float32 maths, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow
from flashinfer.ops.norm import Gated, Modulated, Problem


def run(problem, config, *args):
    _RUN[type(problem)](problem, *args)


def norm(problem, x, residual, weight, bias, out, eps, quantised=None):
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


def gated(problem, branch, residual, weight, alpha, beta, out, eps, center, following=(None, None, 0.0, 0.0)):
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


def modulated(problem, given, eps):
    """The stream and its modulated norm; given : Modulation."""
    y = given.x.float()
    scale = 1.0 if given.input_scale is None else given.input_scale
    if problem.gate:
        gate = given.gate.float()
        y = y * ((gate if given.gate_bias is None else gate + given.gate_bias) * scale)
    else:
        y = y * scale
    y = y if given.residual is None else y + given.residual
    given.stream.copy_(y)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    factor, shift = given.factor.float() + problem.one, given.shift.float()
    factor = factor if given.factor_bias is None else factor + given.factor_bias
    shift = shift if given.shift_bias is None else shift + given.shift_bias
    y = y * factor + shift
    if not problem.format:
        given.out.copy_(y)
        return
    y = y.to(given.stream.dtype).float()
    nvfp4 = problem.format == "nvfp4"
    codes, factors = narrow.quantize_nvfp4(y, given.global_scale) if nvfp4 else narrow.quantize_mxfp8(y)
    given.out.copy_(codes.view(torch.uint8))
    given.factors.copy_(layouts.arrange(factors.view(torch.uint8), "128x4"))


_RUN = {Problem: norm, Gated: gated, Modulated: modulated}

IMPLEMENTATION = Implementation(run)

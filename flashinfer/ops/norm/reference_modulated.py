"""A modulated norm in torch: float32 maths, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow


def run(problem, config, given, eps):
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


IMPLEMENTATION = Implementation(run)

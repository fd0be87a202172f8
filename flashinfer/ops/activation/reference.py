"""The gated activations in torch: float32 maths, one rounding at the end."""

from functools import partial

import torch
from torch.nn import functional

from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow

_ACT = {"silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


def run(problem, config, x, out, quantised=None):
    """out = act(first half of x) * second half; x is [rows, 2 * hidden]. quantised : Quantised, for the formats."""
    gate, up = x.chunk(2, dim=-1)
    if quantised is not None:
        y = (_ACT[problem.kind](gate.float()) * up).to(x.dtype).float()
        return _quantise(problem, y.transpose(1, 2) if problem.across else y, out, quantised)
    torch.mul(_ACT[problem.kind](gate.float()), up, out=out)


def _quantise(problem, y, out, given):
    if problem.format == "mxfp8":
        codes, found = narrow.quantize_mxfp8(y)
    else:
        codes, found = narrow.quantize_nvfp4(y, given.global_scale.view(-1, 1, 1), problem.score)
    codes, found = codes.view(torch.uint8), found.view(torch.uint8)
    arranged = layouts.arrange(found, problem.layout)
    if given.counts is None:
        out.copy_(codes)
        given.factors.copy_(arranged)
        return
    # With the padding of rows that count, which is zero.
    size = layouts.padded(*found.shape[1:], problem.layout)
    at = layouts.offsets(*size, problem.layout, y.device)
    for entry, count in enumerate(given.counts.clamp(0, y.shape[1]).tolist()):
        out[entry, :count] = codes[entry, :count]
        given.factors[entry][at[:count]] = arranged[entry][at[:count]]


IMPLEMENTATION = Implementation(run)

"""The gated activations in torch: float32 maths, one rounding at the end."""

from functools import partial

import torch
from torch.nn import functional

from flashinfer.ops import layouts, narrow

_ACT = {"silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


def run(problem, config, x, out, experts=None):
    """out = act(first half of x) * second half; x is [rows, 2 * hidden]. experts : Experts, for the NVFP4 form."""
    gate, up = x.chunk(2, dim=-1)
    if experts is not None:
        y = (_ACT[problem.kind](gate.float()) * up).to(x.dtype).float()
        codes, found = narrow.quantize_nvfp4(y, experts.global_scale.view(-1, 1, 1), problem.score)
        at = layouts.offsets(*found.shape[1:], "128x4", x.device)
        for entry, count in enumerate(experts.counts.clamp(0, x.shape[1]).tolist()):
            out[entry, :count] = codes[entry, :count]
            experts.factors[entry][at[:count]] = found[entry, :count].view(torch.uint8)
        return
    torch.mul(_ACT[problem.kind](gate.float()), up, out=out)

"""The block-scaled formats in torch."""

import torch
from torch.nn.functional import pad

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow
from flashinfer.ops.formats import ELEMENTS
from flashinfer.ops.quantize import Dequantize, Groups, Interleave, Packbits, Problem


def _quantize(problem, x, global_scale, counts, codes, factors, row_scales):
    """x [batch, rows, n] to codes, bytes [batch, rows, .], and factors, bytes [batch, .], in their layout.

    global_scale [1] or [batch]; counts int32 [batch]; row_scales float32 [batch, rows].
    """
    y = x.float()
    if problem.kind == "mxfp8":
        y = pad(y, (0, codes.shape[-1] - y.shape[-1]))
        values, found = narrow.quantize_mxfp8(y)
    elif problem.kind == "mxfp4":
        values, found = narrow.quantize_mxfp4(y)
    else:
        if problem.row_scale:
            row_scales.copy_(y.abs().amax(-1) * global_scale)
            scale = torch.where(row_scales == 0, 0, 1 / row_scales)[..., None]
        else:
            scale = (1 / global_scale if problem.inverse else global_scale).view(-1, 1, 1)
        values, found = narrow.quantize_nvfp4(y, scale, problem.score)
    arranged = layouts.arrange(found.view(torch.uint8), problem.layout)
    if counts is None:
        codes.copy_(values.view(torch.uint8))
        factors.copy_(arranged)
        return
    for entry, count in enumerate(counts.clamp(0, x.shape[1]).tolist()):
        codes[entry, :count] = values[entry, :count].view(torch.uint8)
        # With the padding of these rows, which is zero.
        size = layouts.padded(*found.shape[1:], problem.layout)
        at = layouts.offsets(*size, problem.layout, x.device)[:count]
        factors[entry][at] = arranged[entry][at]


def _groups(problem, x, size, least, codes, scales):
    """x [rows, n] to codes, bytes of its shape, and scales [rows, n / size]."""
    y = x.float().unflatten(-1, (-1, size))
    amax = y.abs().amax(-1)
    largest = ELEMENTS[problem.out].largest
    scale = torch.where(amax < least, least, amax) / torch.full_like(amax, largest)
    if problem.power_of_two:
        mantissa, exponent = torch.frexp(scale.clamp(min=1e-10))
        power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = power.where(scale.isfinite(), scale)
    y = (y / scale[..., None]).flatten(-2)
    if problem.out == "i8":
        codes.copy_(y.nan_to_num(nan=0).clamp(-128, 127).round().to(torch.int8).view(torch.uint8))
    else:
        codes.copy_(narrow.to_fp8(y, torch_dtype(problem.out)).view(torch.uint8))
    scales.copy_(scale)


def _dequantize(problem, codes, factors, global_scale, out):
    """Codes, bytes [rows, .], and factors in their layout to out [rows, n]; global_scale [1] or None."""
    if problem.element == "e2m1":
        values = narrow.from_e2m1(codes)
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    rows, n = values.shape
    found = layouts.restore(factors, rows, n // problem.width, problem.layout)
    wide = narrow.from_ue8m0(found) if problem.factor == "ue8m0" else found.view(torch.float8_e4m3fn).float()
    values = values.unflatten(-1, (-1, problem.width)) * wide[..., None]
    if global_scale is not None:
        values = values * global_scale
    out.copy_(values.flatten(-2))


def _interleave(problem, factors, out):
    """Factors [batch, rows, blocks] to out [batch, .]."""
    out.copy_(layouts.arrange(factors, problem.layout))


def _packbits(problem, x, indptr, packed_indptr, out):
    """x, bytes [n], to out, bytes; segment i from indptr[i] on, to out from packed_indptr[i] on."""
    weights = 1 << torch.arange(8, device=x.device)
    weights = weights if problem.little else weights.flip(0)
    ends = [0, x.numel()] if indptr is None else indptr.tolist()
    starts = [0] if packed_indptr is None else packed_indptr.tolist()
    for begin, end, start in zip(ends, ends[1:], starts):
        bits = (pad(x[begin:end], (0, (begin - end) % 8)) != 0).view(-1, 8)
        out[start : start + len(bits)] = (bits * weights).sum(-1).to(torch.uint8)


# One module for five ops, whose statements are a few lines each.
IMPLEMENTATION = Implementation(
    {Problem: _quantize, Groups: _groups, Dequantize: _dequantize, Interleave: _interleave, Packbits: _packbits}
)

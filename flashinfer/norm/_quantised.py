"""The op of norms whose result is quantised: its checks and its launch."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.norm._rows import check_rows, check_weights, launch
from flashinfer.ops import layouts
from flashinfer.ops import norm as room
from flashinfer.ops.formats import FORMATS


@custom_op(
    "flashinfer::rmsnorm_quantised",
    mutates_args=("residual", "out", "block_scale", "linear_scale", "normed"),
)
def quantised(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    block_scale: torch.Tensor | None,
    linear_scale: torch.Tensor | None,
    normed: torch.Tensor | None,
    numbers: list[float],
    format: str,
    layout: str,
    after: str,
    *,
    pdl: bool,
) -> None:
    """numbers : eps, and the scale of the tensor where `scale` is None."""
    beside = {"residual": residual, "y_out" if layout else "normed_out": normed}
    check_rows(input, **{name: tensor for name, tensor in beside.items() if tensor is not None})
    check_weights(input, weight=weight)
    same_device(input=input, weight=weight, out=out, scale=scale, block_scale=block_scale, **beside)
    same_device(input=input, block_scale_unswizzled=linear_scale)
    shape = input.shape
    codes = (*shape[:-1], shape[-1] // 2) if layout else tuple(shape)
    require(out.shape == codes, "y_fp4" if layout else "out", tuple(out.shape), str(codes))
    if layout:
        linear = (*shape[:-1], shape[-1] // FORMATS[format].width)
        _check_block_scale("block_scale", block_scale, linear, layout == "linear")
        if layout == "both":
            _check_block_scale("block_scale_unswizzled", linear_scale, linear, True)
    eps, number = numbers
    how = "tensor" if scale is not None else "" if number == 1 else "number"
    given = room.Quantised(number if scale is None else scale, block_scale, linear_scale, normed)
    op = room.rmsnorm if residual is None else room.fused_add_rmsnorm
    fields = {"format": format, "scale": how, "layout": layout, "normed": normed is not None, "pdl": pdl}
    if layout not in ("", "linear"):
        # The padding of tiled block scales is written too: a row has four blocks at least.
        fields["least"] = 4 * FORMATS[format].width
    launch(op, input, weight, out, eps, residual=residual, after=after, quantised=given, **fields)


def padded(linear) -> int:
    """Elements of swizzled block scales whose linear shape is `linear`."""
    high, wide = layouts.padded(torch.Size(linear[:-1]).numel(), linear[-1], "128x4")
    return high * wide


def _check_block_scale(name, tensor, linear, as_linear: bool) -> None:
    if as_linear:
        fits, allowed = tensor.shape == linear, f"{linear}"
    else:
        size = padded(linear)
        fits, allowed = tensor.numel() == size, f"{size} elements, rows padded to 128 and blocks to 4"
    require(fits and tensor.is_contiguous(), name, tuple(tensor.shape), f"{allowed}, contiguous")

"""SiLU gating and quantisation in one launch."""

from __future__ import annotations

import math

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, same_device, wants_pdl
from flashinfer._core.custom_op import custom_op
from flashinfer._core.scalars import scales
from flashinfer.ops import activation as room
from flashinfer.ops import layouts
from flashinfer.ops.formats import FORMATS
from flashinfer.quantization.nvfp4_quantization_utils import UNSET, NVFP44Over6Config, Unset, resolve_nvfp4_4over6


@checked
def silu_and_mul_nvfp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | float,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU gating, quantised to NVFP4: ``fp4_quantize(silu_and_mul(input), global_scale)`` in one launch.

    Parameters
    ----------
    input : torch.Tensor
        [..., 2 * K]; bfloat16 or float16, any strides. K a multiple of 16.
    global_scale : torch.Tensor or float
        One element (float32, float16 or bfloat16), or a number: 448 * 6 / (largest magnitude of the gated rows). It
        multiplies block factors.
    sf_vec_size : int
        16.
    is_sf_swizzled_layout, is_sf_8x4_layout, enable_pdl
        As in `flashinfer.fp4_quantize`.
    nvfp4_4over6 : NVFP44Over6Config, optional
        As in `fp4_quantize`.

    Returns
    -------
    codes : torch.Tensor
        uint8 [rows, K / 2]: two e2m1 a byte, the first in the low half; leading dimensions are one.
    factors : torch.Tensor
        uint8 [padded rows, padded K / 16], in e4m3.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    Notes
    -----
    The gated row is rounded to the dtype of `input` before it is quantised.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202; OCP Microscaling Formats
    Specification 1.0, for e2m1

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.silu_and_mul_nvfp4_quantize(torch.ones(3, 64).half(), 100.0)
    >>> codes.shape, factors.shape
    (torch.Size([3, 16]), torch.Size([128, 4]))
    """
    require(sf_vec_size == 16, "sf_vec_size", sf_vec_size, "16")
    tiled = is_sf_swizzled_layout or not is_sf_8x4_layout
    require(tiled, "is_sf_8x4_layout", is_sf_8x4_layout, "False, without is_sf_swizzled_layout")
    layout = ("8x4" if is_sf_8x4_layout else "128x4") if is_sf_swizzled_layout else "linear"
    rows = gated_rows("input", input, 16)
    scale = scales("global_scale", global_scale, input.device)
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    high, wide = layouts.padded(rows.shape[1], rows.shape[2] // 32, layout)
    codes = torch.empty(1, rows.shape[1], rows.shape[2] // 4, dtype=torch.uint8, device=input.device)
    factors = torch.empty(1, high * wide, dtype=torch.uint8, device=input.device)
    score = "" if recipe is None else recipe.err_mode_name.lower()
    silu_quantised(rows, scale, None, codes, factors, "nvfp4", layout, score, pdl=wants_pdl(enable_pdl))
    return codes[0], factors.view(high, wide)


def gated_rows(name: str, x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., 2 * K] as [1, rows, 2 * K], with K whole blocks of `width`."""
    require(x.dim() >= 2, name, tuple(x.shape), "two dimensions or more")
    fits = x.shape[-1] > 0 and x.shape[-1] % (2 * width) == 0
    require_fit(name, x, fits, f"[..., 2 * K] with K a multiple of {width}", torch.bfloat16, torch.float16)
    return x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])


@custom_op("flashinfer::silu_and_mul_quantised", mutates_args=("codes", "factors"))
def silu_quantised(
    a: torch.Tensor,
    global_scale: torch.Tensor | None,
    mask: torch.Tensor | None,
    codes: torch.Tensor,
    factors: torch.Tensor,
    format: str,
    layout: str,
    score: str,
    *,
    across: bool = False,
    pdl: bool = True,
) -> None:
    """The SiLU-gated rows of a [batch, rows, 2 * hidden], rounded to its dtype, in codes and factors of `format`.

    codes : bytes [batch, rows, .], or [batch, hidden, rows] with `across`. factors : bytes [batch, .], in the layout.
    """
    require(a.dtype in (torch.bfloat16, torch.float16), "a", a.dtype, "bfloat16, float16")
    hidden = a.shape[2] // 2
    same_device(a=a, mask=mask, global_scale=global_scale)
    if codes.numel() == 0:
        factors.zero_()
        return
    # Padding of the factors counts: a row has four blocks at least.
    least = 4 * FORMATS[format].width
    problem = room.Problem(
        kind="silu",
        dtype=dtype_name(a.dtype),
        block=64 if across else min(max(1 << (hidden - 1).bit_length(), least), 1024),
        aligned=hidden * a.element_size() % 16 == 0 and is_aligned(a),
        format=format,
        layout=layout,
        counted=mask is not None,
        across=across,
        score=score,
        pdl=pdl,
    )
    given = room.Quantised(factors, global_scale, None if mask is None else mask.contiguous())
    room.act_and_mul(problem, a.device).run(a, codes, given)

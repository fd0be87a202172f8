"""Quantisation as upstream's kernels in CuTe DSL are called; the kernels here are Triton's."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import check_apart, require
from flashinfer.quantization.fp4_quantization import mxfp4_quantize, nvfp4_quantize
from flashinfer.quantization.fp8_quantization import mxfp8_quantize
from flashinfer.quantization.nvfp4_quantization_utils import UNSET, NVFP44Over6Config, Unset
from flashinfer.tllm_enums import SfLayout


@checked
@named(a="input", a_global_sf="global_scale")
def nvfp4_quantize_cute_dsl(
    input: torch.Tensor,
    global_scale: float | torch.Tensor,
    sf_layout: int = 0,
    enable_pdl: bool | None = None,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nvfp4_quantize` by a number for the layout.

    Parameters
    ----------
    input : torch.Tensor
        [M, K]; bfloat16, float16 or an e4m3 dtype that `nvfp4_quantize` takes. K a multiple of 16.
    global_scale : float or torch.Tensor
        `a_global_sf` of `nvfp4_quantize`.
    sf_layout : int
        0: 128x4 tiles, 1: 8x4 tiles, 2: row-major.
    enable_pdl, nvfp4_4over6
        As in `flashinfer.fp4_quantize`.
    out : (torch.Tensor, torch.Tensor), optional
        Receive codes, uint8 [M, K / 2], and factors, uint8, contiguous, as many as the layout has or more; views of
        these are returned.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        Codes and factors.

    Raises
    ------
    ValueError
        As `nvfp4_quantize` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(128, 64).bfloat16()
    >>> codes, factors = flashinfer.quantization.nvfp4_quantize_cute_dsl(x, 1.0)
    >>> codes.shape, factors.numel()
    (torch.Size([128, 32]), 512)
    """
    codes, factors = nvfp4_quantize(
        input, global_scale, _layout(sf_layout), enable_pdl=enable_pdl, nvfp4_4over6=nvfp4_4over6
    )
    if out is None:
        return codes, factors
    given, rest = out
    fits = given.shape == codes.shape and given.dtype == torch.uint8
    require(fits, "out", tuple(given.shape), f"uint8 {list(codes.shape)} first")
    fits = rest.numel() >= factors.numel() and rest.dtype == torch.uint8 and rest.is_contiguous()
    require(fits, "out", tuple(rest.shape), f"uint8, contiguous, {factors.numel()} elements or more second")
    check_apart([("out[0]", given), ("out[1]", rest)], [("input", input)])
    into = rest.view(-1)[: factors.numel()].view(factors.shape)
    given.copy_(codes)
    into.copy_(factors)
    return given, into


@checked
@named(a="input", a_global_sf="global_scale_inv")
def nvfp4_quantize_per_token_cute_dsl(
    input: torch.Tensor,
    global_scale_inv: torch.Tensor | float,
    sf_layout: int = 0,
    enable_pdl: bool | None = None,
    out_scale: torch.Tensor | None = None,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`nvfp4_quantize` with a scale for each row.

    Parameters
    ----------
    input : torch.Tensor
        [M, K]; bfloat16 or float16. K a multiple of 16.
    global_scale_inv : torch.Tensor or float
        `a_global_sf` of `nvfp4_quantize`.
    sf_layout : int
        0: 128x4 tiles, 1: 8x4 tiles, 2: row-major.
    enable_pdl, nvfp4_4over6
        As in `flashinfer.fp4_quantize`.
    out_scale : torch.Tensor or float, optional
        One element that the scales which are returned are times. Codes and factors do not depend on it.

    Returns
    -------
    (torch.Tensor, torch.Tensor, torch.Tensor)
        Codes, factors, and float32 scales [M].

    Raises
    ------
    ValueError
        As `nvfp4_quantize` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(128, 64).bfloat16()
    >>> codes, factors, scales = flashinfer.quantization.nvfp4_quantize_per_token_cute_dsl(x, 1.0)
    >>> codes.shape, scales.shape
    (torch.Size([128, 32]), torch.Size([128]))
    """
    return nvfp4_quantize(
        input, global_scale_inv, _layout(sf_layout), enable_pdl=enable_pdl, per_token_activation=True,
        out_scale=out_scale, nvfp4_4over6=nvfp4_4over6,
    )  # fmt: skip


@checked
@named(a="input")
def mxfp4_quantize_cute_dsl(
    input: torch.Tensor, sf_layout: int = 0, enable_pdl: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mxfp4_quantize` by a number for the layout.

    Parameters
    ----------
    input : torch.Tensor
        [M, K]; bfloat16 or float16. K a multiple of 32.
    sf_layout : int
        0: 128x4 tiles, 1: 8x4 tiles, 2: row-major.
    enable_pdl
        As in `flashinfer.fp4_quantize`.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        Codes, uint8 [M, K / 2], and ue8m0 factors.

    Raises
    ------
    ValueError
        As `mxfp4_quantize` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(128, 64).bfloat16()
    >>> codes, factors = flashinfer.quantization.mxfp4_quantize_cute_dsl(x)
    >>> codes.shape, factors.numel()
    (torch.Size([128, 32]), 512)
    """
    return mxfp4_quantize(input, enable_pdl=enable_pdl, sfLayout=_layout(sf_layout))


@checked
def mxfp8_quantize_cute_dsl(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    is_sf_8x4_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mxfp8_quantize`, with `is_sf_8x4_layout` for tiles of 8 rows and 4 factors.

    Parameters
    ----------
    input, is_sf_swizzled_layout, alignment
        As in `flashinfer.mxfp8_quantize`.
    enable_pdl : bool, optional
        As in `flashinfer.rmsnorm`.
    is_sf_8x4_layout : bool
        Tiles of 8 rows and 4 factors; with is_sf_swizzled_layout only.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        Codes and ue8m0 factors.

    Raises
    ------
    ValueError
        As `mxfp8_quantize` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(128, 64).bfloat16()
    >>> codes, factors = flashinfer.quantization.mxfp8_quantize_cute_dsl(x)
    >>> codes.shape, factors.numel()
    (torch.Size([128, 64]), 512)
    """
    tiled = is_sf_swizzled_layout or not is_sf_8x4_layout
    require(tiled, "is_sf_8x4_layout", is_sf_8x4_layout, "False, without is_sf_swizzled_layout")
    layout = SfLayout.layout_8x4 if is_sf_8x4_layout else None
    return mxfp8_quantize(input, is_sf_swizzled_layout, alignment, enable_pdl, sf_swizzle_layout=layout)


def _layout(value: int) -> SfLayout:
    layouts = {layout.value: layout for layout in SfLayout}
    require(value in layouts, "sf_layout", value, "0 (128x4), 1 (8x4), 2 (linear)")
    return layouts[value]

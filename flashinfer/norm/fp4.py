"""Norms to NVFP4 and MXFP4 in one launch."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require, wants_pdl
from flashinfer._core.scalars import scales
from flashinfer.norm._quantised import padded, quantised

FP4 = torch.float4_e2m1fn_x2


@checked
@named(out="y_fp4")
def rmsnorm_fp4quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm to FP4 with block scales: NVFP4 or MXFP4 of ``y = rmsnorm(input, weight)``, in one launch.

    Codes and block scales have the bits that `nvfp4_quantize` or `mxfp4_quantize` gives for ``rmsnorm(input, weight)``.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. hidden a multiple of
        `block_size`, up to 32768 on a GPU.
    weight, eps, enable_pdl
        As in `flashinfer.rmsnorm`.
    y_fp4 : torch.Tensor, optional
        Receives the codes; [..., hidden / 2], float4_e2m1fn_x2 or uint8: two e2m1 a byte, the first in the low half.
    block_scale : torch.Tensor, optional
        Receives the block scales, float8_e4m3fn for NVFP4 and uint8 for MXFP4 (uint8 for both), contiguous. Linear:
        [..., hidden / block_size]. Swizzled: as many elements as rows, padded to a multiple of 128, times blocks of a
        row, padded to a multiple of 4; padding becomes 0.
    global_scale : torch.Tensor, optional
        NVFP4: a tensor of one element (float32, float16 or bfloat16), or a number, g; block scales are multiplied by
        it, so that ``y`` is about ``code * block_scale / g``. With ``448 * 6 / max(abs(y))`` they use the whole range
        of e4m3. The default is 1. Upstream's docstring says that the norm is divided by it; its kernels multiply.
    block_size : int
        16 for NVFP4, 32 for MXFP4.
    scale_format : str, optional
        "e4m3" with blocks of 16 and "ue8m0" with blocks of 32, which are the defaults.
    is_sf_swizzled_layout : bool
        Block scales in tiles of 128 rows and 4 blocks, `[row tile][block tile][32][4][4]`, as tensor cores read them.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        `y_fp4` and `block_scale`, or new tensors; a new swizzled block_scale has one dimension.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above.

    Notes
    -----
    NVFP4: the scale s of a block is ``e4m3(g * max(abs(y)) / 6)``, a code ``e2m1(y * g / s)``, and zero where s is 0.
    MXFP4: the scale is the least power of two with ``max(abs(y)) / scale <= 6``. float32 maths; the norm is rounded to
    the dtype of `input` before it is quantised.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; OCP Microscaling
    Formats Specification 1.0; NVIDIA, PTX ISA, block scaling of mma (NVFP4 and the tiles of scale factors)

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.rmsnorm_fp4quant(torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16())
    >>> codes.shape, factors.shape
    (torch.Size([2, 32]), torch.Size([2, 4]))
    """
    layout = "128x4" if is_sf_swizzled_layout else "linear"
    return to_fp4(
        input, None, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, layout,
        pdl=wants_pdl(enable_pdl),
    )[:2]  # fmt: skip


@checked
@named(out="y_fp4", normed="y_out", linear_scale="block_scale_unswizzled")
def add_rmsnorm_fp4quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Add, normalise, quantise to FP4: ``residual += input``, then `rmsnorm_fp4quant` of the sum.

    Parameters
    ----------
    input, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, enable_pdl
        As in `rmsnorm_fp4quant`, as are the errors. `input` is only read.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    is_sf_swizzled_layout : bool
        As in `rmsnorm_fp4quant`.
    output_both_sf_layouts : bool
        Write block scales in both layouts: `block_scale` is swizzled then, whatever `is_sf_swizzled_layout`.
    block_scale_unswizzled : torch.Tensor, optional
        Receives the linear block scales, if both layouts are written. Refused otherwise.
    y_out : torch.Tensor, optional
        Receives the norm as well, rounded; shape and dtype of `input`, any strides. The codes do not change by it.

    Returns
    -------
    (torch.Tensor, torch.Tensor) or (torch.Tensor, torch.Tensor, torch.Tensor)
        Codes, block scales, and with `output_both_sf_layouts` the linear block scales.

    Raises
    ------
    ValueError
        As `rmsnorm_fp4quant` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, residual, weight = torch.randn(2, 64).bfloat16(), torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    >>> codes, factors = flashinfer.add_rmsnorm_fp4quant(x, residual, weight)
    >>> codes.shape, factors.shape
    (torch.Size([2, 32]), torch.Size([2, 4]))
    """
    layout = "both" if output_both_sf_layouts else "128x4" if is_sf_swizzled_layout else "linear"
    both = layout == "both" or block_scale_unswizzled is None
    require(both, "block_scale_unswizzled", "a tensor", "None, unless output_both_sf_layouts")
    results = to_fp4(
        input, residual, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, layout,
        linear_scale=block_scale_unswizzled, normed=y_out, pdl=wants_pdl(enable_pdl),
    )  # fmt: skip
    codes, factors, linear = results
    return (codes, factors) if linear is None else (codes, factors, linear)


def to_fp4(
    input, residual, weight, codes, block_scale, global_scale, eps, block_size, scale_format, layout, /,
    *, after="", linear_scale=None, normed=None, pdl=True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    formats = {16: ("e4m3", "nvfp4"), 32: ("ue8m0", "mxfp4")}
    require(block_size in formats, "block_size", block_size, "16, 32")
    kind, format = formats[block_size]
    named = scale_format in (None, kind)
    require(named, "scale_format", repr(scale_format), f"{kind!r} with blocks of {block_size}")
    shape = input.shape
    require(len(shape) in (2, 3), "input", tuple(shape), "[rows, hidden] or [batch, heads, hidden]")
    fits = shape[-1] % block_size == 0
    require(fits, "input", tuple(shape), f"rows of a multiple of {block_size}, the block size")
    require(format == "nvfp4" or global_scale is None, "global_scale", "a tensor", "None with blocks of 32")
    if global_scale is not None:
        global_scale = scales("global_scale", global_scale, input.device)
    if codes is None:
        codes = input.new_empty((*shape[:-1], shape[-1] // 2), dtype=FP4)
    scale_dtype = torch.float8_e4m3fn if format == "nvfp4" else torch.uint8
    linear = (*shape[:-1], shape[-1] // block_size)
    if block_scale is None:
        size = linear if layout == "linear" else (padded(linear),)
        block_scale = input.new_empty(size, dtype=scale_dtype)
    if layout == "both" and linear_scale is None:
        linear_scale = input.new_empty(linear, dtype=scale_dtype)
    for name, tensor, allowed in (("y_fp4", codes, FP4), ("block_scale", block_scale, scale_dtype),
                                  ("block_scale_unswizzled", linear_scale, scale_dtype)):  # fmt: skip
        fits = tensor is None or tensor.dtype in (allowed, torch.uint8)
        require(fits, name, tensor is not None and tensor.dtype, f"{allowed}, uint8")
    # In bytes, for torch.compile has hardly an operation for the narrow dtypes.
    out, factors = codes.view(torch.uint8), block_scale.view(torch.uint8)
    linear = None if linear_scale is None else linear_scale.view(torch.uint8)
    quantised(input, residual, weight, out, global_scale, factors, linear, normed, [eps, 1.0], format, layout, after,
              pdl=pdl)  # fmt: skip
    return codes, block_scale, linear_scale

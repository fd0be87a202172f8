"""What FP4 codes and their factors stand for, as floats."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.quantization import _rows
from flashinfer.tllm_enums import SfLayout


@checked
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """FP4 codes and their factors as float32: code * factor * global scale.

    Parameters
    ----------
    e2m1_tensor : torch.Tensor
        uint8 [M, K / 2]. This and the others may be on devices of their own.
    ufp8_scale_tensor : torch.Tensor
        uint8 or float8_e4m3fn, any shape: the bytes of the layout.
    global_scale_tensor : torch.Tensor, optional
        float32 [1]: the scale of dequantisation, the inverse of what `nvfp4_quantize` takes.
    sf_vec_size : int
        Elements to a factor: 16 or 32.
    ufp8_type : int
        0: factors in ue8m0; 1: in e4m3.
    is_sf_swizzled_layout, is_sf_8x4_layout : bool
        As in `fp4_quantize`.

    Returns
    -------
    torch.Tensor
        float32 [M, K] on the host, as upstream has it, wherever the codes are. The product with the global scale is
        the one that is rounded.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((4, 64), 3.0).bfloat16(), torch.ones(1))
    >>> flashinfer.e2m1_and_ufp8sf_scale_to_float(codes, factors, torch.ones(1))[0, :2]
    tensor([3., 3.])
    """
    require(sf_vec_size in (16, 32), "sf_vec_size", sf_vec_size, "16, 32")
    require(ufp8_type in (0, 1), "ufp8_type", ufp8_type, "0 (ue8m0), 1 (e4m3)")
    tiled = is_sf_swizzled_layout or not is_sf_8x4_layout
    require(tiled, "is_sf_8x4_layout", is_sf_8x4_layout, "False, without is_sf_swizzled_layout")
    layout = ("8x4" if is_sf_8x4_layout else "128x4") if is_sf_swizzled_layout else "linear"
    scale = None
    if global_scale_tensor is not None:
        scale = _rows.scale_tensor("global_scale_tensor", global_scale_tensor, e2m1_tensor)
    factor = "ue8m0" if ufp8_type == 0 else "e4m3"
    names = "e2m1_tensor", "ufp8_scale_tensor"
    factors = ufp8_scale_tensor.to(e2m1_tensor.device)
    return _rows.float_of_fp4(names, e2m1_tensor, factors, scale, factor, sf_vec_size, layout).cpu()


@checked
def mxfp4_dequantize(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> torch.Tensor:
    """What `mxfp4_quantize` gave, as float32; exact.

    Parameters
    ----------
    a_fp4 : torch.Tensor
        uint8 [M, K / 2].
    a_sf : torch.Tensor
        uint8, any shape: the bytes of the layout.
    sfLayout : SfLayout
        Where the factors are.

    Returns
    -------
    torch.Tensor
        float32 [M, K] on the host, as upstream has it, wherever the codes are.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.mxfp4_quantize(torch.full((4, 64), 3.0).bfloat16())
    >>> flashinfer.mxfp4_dequantize(codes, factors)[0, :2]
    tensor([3., 3.])
    """
    layout = _rows.layout_name("sfLayout", sfLayout)
    return _rows.float_of_fp4(("a_fp4", "a_sf"), a_fp4, a_sf.to(a_fp4.device), None, "ue8m0", 32, layout).cpu()


@checked
def mxfp4_dequantize_host(weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """MXFP4 with row-major factors as float32; exact.

    Parameters
    ----------
    weight : torch.Tensor
        uint8 [M, K / 2].
    scale : torch.Tensor
        uint8, M x K / group_size factors in ue8m0, row by row.
    group_size : int
        Elements to a factor: 16, 32, 64 or 128.

    Returns
    -------
    torch.Tensor
        float32 [M, K], on the device of `weight`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = torch.full((1, 16), 0x22, dtype=torch.uint8), torch.full((1, 1), 128, dtype=torch.uint8)
    >>> flashinfer.mxfp4_dequantize_host(codes, factors)[0, :2]  # 1 x 2 ** (128 - 127)
    tensor([2., 2.])
    """
    require(group_size in (16, 32, 64, 128), "group_size", group_size, "16, 32, 64, 128")
    return _rows.float_of_fp4(("weight", "scale"), weight, scale, None, "ue8m0", group_size, "linear")

"""MXFP8: e4m3 values with a power-of-two factor for 32 of them."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require, wants_pdl
from flashinfer.quantization import _rows
from flashinfer.tllm_enums import SfLayout

__all__ = ["mxfp8_dequantize_host", "mxfp8_quantize"]


def mxfp8_quantize(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to MXFP8.

    A block of 32 has the least power of two f for which its largest magnitude over f is at most 448, in ue8m0, and the
    values e4m3(x / f), rounded to nearest even. A NaN makes its block's factor NaN; infinity saturates.

    Parameters
    ----------
    input : torch.Tensor
        [..., K]; bfloat16, float16, float32 or float8_e4m3fn, rows contiguous. Any K: rows are padded with zeros.
    is_sf_swizzled_layout : bool
        Factors in 128x4 tiles, padded with zeros, and not row-major.
    alignment : int
        K is rounded up to a multiple of this, which is one of 32.
    enable_pdl : bool, optional
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself. None and True: small launches, where the GPU has it (compute capability 9.0 and above). It
        has no effect on results.
    backend : str
        "cuda" or "cute-dsl", upstream's two implementations of one function, or a variant's name.
    sf_swizzle_layout : SfLayout, optional
        Where the factors go; it stands for `is_sf_swizzled_layout` where it is given.

    Returns
    -------
    values : torch.Tensor
        float8_e4m3fn [..., padded K].
    factors : torch.Tensor
        uint8 of one dimension: padded rows x padded K / 32, the bytes of the layout.

    Raises
    ------
    ValueError
        A shape, dtype or stride other than the above.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023; rounding the factor up is Mishra et al., Recipes for
    Pre-training LLMs with MXFP8, 2025, https://arxiv.org/abs/2506.08027
    """
    rows = _rows.as_rows("input", input)
    require(alignment > 0 and alignment % 32 == 0, "alignment", alignment, "a multiple of 32")
    columns = -(-input.shape[-1] // alignment) * alignment
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    pdl = wants_pdl(enable_pdl)
    codes, factors, _ = _rows.quantize("input", rows, "mxfp8", layout, columns=columns, backend=backend, pdl=pdl)
    return codes.view(torch.float8_e4m3fn).view(*input.shape[:-1], columns), factors[0]


def mxfp8_dequantize_host(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> torch.Tensor:
    """What `mxfp8_quantize` gave, as float32; exact.

    Parameters
    ----------
    input : torch.Tensor
        float8_e4m3fn or uint8 [M, K], K a multiple of 32.
    scale_tensor : torch.Tensor
        uint8, any shape: the bytes of the layout.
    is_sf_swizzled_layout, sf_swizzle_layout
        As in `mxfp8_quantize`.

    Returns
    -------
    torch.Tensor
        float32 [M, K], on the device of `input`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.
    """
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    return _rows.dequantize(("input", "scale_tensor"), input, scale_tensor, None, "e4m3", "ue8m0", 32, layout)


def _layout(is_sf_swizzled_layout: bool, sf_swizzle_layout: SfLayout | None) -> str:
    if sf_swizzle_layout is not None:
        return _rows.layout_name("sf_swizzle_layout", sf_swizzle_layout)
    return "128x4" if is_sf_swizzled_layout else "linear"

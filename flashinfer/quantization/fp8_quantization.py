"""MXFP8: e4m3 values with a power-of-two factor for 32 of them."""

from __future__ import annotations

import math

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, require, require_fit, wants_pdl
from flashinfer.ops import layouts
from flashinfer.quantization import _rows
from flashinfer.tllm_enums import SfLayout

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@checked
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
    enable_pdl, backend
        As in `flashinfer.fp4_quantize`.
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.mxfp8_quantize(torch.randn(4, 64).bfloat16(), is_sf_swizzled_layout=False)
    >>> codes.shape, factors.shape
    (torch.Size([4, 64]), torch.Size([8]))
    """
    rows = _rows.as_rows("input", input)
    require(alignment > 0 and alignment % 32 == 0, "alignment", alignment, "a multiple of 32")
    columns = -(-input.shape[-1] // alignment) * alignment
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    pdl = wants_pdl(enable_pdl)
    codes, factors, _ = _rows.quantize("input", rows, "mxfp8", layout, columns=columns, backend=backend, pdl=pdl)
    return codes.view(torch.float8_e4m3fn).view(*input.shape[:-1], columns), factors[0]


@checked
def mxfp8_grouped_quantize(
    a: torch.Tensor, mask: torch.Tensor, backend: str = "cutile"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the first rows of each matrix of a batch to MXFP8, for grouped GEMMs with a mask.

    Parameters
    ----------
    a : torch.Tensor
        [B, M, K]; bfloat16, float16, float32 or float8_e4m3fn, rows contiguous. K a multiple of 32; it is padded with
        zeros to one of 128.
    mask : torch.Tensor
        int32 [B]: how many rows of each matrix count. Values and factors of the others are not defined. More than M
        counts as M.
    backend : str
        "cutile" or "cake", upstream's implementations, or a variant's name.

    Returns
    -------
    values : torch.Tensor
        float8_e4m3fn [M, padded K, B], a view of [B, M, padded K].
    factors : torch.Tensor
        uint8 [32, 4, padded M / 128, 4, padded K / 128, B], a view of 128x4 tiles: row 128 i + 32 g + r and factor 4 j
        + c are at [r, g, i, c, j].

    Raises
    ------
    ValueError
        A shape, dtype, device or stride other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, counts = torch.randn(2, 128, 128).bfloat16(), torch.tensor([3, 128]).int()
    >>> codes, factors = flashinfer.mxfp8_grouped_quantize(x, counts)
    >>> codes.shape, factors.shape
    (torch.Size([128, 128, 2]), torch.Size([32, 4, 1, 4, 1, 2]))
    """
    require(a.dim() == 3, "a", tuple(a.shape), "[B, M, K]")
    batch, rows, columns = a.shape
    require(columns % 32 == 0, "a", tuple(a.shape), "[B, M, K] with K a multiple of 32")
    require_fit("mask", mask, mask.shape == (batch,), f"[{batch}], the first dimension of a", torch.int32)
    require(mask.device == a.device, "mask", f"a tensor on {mask.device}", f"{a.device}, where a is")
    columns = -(-columns // 128) * 128
    chosen = "auto" if backend in ("cutile", "cake") else backend
    codes, factors, _ = _rows.quantize(
        "a", a, "mxfp8", "128x4", counts=mask.contiguous(), columns=columns, backend=chosen
    )
    high, wide = layouts.padded(rows, columns // 32, "128x4")
    tiles = factors.view(batch, high // 128, wide // 4, 32, 4, 4)
    return codes.view(torch.float8_e4m3fn).permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


@checked
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.mxfp8_quantize(torch.full((4, 64), 3.0).bfloat16())
    >>> flashinfer.mxfp8_dequantize_host(codes.view(torch.uint8), factors.view(torch.uint8))[0, :2]
    tensor([3., 3.])
    """
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    return _rows.dequantize(("input", "scale_tensor"), input, scale_tensor, None, "e4m3", "ue8m0", 32, layout)


def _layout(is_sf_swizzled_layout: bool, sf_swizzle_layout: SfLayout | None) -> str:
    if sf_swizzle_layout is not None:
        return _rows.layout_name("sf_swizzle_layout", sf_swizzle_layout)
    return "128x4" if is_sf_swizzled_layout else "linear"


@checked
def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cutile",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of each row to FP8 or INT8, each with a float32 scale.

    ``scale = max(max(abs(group)), eps) / largest``, with 448, 57344 or 127 the largest, and ``code = x / scale``,
    rounded to nearest even.

    Parameters
    ----------
    x : torch.Tensor
        [..., n]; bfloat16, float16 or float32, any strides.
    group_size : int
        Elements of a group, which divides n.
    eps : float
        The least magnitude that a scale is made for.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn (the default), float8_e5m2 or int8.
    column_major_scales : bool
        Scales of a column stand together, for x [rows, n]; the shape is the same.
    scale_tma_aligned : bool
        With `column_major_scales`: columns begin at multiples of 16 bytes.
    scale_ue8m0 : bool
        With `column_major_scales`: scales, 1e-10 at least, are rounded up to powers of two.
    backend : str
        "cutile", upstream's implementation, or a variant's name.

    Returns
    -------
    codes : torch.Tensor
        Shape of `x`, contiguous, `dst_dtype`. A NaN makes its group NaN, or 0 in int8.
    scales : torch.Tensor
        float32 [..., n / group_size]: x is about code * scale.

    Raises
    ------
    ValueError
        A shape, dtype, value or combination other than the above.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2, https://arxiv.org/abs/2412.19437

    Examples
    --------
    >>> import torch
    >>> from flashinfer.quantization import per_token_group_quant_8bit
    >>> codes, scales = per_token_group_quant_8bit(torch.randn(3, 256), 128)
    >>> codes.shape, scales.shape
    (torch.Size([3, 256]), torch.Size([3, 2]))
    """
    require_fit("x", x, x.dim() >= 1, "one dimension or more", torch.bfloat16, torch.float16, torch.float32)
    n = x.shape[-1]
    divides = 0 < group_size <= 32768 and n % group_size == 0
    require(divides, "group_size", group_size, f"a divisor of {n}, the last dimension of x, up to 32768")
    require(eps > 0, "eps", eps, "more than 0")
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    require(dtype in _EIGHT_BITS, "dst_dtype", dtype, "float8_e4m3fn, float8_e5m2, int8")
    flags = {"scale_tma_aligned": scale_tma_aligned, "scale_ue8m0": scale_ue8m0}
    for name, flag in flags.items():
        require(column_major_scales or not flag, name, flag, "False, without column_major_scales")
    two = x.dim() == 2 or not column_major_scales
    require(two, "column_major_scales", column_major_scales, "False, but for x of two dimensions")
    count = math.prod(x.shape[:-1])
    rows = x.reshape(count, n).contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    if column_major_scales:
        pitch = -(-len(x) // 4) * 4 if scale_tma_aligned else len(x)
        scales = torch.empty(n // group_size, pitch, dtype=torch.float32, device=x.device)[:, : len(x)].T
    else:
        scales = torch.empty(*x.shape[:-1], n // group_size, dtype=torch.float32, device=x.device)
    flat = codes.view(count, n).view(torch.uint8)
    into = scales if column_major_scales else scales.view(count, n // group_size)
    chosen = "auto" if backend == "cutile" else backend
    _rows.quantize_groups(rows, group_size, eps, flat, into, dtype_name(dtype), scale_ue8m0, chosen)
    return codes, scales

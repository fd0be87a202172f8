"""SiLU gating and its gradient, quantised to MXFP8 along rows, down columns, or both."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, same_device
from flashinfer.quantization.fp8_quantization import mxfp8_quantize
from flashinfer.quantization.gated import gated_rows, silu_quantised

__all__ = ["silu_and_mul_mxfp8_quantize", "silu_and_mul_mxfp8_quantize_backward"]


@checked
def silu_and_mul_mxfp8_quantize(
    gated_input: torch.Tensor, *, rowwise: bool = True, colwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """SiLU gating, quantised to MXFP8 along rows, down columns, or both.

    ``y = silu_and_mul(gated_input)`` in the dtype of the input, then as `mxfp8_quantize` says: a block of 32 has the
    least power of two f for which its largest magnitude over f is at most 448, and the values e4m3(y / f).

    Parameters
    ----------
    gated_input : torch.Tensor
        [M, 2 * K]: gates, then factors; bfloat16 or float16, any strides. M and K multiples of 128.
    rowwise : bool
        Quantise blocks of 32 columns of a row, as products over K need them.
    colwise : bool
        Quantise blocks of 32 rows of a column, as products over M need them, such as the gradient of a weight.

    Returns
    -------
    row_output : torch.Tensor
        float8_e4m3fn [M, K].
    col_output : torch.Tensor
        float8_e4m3fn [M, K], with strides (1, M).
    row_scales : torch.Tensor
        float8_e8m0fnu [M, K / 32]: the bytes of 128x4 tiles (`SfLayout`), not row-major.
    col_scales : torch.Tensor
        float8_e8m0fnu [K * M / 32]: of the transpose [K, M], in 128x4 tiles.

    What is not asked for has no elements.

    Raises
    ------
    ValueError
        A shape or dtype other than the above, or neither of the two.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023; rounding the factor up is Mishra et al., Recipes for
    Pre-training LLMs with MXFP8, 2025, https://arxiv.org/abs/2506.08027

    Examples
    --------
    >>> import torch, flashinfer
    >>> values, _, scales, _ = flashinfer.silu_and_mul_mxfp8_quantize(torch.ones(128, 256).bfloat16())
    >>> values.shape, scales.shape
    (torch.Size([128, 128]), torch.Size([128, 4]))
    """
    require(gated_input.dim() == 2, "gated_input", tuple(gated_input.shape), "[M, 2 * K]")
    require(rowwise or colwise, "rowwise", rowwise, "True, without colwise")
    rowwise, colwise = bool(rowwise), bool(colwise)
    rows = gated_rows("gated_input", gated_input, 128)
    m, k, device = gated_input.shape[0], gated_input.shape[1] // 2, gated_input.device
    require(m > 0 and m % 128 == 0, "gated_input", tuple(gated_input.shape), "[M, 2 * K] with M a multiple of 128")
    sizes = [m * k * rowwise, m * k * colwise, m * k // 32 * rowwise, m * k // 32 * colwise]
    row, column, row_scales, column_scales = (torch.empty(n, dtype=torch.uint8, device=device) for n in sizes)
    if rowwise:
        silu_quantised(rows, None, None, row.view(1, m, k), row_scales[None], "mxfp8", "128x4", "")
        row, row_scales = row.view(m, k), row_scales.view(m, k // 32)
    if colwise:
        silu_quantised(rows, None, None, column.view(1, k, m), column_scales[None], "mxfp8", "128x4", "", across=True)
        column = column.view(k, m).T
    row, column = row.view(torch.float8_e4m3fn), column.view(torch.float8_e4m3fn)
    return row, column, row_scales.view(torch.float8_e8m0fnu), column_scales.view(torch.float8_e8m0fnu)


@checked
def silu_and_mul_mxfp8_quantize_backward(
    gated_input: torch.Tensor, grad_output: torch.Tensor, *, rowwise: bool = True, colwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of SiLU gating, quantised to MXFP8 along rows, down columns, or both.

    With g the gates, u the factors, s = sigmoid(g) and d the gradient of the result, the gradient is
    ``[d u s (1 + g (1 - s)) | d g s]``, in float32; it is rounded to the dtype of the input, then quantised as
    `silu_and_mul_mxfp8_quantize` does. Computed by torch, step by step: not one launch.

    Parameters
    ----------
    gated_input, rowwise, colwise
        As in `silu_and_mul_mxfp8_quantize`.
    grad_output : torch.Tensor
        [M, K], dtype of `gated_input`, any strides.

    Returns
    -------
    row_output, col_output, row_scales, col_scales : torch.Tensor
        As in `silu_and_mul_mxfp8_quantize`, with 2 * K columns for K.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above, or neither of the two.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202; OCP Microscaling Formats (MX)
    Specification 1.0, 2023

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, grad = torch.ones(128, 256).bfloat16(), torch.ones(128, 128).bfloat16()
    >>> values, _, scales, _ = flashinfer.silu_and_mul_mxfp8_quantize_backward(x, grad)
    >>> values.shape, scales.shape
    (torch.Size([128, 256]), torch.Size([128, 8]))
    """
    require(gated_input.dim() == 2, "gated_input", tuple(gated_input.shape), "[M, 2 * K]")
    require(rowwise or colwise, "rowwise", rowwise, "True, without colwise")
    (m, width), dtype = gated_input.shape, gated_input.dtype
    require(dtype in (torch.bfloat16, torch.float16), "gated_input", dtype, "bfloat16, float16")
    whole = m > 0 and m % 128 == 0 and width > 0 and width % 256 == 0
    require(whole, "gated_input", tuple(gated_input.shape), "[M, 2 * K] with M and K multiples of 128")
    fits = grad_output.shape == (m, width // 2) and grad_output.dtype == dtype
    require(fits, "grad_output", f"{grad_output.dtype} {tuple(grad_output.shape)}", f"{dtype} {(m, width // 2)}")
    same_device(gated_input=gated_input, grad_output=grad_output)
    gate, up = gated_input.float().chunk(2, 1)
    sigmoid, grad = gate.sigmoid(), grad_output.float()
    of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    gradient = torch.cat((of_gate, grad * gate * sigmoid), 1).to(dtype)
    nothing = gradient.new_empty(0, dtype=torch.uint8)
    row, row_scales, column, column_scales = (nothing,) * 4
    if rowwise:
        row, row_scales = mxfp8_quantize(gradient)
        row_scales = row_scales.view(m, width // 32)
    if colwise:
        column, column_scales = mxfp8_quantize(gradient.T.contiguous())
        column = column.T
    row, column = row.view(torch.float8_e4m3fn), column.view(torch.float8_e4m3fn)
    return row, column, row_scales.view(torch.float8_e8m0fnu), column_scales.view(torch.float8_e8m0fnu)

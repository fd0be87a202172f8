"""SiLU gating, quantised to MXFP8 along rows, down columns, or both."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.quantization.gated import gated_rows, silu_quantised

__all__ = ["silu_and_mul_mxfp8_quantize"]


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

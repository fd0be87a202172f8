"""Matrix products of few rows with a bias, of any format."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, same_device
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm import dense
from flashinfer.gemm._launch import gemm

_HALVES = (torch.bfloat16, torch.float16)
# A factor's dtype says its format, and with it how many elements it is of.
_FACTORS = {torch.float8_e4m3fn: ("ue4m3", 16), torch.float8_e8m0fnu: ("ue8m0", 32)}


@checked
@answering()
def tgv_gemm_sm100(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    pdl: bool = False,
    out: torch.Tensor | None = None,
    a_descale: torch.Tensor | None = None,
    b_descale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Matrix product for few rows: ``out = a @ b + bias`` of operands with their scales. Any chip runs it.

    Parameters
    ----------
    a : torch.Tensor
        [m, k]; bfloat16, float16, float8_e4m3fn or float8_e5m2. Or e2m1, two values in a byte, [m, k / 2]:
        float4_e2m1fn_x2 or uint8. Any m. Rows contiguous with block scales, else any strides.
    b : torch.Tensor
        [k, n], or [k / 2, n] of e2m1, the transpose of a weight; columns contiguous with block scales, else any
        strides. Of the dtype of `a`; with scales for 32 elements FP4 or FP8, whichever `a` is.
    bias : torch.Tensor or None
        [n]; bfloat16, float16 or float32.
    pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.
    out : torch.Tensor, optional
        [m, n], receives the result; bfloat16 or float16. By default of the dtype of a 16-bit `a`, else of a 16-bit
        `bias`, else bfloat16.
    a_descale, b_descale : torch.Tensor, optional
        The scales of FP4 and FP8 operands. Factors of 16 elements in float8_e4m3fn (both operands FP4), or of 32 in
        float8_e8m0fnu: the bytes of 128x4 tiles of `a` and of b.T, any shape. Or, for FP8, a scale of the whole
        operand: one element (float32, float16 or bfloat16) on either device.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [m, n]. Products are summed in float32, the bias is added, and the sum is rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b, bias = torch.ones(2, 64).bfloat16(), torch.ones(32, 64).bfloat16().T, torch.ones(32).bfloat16()
    >>> flashinfer.tgv_gemm_sm100(a, b, bias)[0, 0]
    tensor(65., dtype=torch.bfloat16)
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((32, 64), 6.0).bfloat16(), torch.ones(1))
    >>> factors = factors.view(torch.float8_e4m3fn)
    >>> flashinfer.tgv_gemm_sm100(codes, codes.T, bias, a_descale=factors, b_descale=factors)[0, 0]  # 64 x 36 + 1
    tensor(2304., dtype=torch.bfloat16)
    """
    halves = a.dtype in _HALVES
    for name, scale in (("a_descale", a_descale), ("b_descale", b_descale)):
        require((scale is not None) != halves, name, None if scale is None else scale.dtype,
                "a scale for FP4 and FP8 operands, None for others")  # fmt: skip
    dtype = a.dtype if halves else bias.dtype if bias is not None and bias.dtype in _HALVES else torch.bfloat16
    if out is not None:
        require(out.dtype in given.OUT, "out", out.dtype, ", ".join(map(str, given.OUT)))
        dtype = out.dtype
    if a_descale is not None and b_descale is not None and a_descale.dtype in _FACTORS:
        return _of_blocks(a, b, bias, out, dtype, a_descale, b_descale)
    dense._check_operands("a", a, "b", b, 2, _HALVES if halves else given.FP8)
    out = dense._result(out, (a.shape[0], b.shape[1]), dtype, a.device)
    dense._check_bias(bias, b.shape[1])
    scales = ("a_descale", a_descale), ("b_descale", b_descale)
    a_scale, b_scale = (None if scale is None else dense._scale(name, scale, a.device) for name, scale in scales)
    dense._product(a, b, out, bias, a_scale, b_scale, "auto")
    return out


def _of_blocks(a, b, bias, out, dtype, a_descale, b_descale) -> torch.Tensor:
    """The product of operands with factors of 16 or 32 elements in 128x4 tiles."""
    scale, width = _FACTORS[a_descale.dtype]
    require(b_descale.dtype == a_descale.dtype, "b_descale", b_descale.dtype, f"{a_descale.dtype}, as a_descale has")
    a, b = _codes("a", a, width), _codes("b", b, width, transposed=True)
    k, k_of_b = (x.shape[1] * (2 if x.dtype == torch.uint8 else 1) for x in (a, b))
    given.same("b", k_of_b, "a", k, "K")
    blocks = given.blocks_of("a", k, width)
    a_descale = given.factors("a_descale", a_descale, a.shape[0], blocks, "128x4")
    b_descale = given.factors("b_descale", b_descale, b.shape[0], blocks, "128x4")
    dense._check_bias(bias, b.shape[0])
    out = dense._result(out, (a.shape[0], b.shape[0]), dtype, a.device)
    same_device(a=a, bias=bias, out=out)
    sums = torch.empty(1, *out.shape, dtype=torch.float32, device=a.device)
    gemm(a[None], b[None], a_descale, b_descale, None, sums, scale, "128x4", "128x4", width=width)
    out.copy_(sums[0] if bias is None else sums[0] + bias)
    return out


def _codes(name: str, x: torch.Tensor, width: int, transposed: bool = False) -> torch.Tensor:
    """Codes of FP4, as uint8, or of FP8, in rows. Factors of 16 elements are of FP4's alone."""
    if width == 16 or x.dtype not in given.FP8:
        return given.fp4(name, x, transposed=transposed)
    return given.fp8(name, x, transposed=transposed)

"""Norms to FP8 in one launch, and RMSNorm through SiLU to the dtype of the input, FP8 or NVFP4."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require, require_fit, same_device, wants_pdl
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer._core.scalars import scales
from flashinfer.compat.queries import answering
from flashinfer.norm._quantised import quantised
from flashinfer.norm._rows import check_rows, check_weights, launch
from flashinfer.norm.fp4 import FP4, to_fp4
from flashinfer.ops import norm as room

_FP8 = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}


@replayed
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """RMSNorm to FP8 with one scale: ``out = fp8(rmsnorm(input, weight) / scale)``.

    Parameters
    ----------
    out : torch.Tensor
        Receives the result; shape of `input`, float8_e4m3fn or float8_e5m2, any strides. Rounded to nearest even; what
        is beyond the format's largest value becomes that.
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides.
    weight, eps, enable_pdl
        As in `flashinfer.rmsnorm`.
    scale : torch.Tensor or float
        What a code of 1 stands for, so the norm is divided by it: a number, or a tensor of one element (float32,
        float16 or bfloat16), read on the device. Results are multiplied by its float32 inverse.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    float32 maths; the norm is not rounded before it is quantised.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; OCP 8-bit Floating
    Point Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> out = torch.empty(1, 4, dtype=torch.float8_e4m3fn)
    >>> flashinfer.rmsnorm_quant(out, torch.full((1, 4), 3.0), torch.ones(4), torch.tensor([0.5]), eps=0.0)
    >>> out.float()
    tensor([[2., 2., 2., 2.]])
    """
    _to_fp8(out, input, None, weight, scale, eps, wants_pdl(enable_pdl))


@replayed
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, normalise, quantise: ``residual += input``, then ``out = fp8(rmsnorm(residual, weight) / scale)``.

    Parameters
    ----------
    out, input, weight, scale, eps, enable_pdl
        As in `rmsnorm_quant`, as are the errors. `input` is only read.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> out, residual = torch.empty(1, 4, dtype=torch.float8_e4m3fn), torch.full((1, 4), 3.0)
    >>> x, scale = torch.ones(1, 4), torch.tensor([0.5])
    >>> flashinfer.fused_add_rmsnorm_quant(out, x, residual, torch.ones(4), scale, eps=0.0)
    >>> out.float(), residual
    (tensor([[2., 2., 2., 2.]]), tensor([[4., 4., 4., 4.]]))
    """
    _to_fp8(out, input, residual, weight, scale, eps, wants_pdl(enable_pdl))


@checked
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """LayerNorm to FP8 with one scale: ``out = fp8(layernorm(input, gemma, beta) / scale)``.

    Parameters
    ----------
    out, input, scale, eps
        As in `rmsnorm_quant`, as are the errors; `eps` is added to the variance.
    gemma : torch.Tensor
        The factor, [hidden]; bfloat16, float16 or float32. The name is upstream's.
    beta : torch.Tensor
        The shift, [hidden]; dtype of `gemma`.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or number other than the above.

    Notes
    -----
    float32 maths; the norm is not rounded before it is quantised.

    References
    ----------
    Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450; OCP 8-bit Floating Point
    Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> out = torch.empty(2, 64, dtype=torch.float8_e4m3fn)
    >>> flashinfer.layernorm_quant(out, torch.randn(2, 64), torch.ones(64), torch.zeros(64), 0.5)
    """
    format, tensor, number = _fp8_format(out, input, scale)
    _layernorm_quantised(input, gemma, beta, out, tensor, eps, number, format)


@answering()
@checked
@named(normed="normed_out")
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, normalise, and quantise to FP8 with a scale for each 128 columns of a row.

    ``residual += input``; ``normed_out = rmsnorm(residual, weight)``; then, for each block of 128 columns of the
    rounded `normed_out`, ``scale = max(abs(block)) / 448`` and ``out = fp8(block / scale)``.

    Parameters
    ----------
    out : torch.Tensor
        [rows, hidden], float8_e4m3fn, any strides.
    block_scale : torch.Tensor
        [hidden / 128, rows rounded up to a multiple of 4], float32, contiguous: scales of a block stand together, as
        block-scaled GEMMs read them. ``block_scale.T[:rows]`` is one row of scales for each row. What is past `rows` is
        not written.
    normed_out : torch.Tensor
        [rows, hidden], in the dtype of `input`, any strides. It may be `input` itself.
    input : torch.Tensor
        [rows, hidden]; bfloat16, float16 or float32, any strides. hidden a multiple of 128, up to 32768 on a GPU.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    weight, eps, enable_pdl
        As in `flashinfer.rmsnorm`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    A scale is at least 2 ** -126. A block with a NaN has NaN for its scale.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2, https://arxiv.org/abs/2412.19437

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, residual, weight = torch.ones(2, 128).bfloat16(), torch.ones(2, 128).bfloat16(), torch.ones(128).bfloat16()
    >>> out, scale, normed = torch.empty(2, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 4), torch.empty_like(x)
    >>> flashinfer.fused_add_rmsnorm_fp8_block_quant(out, scale, normed, x, residual, weight)
    >>> (out.float() * scale.T[:2])[:, 0], residual[:, 0]
    (tensor([1., 1.]), tensor([2., 2.], dtype=torch.bfloat16))
    """
    require(input.dim() == 2, "input", tuple(input.shape), "[rows, hidden]")
    rows, hidden = input.shape
    require(hidden % 128 == 0, "input", tuple(input.shape), "[rows, hidden] with hidden a multiple of 128")
    require(out.dtype == torch.float8_e4m3fn, "out", out.dtype, "float8_e4m3fn")
    pitch = -(-rows // 4) * 4
    fits = block_scale.shape == (hidden // 128, pitch) and block_scale.is_contiguous()
    require_fit("block_scale", block_scale, fits, f"[{hidden // 128}, {pitch}], contiguous", torch.float32)
    quantised(
        input, residual, weight, out, None, block_scale, None, normed_out, [eps, 1.0], "fp8_block", "", "",
        pdl=wants_pdl(enable_pdl),
    )  # fmt: skip


@answering()
@checked
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm through SiLU: ``out = silu(rmsnorm(input, weight))`` with ``silu(x) = x / (1 + exp(-x))``.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on
        a GPU for NVFP4.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    eps : float
        Added to the mean square.
    out : torch.Tensor, optional
        Its dtype is the format of the result: that of `input` (the default), float8_e4m3fn without a scale, both in the
        shape of `input`; or float4_e2m1fn_x2 [..., hidden / 2], NVFP4 without a global scale, for hidden a multiple
        of 16.
    block_scale : torch.Tensor, optional
        For NVFP4, receives the scale of each 16 columns: [..., hidden / 16], float8_e4m3fn, contiguous. It is allocated
        by default. Other formats have none, and leave it alone.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        The result; for NVFP4, codes and block scales, as `rmsnorm_fp4quant` gives them. Computed in float32 and rounded
        once; into NVFP4 goes what has been rounded to the dtype of `input`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; Elfwing et al.,
    Sigmoid-Weighted Linear Units, 2017, https://arxiv.org/abs/1702.03118

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.fused_rmsnorm_silu(torch.ones(1, 64).bfloat16(), torch.ones(64).bfloat16(), 0.0)[0, :2]
    tensor([0.7305, 0.7305], dtype=torch.bfloat16)
    """
    if out is not None and out.dtype == FP4:
        return to_fp4(input, None, weight, out, block_scale, None, eps, 16, None, "linear", after="silu")[:2]
    out = torch.empty_like(input) if out is None else out
    if out.dtype == torch.float8_e4m3fn:
        quantised(input, None, weight, out, None, None, None, None, [eps, 1.0], "fp8e4nv", "", "silu", pdl=True)
    else:
        _rmsnorm_silu(input, weight, out, eps)
    return out


@custom_op("flashinfer::layernorm_quantised", mutates_args=("out",))
def _layernorm_quantised(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None,
    eps: float, number: float, format: str,
) -> None:  # fmt: skip
    check_rows(input)
    check_weights(input, gemma=gemma, beta=beta)
    require(beta.dtype == gemma.dtype, "beta", beta.dtype, f"{gemma.dtype}, the dtype of gemma")
    require(out.shape == input.shape, "out", tuple(out.shape), f"{tuple(input.shape)}, the shape of input")
    same_device(input=input, gemma=gemma, beta=beta, out=out, scale=scale)
    how = "tensor" if scale is not None else "" if number == 1 else "number"
    given = room.Quantised(number if scale is None else scale)
    launch(room.layernorm, input, gemma, out, eps, bias=beta, quantised=given, format=format, scale=how)


def _fp8_format(out, input, scale) -> tuple[str, torch.Tensor | None, float]:
    """The format of the result, and the scale as a tensor or a number."""
    require(out.dtype in _FP8, "out", out.dtype, "float8_e4m3fn, float8_e5m2")
    tensor, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, float(scale))
    require(number > 0, "scale", scale, "more than 0")
    tensor = None if tensor is None else scales("scale", tensor, input.device)
    return _FP8[out.dtype], tensor, number


def _to_fp8(out, input, residual, weight, scale, eps, pdl) -> None:
    format, tensor, number = _fp8_format(out, input, scale)
    quantised(input, residual, weight, out, tensor, None, None, None, [eps, number], format, "", "", pdl=pdl)


@custom_op("flashinfer::rmsnorm_silu", mutates_args=("out",))
def _rmsnorm_silu(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    check_rows(input, out=out)
    check_weights(input, weight=weight)
    same_device(input=input, weight=weight, out=out)
    launch(room.rmsnorm, input, weight, out, eps, after="silu")

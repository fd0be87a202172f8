"""Normalisation layers: RMSNorm and LayerNorm over the last dimension."""

from __future__ import annotations

import torch

from flashinfer._core.checks import dtype_name, is_aligned, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.ops import norm as room

__all__ = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "gemma_rmsnorm", "layernorm", "rmsnorm"]

_ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Root mean square normalisation: ``out = input / sqrt(mean(input ** 2) + eps) * weight``, per row.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden], or [batch, heads, hidden] as QK-norm has it; bfloat16, float16 or float32, any strides. hidden
        up to 32768 on a GPU.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    eps : float
        Added to the mean square.
    out : torch.Tensor, optional
        Receives the result; shape and dtype of `input`, any strides. It may be `input` itself.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor like `input`. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467
    """
    out = torch.empty_like(input) if out is None else out
    _rmsnorm(input, weight, out, eps, False)
    return out


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """RMSNorm whose weight is stored minus one: ``out = input / sqrt(mean(input ** 2) + eps) * (weight + 1)``, per row.

    Parameters, result, errors and source are those of `rmsnorm`.
    """
    out = torch.empty_like(input) if out is None else out
    _rmsnorm(input, weight, out, eps, True)
    return out


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add and normalise in place: ``residual += input``, then ``input = rmsnorm(residual)``, per row.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. Overwritten with the
        normalised sum. hidden up to 32768 on a GPU.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    eps : float
        Added to the mean square.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467
    """
    _fused_add_rmsnorm(input, residual, weight, eps, False)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add and normalise in place, the weight stored minus one: ``residual += input``, then
    ``input = gemma_rmsnorm(residual)``, per row.

    Parameters, errors and source are those of `fused_add_rmsnorm`.
    """
    _fused_add_rmsnorm(input, residual, weight, eps, True)


def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Layer normalisation: ``(input - mean(input)) / sqrt(var(input) + eps) * gemma + beta``, per row.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a
        GPU.
    gemma : torch.Tensor
        The scale, [hidden]; bfloat16, float16 or float32. The name is upstream's.
    beta : torch.Tensor
        The shift, [hidden]; dtype of `gemma`.
    eps : float
        Added to the variance (the biased one, divided by hidden).

    Returns
    -------
    torch.Tensor
        A new tensor like `input`. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450
    """
    out = torch.empty_like(input)
    _layernorm(input, gemma, beta, out, eps)
    return out


@custom_op("flashinfer::rmsnorm", mutates_args=("out",))
def _rmsnorm(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, gemma: bool) -> None:
    _check_rows(input, out=out)
    _check_weights(input, weight=weight)
    same_device(input=input, weight=weight, out=out)
    _run(room.rmsnorm, input, None, weight, None, out, eps, gemma)


@custom_op("flashinfer::fused_add_rmsnorm", mutates_args=("input", "residual"))
def _fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> None:
    _check_rows(input, residual=residual)
    _check_weights(input, weight=weight)
    same_device(input=input, residual=residual, weight=weight)
    _run(room.fused_add_rmsnorm, input, residual, weight, None, input, eps, gemma)


@custom_op("flashinfer::layernorm", mutates_args=("out",))
def _layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    _check_rows(input, out=out)
    _check_weights(input, gemma=gemma, beta=beta)
    require(beta.dtype == gemma.dtype, "beta", beta.dtype, f"{gemma.dtype}, the dtype of gemma")
    same_device(input=input, gemma=gemma, beta=beta)
    _run(room.layernorm, input, None, gemma, beta, out, eps, False)


def _run(op, x, residual, weight, bias, out, eps, gemma) -> None:
    if x.numel() == 0:
        return
    hidden = x.shape[-1]
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    given = [t for t in (x, residual, weight, bias, out) if t is not None]
    problem = room.Problem(
        kind=op.name,
        dtype=dtype_name(x.dtype),
        weight_dtype=dtype_name(weight.dtype),
        block=1 << (hidden - 1).bit_length(),
        gemma=gemma,
        aligned=hidden * x.element_size() % 16 == 0 and is_aligned(*given),
    )
    op(problem, x.device).run(x, residual, weight, bias, out, eps)


def _check_rows(input, **others) -> None:
    require(input.dim() in (2, 3), "input", tuple(input.shape), "[rows, hidden] or [batch, heads, hidden]")
    require(input.dtype in _ROW_DTYPES, "input", input.dtype, "bfloat16, float16, float32")
    for name, tensor in others.items():
        require(tensor.shape == input.shape, name, tuple(tensor.shape), f"{tuple(input.shape)}, the shape of input")
        require(tensor.dtype == input.dtype, name, tensor.dtype, f"{input.dtype}, the dtype of input")


def _check_weights(input, **weights) -> None:
    hidden = input.shape[-1]
    for name, weight in weights.items():
        require(weight.shape == (hidden,), name, tuple(weight.shape), f"[{hidden}], the last dimension of input")
        require(weight.dtype in _ROW_DTYPES, name, weight.dtype, "bfloat16, float16, float32")

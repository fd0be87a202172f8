"""RMSNorm with scales of whole tensors."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.norm import plain
from flashinfer.norm._rows import check_weights
from flashinfer.triton._scaled import narrowed, scale_of, widened

__all__ = ["rms_norm", "rms_norm_add_residual"]


@checked
@named(input="x")
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    in_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """``out = rmsnorm(in_scale * x, weight) * out_scale``, per row.

    Parameters
    ----------
    x : torch.Tensor
        [b, n]; any floating-point dtype.
    weight : torch.Tensor
        [n]; bfloat16, float16 or float32.
    out : torch.Tensor
        Receives the result, [b, n], any floating-point dtype. With `out_scale` what is beyond its largest value becomes
        that.
    eps : float
        Added to the mean square.
    in_scale, out_scale : torch.Tensor, optional
        One element: the factors of x and of the result.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    Computed in float32 and rounded once.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.triton.norm import rms_norm
    >>> out = torch.empty(1, 4, dtype=torch.float8_e4m3fn)
    >>> rms_norm(torch.full((1, 4), 3.0), torch.ones(4), out, 0.0, out_scale=torch.tensor(2.0))
    >>> out.float()
    tensor([[2., 2., 2., 2.]])
    """
    _check(x, weight, out=out)
    _norm(x, weight, out, eps, scale_of("in_scale", in_scale, x), scale_of("out_scale", out_scale, x))


@checked
@named(input="x", out="x_out")
def rms_norm_add_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_out: torch.Tensor | None = None,
    x_in_scale: torch.Tensor | None = None,
    x_out_scale: torch.Tensor | None = None,
) -> None:
    """``residual += x_in_scale * x``, then ``rmsnorm(residual, weight) * x_out_scale`` into x, or into `x_out`.

    Parameters
    ----------
    x : torch.Tensor
        [b, n]; any floating-point dtype. Overwritten with the result, if there is no `x_out`.
    residual : torch.Tensor
        [b, n], any floating-point dtype. Overwritten with the sum. The norm is that of the float32 sum.
    weight, eps
        As in `rms_norm`.
    x_out : torch.Tensor, optional
        Receives the result, [b, n], any floating-point dtype.
    x_in_scale, x_out_scale : torch.Tensor, optional
        As those of `rms_norm`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.triton.norm import rms_norm_add_residual
    >>> x, residual = torch.ones(1, 4), torch.full((1, 4), 3.0)
    >>> rms_norm_add_residual(x, residual, torch.ones(4), 0.0)
    >>> x, residual
    (tensor([[1., 1., 1., 1.]]), tensor([[4., 4., 4., 4.]]))
    """
    _check(x, weight, residual=residual, x_out=x_out)
    scales = scale_of("x_in_scale", x_in_scale, x), scale_of("x_out_scale", x_out_scale, x)
    if x_out is None:
        _norm_sum_inplace(x, residual, weight, eps, *scales)
    else:
        _norm_sum(x, residual, weight, x_out, eps, *scales)


def _check(x, weight, **others) -> None:
    require(x.dim() == 2, "x", tuple(x.shape), "[b, n]")
    for name, tensor in {"x": x, **others}.items():
        if tensor is not None:
            require(tensor.shape == x.shape, name, tuple(tensor.shape), f"{tuple(x.shape)}, the shape of x")
            require(tensor.dtype.is_floating_point, name, tensor.dtype, "a floating-point dtype")
    check_weights(x, weight=weight)
    same_device(x=x, weight=weight, **others)


@custom_op("flashinfer::triton_rms_norm", mutates_args=("out",))
def _norm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, in_scale: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:  # fmt: skip
    if in_scale is None and out_scale is None and out.dtype == x.dtype and x.dtype.itemsize > 1:
        plain.rmsnorm(x, weight, eps, out=out)
    else:
        out.copy_(narrowed(plain.rmsnorm(widened(x, in_scale), weight, eps), out_scale, out.dtype))


@custom_op("flashinfer::triton_rms_norm_add_residual", mutates_args=("residual", "out"))
def _norm_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float,
    in_scale: torch.Tensor | None, out_scale: torch.Tensor | None,
) -> None:  # fmt: skip
    total = widened(x, in_scale) + residual.float()
    residual.copy_(total)
    out.copy_(narrowed(plain.rmsnorm(total, weight, eps), out_scale, out.dtype))


@custom_op("flashinfer::triton_rms_norm_add_residual_inplace", mutates_args=("x", "residual"))
def _norm_sum_inplace(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, in_scale: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:  # fmt: skip
    if in_scale is None and out_scale is None and residual.dtype == x.dtype and x.dtype.itemsize > 1:
        plain.fused_add_rmsnorm(x, residual, weight, eps)
        return
    total = widened(x, in_scale) + residual.float()
    residual.copy_(total)
    x.copy_(narrowed(plain.rmsnorm(total, weight, eps), out_scale, x.dtype))

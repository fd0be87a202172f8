"""RMSNorm with scales of whole tensors."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.norm import plain
from flashinfer.triton._scaled import narrowed, widened

__all__ = ["rms_norm", "rms_norm_add_residual"]


@checked
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
    require(x.dim() == 2, "x", tuple(x.shape), "[b, n]")
    require(out.shape == x.shape, "out", tuple(out.shape), f"{tuple(x.shape)}, the shape of x")
    if in_scale is None and out_scale is None and out.dtype == x.dtype:
        plain.rmsnorm(x, weight, eps, out=out)
    else:
        y = plain.rmsnorm(widened("in_scale", x, in_scale), weight, eps)
        out.copy_(narrowed("out_scale", y, out_scale, out.dtype))


@checked
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
    weight : torch.Tensor
        [n]; bfloat16, float16 or float32.
    eps : float
        Added to the mean square.
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
    require(x.dim() == 2, "x", tuple(x.shape), "[b, n]")
    out = x if x_out is None else x_out
    for name, tensor in (("residual", residual), ("x_out", out)):
        require(tensor.shape == x.shape, name, tuple(tensor.shape), f"{tuple(x.shape)}, the shape of x")
    if out is x and x_in_scale is None and x_out_scale is None and residual.dtype == x.dtype:
        plain.fused_add_rmsnorm(x, residual, weight, eps)
        return
    total = widened("x_in_scale", x, x_in_scale) + residual.float()
    residual.copy_(total)
    out.copy_(narrowed("x_out_scale", plain.rmsnorm(total, weight, eps), x_out_scale, out.dtype))

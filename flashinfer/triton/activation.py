"""SiLU gating with scales of whole tensors."""

from __future__ import annotations

import torch

from flashinfer import activation
from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer.triton._scaled import narrowed, scale_of, widened

__all__ = ["silu_and_mul"]


@checked
@named(input="x")
def silu_and_mul(
    x: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    o_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``silu(x_scale * x[:, :d]) * (x_scale * x[:, d:]) * o_scale``.

    Parameters
    ----------
    x : torch.Tensor
        [b, 2 * d]; any floating-point dtype.
    x_scale, o_scale : torch.Tensor, optional
        One element: the factors of x and of the result. With `o_scale` what is beyond the dtype's largest value becomes
        that.
    dtype : torch.dtype, optional
        Of the result; that of x by default.

    Returns
    -------
    torch.Tensor
        [b, d]. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.triton.activation import silu_and_mul
    >>> silu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]]), o_scale=torch.tensor(0.5), dtype=torch.float16)
    tensor([[  0., 100.]], dtype=torch.float16)
    """
    require(x.dim() == 2 and x.shape[1] % 2 == 0, "x", tuple(x.shape), "[b, 2 * d]")
    dtype = dtype or x.dtype
    for name, given in (("x", x.dtype), ("dtype", dtype)):
        require(given.is_floating_point, name, given, "a floating-point dtype")
    in_scale, out_scale = scale_of("x_scale", x_scale, x), scale_of("o_scale", o_scale, x)
    if in_scale is None and out_scale is None and dtype == x.dtype and dtype.itemsize > 1:
        return activation.silu_and_mul(x)
    return narrowed(activation.silu_and_mul(widened(x, in_scale)), out_scale, dtype)

"""Normalisation layers: RMSNorm and LayerNorm over the last dimension."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require, same_device, wants_pdl
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer.norm._rows import check_rows, check_weights, launch
from flashinfer.ops import norm as room


@replayed
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
        [rows, hidden], or [batch, heads, hidden] as QK-norm has it; bfloat16, float16 or float32, any strides.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    eps : float
        Added to the mean square.
    out : torch.Tensor, optional
        Receives the result; shape and dtype of `input`, any strides. It may be `input` itself.
    enable_pdl : bool, optional
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself. None and True: small launches, where the GPU has it (compute capability 9.0 and above). It
        has no effect on results.

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

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.rmsnorm(torch.full((1, 4), 3.0), torch.full((4,), 2.0), eps=0.0)
    tensor([[2., 2., 2., 2.]])
    """
    out = torch.empty_like(input) if out is None else out
    _rmsnorm(input, weight, out, eps, False, wants_pdl(enable_pdl))
    return out


@replayed
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """RMSNorm whose weight is stored minus one: ``out = input / sqrt(mean(input ** 2) + eps) * (weight + 1)``, per row.

    Parameters
    ----------
    input, weight, eps, out, enable_pdl
        As in `rmsnorm`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor like `input`. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.gemma_rmsnorm(torch.full((1, 4), 3.0), torch.ones(4), eps=0.0)
    tensor([[2., 2., 2., 2.]])
    """
    out = torch.empty_like(input) if out is None else out
    _rmsnorm(input, weight, out, eps, True, wants_pdl(enable_pdl))
    return out


@checked
@named(out="output")
def qk_rmsnorm_cute(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """RMSNorm of heads into `output`, as upstream's kernel in CuTe DSL is called.

    Parameters
    ----------
    input : torch.Tensor
        [batch, heads, head_dim]; bfloat16, float16 or float32, any strides.
    weight, eps, enable_pdl
        As in `rmsnorm`.
    output : torch.Tensor
        Receives the result; shape and dtype of `input`, any strides.
    weight_bias : float
        0, or 1 for a weight that is stored minus one.

    Raises
    ------
    ValueError
        As `rmsnorm` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, out = torch.full((1, 2, 64), 3.0), torch.empty(1, 2, 64)
    >>> flashinfer.norm.qk_rmsnorm_cute(x, torch.ones(64), out)
    >>> round(out[0, 0, 0].item(), 3)
    1.0
    """
    require(input.dim() == 3, "input", tuple(input.shape), "[batch, heads, head_dim]")
    require(weight_bias in (0, 1), "weight_bias", weight_bias, "0, 1")
    (gemma_rmsnorm if weight_bias else rmsnorm)(input, weight, eps, output, enable_pdl)


@replayed
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
        normalised sum.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    weight, eps, enable_pdl
        As in `rmsnorm`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, residual = torch.ones(1, 4), torch.full((1, 4), 3.0)
    >>> flashinfer.fused_add_rmsnorm(x, residual, torch.ones(4), eps=0.0)
    >>> x, residual
    (tensor([[1., 1., 1., 1.]]), tensor([[4., 4., 4., 4.]]))
    """
    _fused_add_rmsnorm(input, residual, weight, eps, False, wants_pdl(enable_pdl))


@replayed
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add and normalise in place, the weight stored minus one: ``residual += input``, then
    ``input = gemma_rmsnorm(residual)``, per row.

    Parameters
    ----------
    input, residual
        As in `fused_add_rmsnorm`.
    weight, eps, enable_pdl
        As in `rmsnorm`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, residual = torch.ones(1, 4), torch.full((1, 4), 3.0)
    >>> flashinfer.gemma_fused_add_rmsnorm(x, residual, torch.zeros(4), eps=0.0)
    >>> x, residual
    (tensor([[1., 1., 1., 1.]]), tensor([[4., 4., 4., 4.]]))
    """
    _fused_add_rmsnorm(input, residual, weight, eps, True, wants_pdl(enable_pdl))


@replayed
def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Layer normalisation: ``(input - mean(input)) / sqrt(var(input) + eps) * gemma + beta``, per row.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides.
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.layernorm(torch.tensor([[1.0, 3.0]]).bfloat16(), torch.ones(2), torch.zeros(2), eps=0.0)
    tensor([[-1.,  1.]], dtype=torch.bfloat16)
    """
    out = torch.empty_like(input)
    _layernorm(input, gemma, beta, out, eps)
    return out


@custom_op("flashinfer::rmsnorm", mutates_args=("out",))
def _rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, gemma: bool, pdl: bool
) -> None:
    check_rows(input, out=out)
    check_weights(input, weight=weight)
    same_device(input=input, weight=weight, out=out)
    launch(room.rmsnorm, input, weight, out, eps, gemma=gemma, pdl=pdl)


@custom_op("flashinfer::fused_add_rmsnorm", mutates_args=("input", "residual"))
def _fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool, pdl: bool
) -> None:
    check_rows(input, residual=residual)
    check_weights(input, weight=weight)
    same_device(input=input, residual=residual, weight=weight)
    launch(room.fused_add_rmsnorm, input, weight, input, eps, residual=residual, gemma=gemma, pdl=pdl)


@custom_op("flashinfer::layernorm", mutates_args=("out",))
def _layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    check_rows(input, out=out)
    check_weights(input, gemma=gemma, beta=beta)
    require(beta.dtype == gemma.dtype, "beta", beta.dtype, f"{gemma.dtype}, the dtype of gemma")
    same_device(input=input, gemma=gemma, beta=beta)
    launch(room.layernorm, input, gemma, out, eps, bias=beta)

"""Gated activations of feed-forward layers."""

from __future__ import annotations

import torch

from flashinfer._core.checks import dtype_name, is_aligned, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.ops import activation as room

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]


def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """SiLU gating: ``out = silu(input[..., :hidden]) * input[..., hidden:]`` with ``silu(x) = x / (1 + exp(-x))``.

    Parameters
    ----------
    input : torch.Tensor
        [..., 2 * hidden]; bfloat16, float16 or float32, any strides, any hidden.
    out : torch.Tensor, optional
        Receives the result; [..., hidden] in the dtype of `input`, any strides. It may not overlap `input`.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor of its shape. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202
    """
    return _gated("silu", input, out)


def gelu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GELU gating: ``out = gelu(input[..., :hidden]) * input[..., hidden:]`` with
    ``gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))``.

    Parameters, result, errors and source are those of `silu_and_mul`.
    """
    return _gated("gelu", input, out)


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GELU gating in the tanh form: ``out = gelu(input[..., :hidden]) * input[..., hidden:]`` with
    ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``.

    Parameters, result, errors and source are those of `silu_and_mul`.
    """
    return _gated("gelu_tanh", input, out)


def _gated(kind, input, out) -> torch.Tensor:
    if out is None:
        out = input.new_empty(_result_shape(input))
    _act_and_mul(input, out, kind)
    return out


@custom_op("flashinfer::act_and_mul", mutates_args=("out",))
def _act_and_mul(input: torch.Tensor, out: torch.Tensor, kind: str) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    require(input.dtype in dtypes, "input", input.dtype, "bfloat16, float16, float32")
    shape = _result_shape(input)
    require(out.shape == shape, "out", tuple(out.shape), f"{tuple(shape)}, half of input in the last dimension")
    require(out.dtype == input.dtype, "out", out.dtype, f"{input.dtype}, the dtype of input")
    same_device(input=input, out=out)
    if out.numel() == 0:
        return
    hidden = shape[-1]
    x = input.reshape(-1, 2 * hidden)
    # Rows of an `out` of three and more dimensions may have no common stride; then they are written at the end.
    y = out if out.dim() == 2 else out.contiguous().view(-1, hidden)
    problem = room.Problem(
        kind=kind,
        dtype=dtype_name(x.dtype),
        block=min(1 << (hidden - 1).bit_length(), 1024),
        aligned=hidden * x.element_size() % 16 == 0 and is_aligned(x, y),
    )
    room.act_and_mul(problem, x.device).run(x, y)
    if y.data_ptr() != out.data_ptr():
        out.copy_(y.view(shape))


def _result_shape(input) -> torch.Size:
    last = input.shape[-1] if input.dim() else 0
    require(input.dim() > 0 and last % 2 == 0, "input", tuple(input.shape), "[..., 2 * hidden]")
    return torch.Size((*input.shape[:-1], last // 2))

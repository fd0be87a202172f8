"""Gated activations of feed-forward layers."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, same_device, wants_pdl
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer._core.scalars import scales
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import activation as room
from flashinfer.ops import layouts
from flashinfer.quantization.gated import silu_quantised
from flashinfer.quantization.nvfp4_quantization_utils import UNSET, NVFP44Over6Config, Unset, resolve_nvfp4_4over6
from flashinfer.trace.templates import describe

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "silu_and_mul",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
    "silu_and_scaled_nvfp4_experts_quantize",
]


@replayed
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
        As in `flashinfer.rmsnorm`.

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

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.silu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    return _gated("silu", input, out, enable_pdl)


@replayed
def gelu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GELU gating: ``out = gelu(input[..., :hidden]) * input[..., hidden:]`` with
    ``gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))``.

    Parameters
    ----------
    input, out, enable_pdl
        As in `silu_and_mul`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor of its shape. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.gelu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    return _gated("gelu", input, out, enable_pdl)


@replayed
def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GELU gating by tanh: ``out = gelu(input[..., :hidden]) * input[..., hidden:]`` with
    ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``.

    Parameters
    ----------
    input, out, enable_pdl
        As in `silu_and_mul`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor of its shape. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.gelu_tanh_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    return _gated("gelu_tanh", input, out, enable_pdl)


@checked
def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU gating of the first rows of each expert's matrix, quantised to NVFP4, for grouped GEMMs with a mask.

    ``scaled_fp4_grouped_quantize(silu_and_mul(a), mask, a_global_sf)`` in one launch, with the same bits.

    Parameters
    ----------
    a : torch.Tensor
        [B, M, 2 * K]; bfloat16 or float16, any strides. K a multiple of 16.
    mask : torch.Tensor
        int32 [B]: how many rows of each matrix count. The others are not read, and their codes and factors are not
        defined.
    a_global_sf : torch.Tensor
        One element or [B] (float32, float16 or bfloat16), or a number: 448 * 6 / (largest magnitude of the gated rows).
        It multiplies block factors.
    nvfp4_4over6 : NVFP44Over6Config, optional
        As in `fp4_quantize`.

    Returns
    -------
    codes : torch.Tensor
        uint8 [M, K / 2, B], a view of [B, M, K / 2]: two e2m1 a byte, the first in the low half.
    factors : torch.Tensor
        float8_e4m3fn [32, 4, padded M / 128, 4, padded K / 64, B], a view of 128x4 tiles: row 128 i + 32 g + r and
        factor 4 j + c are at [r, g, i, c, j]. The padding of rows that count is 0.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    The gated row is rounded to the dtype of `a` before it is quantised.

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202; OCP Microscaling Formats
    Specification 1.0, for e2m1

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, counts = torch.randn(2, 4, 128).bfloat16(), torch.tensor([3, 4]).int()
    >>> codes, factors = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(x, counts, torch.ones(2))
    >>> codes.shape
    torch.Size([4, 32, 2])
    """
    require(a.dim() == 3, "a", tuple(a.shape), "[B, M, 2 * K]")
    batch, rows, twice = a.shape
    require(twice % 32 == 0, "a", tuple(a.shape), "[B, M, 2 * K] with K a multiple of 16")
    high, wide = layouts.padded(rows, twice // 32, "128x4")
    codes = torch.empty(batch, rows, twice // 4, dtype=torch.uint8, device=a.device)
    factors = torch.empty(batch, high * wide, dtype=torch.uint8, device=a.device)
    recipe = resolve_nvfp4_4over6(nvfp4_4over6)
    score = "" if recipe is None else recipe.err_mode_name.lower()
    require_fit("mask", mask, mask.shape == (batch,), f"[{batch}], the first dimension of a", torch.int32)
    scale = scales("a_global_sf", a_global_sf, a.device, batch)
    silu_quantised(a, scale, mask, codes, factors, "nvfp4", "128x4", score, pdl=True)
    tiles = factors.view(torch.float8_e4m3fn).view(batch, high // 128, wide // 4, 32, 4, 4)
    return codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


# vLLM's name of it.
silu_and_scaled_nvfp4_experts_quantize = silu_and_mul_scaled_nvfp4_experts_quantize


def _gated(kind, input, out, enable_pdl) -> torch.Tensor:
    if out is None:
        out = input.new_empty(_result_shape(input))
    _act_and_mul(input, out, kind, wants_pdl(enable_pdl))
    return out


@custom_op("flashinfer::act_and_mul", mutates_args=("out",))
def _act_and_mul(input: torch.Tensor, out: torch.Tensor, kind: str, pdl: bool) -> None:
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
        block=min(power_of_two(hidden), 1024),
        aligned=hidden * x.element_size() % 16 == 0 and is_aligned(x, y),
        pdl=pdl,
    )
    room.act_and_mul(problem, x.device).run(x, y)
    if y.data_ptr() != out.data_ptr():
        out.copy_(y.view(shape))


def _result_shape(input) -> torch.Size:
    last = input.shape[-1] if input.dim() else 0
    require(input.dim() > 0 and last % 2 == 0, "input", tuple(input.shape), "[..., 2 * hidden]")
    return torch.Size((*input.shape[:-1], last // 2))


describe(__name__, globals())

"""Linear layers of SVDQuant: an NVFP4 weight beside a product of two narrow matrices in bfloat16."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import check_apart, require, require_fit, same_device
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm.blockscaled import mm_fp4
from flashinfer.gemm.dense import mm_bf16
from flashinfer.ops import layouts
from flashinfer.quantization import nvfp4_quantize

_UPSTREAM = ("auto", "cutlass", "cute-dsl", "cute-dsl-unfused", "cake")
_HALVES = (torch.bfloat16, torch.float16)


@checked
@named(a="x", a_global_sf="global_scale")
@answering(*_UPSTREAM)
def nvfp4_quantize_smooth(
    x: torch.Tensor,
    pre_quant_scale: torch.Tensor,
    global_scale: torch.Tensor,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``nvfp4_quantize(x * pre_quant_scale, global_scale)``, with the same bits; the product is rounded first.

    Parameters
    ----------
    x : torch.Tensor
        [m, k]; bfloat16 or float16, any strides. k a multiple of 16.
    pre_quant_scale : torch.Tensor
        [k], dtype of x: a factor of each column.
    global_scale : torch.Tensor
        One element (float32, float16, bfloat16): 448 * 6 / (largest magnitude of x * pre_quant_scale).
    enable_pdl : bool, optional
        Programmatic dependent launch, as in `flashinfer.nvfp4_quantize`. It has no effect on results.
    backend : str
        "auto", "cutlass", "cute-dsl", "cute-dsl-unfused" or "cake": one result. Or a variant's name.

    Returns
    -------
    codes : torch.Tensor
        uint8 [m, k / 2], two codes a byte, the first in the low half.
    factors : torch.Tensor
        uint8 of one dimension: e4m3 in 128x4 tiles.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, smooth = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    >>> codes, factors = flashinfer.nvfp4_quantize_smooth(x, smooth, torch.ones(1))
    >>> codes.shape, factors.shape
    (torch.Size([3, 32]), torch.Size([512]))
    """
    require_fit("x", x, x.dim() == 2, "[m, k]", *_HALVES)
    _check_columns("pre_quant_scale", pre_quant_scale, x.shape[1], (x.dtype,))
    same_device(x=x, pre_quant_scale=pre_quant_scale)
    variant = "cuda" if backend in _UPSTREAM else backend
    smooth = (x * pre_quant_scale).contiguous()
    codes, factors = nvfp4_quantize(smooth, global_scale, enable_pdl=enable_pdl, backend=variant)
    return codes, factors.view(-1)


@checked
@named(a_descale="a_sf", b_descale="b_sf")
@answering(*_UPSTREAM)
def mm_nvfp4_svdquant(
    a: torch.Tensor,
    b: torch.Tensor,
    a_sf: torch.Tensor,
    b_sf: torch.Tensor,
    alpha: torch.Tensor,
    d: torch.Tensor,
    l1: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``out = alpha * (a @ b.T + d @ l1.T) + bias``: an NVFP4 product and a correction of low rank.

    A caller whose correction is not to be scaled divides l1 by alpha first.

    Parameters
    ----------
    a : torch.Tensor
        [m, k / 2] uint8, two e2m1 in a byte, rows contiguous. k a multiple of 16.
    b : torch.Tensor
        [n, k / 2]; the same.
    a_sf, b_sf : torch.Tensor
        Factors in e4m3, uint8 or float8_e4m3fn, in 128x4 tiles: the bytes of whole tiles of m and of n rows, in any
        shape, contiguous. There may be more of them.
    alpha : torch.Tensor
        One element (float32, float16 or bfloat16).
    d : torch.Tensor
        [m, rank]; bfloat16 or float16, any strides.
    l1 : torch.Tensor
        [n, rank], dtype of d, any strides.
    bias : torch.Tensor, optional
        [n]; bfloat16, float16 or float32.
    out : torch.Tensor, optional
        [m, n], rows contiguous; bfloat16 or float16.
    backend : str
        "auto", "cutlass", "cute-dsl", "cute-dsl-unfused" or "cake": one result. Or a variant's name.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor in the dtype of d. Both products are summed and added in float32, and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    Li et al., SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models, 2024,
    https://arxiv.org/abs/2411.05007

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> d, l1 = torch.ones(128, 32).bfloat16(), torch.ones(128, 32).bfloat16()
    >>> flashinfer.mm_nvfp4_svdquant(codes, codes, factors, factors, torch.ones(1), d, l1)[0, 0]  # 64 x 36 + 32
    tensor(2336., dtype=torch.bfloat16)
    """
    codes, weight = given.fp4("a", a), given.fp4("b", b)
    given.same("b", 2 * weight.shape[1], "a", 2 * codes.shape[1], "k")
    (m, half), n = codes.shape, weight.shape[0]
    blocks = given.blocks_of("a", 2 * half, 16)
    require(d.dtype in _HALVES, "d", d.dtype, "bfloat16, float16")
    require(d.dim() == 2 and d.shape[0] == m, "d", tuple(d.shape), f"[{m}, rank]")
    rank = d.shape[1]
    require(l1.shape == (n, rank), "l1", tuple(l1.shape), f"[{n}, {rank}]")
    require(l1.dtype == d.dtype, "l1", l1.dtype, f"{d.dtype}, the dtype of d")
    if bias is not None:
        _check_columns("bias", bias, n, (*_HALVES, torch.float32))
    read = {"a": a, "b": b, "a_sf": a_sf, "b_sf": b_sf, "alpha": alpha, "d": d, "l1": l1, "bias": bias}
    same_device(**read | {"alpha": None, "out": out})
    require(out is None or out.dtype in _HALVES, "out", None if out is None else out.dtype, "bfloat16, float16")
    check_apart([("out", out)], read.items(), in_place=())
    out = given.result(out, (m, n), d.dtype if out is None else out.dtype, a)
    variant = given.variant_of(backend, _UPSTREAM)
    a_sf, b_sf = _tiles("a_sf", a_sf, m, blocks), _tiles("b_sf", b_sf, n, blocks)
    alpha = given.alpha_of(alpha, a)
    total = mm_fp4(codes, weight.T, a_sf, b_sf, None, torch.float32, backend=variant)
    total += mm_bf16(d, l1.T, out_dtype=torch.float32, backend="reference" if variant == "reference" else "auto")
    total *= alpha
    if bias is not None:
        total += bias
    return out.copy_(total)


@checked
@named(a="x", d="x", b="weight_fp4", a_sf="x", b_sf="weight_sf", l1="l1_scaled")
@answering(*_UPSTREAM)
def svdquant_linear(
    x: torch.Tensor,
    weight_fp4: torch.Tensor,
    weight_sf: torch.Tensor,
    alpha: torch.Tensor,
    pre_quant_scale: torch.Tensor,
    l2t_smoothed: torch.Tensor,
    l1_scaled: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer of SVDQuant: ``alpha * (nvfp4(x * pre_quant_scale) @ weight.T + x @ l2t @ l1.T) + bias``.

    Parameters
    ----------
    x, pre_quant_scale, global_scale
        As in `nvfp4_quantize_smooth`.
    weight_fp4, weight_sf : torch.Tensor
        What the low rank leaves of the weight, as b and b_sf of `mm_nvfp4_svdquant`.
    alpha, bias, backend, enable_pdl
        As there.
    l2t_smoothed : torch.Tensor
        [k, rank], dtype of x: the second factor transposed, its rows times pre_quant_scale. ``x @ l2t`` is rounded.
    l1_scaled : torch.Tensor
        [n, rank], dtype of x: the first factor over alpha.

    Returns
    -------
    torch.Tensor
        [m, n] in the dtype of x.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    Li et al., SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models, 2024,
    https://arxiv.org/abs/2411.05007

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((32, 64), 6.0).bfloat16(), torch.ones(1))
    >>> x, smooth, one = torch.full((1, 64), 2.0).bfloat16(), torch.full((64,), 0.5).bfloat16(), torch.ones(1)
    >>> l2t, l1 = torch.ones(64, 32).bfloat16() / 64, torch.ones(32, 32).bfloat16()
    >>> flashinfer.svdquant_linear(x, codes, factors, one, smooth, l2t, l1, 448 * 6 * one)[0, 0]  # 64 x 6 x 2688 + 64
    tensor(1032192., dtype=torch.bfloat16)
    """
    require(x.dim() == 2, "x", tuple(x.shape), "[m, k]")
    require(l2t_smoothed.dim() == 2, "l2t_smoothed", tuple(l2t_smoothed.shape), f"[{x.shape[-1]}, rank]")
    require(l2t_smoothed.dtype == x.dtype, "l2t_smoothed", l2t_smoothed.dtype, f"{x.dtype}, the dtype of x")
    fits = l2t_smoothed.shape[0] == x.shape[-1]
    require(fits, "l2t_smoothed", tuple(l2t_smoothed.shape), f"[{x.shape[-1]}, rank]")
    codes, factors = nvfp4_quantize_smooth(x, pre_quant_scale, global_scale, enable_pdl, backend)
    down = mm_bf16(x, l2t_smoothed, out_dtype=x.dtype, backend="auto")
    return mm_nvfp4_svdquant(codes, weight_fp4, factors, weight_sf, alpha, down, l1_scaled, bias, None, backend)


def _check_columns(name: str, x: torch.Tensor, columns: int, dtypes: tuple) -> None:
    require(x.shape == (columns,), name, tuple(x.shape), f"[{columns}]")
    require(x.dtype in dtypes, name, x.dtype, ", ".join(map(str, dtypes)))


def _tiles(name: str, factors: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The bytes of the tiles of so many rows, the first of `factors`."""
    high, wide = layouts.padded(rows, blocks, "128x4")
    fits = factors.is_contiguous() and factors.numel() >= high * wide
    require(fits, name, f"{tuple(factors.shape)}, strides {factors.stride()}", f"{high * wide} or more, contiguous")
    return factors.view(-1)[: high * wide]

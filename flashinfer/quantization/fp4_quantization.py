"""FP4 for tensor cores: NVFP4 and MXFP4 of activations and weights, and the arrangement of what kernels read."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_fit, same_device, wants_pdl
from flashinfer.ops import layouts
from flashinfer.ops.formats import FORMATS
from flashinfer.quantization import _rows
from flashinfer.quantization.arrangement import (
    block_scale_interleave,
    nvfp4_block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)
from flashinfer.quantization.fp4_dequantization import (
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
)
from flashinfer.quantization.kv_cache import (
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize_paged_kv_cache,
)
from flashinfer.quantization.nvfp4_quantization_utils import UNSET, NVFP44Over6Config, Unset, resolve_nvfp4_4over6
from flashinfer.tllm_enums import SfLayout

__all__ = [
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
]


@checked
def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | float | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to FP4: NVFP4 (a factor in e4m3 for 16 elements) or MXFP4 (one in ue8m0 for 32).

    With g the global scale and a the largest magnitude of a block, NVFP4 takes the factor f = e4m3(g * (a * (1 / 6)))
    and the codes e2m1(x * (1 / (f * (1 / g)))), every operation rounded to float32, so that x is about code * f / g.
    MXFP4 takes the least power of two f with a / f <= 6, and x is about code * f. Rounding is to nearest even, and what
    is too large saturates. A NaN makes its block's factor NaN.

    Parameters
    ----------
    input : torch.Tensor
        [..., K]; bfloat16, float16, float32 or float8_e4m3fn, rows contiguous. K a multiple of `sf_vec_size`. Where it
        is the columns that are contiguous, [..., K, M], they are what is quantised, and results are transposed too.
    global_scale : torch.Tensor, optional
        One element (float32, float16, bfloat16) or a number; NVFP4 needs it, as 448 * 6 / (largest magnitude). MXFP4
        has no global scale and leaves it unread.
    sf_vec_size : int
        Elements to a factor: 16 for NVFP4, 32 for MXFP4.
    sf_use_ue8m0 : bool
        Whether factors are in ue8m0, as in MXFP4, or in e4m3.
    is_sf_swizzled_layout : bool
        Factors in tiles, padded with zeros, and not row-major.
    is_sf_8x4_layout : bool
        Tiles of 8 rows and 4 factors, and not of 128 and 4.
    is_global_scale_inversed : bool
        `global_scale` holds 1 / g.
    enable_pdl : bool, optional
        As in `flashinfer.rmsnorm`.
    backend : str
        "cuda" or "cute-dsl", upstream's two implementations of one function, or a variant's name.
    nvfp4_4over6 : NVFP44Over6Config, optional
        Map each block's largest value to 4 or to 6, whichever errs less; None: to 6. Left out, the environment
        decides (`resolve_nvfp4_4over6`). NVFP4 only.

    Returns
    -------
    codes : torch.Tensor
        uint8 [..., K / 2], two codes a byte, the first in the low half.
    factors : torch.Tensor
        uint8 [padded rows, padded K / sf_vec_size]: the bytes of the layout. Without tiles, nothing is padded.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or combination other than the above.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.full((128, 64), 3.0).bfloat16()
    >>> codes, factors = flashinfer.fp4_quantize(x, torch.ones(1))
    >>> codes.shape, factors.shape
    (torch.Size([128, 32]), torch.Size([128, 4]))
    """
    recipe = "mxfp4" if sf_use_ue8m0 else "nvfp4"
    width = FORMATS[recipe].width
    require(sf_vec_size == width, "sf_vec_size", sf_vec_size, f"{width}, with sf_use_ue8m0={sf_use_ue8m0}")
    tiled = is_sf_swizzled_layout or not is_sf_8x4_layout
    require(tiled, "is_sf_8x4_layout", is_sf_8x4_layout, "False, without is_sf_swizzled_layout")
    if _rows.is_column_major(input):
        codes, factors = fp4_quantize(
            input.mT, global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout, is_sf_8x4_layout,
            is_global_scale_inversed, enable_pdl, backend, nvfp4_4over6,
        )  # fmt: skip
        return codes.mT, factors.mT
    rows = _rows.as_rows("input", input)
    layout = ("8x4" if is_sf_8x4_layout else "128x4") if is_sf_swizzled_layout else "linear"
    scale = None
    if not sf_use_ue8m0:
        require(global_scale is not None, "global_scale", None, "a number, or a tensor of one element")
        scale = _rows.scale_tensor("global_scale", global_scale, input)
    codes, factors, _ = _rows.quantize(
        "input", rows, recipe, layout, scale, score=_score(nvfp4_4over6, recipe),
        inverse=is_global_scale_inversed and not sf_use_ue8m0, backend=backend, pdl=wants_pdl(enable_pdl),
    )  # fmt: skip
    _, blocks = layouts.padded(1, input.shape[-1] // width, layout)
    return codes.view(*input.shape[:-1], input.shape[-1] // 2), _matrix(factors, blocks)


def _check_live_rows(index: torch.Tensor, per_token_activation: bool, a: torch.Tensor) -> None:
    name = "expanded_idx_to_permuted_idx"
    require(per_token_activation, name, "a tensor", "None, without per_token_activation")
    fits = index.dtype == torch.int32 and index.dim() == 1
    require(fits, name, f"{index.dtype} {tuple(index.shape)}", "int32 of one dimension")
    same_device(a=a, **{name: index})


@checked
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, ...]:
    """Quantise rows to NVFP4, as `fp4_quantize` does.

    Parameters
    ----------
    a : torch.Tensor
        [..., K]; bfloat16, float16, float32 or float8_e4m3fn, rows contiguous, or columns as in `fp4_quantize`. K a
        multiple of 16.
    a_global_sf : torch.Tensor or float
        One element (float32, float16, bfloat16) or a number: 448 * 6 / (largest magnitude), which multiplies block
        factors. With `per_token_activation` 1 / (448 * 6), which times a row's
        largest magnitude is the scale of the row.
    sfLayout : SfLayout
        Where the factors go.
    do_shuffle : bool
        Reorder the rows of codes, factors and row scales for kernels that TensorRT-LLM generates (`shuffle_matrix_a`
        with an epilogue of 128 rows); only in the 128x4 layout. M a multiple of 128, K one of 64.
    sf_vec_size : int
        16.
    enable_pdl, backend, nvfp4_4over6
        As in `fp4_quantize`.
    per_token_activation : bool
        Each row has a scale s of its own, and is quantised with the global scale 1 / s. A row of zeros has scale 0.
    expanded_idx_to_permuted_idx : torch.Tensor, optional
        int32 of one dimension, with `per_token_activation`: the rows of a that count, as routing to experts gives
        them; -1 names none. Each of them stays where it is. What is in the others' codes, factors and scales is not
        specified; here they are quantised, too.
    out_scale : torch.Tensor or float, optional
        With `per_token_activation`: one element that the scales which are returned are times. Codes and factors do not
        depend on it.

    Returns
    -------
    codes : torch.Tensor
        uint8 [..., K / 2].
    factors : torch.Tensor
        uint8 [padded M, padded K / 16], of M rows in all.
    row_scales : torch.Tensor
        With `per_token_activation`: float32 [M], in the order of the codes' rows.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.randn(4, 64).bfloat16()
    >>> codes, factors = flashinfer.nvfp4_quantize(x, (448 * 6) / x.abs().amax().float().view(1))
    >>> codes.shape, factors.shape
    (torch.Size([4, 32]), torch.Size([128, 4]))
    """
    require(sf_vec_size == 16, "sf_vec_size", sf_vec_size, "16")
    if expanded_idx_to_permuted_idx is not None:
        _check_live_rows(expanded_idx_to_permuted_idx, per_token_activation, a)
    given = out_scale is None or per_token_activation
    require(given, "out_scale", "a scale", "None, without per_token_activation")
    layout = _rows.layout_name("sfLayout", sfLayout)
    require(not do_shuffle or layout == "128x4", "do_shuffle", do_shuffle, "False, but in the 128x4 layout")
    if _rows.is_column_major(a):
        codes, factors, *more = nvfp4_quantize(
            a.mT, a_global_sf, sfLayout, do_shuffle, sf_vec_size, enable_pdl, backend, per_token_activation, None,
            out_scale, nvfp4_4over6,
        )  # fmt: skip
        return codes.mT, factors.mT, *more
    rows = _rows.as_rows("a", a)
    scale = _rows.scale_tensor("a_global_sf", a_global_sf, a)
    codes, factors, row_scales = _rows.quantize(
        "a", rows, "nvfp4", "linear" if do_shuffle else layout, scale, score=_score(nvfp4_4over6, "nvfp4"),
        row_scale=per_token_activation, backend=backend, pdl=wants_pdl(enable_pdl),
    )  # fmt: skip
    codes = codes[0]
    _, blocks = layouts.padded(1, a.shape[-1] // 16, "linear" if do_shuffle else layout)
    factors = _matrix(factors, blocks)
    if do_shuffle:
        codes, factors = shuffle_matrix_a(codes, 128), shuffle_matrix_sf_a(factors, 128).view(factors.shape)
    codes = codes.view(*a.shape[:-1], a.shape[-1] // 2)
    if row_scales is None:
        return codes, factors
    row_scales = row_scales[0]
    if do_shuffle:
        row_scales = shuffle_matrix_a(row_scales[:, None], 128)[:, 0]
    if out_scale is not None:
        row_scales = row_scales * _rows.scale_tensor("out_scale", out_scale, a)
    return codes, factors, row_scales


@checked
def mxfp4_quantize(
    a: torch.Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to MXFP4, as `fp4_quantize` does.

    Parameters
    ----------
    a : torch.Tensor
        [..., K]; bfloat16, float16, float32 or float8_e4m3fn, rows contiguous, or columns as in `fp4_quantize`. K a
        multiple of 32.
    backend, enable_pdl
        As in `fp4_quantize`.
    sfLayout : SfLayout
        Where the factors go.

    Returns
    -------
    codes : torch.Tensor
        uint8 [..., K / 2].
    factors : torch.Tensor
        uint8 [padded M, padded K / 32], in ue8m0, of M rows in all.

    Raises
    ------
    ValueError
        A shape, dtype or stride other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.full((128, 64), 3.0).bfloat16()
    >>> codes, factors = flashinfer.mxfp4_quantize(x)
    >>> codes.shape, factors.numel()
    (torch.Size([128, 32]), 512)
    """
    if _rows.is_column_major(a):
        codes, factors = mxfp4_quantize(a.mT, backend, enable_pdl, sfLayout)
        return codes.mT, factors.mT
    layout, rows = _rows.layout_name("sfLayout", sfLayout), _rows.as_rows("a", a)
    codes, factors, _ = _rows.quantize("a", rows, "mxfp4", layout, backend=backend, pdl=wants_pdl(enable_pdl))
    _, blocks = layouts.padded(1, a.shape[-1] // 32, layout)
    return codes.view(*a.shape[:-1], a.shape[-1] // 2), _matrix(factors, blocks)


@checked
def nvfp4_batched_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sf_vec_size: int = 16,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a batch of matrices to NVFP4, each with factors in 128x4 tiles of its own.

    Parameters
    ----------
    a : torch.Tensor
        [B, M, K]; bfloat16, float16, float32 or float8_e4m3fn, rows contiguous. K a multiple of 16.
    a_global_sf : torch.Tensor
        float32 [1] or [B]: 448 * 6 / (largest magnitude).
    sf_vec_size : int
        16.
    nvfp4_4over6 : NVFP44Over6Config, optional
        As in `fp4_quantize`.

    Returns
    -------
    codes : torch.Tensor
        uint8 [B, M, K / 2].
    factors : torch.Tensor
        uint8 [B, padded M x padded K / 16].

    Raises
    ------
    ValueError
        A shape, dtype, device or stride other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.full((2, 128, 64), 3.0).bfloat16()
    >>> codes, factors = flashinfer.nvfp4_batched_quantize(x, torch.ones(1))
    >>> codes.shape, factors.numel()
    (torch.Size([2, 128, 32]), 1024)
    """
    require(a.dim() == 3, "a", tuple(a.shape), "[B, M, K]")
    require(sf_vec_size == 16, "sf_vec_size", sf_vec_size, "16")
    scale = _rows.scale_tensor("a_global_sf", a_global_sf, a, a.shape[0])
    codes, factors, _ = _rows.quantize("a", a, "nvfp4", "128x4", scale, score=_score(nvfp4_4over6, "nvfp4"))
    return codes, factors


@checked
def scaled_fp4_grouped_quantize(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: NVFP44Over6Config | Unset | None = UNSET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the first rows of each matrix of a batch to NVFP4, for grouped GEMMs with a mask.

    Parameters
    ----------
    a, a_global_sf
        As in `nvfp4_batched_quantize`.
    mask : torch.Tensor
        int32 [B]: how many rows of each matrix count. Codes and factors of the others are not defined.
    nvfp4_4over6 : NVFP44Over6Config, optional
        As in `fp4_quantize`.

    Returns
    -------
    codes : torch.Tensor
        uint8 [M, K / 2, B], a view of [B, M, K / 2].
    factors : torch.Tensor
        float8_e4m3fn [32, 4, padded M / 128, 4, padded K / 64, B], a view of 128x4 tiles: row 128 i + 32 g + r and
        factor 4 j + c are at [r, g, i, c, j]. The padding of rows that count is 0.

    Raises
    ------
    ValueError
        A shape, dtype, device or stride other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.full((2, 128, 64), 3.0).bfloat16()
    >>> codes, factors = flashinfer.scaled_fp4_grouped_quantize(x, torch.tensor([128, 5]).int(), torch.ones(2))
    >>> codes.shape
    torch.Size([128, 32, 2])
    """
    require(a.dim() == 3, "a", tuple(a.shape), "[B, M, K]")
    batch, rows, columns = a.shape
    require_fit("mask", mask, mask.shape == (batch,), f"[{batch}], the first dimension of a", torch.int32)
    require(mask.device == a.device, "mask", f"a tensor on {mask.device}", f"{a.device}, where a is")
    scale = _rows.scale_tensor("a_global_sf", a_global_sf, a, batch)
    score = _score(nvfp4_4over6, "nvfp4")
    codes, factors, _ = _rows.quantize("a", a, "nvfp4", "128x4", scale, mask.contiguous(), score=score)
    high, wide = layouts.padded(rows, columns // 16, "128x4")
    tiles = factors.view(torch.float8_e4m3fn).view(batch, high // 128, wide // 4, 32, 4, 4)
    return codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def _matrix(factors: torch.Tensor, blocks: int) -> torch.Tensor:
    """Flat factors [1, .] as [padded rows, blocks]."""
    return factors.view(-1, blocks) if factors.numel() else factors.view(0, blocks)


def _score(setting, recipe: str) -> str:
    """The error by which NVFP4 chooses between 4 and 6; "" where it does not."""
    if recipe != "nvfp4":
        given = isinstance(setting, NVFP44Over6Config)
        require(not given, "nvfp4_4over6", setting, "None, with factors in ue8m0")
        return ""
    config = resolve_nvfp4_4over6(setting)
    return "" if config is None else config.err_mode_name.lower()

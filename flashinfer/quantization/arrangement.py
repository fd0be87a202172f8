"""Arranging weights and scale factors as kernels read them."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import check_apart, require
from flashinfer.ops import layouts
from flashinfer.quantization import _rows
from flashinfer.utils import get_shuffle_matrix_a_row_indices, get_shuffle_matrix_sf_a_row_indices


@checked
def block_scale_interleave(unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Row-major scale factors to 128x4 tiles.

    Parameters
    ----------
    unswizzled_sf : torch.Tensor
        [rows, factors] or [experts, rows, factors]; uint8 or bfloat16, any strides.
    out : torch.Tensor, optional
        Receives the result: its dtype and as many elements, contiguous.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor of one dimension: for each expert, rows padded to a multiple of 128 times factors padded
        to one of 4; the padding is zero.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.block_scale_interleave(torch.zeros(128, 4, dtype=torch.uint8)).shape
    torch.Size([512])
    """
    shape = tuple(unswizzled_sf.shape)
    require(len(shape) in (2, 3), "unswizzled_sf", shape, "[rows, factors] or [experts, rows, factors]")
    allowed = unswizzled_sf.dtype in (torch.uint8, torch.bfloat16)
    require(allowed, "unswizzled_sf", unswizzled_sf.dtype, "uint8, bfloat16")
    factors = unswizzled_sf if len(shape) == 3 else unswizzled_sf[None]
    high, wide = layouts.padded(factors.shape[1], factors.shape[2], "128x4")
    count = factors.shape[0] * high * wide
    if out is None:
        out = factors.new_empty(count)
    fits = out.numel() == count and out.dtype == factors.dtype and out.is_contiguous()
    require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{factors.dtype} with {count} elements, contiguous")
    check_apart([("out", out)], [("unswizzled_sf", unswizzled_sf)], in_place=())
    _rows.interleave(factors, out.view(factors.shape[0], high * wide))
    return out


nvfp4_block_scale_interleave = block_scale_interleave


@checked
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """The rows of a weight in the order that TensorRT-LLM's generated kernels want.

    Parameters
    ----------
    input_tensor : torch.Tensor
        [rows, .]; rows a multiple of 16, of 32 if `epilogue_tile_m` is one of 128.
    epilogue_tile_m : int
        Rows that the kernel's epilogue treats at once; see `flashinfer.utils.get_shuffle_matrix_a_row_indices`.

    Returns
    -------
    torch.Tensor
        A new tensor like `input_tensor`.

    Raises
    ------
    ValueError
        Rows that are no such multiple, or another number of axes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.shuffle_matrix_a(torch.arange(128)[:, None].expand(128, 64).to(torch.uint8), 128)[:4, 0]
    tensor([ 0,  4,  8, 12], dtype=torch.uint8)
    """
    order = get_shuffle_matrix_a_row_indices(input_tensor, epilogue_tile_m)
    return input_tensor[order.to(input_tensor.device)]


@checked
@named(unswizzled_sf="input_tensor")
def shuffle_matrix_sf_a(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """Row-major scale factors of a weight in the row order of `shuffle_matrix_a`, in 128x4 tiles.

    Parameters
    ----------
    input_tensor : torch.Tensor
        uint8 [rows, factors]; rows a multiple of 128, factors one of 4, so that nothing is padded.
    epilogue_tile_m : int
        As in `shuffle_matrix_a`.
    num_elts_per_sf : int
        Elements to a factor, 16 or 32. It does not change the order.

    Returns
    -------
    torch.Tensor
        uint8 of one dimension, as `block_scale_interleave` gives it.

    Raises
    ------
    ValueError
        Rows that are no such multiple, or another number of axes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.shuffle_matrix_sf_a(torch.zeros(128, 4, dtype=torch.uint8), 128).shape
    torch.Size([512])
    """
    order = get_shuffle_matrix_sf_a_row_indices(input_tensor, epilogue_tile_m, num_elts_per_sf)
    return block_scale_interleave(input_tensor[order.to(input_tensor.device)])

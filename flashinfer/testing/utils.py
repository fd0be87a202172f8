"""Operands of FP8 products with a scale for each tile, as callers prepare and check them; timers by their second path.

Scales are powers of two, of which a tile's largest magnitude divided by 448 is at most the scale: no code saturates.
"""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.testing.bench import bench_gpu_time
from flashinfer.testing.profiled import (
    aggregate_gpu_time_across_ranks,
    bench_kineto,
    calculate_rotation_count,
    count_bytes,
    empty_suppress,
    get_l2_cache_size,
    suppress_stdout_stderr,
)
from flashinfer.testing.timers import (
    attention_flops,
    attention_flops_with_actual_seq_lens,
    attention_tb_per_sec,
    attention_tb_per_sec_with_actual_seq_lens,
    attention_tflops_per_sec,
    attention_tflops_per_sec_with_actual_seq_lens,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_gpu_time_with_cupti,
    set_seed,
    sleep_after_kernel_run,
)

# Magnitudes below it are scaled as if it were there: a tile of zeros has a scale, too.
LEAST = 1e-4


def quantize_fp8(
    x: torch.Tensor, scale_shape: tuple[int, ...], tile_shape: tuple[int, ...], scale_major_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one scale for each tile.

    Parameters
    ----------
    x : torch.Tensor
        Two or three axes, each a whole number of tiles long.
    scale_shape : tuple of int
        Tiles along the axes of x; with "MN" its last two are exchanged.
    tile_shape : tuple of int
        Elements of a tile along the axes of x.
    scale_major_mode : str
        "K": scales in the order of x; "MN": with the last two axes exchanged.

    Returns
    -------
    tuple of torch.Tensor
        float8_e4m3fn codes in the shape of x, and float32 scales in `scale_shape`, which multiply them.

    Raises
    ------
    ValueError
        Other axes, or shapes that do not make up that of x.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.utils import dequantize_fp8, quantize_fp8
    >>> codes, scales = quantize_fp8(torch.ones(4, 256), (2, 4), (1, 128), "MN")
    >>> tuple(scales.shape), bool((dequantize_fp8(codes, scales, "MN") == 1).all())
    ((2, 4), True)
    """
    require(x.dim() in (2, 3), "x", tuple(x.shape), "two or three axes")
    tiles = _in_order_of_x(list(scale_shape), scale_major_mode)
    made = tuple(n * t for n, t in zip(tiles, tile_shape))
    fits = len(scale_shape) == len(tile_shape) == x.dim() and made == tuple(x.shape)
    require(fits, "scale_shape", tuple(scale_shape), f"tiles of {tuple(tile_shape)} that make up x, {tuple(x.shape)}")
    scales = _scales(_tiled(x, tiles).abs().float().amax(dim=tuple(range(x.dim(), 2 * x.dim()))))
    codes = (_tiled(x.float(), tiles) / scales.reshape(*tiles, *[1] * x.dim())).to(torch.float8_e4m3fn)
    return _untiled(codes).contiguous(), _exchanged(scales, scale_major_mode).contiguous()


def dequantize_fp8(x: torch.Tensor, x_scale: torch.Tensor, scale_major_mode: str) -> torch.Tensor:
    """Codes times the scale of their tile: what `quantize_fp8` gave, in float32.

    Parameters
    ----------
    x : torch.Tensor
        Codes, of two or three axes.
    x_scale : torch.Tensor
        float32 scales, of as many axes.
    scale_major_mode : str
        "K" or "MN", as that of `quantize_fp8`.

    Returns
    -------
    torch.Tensor
        float32, in the shape of x.

    Raises
    ------
    ValueError
        Axes of x that are no whole number of tiles long.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.utils import dequantize_fp8
    >>> dequantize_fp8(torch.ones(1, 4), torch.tensor([[2.0, 3.0]]), "K")
    tensor([[2., 2., 3., 3.]])
    """
    scales = _exchanged(x_scale, scale_major_mode)
    fits = x.dim() == scales.dim() and all(size % n == 0 if n else size == 0 for size, n in zip(x.shape, scales.shape))
    require(fits, "x_scale", tuple(x_scale.shape), f"whole tiles of x, {tuple(x.shape)}")
    tiled = _tiled(x.float(), list(scales.shape))
    return _untiled(tiled * scales.reshape(*scales.shape, *[1] * x.dim()))


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one scale for 128 columns of a row.

    Parameters
    ----------
    x : torch.Tensor
        [m, n], n a multiple of 128.

    Returns
    -------
    tuple of torch.Tensor
        float8_e4m3fn [m, n], and float32 [m, n / 128], which multiplies it.

    Raises
    ------
    ValueError
        A shape other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.utils import per_token_cast_to_fp8
    >>> per_token_cast_to_fp8(torch.full((1, 128), 448.0))[1]
    tensor([[1.]])
    """
    require(x.dim() == 2 and x.shape[1] % 128 == 0, "x", tuple(x.shape), "[m, a multiple of 128]")
    return quantize_fp8(x, (x.shape[0], x.shape[1] // 128), (1, 128), "K")


def per_block_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one scale for each block of 128 x 128; those at the edges may be smaller.

    Parameters
    ----------
    x : torch.Tensor
        [m, n].

    Returns
    -------
    tuple of torch.Tensor
        float8_e4m3fn [m, n], and float32 [ceil(m / 128), ceil(n / 128)], which multiplies it.

    Raises
    ------
    ValueError
        A shape other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.utils import per_block_cast_to_fp8
    >>> codes, scales = per_block_cast_to_fp8(torch.full((130, 128), 448.0))
    >>> tuple(codes.shape), scales.tolist()
    ((130, 128), [[1.0], [1.0]])
    """
    require(x.dim() == 2, "x", tuple(x.shape), "two axes")
    m, n = x.shape
    blocks = -(-m // 128), -(-n // 128)
    padded = torch.nn.functional.pad(x, (0, blocks[1] * 128 - n, 0, blocks[0] * 128 - m))
    codes, scales = quantize_fp8(padded, blocks, (128, 128), "K")
    return codes[:m, :n].contiguous(), scales


def _scales(largest):
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=LEAST) / 448)))


def _in_order_of_x(shape, mode):
    require(mode in ("K", "MN"), "scale_major_mode", mode, "K, MN")
    return [*shape[:-2], shape[-1], shape[-2]] if mode == "MN" else shape


def _exchanged(scales, mode):
    require(mode in ("K", "MN"), "scale_major_mode", mode, "K, MN")
    return scales.transpose(-1, -2) if mode == "MN" else scales


def _tiled(x, tiles):
    """[a n, b m] as [a, b, n, m], where `tiles` is [a, b]."""
    split = x.reshape([size for n, whole in zip(tiles, x.shape) for size in (n, whole // n if n else 1)])
    return split.permute(*range(0, split.dim(), 2), *range(1, split.dim(), 2))


def _untiled(x):
    axes = x.dim() // 2
    order = [axis for pair in zip(range(axes), range(axes, 2 * axes)) for axis in pair]
    shape = [n * t for n, t in zip(x.shape[:axes], x.shape[axes:])]
    return x.permute(order).reshape(shape)

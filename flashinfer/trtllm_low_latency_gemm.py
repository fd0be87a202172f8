"""Weights of FP8 products of few rows, as TensorRT-LLM's low-latency kernels take them."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.fused_moe.layouts import convert_to_block_layout, get_w2_permute_indices_with_cache

__all__ = ["prepare_low_latency_gemm_weights"]

# Rows that those kernels' epilogue treats at once, and columns of a block: 128 bytes.
_EPILOGUE_TILE, _BLOCK = 128, 128


@checked
def prepare_low_latency_gemm_weights(w: torch.Tensor, permutation_indices_cache: dict) -> torch.Tensor:
    """A weight with shuffled rows in blocks of columns: `b` of `mm_fp8`.

    Parameters
    ----------
    w : torch.Tensor
        float8_e4m3fn [n, k]; n a multiple of 32, k of 128.
    permutation_indices_cache : dict
        The caller's; keeps orders of rows that were worked out.

    Returns
    -------
    torch.Tensor
        float8_e4m3fn [k / 128, n, 128]: rows as `flashinfer.shuffle_matrix_a` with an epilogue tile of 128 orders them,
        in the blocks of `flashinfer.fused_moe.convert_to_block_layout`.

    Raises
    ------
    ValueError
        A shape or dtype other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.prepare_low_latency_gemm_weights(torch.ones(128, 128).to(torch.float8_e4m3fn), {}).shape
    torch.Size([1, 128, 128])
    """
    shape = tuple(w.shape)
    fits = len(shape) == 2 and shape[0] % 32 == 0 and shape[1] % _BLOCK == 0
    require(fits, "w", shape, "[a multiple of 32, a multiple of 128]")
    require(w.dtype == torch.float8_e4m3fn, "w", w.dtype, "float8_e4m3fn")
    codes = w.view(torch.uint8)
    order = get_w2_permute_indices_with_cache(permutation_indices_cache, codes, _EPILOGUE_TILE)
    return convert_to_block_layout(codes[order], _BLOCK).view(w.dtype)

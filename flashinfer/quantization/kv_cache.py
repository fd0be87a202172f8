"""NVFP4 of keys and values."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.quantization import _rows

__all__ = ["nvfp4_kv_dequantize", "nvfp4_kv_quantize", "nvfp4_quantize_paged_kv_cache"]


def nvfp4_kv_quantize(input: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows of keys or values to NVFP4 with row-major factors.

    Parameters
    ----------
    input : torch.Tensor
        [M, K]; bfloat16 or float16, rows contiguous. K a multiple of 16.
    global_scale : torch.Tensor
        float32 [1]: the scale of dequantisation, (largest magnitude) / (448 * 6), as `nvfp4_kv_dequantize` takes it.

    Returns
    -------
    codes : torch.Tensor
        uint8 [M, K / 2], two codes a byte, the first in the low half.
    factors : torch.Tensor
        uint8 [M, K / 16], in e4m3. A value is about code * factor * global_scale.

    Raises
    ------
    ValueError
        A shape, dtype, device or stride other than the above.
    """
    require(input.dim() == 2, "input", tuple(input.shape), "[M, K]")
    require(input.dtype in (torch.bfloat16, torch.float16), "input", input.dtype, "bfloat16, float16")
    scale = _rows.scale_tensor("global_scale", global_scale, input)
    codes, factors, _ = _rows.quantize("input", input[None], "nvfp4", "linear", scale, inverse=True)
    return codes[0], factors.view(input.shape[0], input.shape[1] // 16)


def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """What `nvfp4_kv_quantize` gave, as floats: code * factor * global_scale in float32, rounded to the result's dtype.

    Parameters
    ----------
    fp4_data : torch.Tensor
        uint8 [M, K / 2].
    block_scales : torch.Tensor
        uint8 or float8_e4m3fn [M, K / 16].
    global_scale : torch.Tensor
        float32 [1].
    output_dtype : torch.dtype
        bfloat16 or float16.

    Returns
    -------
    torch.Tensor
        [M, K] of `output_dtype`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.
    """
    allowed = output_dtype in (torch.bfloat16, torch.float16)
    require(allowed, "output_dtype", output_dtype, "bfloat16, float16")
    scale = _rows.scale_tensor("global_scale", global_scale, fp4_data)
    names = "fp4_data", "block_scales"
    return _rows.dequantize(names, fp4_data, block_scales, scale, "e2m1", "e4m3", 16, "linear", output_dtype)


def nvfp4_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: str = "HND",
    k_global_sf: torch.Tensor | None = None,
    v_global_sf: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], float, float]:
    """Quantise a paged KV cache to NVFP4, with V's factors as TensorRT-LLM's generated attention kernels read them.

    Parameters
    ----------
    k_cache, v_cache : torch.Tensor
        [num_pages, num_kv_heads, page_size, head_dim] (HND) or [num_pages, page_size, num_kv_heads, head_dim] (NHD);
        bfloat16 or float16. page_size a multiple of 4, head_dim of 16.
    kv_layout : str
        "HND" or "NHD".
    k_global_sf, v_global_sf : torch.Tensor, optional
        float32 of one element: what values are multiplied by before they are quantised; 448 / (largest magnitude) where
        they are left out.

    Returns
    -------
    codes : tuple of two torch.Tensor
        uint8, the shape of the cache with head_dim / 2.
    factors : tuple of two torch.Tensor
        float8_e4m3fn, the shape of the cache with head_dim / 16. Those of V are, in the page of each head, four tokens
        interleaved: token 4 i + t's factor f is where row-major token 4 i + (4 f + t) div (head_dim / 16) has factor
        (4 f + t) mod (head_dim / 16).
    k_global_scale, v_global_scale : float
        The scales of dequantisation, 1 / global_sf. Reading them waits for the device.

    Raises
    ------
    ValueError
        A shape, dtype, device or layout other than the above.
    """
    require(kv_layout in ("HND", "NHD"), "kv_layout", repr(kv_layout), "'HND', 'NHD'")
    require(k_cache.dim() == 4, "k_cache", tuple(k_cache.shape), "four dimensions")
    require(v_cache.shape == k_cache.shape, "v_cache", tuple(v_cache.shape), f"{tuple(k_cache.shape)}, as k_cache")
    tokens = 2 if kv_layout == "HND" else 1
    fits = k_cache.shape[tokens] % 4 == 0
    require(fits, "k_cache", tuple(k_cache.shape), "a page_size that is a multiple of 4")
    k_codes, k_factors, k_scale = _pages("k_cache", k_cache, "k_global_sf", k_global_sf)
    v_codes, v_factors, v_scale = _pages("v_cache", v_cache, "v_global_sf", v_global_sf)
    # [pages, heads, tokens, factors]; of each four tokens, factor by factor.
    by_head = v_factors if tokens == 2 else v_factors.transpose(1, 2)
    by_head = by_head.unflatten(2, (-1, 4)).transpose(3, 4).reshape(by_head.shape)
    v_factors = by_head if tokens == 2 else by_head.transpose(1, 2).contiguous()
    factors = tuple(f.view(torch.float8_e4m3fn) for f in (k_factors, v_factors))
    return (k_codes, v_codes), factors, k_scale, v_scale


def _pages(name: str, cache: torch.Tensor, scale_name: str, scale: torch.Tensor | None):
    """Codes, row-major factors, and the scale of dequantisation of one of the two caches."""
    require(cache.dtype in (torch.bfloat16, torch.float16), name, cache.dtype, "bfloat16, float16")
    if scale is None:
        amax = cache.abs().amax().float().view(1) if cache.numel() else torch.zeros(1, device=cache.device)
        scale = 448 / torch.where(amax == 0, 1, amax)
    else:
        scale = _rows.scale_tensor(scale_name, scale, cache)
    *outer, head_dim = cache.shape
    codes, factors, _ = _rows.quantize(name, cache.reshape(1, -1, head_dim), "nvfp4", "linear", scale)
    return codes.view(*outer, head_dim // 2), factors.view(*outer, head_dim // 16), float(1 / scale)

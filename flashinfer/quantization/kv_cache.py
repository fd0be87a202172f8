"""NVFP4 of keys and values, and paged caches in every format with factors as floats."""

from __future__ import annotations

import math

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, check_traced, check_values, require, require_fit, same_device
from flashinfer._core.literals import KvLayout
from flashinfer._core.tracing import is_traced
from flashinfer.compat.queries import answering
from flashinfer.ops.formats import ELEMENTS, KV_FORMATS, KV_NAMES, Format
from flashinfer.ops.kv_layout import check_layout, paged_views
from flashinfer.ops.narrow import widened
from flashinfer.quantization import _rows


@checked
@answering()
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_kv_quantize(torch.randn(4, 64).bfloat16(), torch.ones(1))
    >>> codes.shape, factors.shape
    (torch.Size([4, 32]), torch.Size([4, 4]))
    """
    require_fit("input", input, input.dim() == 2, "[M, K]", torch.bfloat16, torch.float16)
    scale = _rows.scale_tensor("global_scale", global_scale, input)
    codes, factors, _ = _rows.quantize("input", input[None], "nvfp4", "linear", scale, inverse=True)
    return codes[0], factors.view(input.shape[0], input.shape[1] // 16)


@checked
@answering()
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_kv_quantize(torch.full((1, 64), 3.0).bfloat16(), torch.ones(1))
    >>> flashinfer.nvfp4_kv_dequantize(codes, factors, torch.ones(1))[0, :2]
    tensor([3., 3.], dtype=torch.bfloat16)
    """
    allowed = output_dtype in (torch.bfloat16, torch.float16)
    require(allowed, "output_dtype", output_dtype, "bfloat16, float16")
    scale = _rows.scale_tensor("global_scale", global_scale, fp4_data)
    names = "fp4_data", "block_scales"
    return _rows.dequantize(names, fp4_data, block_scales, scale, "e2m1", "e4m3", 16, "linear", output_dtype)


@checked
def nvfp4_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: KvLayout = "HND",
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

    Examples
    --------
    >>> import torch, flashinfer
    >>> k, v = torch.randn(2, 2, 16, 64).bfloat16(), torch.randn(2, 2, 16, 64).bfloat16()
    >>> (k_codes, v_codes), (k_factors, v_factors), k_scale, v_scale = flashinfer.nvfp4_quantize_paged_kv_cache(k, v)
    >>> k_codes.shape, k_factors.shape
    (torch.Size([2, 2, 16, 32]), torch.Size([2, 2, 16, 4]))
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
    factors = k_factors.view(torch.float8_e4m3fn), v_factors.view(torch.float8_e4m3fn)
    return (k_codes, v_codes), factors, k_scale, v_scale


def _pages(name: str, cache: torch.Tensor, scale_name: str, scale: torch.Tensor | None):
    """Codes, row-major factors, and the scale of dequantisation of one of the two caches."""
    require(cache.dtype in (torch.bfloat16, torch.float16), name, cache.dtype, "bfloat16, float16")
    if scale is None:
        empty = torch.zeros(1, dtype=torch.float32, device=cache.device)
        amax = cache.abs().amax().float().view(1) if cache.numel() else empty
        scale = 448 / torch.where(amax == 0, 1, amax)
    else:
        scale = _rows.scale_tensor(scale_name, scale, cache)
    *outer, head_dim = cache.shape
    codes, factors, _ = _rows.quantize(name, cache.reshape(1, -1, head_dim), "nvfp4", "linear", scale)
    return codes.view(*outer, head_dim // 2), factors.view(*outer, head_dim // 16), float(1 / scale)


@checked
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: KvLayout = "NHD",
) -> None:
    """The keys and values of each request in a paged NVFP4 cache, as floats side by side: code * factor * scale.

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    paged_kv_cache, kv_layout
        As in `flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping`.
    kv_cache_sf : torch.Tensor or (torch.Tensor, torch.Tensor)
        The same with head_dim / 16, float8_e4m3fn or uint8: the factors, row by row.
    block_tables : torch.Tensor
        int32 or int64 [batch, max_pages]: page ids of each request; past its keys anything.
    seq_lens : torch.Tensor
        int32 or int64 [batch]: keys of each request; those past max_seq_len or the table are left out.
    k_scale, v_scale : float or torch.Tensor
        The scales of dequantisation, float32 [1]; positive.
    output_k, output_v : torch.Tensor
        [batch, max_seq_len, num_kv_heads, head_dim], bfloat16 or float16, contiguous. Written up to a request's keys;
        the rest stays as it is.

    Raises
    ------
    ValueError
        A shape, dtype, device or layout other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = torch.full((2, 4, 1, 8), 0x22, dtype=torch.uint8), torch.full((2, 4, 1, 1), 0x38)
    >>> k, v = torch.zeros(1, 5, 1, 16, dtype=torch.float16), torch.zeros(1, 5, 1, 16, dtype=torch.float16)
    >>> cache, scales = (codes, codes), (factors.to(torch.uint8), factors.to(torch.uint8))
    >>> flashinfer.nvfp4_kv_dequantize_paged(cache, scales, torch.tensor([[1, 0]]), torch.tensor([3]), 0.5, 2.0, k, v)
    >>> k[0, :, 0, 0].tolist(), v[0, :, 0, 0].tolist()
    ([0.5, 0.5, 0.5, 0.0, 0.0], [2.0, 2.0, 2.0, 0.0, 0.0])
    """
    scales = ("k_scale", k_scale), ("v_scale", v_scale)
    _dequantise("nvfp4", paged_kv_cache, kv_cache_sf, block_tables, seq_lens, (output_k, output_v), kv_layout, scales)


@checked
def kv_dequantize_paged(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_data_type: str | torch.dtype,
    kv_layout: KvLayout = "NHD",
) -> None:
    """The keys and values of each request in a paged cache with factors, as floats side by side: code * factor.

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    paged_kv_cache, kv_cache_sf : torch.Tensor or (torch.Tensor, torch.Tensor)
        Codes and factors, as `flashinfer.page.quantize_append_paged_kv_cache` writes them; of "nvfp4", as
        `nvfp4_kv_dequantize_paged` takes them. Any strides.
    block_tables, seq_lens, output_k, output_v, kv_layout
        As in `nvfp4_kv_dequantize_paged`.
    kv_data_type : str or torch.dtype
        "nvfp4", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "int4_group_64".

    Raises
    ------
    ValueError
        A shape, dtype, device or layout other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = torch.full((2, 4, 1, 16), -100, dtype=torch.int8), torch.full((2, 4, 1, 1), 0.25)
    >>> k, v = torch.zeros(1, 3, 1, 16, dtype=torch.float16), torch.zeros(1, 3, 1, 16, dtype=torch.float16)
    >>> table, lens, name = torch.tensor([[1, 0]]), torch.tensor([2]), "int8_per_token_head"
    >>> flashinfer.quantization.kv_dequantize_paged((codes, codes), (factors, factors), table, lens, k, v, name)
    >>> k[0, :, 0, 0].tolist()
    [-25.0, -25.0, 0.0]
    """
    name = KV_NAMES.get(kv_data_type, "")
    require(name in KV_FORMATS, "kv_data_type", repr(kv_data_type), ", ".join(KV_FORMATS))
    _dequantise(name, paged_kv_cache, kv_cache_sf, block_tables, seq_lens, (output_k, output_v), kv_layout)


def _dequantise(name: str, cache, factors, block_tables, seq_lens, outputs, kv_layout: str, scales=()) -> None:
    """Both of a cache in the format `name`; `scales` are the names and values of two scales of dequantisation."""
    check_layout(kv_layout)
    codes, factors = paged_views(cache, kv_layout), paged_views(factors, kv_layout, "kv_cache_sf")
    device = same_device(paged_kv_cache=codes[0], kv_cache_sf=factors[0], output_k=outputs[0], output_v=outputs[1])
    integers = (torch.int32, torch.int64)
    for table_name, t, axes in (("block_tables", block_tables, 2), ("seq_lens", seq_lens, 1)):
        require(t.dim() == axes, table_name, tuple(t.shape), "[batch, max_pages]" if axes == 2 else "[batch]")
        require(t.dtype in integers, table_name, t.dtype, "int32, int64")
        require(t.device == device, table_name, f"a tensor on {t.device}", str(device))
    batch, known = block_tables.shape[0], KV_FORMATS[name]
    require(seq_lens.shape[0] == batch, "seq_lens", tuple(seq_lens.shape), f"[{batch}], as block_tables")
    kept = (torch.uint8, torch.float8_e4m3fn) if name == "nvfp4" else (torch.float32,)
    coded = tuple(dict.fromkeys((torch.uint8, ELEMENTS[known.element].dtype)))
    scale_of = [positive_scale(scales[i][0], scales[i][1], device) if scales else None for i in range(2)]
    read = [("paged_kv_cache", t) for t in codes] + [("kv_cache_sf", t) for t in factors]
    check_apart(zip(("output_k", "output_v"), outputs, strict=True), read)
    for i, out in enumerate(outputs):
        pages, page_size, heads, packed = codes[i].shape
        require(codes[i].dtype in coded, "paged_kv_cache", codes[i].dtype, ", ".join(map(str, coded)))
        dim = packed * known.per_byte
        shape = (pages, page_size, heads, known.blocks(dim))
        fits = tuple(factors[i].shape) == shape and dim % (known.width or 1) == 0
        require(fits, "kv_cache_sf", tuple(factors[i].shape), f"{shape}: pages, tokens, heads, blocks of head_dim")
        require(factors[i].dtype in kept, "kv_cache_sf", factors[i].dtype, ", ".join(map(str, kept)))
        out_name = ("output_k", "output_v")[i]
        fits = out.dim() == 4 and out.shape[0] == batch and tuple(out.shape[2:]) == (heads, dim) and out.is_contiguous()
        require(fits, out_name, tuple(out.shape), f"[{batch}, max_seq_len, {heads}, {dim}], contiguous")
        require(out.dtype in (torch.bfloat16, torch.float16), out_name, out.dtype, "bfloat16, float16")
    check_values("seq_lens", seq_lens, 0, (1 << 31) - 1)
    if device.type == "cpu":
        columns = torch.arange(block_tables.shape[1], device=device) * page_size
        check_values("block_tables", block_tables[columns < seq_lens[:, None]], 0, pages - 1)
    for i, out in enumerate(outputs):
        _gather(known, codes[i], factors[i], block_tables, seq_lens, scale_of[i], out)


def _gather(known: Format, codes, factors, tables, lens, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the rows of `codes` that `tables` names to `out`, dequantised."""
    pages, page_size = codes.shape[:2]
    count = min(out.shape[1], tables.shape[1] * page_size)
    if not pages or not count or not out.numel():
        return
    tables = tables[:, : -(-count // page_size)].long().clamp(0, pages - 1)
    value = widened(codes.view(torch.uint8)[tables], known.element).unflatten(-1, (factors.shape[-1], -1))
    if known.factor == "ue4m3":
        factor = factors.view(torch.uint8)[tables].view(torch.float8_e4m3fn).float()
    else:
        factor = factors[tables]
    value = value * factor[..., None]
    if scale is not None:
        value = value * scale
    value = value.flatten(-2).flatten(1, 2)[:, :count].to(out.dtype)
    there = torch.arange(count, dtype=torch.int64, device=out.device) < lens[:, None]
    mine = out[:, :count]
    mine.copy_(torch.where(there[..., None, None], value, mine))


def positive_scale(name: str, scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A scale of dequantisation as float32 [1] on `device`. The value of a tensor on a GPU is not looked at."""
    if isinstance(scale, torch.Tensor):
        require(scale.numel() == 1, name, tuple(scale.shape), "a number, or a tensor of one element")
        require(scale.is_floating_point(), name, scale.dtype, "float32")
        if scale.is_cuda:
            require(scale.device == device, name, f"a tensor on {scale.device}", f"{device}, or the CPU")
            return scale.reshape(1).float()
        if is_traced():
            check_traced((scale > 0) & scale.isfinite(), name, "a positive finite number")
            return scale.reshape(1).to(device=device, dtype=torch.float32)
        scale = scale.item()
    require(math.isfinite(scale) and scale > 0, name, scale, "a positive finite number")
    return torch.full((1,), float(scale), dtype=torch.float32, device=device)

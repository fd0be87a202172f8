"""Appending tokens to a paged KV cache in the formats with factors: NVFP4, and FP8, INT8, INT4 with float32 factors."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.literals import KvLayout
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import page as room
from flashinfer.ops.formats import ELEMENTS, KV_FORMATS, KV_NAMES
from flashinfer.ops.kv_layout import check_layout, paged_views
from flashinfer.ops.page_table import check_page_table, check_vector
from flashinfer.page.append import as_int32
from flashinfer.quantization.kv_cache import positive_scale

# The names of `kv_data_type` whose factors are float32, and those of nvfp4, whose append has names of its own.
ROW_FORMATS = {name: known for name, known in KV_FORMATS.items() if known.factor == "fp32"}
_TABLE = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")


@checked
@named(k_cache="paged_kv_cache", v_cache="paged_kv_cache", k_factors="kv_cache_sf", v_factors="kv_cache_sf")
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float,
    v_scale: float,
    kv_layout: KvLayout = "NHD",
) -> None:
    """Quantise the keys and values of new tokens to NVFP4 and write them into a paged cache, in place, one launch.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        [nnz, num_kv_heads, head_dim]; bfloat16 or float16, head_dim a multiple of 16, any strides.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As in `append_paged_kv_cache`, as are the errors.
    paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
        uint8, as in `append_paged_kv_cache` with head_dim / 2 for head_dim: two e2m1 a byte, the first in the low half.
    kv_cache_sf : torch.Tensor or (torch.Tensor, torch.Tensor)
        float8_e4m3fn or uint8, the same with head_dim / 16: the factor of each 16 elements.
    k_scale, v_scale : float
        The scales of dequantisation: a value is about code * factor * scale.

    Raises
    ------
    ValueError
        As `append_paged_kv_cache` raises it.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
    https://arxiv.org/abs/2309.06180; OCP Microscaling Formats Specification 1.0, for e2m1

    Examples
    --------
    >>> import torch, flashinfer
    >>> k, v, request = torch.randn(3, 2, 64).bfloat16(), torch.randn(3, 2, 64).bfloat16(), torch.zeros(3).int()
    >>> cache, factors = (torch.zeros(4, 2, 16, 2, width, dtype=torch.uint8) for width in (32, 4))
    >>> position, pages, indptr, last = (torch.tensor(x).int() for x in ([0, 1, 2], [2], [0, 1], [3]))
    >>> table = request, position, cache, factors, pages, indptr, last
    >>> flashinfer.nvfp4_quantize_append_paged_kv_cache(k, v, *table, k_scale=1.0, v_scale=1.0)
    >>> (cache[:, 0].flatten(2).sum(-1) > 0).nonzero().tolist()
    [[2, 0], [2, 1], [2, 2]]
    """
    table = [batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len]
    _append_pair(append_key, append_value, table, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout)


@checked
@named(k_cache="paged_kv_cache", v_cache="paged_kv_cache", k_factors="kv_cache_sf", v_factors="kv_cache_sf")
def quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_data_type: str | torch.dtype,
    kv_layout: KvLayout = "NHD",
) -> None:
    """Quantise the keys and values of new tokens and write them into a paged cache, in place, one launch.

    Each block of a row, a head of a token, has a factor: its largest magnitude over that of the format's codes, at
    least 2^-126. Codes are value / factor, to nearest, ties to even; a value is code * factor. Infinity is taken for
    the largest float32. A NaN makes its block's factor NaN.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        [nnz, num_kv_heads, head_dim]; bfloat16 or float16, any strides. head_dim is a multiple of the block.
    paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
        As in `append_paged_kv_cache`, in the dtype of the codes or uint8; of INT4 with head_dim / 2 for head_dim.
    kv_cache_sf : torch.Tensor or (torch.Tensor, torch.Tensor)
        float32, the same with the factors of a row last. Any strides: factors may lie between rows of codes.
    kv_data_type : str or torch.dtype
        "fp8_per_token_head": e4m3, a factor a row, so kv_cache_sf ends in 1; "int8_per_token_head": codes
        -127 ... 127; "int4_per_token_head": codes -7 ... 7, two's complement, two a byte, the first in the low half;
        "int4_group_64": a factor for each 64 of a row, so kv_cache_sf ends in head_dim / 64.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As in `append_paged_kv_cache`.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or layout other than the above, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> key = torch.tensor([0.5, -7.0, 3.0, 0.0], dtype=torch.float16).view(1, 1, 4)
    >>> cache, sf = torch.zeros(1, 2, 2, 1, 2, dtype=torch.uint8), torch.zeros(1, 2, 2, 1, 1)
    >>> table = torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([1])
    >>> flashinfer.page.quantize_append_paged_kv_cache(
    ...     key, key, torch.tensor([0]), torch.tensor([0]), cache, sf, *table, "int4_per_token_head")
    >>> cache[0, 0, 0, 0].tolist(), sf[0, 0, 0, 0].tolist()
    ([144, 3], [1.0])
    """
    table = [batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len]
    _append_rows(append_key, append_value, table, paged_kv_cache, kv_cache_sf, kv_data_type, kv_layout)


@checked
@named(k_cache="paged_kv_cache", v_cache="paged_kv_cache", k_factors="kv_cache_sf", v_factors="kv_cache_sf")
def quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_data_type: str | torch.dtype,
    kv_layout: KvLayout = "NHD",
) -> None:
    """`quantize_append_paged_kv_cache` for engines that name slots.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        [at least nnz, num_kv_heads, head_dim]; bfloat16 or float16, any strides. Rows past nnz are not read.
    slot_mapping : torch.Tensor
        int32 or int64 [nnz]: row i goes to token slot % page_size of page slot // page_size. Slots that are negative or
        past the last page are not written. Two rows with one slot leave either.
    paged_kv_cache, kv_cache_sf, kv_data_type, kv_layout
        As in `quantize_append_paged_kv_cache`.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or layout other than the above, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> key = torch.tensor([0.5, -127.0, 3.0, 0.0], dtype=torch.float16).view(1, 1, 4)
    >>> cache, sf = torch.zeros(1, 2, 2, 1, 4, dtype=torch.int8), torch.zeros(1, 2, 2, 1, 1)
    >>> flashinfer.page.quantize_append_paged_kv_cache_with_slot_mapping(
    ...     key, key, torch.tensor([1]), cache, sf, "int8_per_token_head")
    >>> cache[0, 0, :, 0].tolist(), sf[0, 0, :, 0, 0].tolist()
    ([[0, 0, 0, 0], [0, -127, 3, 0]], [0.0, 1.0])
    """
    _append_rows(append_key, append_value, [slot_mapping], paged_kv_cache, kv_cache_sf, kv_data_type, kv_layout)


@checked
@named(k_cache="ckv_cache", v_cache="kpe_cache", k_factors="ckv_sf_cache")
def nvfp4_quantize_append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    ckv_sf_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    ckv_scale: float,
    kpe_scale: float,
) -> None:
    """Quantise the compressed rows of new tokens and write them into a paged cache of multi-head latent attention, in
    place, one launch: ckv to NVFP4, kpe, whose elements vary more, to FP8.

    Parameters
    ----------
    append_ckv : torch.Tensor
        [nnz, ckv_dim]; bfloat16 or float16, ckv_dim a multiple of 16, any strides.
    append_kpe : torch.Tensor
        [nnz, kpe_dim], in the dtype of append_ckv, any strides.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        As in `append_paged_kv_cache`, as are the errors.
    ckv_cache : torch.Tensor
        uint8 [max_num_pages, page_size, ckv_dim / 2]: two e2m1 a byte, the first in the low half. Any strides.
    ckv_sf_cache : torch.Tensor
        float8_e4m3fn or uint8 [max_num_pages, page_size, ckv_dim / 16]: the factor of each 16 elements.
    kpe_cache : torch.Tensor
        float8_e4m3fn or uint8 [max_num_pages, page_size, kpe_dim]: e4m3.
    ckv_scale, kpe_scale : float
        The scales of dequantisation: a value is about code * factor * ckv_scale, and code * kpe_scale.

    Raises
    ------
    ValueError
        As `append_paged_kv_cache` raises it.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1, https://arxiv.org/abs/2405.04434; OCP Microscaling Formats
    Specification 1.0, for e2m1

    Examples
    --------
    >>> import torch, flashinfer
    >>> ckv, kpe, at = torch.randn(3, 512).bfloat16(), torch.randn(3, 64).bfloat16(), torch.zeros(3).int()
    >>> caches = [torch.zeros(2, 16, dim).byte() for dim in (256, 32, 64)]  # codes, factors, kpe
    >>> table = torch.tensor([1]).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int()
    >>> flashinfer.nvfp4_quantize_append_paged_mla_kv_cache(ckv, kpe, at, torch.arange(3).int(), *caches, *table, 1, 1)
    >>> bool(caches[0][1, :3].any()), bool(caches[0][0].any())
    (True, False)
    """
    for name, x in (("append_ckv", append_ckv), ("append_kpe", append_kpe)):
        require(x.dim() == 2, name, tuple(x.shape), "[nnz, dim]")
    for name, x in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache), ("ckv_sf_cache", ckv_sf_cache)):
        require(x.dim() == 3, name, tuple(x.shape), "[max_num_pages, page_size, dim]")
    scales = _scales(append_ckv.device, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    table = [batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len]
    rows = append_ckv.unsqueeze(1), append_kpe.unsqueeze(1)
    kpe, factors = _bytes("kpe_cache", kpe_cache.unsqueeze(2)), _bytes("ckv_sf_cache", ckv_sf_cache.unsqueeze(2))
    _append_quantised(*rows, table, ckv_cache.unsqueeze(2), kpe, factors, None, *scales)


@checked
@named(k_cache="paged_kv_cache", v_cache="paged_kv_cache", k_factors="kv_cache_sf", v_factors="kv_cache_sf")
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: KvLayout = "NHD",
) -> None:
    """Quantise new keys and values to NVFP4, and write them into slots of a paged cache, in one launch.

    Parameters
    ----------
    append_key, append_value, slot_mapping
        As in `quantize_append_paged_kv_cache_with_slot_mapping`; head_dim is a multiple of 16.
    paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
        uint8: a pair of [num_pages, page_size, num_kv_heads, head_dim / 2] (NHD) or
        [num_pages, num_kv_heads, page_size, head_dim / 2] (HND), or one tensor with keys and values along a second
        dimension of 2. Any strides.
    kv_cache_sf : torch.Tensor or (torch.Tensor, torch.Tensor)
        The same with head_dim / 16, float8_e4m3fn or uint8: the factors, of keys and of values row by row, not
        interleaved as `nvfp4_quantize_paged_kv_cache` leaves those of values.
    k_scale, v_scale : float or torch.Tensor
        The scales of dequantisation, float32 [1]: a value is about code * factor * scale.
    kv_layout : str
        "NHD" or "HND".

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or layout other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> k, v, slots = torch.randn(3, 2, 64).bfloat16(), torch.randn(3, 2, 64).bfloat16(), torch.tensor([0, 5, 17])
    >>> cache = torch.zeros(4, 2, 16, 2, 32, dtype=torch.uint8)
    >>> factors = torch.zeros(4, 2, 16, 2, 4, dtype=torch.uint8)
    >>> flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slots, cache, factors, 1.0, 1.0)
    >>> (cache[:, 0].flatten(2).sum(-1) > 0).nonzero().tolist()
    [[0, 0], [0, 5], [1, 1]]
    """
    _append_pair(append_key, append_value, [slot_mapping], paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout)


def _append_rows(key, value, table: list, paged_kv_cache, kv_cache_sf, kv_data_type, kv_layout: str) -> None:
    name = KV_NAMES.get(kv_data_type, "")
    require(name in ROW_FORMATS, "kv_data_type", repr(kv_data_type), f"{', '.join(ROW_FORMATS)}; of nvfp4, its append")
    check_layout(kv_layout)
    caches, factors = paged_views(paged_kv_cache, kv_layout), paged_views(kv_cache_sf, kv_layout, "kv_cache_sf")
    dtype = ELEMENTS[ROW_FORMATS[name].element].dtype
    for cache in caches:
        fits = cache.dtype in (dtype, torch.uint8)
        require(fits, "paged_kv_cache", cache.dtype, f"{' or '.join(map(str, dict.fromkeys((dtype, torch.uint8))))}")
    k_cache, v_cache = (cache.view(torch.uint8) for cache in caches)
    _append_quantised(key, value, table, k_cache, v_cache, factors[0], factors[1], [1.0, 1.0], [], name)


def _append_pair(key, value, table: list, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout: str) -> None:
    check_layout(kv_layout)
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    k_factors, v_factors = (_bytes("kv_cache_sf", x) for x in paged_views(kv_cache_sf, kv_layout, "kv_cache_sf"))
    numbers, scales = _scales(key.device, k_scale=k_scale, v_scale=v_scale)
    _append_quantised(key, value, table, k_cache, v_cache, k_factors, v_factors, numbers, scales)


def _scales(device: torch.device, **scales: float | torch.Tensor) -> tuple[list[float], list[torch.Tensor]]:
    """Scales as numbers; or, where one of them is a tensor, whose value is not read here, all as float32 [1]."""
    if any(isinstance(scale, torch.Tensor) for scale in scales.values()):
        return [], [positive_scale(name, scale, device) for name, scale in scales.items()]
    for name, scale in scales.items():
        fits = isinstance(scale, (int, float)) and 0 < scale < float("inf")
        require(fits, name, repr(scale), "a finite number above 0")
    return [float(scale) for scale in scales.values()], []


def _bytes(name: str, cache: torch.Tensor) -> torch.Tensor:
    allowed = cache.dtype in (torch.uint8, torch.float8_e4m3fn)
    require(allowed, name, cache.dtype, "uint8, float8_e4m3fn")
    return cache.view(torch.uint8)


@custom_op("flashinfer::append_quantised", mutates_args=("k_cache", "v_cache", "k_factors", "v_factors"))
def _append_quantised(
    key: torch.Tensor,
    value: torch.Tensor,
    table: list[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_factors: torch.Tensor,
    v_factors: torch.Tensor | None,
    numbers: list[float],
    scales: list[torch.Tensor],
    kv_format: str = "nvfp4",
) -> None:
    """Keys in a format, values too, or in FP8 where they have no factors, which is MLA. The scales are numbers or
    tensors.

    table : the tensors of a page table, or one slot mapping.
    """
    if v_factors is None:
        key_name, value_name = "append_ckv", "append_kpe"
        k_name, v_name, factors_name = "ckv_cache", "kpe_cache", "ckv_sf_cache"
    else:
        key_name, value_name = "append_key", "append_value"
        k_name, v_name, factors_name = "paged_kv_cache", "paged_kv_cache", "kv_cache_sf"
    mapped = len(table) == 1
    indices: dict[str, torch.Tensor] = dict(zip(("slot_mapping",) if mapped else _TABLE, table))
    same_device(**{key_name: key, value_name: value}, **indices)
    same_device(**{key_name: key, k_name: k_cache, factors_name: k_factors})
    same_device(**{key_name: key, v_name: v_cache, factors_name: v_factors})
    require_fit(key_name, key, key.dim() == 3, "[nnz, num_kv_heads, head_dim]", torch.bfloat16, torch.float16)
    known = KV_FORMATS[kv_format]
    block = known.width or known.per_byte
    require(key.shape[2] % block == 0, key_name, tuple(key.shape), f"a head_dim that is a multiple of {block}")
    require(value.dtype == key.dtype, value_name, value.dtype, f"{key.dtype}, the dtype of {key_name}")
    rows, heads, dim = key.shape
    value_dim = value.shape[2] if value.dim() == 3 else 0
    fits = value.dim() == 3 and value.shape[1] == heads and (v_factors is None or value_dim % block == 0)
    require(fits, value_name, tuple(value.shape), f"[nnz, {heads}, dim], dim a multiple of {block} in {kv_format}")
    where, kept = (*k_cache.shape[:2], heads), torch.float32 if known.factor == "fp32" else torch.uint8
    widths = [(k_name, k_cache, known.code_bytes(dim), torch.uint8), (factors_name, k_factors, known.blocks(dim), kept)]
    if v_factors is None:
        widths.append((v_name, v_cache, value_dim, torch.uint8))
    else:
        widths.append((v_name, v_cache, known.code_bytes(value_dim), torch.uint8))
        widths.append((factors_name, v_factors, known.blocks(value_dim), kept))
    for name, cache, width, dtype in widths:
        shape = (*where, width)
        require(cache.shape == shape, name, tuple(cache.shape), f"{shape}: pages, slots, heads, width")
        require(cache.dtype == dtype, name, cache.dtype, str(dtype))
    if mapped:
        check_vector("slot_mapping", table[0])
        nnz = table[0].shape[0]
        for name, x in ((key_name, key), (value_name, value)):
            require(x.shape[0] >= nnz, name, tuple(x.shape), f"[{nnz} or more, ...], as slot_mapping has slots")
    else:
        nnz = rows
        require(value.shape[0] == nnz, value_name, tuple(value.shape), f"{nnz} tokens, as {key_name} has")
        check_vector("kv_indptr", indices["kv_indptr"])
        lengths = {"batch_indices": nnz, "positions": nnz, "kv_last_page_len": len(indices["kv_indptr"]) - 1}
        for name, tensor in indices.items():
            check_vector(name, tensor, lengths.get(name))
    if nnz * heads * (dim + value_dim) == 0:
        return
    if not mapped and (not key.is_cuda or env.DEBUG.is_on()):
        check_page_table(indices, k_cache.shape[0], k_cache.shape[1])
    problem = room.Append(
        dtype=dtype_name(key.dtype),
        key_block=power_of_two(dim, 16),
        value_block=power_of_two(value_dim, 16),
        aligned=dim % 32 == value_dim % 32 == 0 and is_aligned(key, value, k_cache, v_cache),
        key_format=kv_format,
        value_format="fp8e4nv" if v_factors is None else kv_format,
        slots=dtype_name(table[0].dtype) if mapped else "",
        scale="tensor" if scales else "number",
    )
    where = table[0].contiguous() if mapped else room.PageTable(*(as_int32(x) for x in table[:4]))
    k_scale, v_scale = scales or numbers
    quantised = room.Quantised(k_scale, v_scale, k_factors, v_factors)
    room.append(problem, key.device).run((key, value), (k_cache, v_cache), where, quantised)

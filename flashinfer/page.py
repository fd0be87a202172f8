"""The paged KV cache: appending tokens, and the index arithmetic of page tables."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.checks import dtype_name, indptr_values, is_aligned, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.held import held
from flashinfer._core.kv_layout import check_layout, paged_views
from flashinfer._core.page_table import check_page_table, check_vector
from flashinfer.ops import page as room
from flashinfer.quantization.kv_cache import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
]


@held
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Token t becomes the token at `positions[t]` of request `batch_indices[t]`: it goes to slot
    ``positions[t] % page_size`` of page ``kv_indices[kv_indptr[batch_indices[t]] + positions[t] // page_size]``. The
    page table is that after the append. One launch writes keys and values.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        [nnz, num_kv_heads, head_dim], in the dtype of the cache (any, fp8 included: elements are copied as they are),
        any strides. Keys and values may differ in head_dim where the cache is a pair.
    batch_indices, positions : torch.Tensor
        [nnz]. A token with a negative one of the two is padding and is not written; see `get_batch_indices_positions`.
    paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
        A pair (keys, values) of [max_num_pages, page_size, num_kv_heads, head_dim] for "NHD" or
        [max_num_pages, num_kv_heads, page_size, head_dim] for "HND"; or one tensor with keys and values along a second
        dimension of 2. Any page size, any strides. With pages of one token the page axis may be left out:
        [slots, num_kv_heads, head_dim], or [slots, 2, num_kv_heads, head_dim], which both layouts share.
    kv_indices : torch.Tensor
        [kv_indptr[-1]] or longer: the pages of every request.
    kv_indptr : torch.Tensor
        [batch_size + 1]: request i has the pages ``kv_indices[kv_indptr[i] : kv_indptr[i + 1]]``. It may be a slice of
        a larger batch's, whose first is not 0.
    kv_last_page_len : torch.Tensor
        [batch_size]: tokens in the last page of each request. It is no part of the address; positions are checked
        against it.
    kv_layout : str
        "NHD" or "HND".

        Index tensors are int32; int64 is taken and converted, which costs a launch each.

    Raises
    ------
    ValueError
        A shape, dtype, device or layout other than the above. On the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits
        for the device), also: a kv_indptr that decreases or runs past kv_indices, a batch index that is no request, a
        position past its request's tokens, a page outside the cache. On a GPU without FLASHINFER_DEBUG such tokens are
        not written, and nothing outside the cache is touched.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
    https://arxiv.org/abs/2309.06180
    """
    check_layout(kv_layout)
    k_cache, v_cache = paged_views(paged_kv_cache, kv_layout)
    _append_paged_kv_cache(
        append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len
    )


@held
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write the compressed rows of new tokens into a paged cache of multi-head latent attention, in place.

    Parameters
    ----------
    append_ckv : torch.Tensor
        [nnz, ckv_dim] (512 in DeepSeek models; any size), in the dtype of the cache, any strides.
    append_kpe : torch.Tensor
        [nnz, kpe_dim] (64 in DeepSeek models; any size), in the dtype of the cache, any strides.
    ckv_cache : torch.Tensor
        [max_num_pages, page_size, ckv_dim], any strides.
    kpe_cache : torch.Tensor
        [max_num_pages, page_size, kpe_dim], any strides.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        As in `append_paged_kv_cache`, as are the errors.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1, https://arxiv.org/abs/2405.04434
    """
    for name, rows, cache in (("ckv", append_ckv, ckv_cache), ("kpe", append_kpe, kpe_cache)):
        paged = cache.dim() == 3 and cache.shape[:2] == ckv_cache.shape[:2]
        require(paged, f"{name}_cache", tuple(cache.shape), "[max_num_pages, page_size, dim], the first two in common")
        fits = rows.dim() == 2 and rows.shape[0] == append_ckv.shape[0] and rows.shape[1] == cache.shape[2]
        require(fits, f"append_{name}", tuple(rows.shape), f"[nnz, {cache.shape[2]}], nnz in common")
        for tensor, of in ((rows, f"append_{name}"), (cache, f"{name}_cache")):
            require(tensor.dtype == append_ckv.dtype, of, tensor.dtype, f"{append_ckv.dtype}, the dtype of append_ckv")
    same_device(append_ckv=append_ckv, append_kpe=append_kpe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    _append_paged_kv_cache(
        append_ckv.unsqueeze(1),
        append_kpe.unsqueeze(1),
        batch_indices,
        positions,
        ckv_cache.unsqueeze(2),
        kpe_cache.unsqueeze(2),
        kv_indices,
        kv_indptr,
        kv_last_page_len,
    )


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
    kv_layout: str = "NHD",
) -> None:
    """Quantise the keys and values of new tokens to NVFP4 and write them into a paged cache, in place, one launch.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        [nnz, num_kv_heads, head_dim]; bfloat16 or float16, head_dim a multiple of 16, any strides.
    paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
        uint8, as in `append_paged_kv_cache` with head_dim / 2 for head_dim: two e2m1 a byte, the first in the low half.
    kv_cache_sf : torch.Tensor or (torch.Tensor, torch.Tensor)
        float8_e4m3fn or uint8, the same with head_dim / 16: the factor of each 16 elements.
    k_scale, v_scale : float
        The scales of dequantisation: a value is about code * factor * scale.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout
        As in `append_paged_kv_cache`, as are the errors.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
    https://arxiv.org/abs/2309.06180; OCP Microscaling Formats Specification 1.0, for e2m1
    """
    check_layout(kv_layout)
    caches, factors = paged_views(paged_kv_cache, kv_layout), paged_views(kv_cache_sf, kv_layout)
    tables = [batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len]
    factors = [_bytes("kv_cache_sf", x) for x in factors]
    scales = _scales(k_scale=k_scale, v_scale=v_scale)
    _append_quantised(append_key, append_value, tables, *caches, *factors, scales)


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
    ckv_cache : torch.Tensor
        uint8 [max_num_pages, page_size, ckv_dim / 2]: two e2m1 a byte, the first in the low half. Any strides.
    ckv_sf_cache : torch.Tensor
        float8_e4m3fn or uint8 [max_num_pages, page_size, ckv_dim / 16]: the factor of each 16 elements.
    kpe_cache : torch.Tensor
        float8_e4m3fn or uint8 [max_num_pages, page_size, kpe_dim]: e4m3.
    ckv_scale, kpe_scale : float
        The scales of dequantisation: a value is about code * factor * ckv_scale, and code * kpe_scale.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
        As in `append_paged_kv_cache`, as are the errors.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1, https://arxiv.org/abs/2405.04434; OCP Microscaling Formats
    Specification 1.0, for e2m1
    """
    given = {"append_ckv": append_ckv, "append_kpe": append_kpe}
    for name, x in given.items():
        require(x.dim() == 2, name, tuple(x.shape), "[nnz, dim]")
    caches = {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "ckv_sf_cache": ckv_sf_cache}
    for name, x in caches.items():
        require(x.dim() == 3, name, tuple(x.shape), "[max_num_pages, page_size, dim]")
    kpe, factors = (_bytes(name, caches[name]).unsqueeze(2) for name in ("kpe_cache", "ckv_sf_cache"))
    tables = [batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len]
    rows = (x.unsqueeze(1) for x in given.values())
    scales = _scales(ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    _append_quantised(*rows, tables, ckv_cache.unsqueeze(2), kpe, factors, None, scales)


@held
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each appended token, and its position in that request, as `append_paged_kv_cache` takes them.

    The appended tokens of a request are its last ones: token t of request i is at position
    ``seq_lens[i] - append_indptr[i + 1] + t``.

    Parameters
    ----------
    append_indptr : torch.Tensor
        [batch_size + 1], int32 or int64: the appended tokens of request i are ``append_indptr[i]`` to
        ``append_indptr[i + 1]``. Requests may append nothing. Offsets may be a slice of a larger batch's, from any
        first one: entries of the result before it are padding, too.
    seq_lens : torch.Tensor
        [batch_size], int32 or int64: tokens of each request after the append.
    nnz : int
        Entries of the result. Those from ``append_indptr[-1]`` on are padding: batch index -1 and position 0, which
        `append_paged_kv_cache` skips. A captured CUDA graph takes nnz for its largest batch.
    batch_indices, positions : torch.Tensor, optional
        Receive the result; [nnz], int32, contiguous.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        batch_indices and positions, int32 [nnz].

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above. On the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits for the
        device), also an append_indptr that decreases, is negative or runs past nnz, or appends more tokens to a
        request than it has.

    Examples
    --------
    >>> append_indptr = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    >>> seq_lens = torch.tensor([5, 5, 5], dtype=torch.int32)
    >>> get_batch_indices_positions(append_indptr, seq_lens, 6)
    (tensor([0, 1, 1, 2, 2, 2], dtype=torch.int32), tensor([4, 3, 4, 2, 3, 4], dtype=torch.int32))
    """
    require(nnz >= 0, "nnz", nnz, "0 or more")
    made = []
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        if tensor is None:
            tensor = torch.empty(nnz, dtype=torch.int32, device=append_indptr.device)
        require(tensor.shape == (nnz,), name, tuple(tensor.shape), f"[{nnz}], nnz")
        require(tensor.dtype == torch.int32, name, tensor.dtype, "int32")
        require(tensor.is_contiguous(), name, f"stride {tensor.stride()}", "contiguous")
        made.append(tensor)
    _batch_indices_positions(append_indptr, seq_lens, *made)
    return made[0], made[1]


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request, from its page table: ``(pages - 1) * page_size + last_page_len``.

    Parameters
    ----------
    kv_indptr : torch.Tensor
        [batch_size + 1], int32 or int64: pages ``kv_indptr[i]`` to ``kv_indptr[i + 1]`` are those of request i.
    kv_last_page_len : torch.Tensor
        [batch_size], dtype of kv_indptr: tokens in the last page. A request without pages has length 0, whatever
        stands here.
    page_size : int
        Tokens of a page.

    Returns
    -------
    torch.Tensor
        [batch_size], in the dtype of kv_indptr.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.
    """
    require(page_size > 0, "page_size", page_size, "1 or more")
    out = torch.empty_like(kv_last_page_len, memory_format=torch.contiguous_format)
    _seq_lens(kv_indptr, kv_last_page_len, out, page_size)
    return out


@custom_op("flashinfer::append_paged_kv_cache", mutates_args=("k_cache", "v_cache"))
def _append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    tables = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    tables |= {"kv_last_page_len": kv_last_page_len}
    same_device(append_key=append_key, append_value=append_value, k_cache=k_cache, v_cache=v_cache, **tables)
    _check_rows(append_key, append_value, k_cache, v_cache)
    nnz, batch = append_key.shape[0], kv_indptr.shape[0] - 1
    check_vector("batch_indices", batch_indices, nnz)
    check_vector("positions", positions, nnz)
    check_vector("kv_indices", kv_indices)
    check_vector("kv_indptr", kv_indptr)
    check_vector("kv_last_page_len", kv_last_page_len, batch)
    if append_key.numel() + append_value.numel() == 0:
        return
    if not append_key.is_cuda or env.DEBUG.is_on():
        check_page_table(tables, k_cache.shape[0], k_cache.shape[1])
    problem = room.Append(
        dtype="u8" if append_key.element_size() == 1 else dtype_name(append_key.dtype),
        key_block=_power_of_two(append_key.shape[2]),
        value_block=_power_of_two(append_value.shape[2]),
        aligned=_aligned(append_key, k_cache) and _aligned(append_value, v_cache),
    )
    choice = room.append(problem, append_key.device)
    rows = append_key, append_value, _int32(batch_indices), _int32(positions)
    choice.run(*rows, k_cache, v_cache, _int32(kv_indices), _int32(kv_indptr))


@custom_op("flashinfer::append_quantised", mutates_args=("k_cache", "v_cache", "k_factors", "v_factors"))
def _append_quantised(
    key: torch.Tensor,
    value: torch.Tensor,
    tables: list[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_factors: torch.Tensor,
    v_factors: torch.Tensor | None,
    scales: list[float],
) -> None:
    """Keys in NVFP4, values too, or in FP8 where they have no factors, which is MLA."""
    if v_factors is None:
        key_name, value_name = "append_ckv", "append_kpe"
        k_name, v_name, factors_name = "ckv_cache", "kpe_cache", "ckv_sf_cache"
    else:
        key_name, value_name = "append_key", "append_value"
        k_name, v_name, factors_name = "paged_kv_cache", "paged_kv_cache", "kv_cache_sf"
    indices = dict(zip(("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"), tables))
    same_device(**{key_name: key, value_name: value}, **indices)
    same_device(**{key_name: key, k_name: k_cache, factors_name: k_factors})
    same_device(**{key_name: key, v_name: v_cache, factors_name: v_factors})
    require(key.dim() == 3, key_name, tuple(key.shape), "[nnz, num_kv_heads, head_dim]")
    require(key.dtype in (torch.bfloat16, torch.float16), key_name, key.dtype, "bfloat16, float16")
    require(key.shape[2] % 16 == 0, key_name, tuple(key.shape), "a head_dim that is a multiple of 16")
    require(value.dtype == key.dtype, value_name, value.dtype, f"{key.dtype}, the dtype of {key_name}")
    nnz, heads, dim = key.shape
    value_dim = value.shape[2] if value.dim() == 3 else 0
    fits = value.dim() == 3 and value.shape[:2] == (nnz, heads) and (v_factors is None or value_dim % 16 == 0)
    require(fits, value_name, tuple(value.shape), f"[{nnz}, {heads}, dim], dim a multiple of 16 in NVFP4")
    where = (*k_cache.shape[:2], heads)
    widths = {"k": (k_name, k_cache, dim // 2), "kf": (factors_name, k_factors, dim // 16)}
    widths["v"] = v_name, v_cache, value_dim if v_factors is None else value_dim // 2
    if v_factors is not None:
        widths["vf"] = factors_name, v_factors, value_dim // 16
    for name, cache, width in widths.values():
        shape = (*where, width)
        require(cache.shape == shape, name, tuple(cache.shape), f"{shape}: pages, slots, heads, width")
        require(cache.dtype == torch.uint8, name, cache.dtype, "uint8")
    for name, tensor in indices.items():
        lengths = {"batch_indices": nnz, "positions": nnz, "kv_last_page_len": len(indices["kv_indptr"]) - 1}
        check_vector(name, tensor, lengths.get(name))
    if key.numel() + value.numel() == 0:
        return
    if not key.is_cuda or env.DEBUG.is_on():
        check_page_table(indices, k_cache.shape[0], k_cache.shape[1])
    problem = room.Append(
        dtype=dtype_name(key.dtype),
        key_block=max(_power_of_two(dim), 16),
        value_block=max(_power_of_two(value_dim), 16),
        aligned=dim % 32 == value_dim % 32 == 0 and is_aligned(key, value, k_cache, v_cache),
        key_form="nvfp4",
        value_form="fp8e4nv" if v_factors is None else "nvfp4",
    )
    quantised = room.Quantised(*scales, k_factors, v_factors)
    batch_indices, positions, kv_indices, kv_indptr, _ = (_int32(x) for x in tables)
    tensors = key, value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr
    room.append(problem, key.device).run(*tensors, quantised)


@custom_op("flashinfer::get_batch_indices_positions", mutates_args=("batch_indices", "positions"))
def _batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    check_vector("append_indptr", append_indptr)
    check_vector("seq_lens", seq_lens, append_indptr.shape[0] - 1)
    same_device(append_indptr=append_indptr, seq_lens=seq_lens, batch_indices=batch_indices, positions=positions)
    nnz = positions.shape[0]
    if not append_indptr.is_cuda or env.DEBUG.is_on():
        indptr_values("append_indptr", append_indptr, nnz, "nnz", sliced=True)
        before = seq_lens - append_indptr.diff()
        negative = (before < 0).nonzero().flatten().tolist()
        require(not negative, "seq_lens", f"fewer tokens than are appended in requests {negative}", "at least as many")
    if nnz == 0:
        return
    choice = room.positions(room.Positions(), positions.device)
    choice.run(_int32(append_indptr), _int32(seq_lens), batch_indices, positions)


@custom_op("flashinfer::get_seq_lens", mutates_args=("out",))
def _seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    check_vector("kv_indptr", kv_indptr)
    check_vector("kv_last_page_len", kv_last_page_len, kv_indptr.shape[0] - 1)
    same_dtype = kv_last_page_len.dtype == kv_indptr.dtype
    require(same_dtype, "kv_last_page_len", kv_last_page_len.dtype, f"{kv_indptr.dtype}, the dtype of kv_indptr")
    same_device(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    if out.numel() == 0:
        return
    choice = room.seq_lens(room.SeqLens(dtype_name(out.dtype)), out.device)
    choice.run(kv_indptr.contiguous(), kv_last_page_len.contiguous(), out, page_size)


def _check_rows(append_key, append_value, k_cache, v_cache) -> None:
    """Shapes and dtypes; messages are made only when wanted, for this is on the path of every launch."""
    for name, rows, cache in (("append_key", append_key, k_cache), ("append_value", append_value, v_cache)):
        if rows.dim() != 3 or rows.shape[1:] != cache.shape[2:]:
            heads, dim = cache.shape[2:]
            allowed = f"[nnz, {heads}, {dim}], as the cache has heads and dimensions"
            require(False, name, tuple(rows.shape), allowed)
        if rows.dtype != cache.dtype:
            require(False, name, rows.dtype, f"{cache.dtype}, the dtype of the cache")
    if append_value.shape[0] != append_key.shape[0]:
        require(False, "append_value", tuple(append_value.shape), f"{append_key.shape[0]} tokens, as append_key has")
    if append_value.dtype != append_key.dtype:
        require(False, "append_value", append_value.dtype, f"{append_key.dtype}, the dtype of append_key")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        allowed = f"{tuple(k_cache.shape[:3])}, the pages, slots and heads of the k cache"
        require(False, "paged_kv_cache", f"values of {tuple(v_cache.shape[:3])}", allowed)
    require(k_cache.shape[1] > 0, "paged_kv_cache", "pages of no token", "a page size of 1 or more")


def _scales(**scales: float) -> list[float]:
    numbers = []
    for name, scale in scales.items():
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            scale = scale.item()
        fits = isinstance(scale, (int, float)) and 0 < scale < float("inf")
        require(fits, name, repr(scale), "a finite number above 0")
        numbers.append(float(scale))
    return numbers


def _bytes(name: str, cache: torch.Tensor) -> torch.Tensor:
    allowed = cache.dtype in (torch.uint8, torch.float8_e4m3fn)
    require(allowed, name, cache.dtype, "uint8, float8_e4m3fn")
    return cache.view(torch.uint8)


def _int32(index: torch.Tensor) -> torch.Tensor:
    return index.to(torch.int32).contiguous()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _aligned(rows: torch.Tensor, cache: torch.Tensor) -> bool:
    return rows.shape[-1] * rows.element_size() % 16 == 0 and is_aligned(rows, cache)

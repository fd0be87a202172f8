"""Rotary position embedding into FP8, and into the pages of a KV cache."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.arguments import checked, named
from flashinfer._core.backends import variants_of
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.literals import KvLayout
from flashinfer.ops import rope as room
from flashinfer.ops.kv_layout import check_layout, paged_views
from flashinfer.ops.page_table import check_page_table, check_vector
from flashinfer.rope._checks import check_cache, check_positions, check_within_cache

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@checked
def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys and quantise them to FP8, one launch: ``fp8(rope(x) * scale)``.

    A head comes in two tensors, the elements that are rotated and those that are not, as MLA has them; the second may
    be absent.

    Parameters
    ----------
    q_rope : torch.Tensor
        [nnz, num_qo_heads, rope_dim]; bfloat16, float16 or float32, any strides.
    k_rope : torch.Tensor
        [nnz, num_kv_heads, rope_dim], or [nnz, rope_dim] for the one head of MLA; dtype of q_rope, any strides.
    q_nope : torch.Tensor or None
        [nnz, num_qo_heads, any], what is not rotated, in the dtype of q_rope; None is a width of 0.
    k_nope : torch.Tensor or None
        [nnz, num_kv_heads, any] or [nnz, any], with as many axes as k_rope, in the dtype of q_rope; None is a width
        of 0.
    cos_sin_cache : torch.Tensor
        [max_position, rope_dim], float32: cosines of the rope_dim / 2 pairs, then their sines.
    pos_ids : torch.Tensor
        [nnz], int32 or int64: the row of the cache for each token.
    is_neox : bool
        True: element j is paired with element ``j + rope_dim / 2``. False: elements 2j and 2j + 1.
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2; by default that of the first result given, or float8_e4m3fn.
    quant_scale_q, quant_scale_kv : float
        Queries and keys are multiplied by them before they are rounded.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : torch.Tensor, optional
        Receive the results; shapes of the inputs, in quantize_dtype, any strides. They may be slices of one tensor.
    enable_pdl : bool
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself: small launches, where the GPU has it (compute capability 9.0 and above). It has no effect on
        results.
    backend : str
        "cuda", which is "auto", or another name that `flashinfer explain` knows; all give the same result.

    Returns
    -------
    (torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor)
        q_rope_out, k_rope_out, q_nope_out and k_nope_out, or new tensors; for an absent input, one of width 0. Computed
        in float32 and rounded once, to nearest even; what is beyond the format's largest value becomes that.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above; on the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits
        for the device), also a position outside the cache. On a GPU without FLASHINFER_DEBUG such a token's rotated
        elements become NaN.

    References
    ----------
    Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864; OCP 8-bit Floating Point Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> angles = torch.arange(2.0)[:, None] * torch.tensor([1.0, 0.01])
    >>> cache, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.tensor([0, 1])
    >>> q_rope, k_rope, q_nope, k_nope = (torch.ones(2, 2, dim).half() for dim in (4, 4, 8, 8))
    >>> q, k, *others = flashinfer.rope.rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cache, positions)
    >>> q.dtype, q.shape, others[0].shape
    (torch.float8_e4m3fn, torch.Size([2, 2, 4]), torch.Size([2, 2, 8]))
    """
    outs = {"q_rope_out": q_rope_out, "k_rope_out": k_rope_out, "q_nope_out": q_nope_out, "k_nope_out": k_nope_out}
    dtype = _fp8_dtype(quantize_dtype, outs.values())
    _check_axes(q_rope, k_rope)
    q_nope = q_rope[..., :0] if q_nope is None else q_nope
    k_nope = k_rope[..., :0] if k_nope is None else k_nope
    results = []
    for (name, out), x in zip(outs.items(), (q_rope, k_rope, q_nope, k_nope)):
        results.append(_result(name, out, x, dtype))
    inputs = [q_rope, _heads("k_rope", k_rope, k_rope), q_nope, _heads("k_nope", k_nope, k_rope)]
    outs = results[0], _heads("k_rope_out", results[1], k_rope), results[2], _heads("k_nope_out", results[3], k_rope)
    numbers = [float(quant_scale_q), float(quant_scale_kv), float(not is_neox)]
    q_out, k_out, q_rest, k_rest = _bytes(outs)
    _rope_quantize(inputs, cos_sin_cache, pos_ids, numbers, q_out, k_out, q_rest, k_rest, dtype_name(dtype), backend,
                   bool(enable_pdl))  # fmt: skip
    return tuple(results)


@checked
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rope_quantize_fp8` of multi-head latent attention, whose keys have one head.

    Parameters
    ----------
    q_rope, q_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv, q_rope_out
        As in `rope_quantize_fp8`.
    k_rope_out, q_nope_out, k_nope_out, enable_pdl
        As in `rope_quantize_fp8`.
    k_rope, k_nope : torch.Tensor
        [nnz, rope_dim] and [nnz, any], in the dtype of q_rope.

    Returns
    -------
    tuple of four torch.Tensor
        q_rope, k_rope, q_nope and k_nope as FP8 codes.

    Raises
    ------
    ValueError
        As `rope_quantize_fp8` raises it.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1, https://arxiv.org/abs/2405.04434

    Examples
    --------
    >>> import torch, flashinfer
    >>> angles = torch.arange(2.0)[:, None] * torch.tensor([1.0, 0.01])
    >>> cache, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.tensor([0, 1])
    >>> q_rope, k_rope, q_nope, k_nope = torch.ones(2, 8, 4), torch.ones(2, 4), torch.ones(2, 8, 16), torch.ones(2, 16)
    >>> parts = (x.half() for x in (q_rope, k_rope, q_nope, k_nope))
    >>> [tuple(x.shape) for x in flashinfer.rope.mla_rope_quantize_fp8(*parts, cache, positions)]
    [(2, 8, 4), (2, 4), (2, 8, 16), (2, 16)]
    """
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip


@checked
@named(k_rope_cache="paged_kv_cache", k_nope_cache="paged_kv_cache", v_cache="paged_kv_cache")
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: KvLayout = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise queries and keys to FP8, and write keys and values into a paged cache, one launch.

    Queries as in `rope_quantize_fp8`; keys and values go where `append_paged_kv_cache` puts them.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quant_scale_q, enable_pdl
        As in `rope_quantize_fp8`.
    v : torch.Tensor or None
        [nnz, num_kv_heads, value_dim] in the dtype of q_rope; None for MLA, whose values are k_nope.
    paged_kv_cache : (torch.Tensor, torch.Tensor)
        With values: keys [max_num_pages, page_size, num_kv_heads, rope_dim + width of k_nope] (NHD), rotated elements
        first, and values [max_num_pages, page_size, num_kv_heads, value_dim]; for "HND" the second and third axis are
        exchanged. MLA: [max_num_pages, page_size, width of k_nope] of k_nope, and [max_num_pages, page_size, rope_dim]
        of k_rope. float8, any strides.
    kv_indices, kv_indptr, batch_indices, positions : torch.Tensor
        The page table and the place of each token, as in `append_paged_kv_cache`. A token with a negative batch index
        or position is padding: its query is written, its key and value are not.
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2; by default that of the cache, which it has to be.
    quant_scale_kv : float
        Keys and values are multiplied by it before they are rounded.
    page_size : int
        Tokens of a page; that of the cache.
    kv_layout : str
        "NHD" or "HND"; MLA's cache is the same in both.
    q_rope_out, q_nope_out : torch.Tensor, optional
        Receive the queries; shapes of the inputs, in quantize_dtype, any strides.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        q_rope_out and q_nope_out, or new tensors.

    Raises
    ------
    ValueError
        A shape, dtype, device, layout or value other than the above; and the errors of `append_paged_kv_cache` and
        `rope_quantize_fp8` for values of tables and positions.

    References
    ----------
    Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864; Kwon et al., Efficient Memory Management for Large
    Language Model Serving with PagedAttention, 2023, https://arxiv.org/abs/2309.06180

    Examples
    --------
    >>> import torch, flashinfer
    >>> q_rope, k_rope, v = torch.ones(2, 4, 8).half(), torch.ones(2, 2, 8).half(), torch.ones(2, 2, 16).half()
    >>> angles, at = torch.zeros(2, 4), torch.arange(2).int()
    >>> cache = [torch.zeros(3, 16, 2, dim).to(torch.float8_e4m3fn) for dim in (8, 16)]
    >>> table = torch.tensor([1]).int(), torch.tensor([0, 1]).int(), torch.zeros(2).int(), at
    >>> q, _ = flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(
    ...     q_rope, k_rope, None, None, v, torch.cat((angles.cos(), angles.sin()), -1), at, tuple(cache), *table)
    >>> q.dtype, cache[1][1, :2].float().sum().item()
    (torch.float8_e4m3fn, 64.0)
    """
    check_layout(kv_layout)
    dtype = _fp8_dtype(quantize_dtype, (*paged_kv_cache, q_rope_out, q_nope_out))
    _check_axes(q_rope, k_rope)
    mla = k_rope.dim() == 2
    allowed = "None where k_rope has two axes (MLA), else a tensor"
    require(mla == (v is None), "v", "None" if v is None else "a tensor", allowed)
    q_nope = q_rope[..., :0] if q_nope is None else q_nope
    k_nope = k_rope[..., :0] if k_nope is None else k_nope
    keys = _heads("k_rope", k_rope, k_rope), _heads("k_nope", k_nope, k_rope)
    rope_dim, rest = k_rope.shape[-1], k_nope.shape[-1]
    if v is None:
        for cache in paged_kv_cache:
            require(cache.dim() == 3, "paged_kv_cache", tuple(cache.shape), "[max_num_pages, page_size, width] for MLA")
        k_nope_cache, k_rope_cache = caches = [cache.unsqueeze(2) for cache in paged_kv_cache]
        widths, v_cache = (rest, rope_dim), None
    else:
        k_cache, v_cache = caches = paged_views(paged_kv_cache, kv_layout)
        require(v.dim() == 3, "v", tuple(v.shape), "[nnz, num_kv_heads, value_dim]")
        k_rope_cache, k_nope_cache = k_cache[..., :rope_dim], k_cache[..., rope_dim:]
        widths = (rope_dim + rest, v.shape[-1])
    given = tuple(cache.shape[-1] for cache in paged_kv_cache)
    require(given == widths, "paged_kv_cache", f"widths {given}", f"{widths}")
    pages, size = caches[0].shape[:2]
    for cache in caches:
        fits = cache.shape[:3] == (pages, size, keys[0].shape[1])
        require(fits, "paged_kv_cache", tuple(cache.shape), f"{pages} pages of {size} tokens, heads of k_rope")
    require(page_size == size, "page_size", page_size, f"{size}, that of paged_kv_cache")
    results = [_result("q_rope_out", q_rope_out, q_rope, dtype), _result("q_nope_out", q_nope_out, q_nope, dtype)]
    numbers = [float(quant_scale_q), float(quant_scale_kv), float(not is_neox)]
    tables = [batch_indices, positions, kv_indices, kv_indptr]
    q_out, q_rest, k_to, k_rest_to, v_to = _bytes((*results, k_rope_cache, k_nope_cache, v_cache))
    heads = [q_rope, keys[0], q_nope, keys[1]]
    pdl = bool(enable_pdl)
    _rope_quantize_append(heads, v, cos_sin_cache, pos_ids, tables, numbers, q_out, q_rest, k_to, k_rest_to, v_to,
                          dtype_name(dtype), pdl=pdl)  # fmt: skip
    return results[0], results[1]


def _check_axes(q_rope: torch.Tensor, k_rope: torch.Tensor) -> None:
    require(q_rope.dim() == 3, "q_rope", tuple(q_rope.shape), "[nnz, num_qo_heads, rope_dim]")
    require(k_rope.dim() in (2, 3), "k_rope", tuple(k_rope.shape), "[nnz, heads, rope_dim] or [nnz, rope_dim]")


def _fp8_dtype(wanted, given) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in given if tensor is not None]
    dtype = wanted or (dtypes[0] if dtypes else torch.float8_e4m3fn)
    require(dtype in _FP8, "quantize_dtype", dtype, "float8_e4m3fn, float8_e5m2")
    require(all(d == dtype for d in dtypes), "quantize_dtype", dtype, f"{dtypes[:1]}, the dtype of what receives it")
    return dtype


def _result(name, out, x, dtype) -> torch.Tensor:
    if out is None:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    require(out.shape == x.shape, name, tuple(out.shape), f"{tuple(x.shape)}, as the input")
    return out


def _bytes(tensors) -> list:
    """Codes are written as bytes: not every architecture has each float8, and torch.compile few operations of them."""
    return [x if x is None else x.view(torch.uint8) for x in tensors]


def _heads(name, x, k_rope) -> torch.Tensor:
    """[nnz, heads, width]; what is beside a k_rope of two axes has two as well."""
    require(x.dim() == k_rope.dim(), name, tuple(x.shape), f"{k_rope.dim()} axes, as k_rope has")
    return x.unsqueeze(1) if x.dim() == 2 else x


@custom_op("flashinfer::rope_quantize_fp8", mutates_args=("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"))
def _rope_quantize(
    heads: list[torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    numbers: list[float],
    q_rope_out: torch.Tensor,
    k_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    k_nope_out: torch.Tensor,
    format: str,
    backend: str,
    pdl: bool,
) -> None:
    """heads : q_rope, k_rope, q_nope, k_nope. numbers : two scales, and 1 where pairs are neighbours. format : of
    the results, which are bytes."""
    q_rope, k_rope, q_nope, k_nope = heads
    q, k = room.Heads(q_rope, q_nope, q_rope_out, q_nope_out), room.Heads(k_rope, k_nope, k_rope_out, k_nope_out)
    _run(q, k, None, cos_sin_cache, pos_ids, numbers, None, format, pdl, backend)


@custom_op(
    "flashinfer::rope_quantize_fp8_append_paged_kv_cache",
    mutates_args=("q_rope_out", "q_nope_out", "k_rope_cache", "k_nope_cache", "v_cache"),
)
def _rope_quantize_append(
    heads: list[torch.Tensor],
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    tables: list[torch.Tensor],
    numbers: list[float],
    q_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    k_rope_cache: torch.Tensor,
    k_nope_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    format: str,
    *,
    pdl: bool,
) -> None:
    """heads, numbers, format : as above. tables : those of the room's Pages."""
    q_rope, k_rope, q_nope, k_nope = heads
    q, k = room.Heads(q_rope, q_nope, q_rope_out, q_nope_out), room.Heads(k_rope, k_nope, k_rope_cache, k_nope_cache)
    values = None if v is None or v_cache is None else room.Heads(v, None, v_cache, None)
    _run(q, k, values, cos_sin_cache, pos_ids, numbers, tables, format, pdl)


def _run(q, k, v, cos_sin_cache, pos_ids, numbers, tables, format, pdl, backend="cuda") -> None:
    _check_heads(q, k, v)
    rotary_dim = check_cache(cos_sin_cache, q.rope)
    require(rotary_dim == q.rope.shape[2], "cos_sin_cache", tuple(cos_sin_cache.shape), f"rows of {q.rope.shape[2]}")
    check_positions("pos_ids", pos_ids, q.rope)
    if tables is not None:
        tables = _check_tables(tables, k.rope_out, len(q.rope))
    check_within_cache("pos_ids", pos_ids, cos_sin_cache)
    named = {} if backend in ("auto", "cuda") else {"backend": backend}
    if named:
        variants_of(backend)
    if len(q.rope) == 0 or q.rope.shape[1] + k.rope.shape[1] == 0:
        return
    # A part that is not rotated and has no columns counts as absent.
    q, k = (x if x.rest.shape[2] else x._replace(rest=None, rest_out=None) for x in (q, k))
    cache = rows_of(cos_sin_cache)
    given = [x for x in (*q, *k, *(v or ())) if x is not None]
    widths = [x.shape[-1] for x in given]
    *scales, interleave = numbers
    problem = room.Quantize(
        dtype=dtype_name(q.rope.dtype),
        out_dtype=format,
        rotary_dim=rotary_dim,
        q_rest=0 if q.rest is None else q.rest.shape[2],
        k_rest=0 if k.rest is None else k.rest.shape[2],
        value_dim=0 if v is None else v.rope.shape[2],
        interleave=bool(interleave),
        position_dtype=dtype_name(pos_ids.dtype),
        append=tables is not None,
        pdl=pdl,
        aligned=all(width % 16 == 0 for width in widths) and is_aligned(cache, *given),
    )
    pages = () if tables is None else (room.Pages(*tables),)
    op = room.rope_quantize(problem, q.rope.device, **named)
    op.run(q, k, v, pos_ids.contiguous(), cache, *scales, *pages)


def _check_heads(q, k, v) -> None:
    require_fit("q_rope", q.rope, q.rope.dim() == 3, "[nnz, num_qo_heads, rope_dim]", *_DTYPES)
    tokens, heads, rope_dim = q.rope.shape
    shapes = {"k_rope": (k.rope, k.rope.shape[1], rope_dim), "q_nope": (q.rest, heads, None)}
    shapes["k_nope"] = k.rest, k.rope.shape[1], None
    if v is not None:
        shapes["v"] = v.rope, k.rope.shape[1], None
    for name, (x, count, width) in shapes.items():
        fits = x.dim() == 3 and x.shape[:2] == (tokens, count) and width in (None, x.shape[2])
        require(fits, name, tuple(x.shape), f"[{tokens}, {count}, {'any' if width is None else width}]")
        require(x.dtype == q.rope.dtype, name, x.dtype, f"{q.rope.dtype}, the dtype of q_rope")
    outs = {"q_rope_out": q.rope_out, "q_nope_out": q.rest_out, "k_rope_out": k.rope_out, "k_nope_out": k.rest_out}
    same_device(q_rope=q.rope, **{name: x for name, (x, *_) in shapes.items()}, **outs)
    if v is not None:
        same_device(q_rope=q.rope, paged_kv_cache=v.rope_out)


def _check_tables(tables, cache, tokens: int) -> list[torch.Tensor]:
    """The index tensors, checked, as int32."""
    named = dict(zip(room.Pages._fields, tables))
    for name, tensor in named.items():
        check_vector(name, tensor, tokens if name in ("batch_indices", "positions") else None)
    same_device(paged_kv_cache=cache, **named)
    if not cache.is_cuda or env.DEBUG.is_on():
        check_page_table(named, cache.shape[0], cache.shape[1])
    return [tensor.to(torch.int32).contiguous() for tensor in tables]

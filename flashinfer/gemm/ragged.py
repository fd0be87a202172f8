"""Products of batches whose entries have rows of any number: by count, by offset, or by a number in each row."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_fit
from flashinfer._core.literals import Backend
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import grouped
from flashinfer.gemm.grouped import Factors, _blocks, _check_indptr, _groupwise
from flashinfer.gemm.groupwise import granularity

_HALVES = (torch.bfloat16, torch.float16)
_BACKENDS = ("cutile", "auto")
# block_scale_type: how a and b are read, and their scale factors.
_SCALED = {
    "nvfp4": (given.fp4, given.fp4, Factors("ue4m3", 16)),
    "mxfp4": (given.fp4, given.fp4, Factors("ue8m0", 32)),
    "mxfp8": (given.fp8, given.fp8, Factors("ue8m0", 32)),
    "mixed": (given.fp8, given.fp4, Factors("ue8m0", 32)),
}


@checked
@answering("cutile")
def masked_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    masked_m: torch.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: torch.Tensor | None = None,
    backend: Backend = "cutile",
) -> torch.Tensor:
    """``a[q, : masked_m[q]] @ b[q]`` for each entry q of a batch.

    Parameters
    ----------
    a : torch.Tensor
        [Q, M, K], or [Q, K, M] with `transpose_a`; bfloat16 or float16, the last dimension contiguous. Transposed, it
        is copied.
    b : torch.Tensor
        [Q, K, N], or [Q, N, K] with `transpose_b`; dtype of a, the last dimension contiguous.
    masked_m : torch.Tensor
        [Q] int32, on the device: how many rows of each entry count. It is read by the kernel alone.
    transpose_a, transpose_b : bool
        Which of the two shapes a and b have.
    out : torch.Tensor, optional
        [Q, M, N] in the dtype of a, rows contiguous.
    backend : str
        "cutile" or "auto": one result. Or a variant's name.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [Q, M, N]. Summed in float32 and rounded once. Rows from masked_m[q] on are not written.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.randn(2, 4, 64, dtype=torch.bfloat16), torch.randn(2, 64, 32, dtype=torch.bfloat16)
    >>> flashinfer.gemm.masked_bmm(a, b, torch.tensor([4, 1], dtype=torch.int32)).shape
    torch.Size([2, 4, 32])
    """
    given.check_matrix("a", a, 3, _HALVES)
    given.check_matrix("b", b, 3, (a.dtype,))
    a = a.mT.contiguous() if transpose_a else a
    k, n = b.shape[:0:-1] if transpose_b else b.shape[1:]
    given.same("b", k, "a", a.shape[2], "K")
    given.same("b", len(b), "a", len(a), "entries")
    require_fit("masked_m", masked_m, masked_m.shape == a.shape[:1], f"[{len(a)}], the entries of a", torch.int32)
    out = given.result(out, (*a.shape[:2], n), a.dtype, a)
    return _unscaled(a, b, out, masked_m, "counts", not transpose_b, a.shape[1], backend)


@checked
@answering("cutile")
def ragged_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    max_m: int,
    max_m_device: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = True,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "cutile",
) -> torch.Tensor:
    """``a[m_indptr[q] : m_indptr[q + 1]] @ b[q].T`` for each entry q of a batch.

    Parameters
    ----------
    a : torch.Tensor
        [M, K], the rows of all entries, or [K, M] with `transpose_a`; bfloat16 or float16, the last dimension
        contiguous. Transposed, it is copied.
    b : torch.Tensor
        [Q, N, K], or [Q, K, N] without `transpose_b`; dtype of a, the last dimension contiguous.
    m_indptr : torch.Tensor
        [Q + 1] int32, on the device: not decreasing, up to M. It is read by the kernel alone.
    max_m : int
        About the most rows of an entry; it chooses the tile, and has no effect on which rows are computed.
    max_m_device : torch.Tensor, optional
        The same on the device, of one element; it has no effect.
    transpose_a, transpose_b, backend
        As in `masked_bmm`.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default that of a.

    Returns
    -------
    torch.Tensor
        [M, N]. Summed in float32 and rounded once. Rows of no entry are not written.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 64).bfloat16(), torch.ones(2, 32, 64).bfloat16()
    >>> flashinfer.gemm.ragged_bmm(a, b, torch.tensor([0, 1, 3]).int(), 2)[0, 0]
    tensor(64., dtype=torch.bfloat16)
    """
    given.check_matrix("a", a, 2, _HALVES)
    given.check_matrix("b", b, 3, (a.dtype,))
    _check_most(max_m, max_m_device)
    a = a.mT.contiguous() if transpose_a else a
    k, n = b.shape[:0:-1] if transpose_b else b.shape[1:]
    given.same("b", k, "a", a.shape[1], "K")
    _check_indptr(m_indptr, b)
    out = given.result(None, (len(a), n), out_dtype or a.dtype, a)
    return _unscaled(a, b, out, m_indptr, "offsets", not transpose_b, max_m, backend)


@checked
@answering("cutile")
def ragged_block_scaled_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    max_m: int,
    max_m_device: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = True,
    out_dtype: torch.dtype | None = None,
    segment_alignment: int = 128,
    backend: Backend = "cutile",
) -> torch.Tensor:
    """`ragged_bmm` in FP8 with float32 scales for blocks.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float8_e4m3fn or float8_e5m2, rows contiguous.
    b : torch.Tensor
        [Q, N, K]; the same.
    a_scale : torch.Tensor
        float32 [M, K / gk], what the codes of a row are multiplied with; gk is what b_scale has.
    b_scale : torch.Tensor
        float32 [Q, N / gn, K / gk]. gk is a power of two, 32 or more; gn and gk divide N and K.
    m_indptr, max_m, max_m_device, backend
        As in `ragged_bmm`, as are errors.
    transpose_a, transpose_b : bool
        Only False, and only True.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default bfloat16.
    segment_alignment : int
        What the caller promises that offsets are multiples of, 1 or more. Any offsets are taken.

    Returns
    -------
    torch.Tensor
        [M, N]. Each gk of K are summed, scaled and added in float32. Rows of no entry are not written.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> scales = torch.ones(3, 1), torch.ones(2, 1, 1)
    >>> flashinfer.gemm.ragged_block_scaled_bmm(a, b, *scales, torch.tensor([0, 1, 3]).int(), 2)[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    require(not transpose_a, "transpose_a", transpose_a, "False")
    require(transpose_b, "transpose_b", transpose_b, "True")
    require(segment_alignment >= 1, "segment_alignment", segment_alignment, "1 or more")
    _check_most(max_m, max_m_device)
    given.fp8("a", a), given.fp8("b", b, 3)
    _check_indptr(m_indptr, b)
    (_, n, k), shape = b.shape, tuple(b_scale.shape)
    fits = len(shape) == 3 and all(shape) and n % shape[1] == 0 and k % shape[2] == 0
    require(fits, "b_scale", shape, f"[{len(b)}, N / gn, K / gk] for N = {n} and K = {k}")
    mnk = granularity((1, n // shape[1], k // shape[2]))
    variant = given.variant_of(backend, _BACKENDS)
    return _groupwise(a, b, a_scale, b_scale, "offsets", m_indptr, None, out_dtype, mnk, "K", max_m, variant)


@checked
@answering("cutile")
def masked_scaled_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    block_scale_type: str,
    max_m_device: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = True,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "cutile",
) -> torch.Tensor:
    """``a[q, : masked_m[q]] @ b[q].T`` for each entry q of a batch, in FP8 or FP4 with scale factors for blocks.

    Parameters
    ----------
    a, b : torch.Tensor
        [Q, M, K] and [Q, N, K], rows contiguous: float8_e4m3fn or float8_e5m2, or [Q, ., K / 2] of uint8 with two e2m1
        in a byte. K a multiple of 32; of 16 in "nvfp4".
    a_scale, b_scale : torch.Tensor
        Bytes of any 8-bit dtype and any shape, contiguous, upstream's being [Q, rows / 128, blocks / 4, 2, 256]: for
        each entry the factors of its rows in 128x4 tiles.
    masked_m, backend
        As in `masked_bmm`.
    block_scale_type : str
        "nvfp4": e2m1, an e4m3 factor for 16 elements. "mxfp4": e2m1, a ue8m0 factor for 32. "mxfp8": FP8, the same.
        "mixed": a as in "mxfp8", b as in "mxfp4"; a is not rounded to FP4.
    max_m_device : torch.Tensor, optional
        The largest of masked_m on the device, of one element; it has no effect.
    transpose_a, transpose_b, out_dtype
        As in `ragged_block_scaled_bmm`.

    Returns
    -------
    torch.Tensor
        [Q, M, N]. Summed in float32 and rounded once. Rows from masked_m[q] on are not written.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023

    Examples
    --------
    >>> import torch, flashinfer
    >>> a = torch.ones(2, 4, 64).to(torch.float8_e4m3fn)
    >>> b = torch.ones(2, 8, 64).to(torch.float8_e4m3fn)
    >>> one = torch.full((2, 1, 1, 2, 256), 127, dtype=torch.uint8)  # 2 ** 0
    >>> counts = torch.tensor([4, 1], dtype=torch.int32)
    >>> flashinfer.gemm.masked_scaled_bmm(a, b, one, one, counts, "mxfp8")[1, 0, 0].item()
    64.0
    """
    a, b, factors = _scaled_operands(a, b, block_scale_type, transpose_a, transpose_b, 3)
    _check_most(0, max_m_device)
    (entries, m, _), n = a.shape, b.shape[1]
    given.same("b", len(b), "a", entries, "entries")
    require_fit("masked_m", masked_m, masked_m.shape == (entries,), f"[{entries}], the entries of a", torch.int32)
    blocks = given.blocks_of("a", _elements(a), factors.width)
    a_scale = given.factors("a_scale", a_scale, m, blocks, "128x4", entries)
    b_scale = given.factors("b_scale", b_scale, n, blocks, "128x4", entries)
    out = given.result(None, (entries, m, n), out_dtype, a)
    grouped(
        a, b, a_scale, b_scale, None, out, masked_m, None, "counts", factors.scale, width=factors.width,
        expected=max(m, 1), backend=given.variant_of(backend, _BACKENDS),
    )  # fmt: skip
    return out


@checked
@answering("cutile")
def ragged_scaled_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    max_m: int,
    block_scale_type: str,
    transpose_a: bool = False,
    transpose_b: bool = True,
    static_persistent: bool = True,
    swizzled_layout_a: bool = True,
    a_global_scale: torch.Tensor | None = None,
    b_global_scale: torch.Tensor | None = None,
    backend: Backend = "cutile",
) -> torch.Tensor:
    """``a[m_indptr[q] : m_indptr[q + 1]] @ b[q].T / (a_global_scale * b_global_scale[q])`` for each entry q of a batch.

    Parameters
    ----------
    a : torch.Tensor
        [M, K], the rows of all entries, rows contiguous, in the format that `block_scale_type` names in
        `masked_scaled_bmm`.
    b : torch.Tensor
        [Q, N, K], the same.
    a_scale : torch.Tensor
        Bytes of any 8-bit dtype and any shape, contiguous, upstream's being [M / 128, blocks / 4, 2, 256]: the factors
        of all rows in 128x4 tiles; of more rows too.
    b_scale, transpose_a, transpose_b, backend
        As in `masked_scaled_bmm`.
    m_indptr : torch.Tensor
        [Q + 1] int32, on the device: not decreasing, up to M. It is read by the kernel alone. Upstream wants multiples
        of 128; any are taken.
    max_m : int
        At most the rows of an entry; it has no effect.
    block_scale_type : str
        "nvfp4", "mxfp4", "mxfp8" or "mixed", as in `masked_scaled_bmm`.
    static_persistent : bool
        How upstream schedules its kernel; it has no effect.
    swizzled_layout_a : bool
        Only True.
    a_global_scale : torch.Tensor, optional
        float32, one element: what the values of a were multiplied with before they were quantised.
    b_global_scale : torch.Tensor, optional
        float32 [Q]: the same, of each entry of b.

    Returns
    -------
    torch.Tensor
        [M, N] float32. Rows of no entry are not written.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a = torch.ones(5, 64).to(torch.float8_e4m3fn)
    >>> b = torch.full((2, 8, 32), 0x22, dtype=torch.uint8)  # two e2m1 of 1 in each byte
    >>> one = torch.full((2, 1, 1, 2, 256), 127, dtype=torch.uint8)
    >>> indptr = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flashinfer.gemm.ragged_scaled_bmm(a, b, one[0], one, indptr, 3, "mixed").shape
    torch.Size([5, 8])
    """
    require(swizzled_layout_a, "swizzled_layout_a", swizzled_layout_a, "True")
    _check_most(max_m, None)
    _check_indptr(m_indptr, b)
    a, b, factors = _scaled_operands(a, b, block_scale_type, transpose_a, transpose_b, 2)
    alpha = None
    for name, scale, count in (("a_global_scale", a_global_scale, 1), ("b_global_scale", b_global_scale, len(b))):
        if scale is not None:
            require(scale.dtype == torch.float32, name, scale.dtype, "float32")
            require(scale.numel() == count, name, tuple(scale.shape), f"[{count}]")
            require(scale.device == a.device, name, scale.device, f"{a.device}, where a is")
            alpha = scale.reshape(-1) if alpha is None else alpha * scale.reshape(-1)
    alpha = None if alpha is None else alpha.reciprocal()
    variant = given.variant_of(backend, _BACKENDS)
    return _blocks(a, b, a_scale, b_scale, m_indptr, alpha, None, torch.float32, factors, variant)


def _scaled_operands(a, b, block_scale_type: str, transpose_a: bool, transpose_b: bool, dims: int):
    """a, with `dims` dimensions, and b as bytes of their formats, and what their scale factors are."""
    require(not transpose_a, "transpose_a", transpose_a, "False")
    require(transpose_b, "transpose_b", transpose_b, "True")
    require(block_scale_type in _SCALED, "block_scale_type", repr(block_scale_type), ", ".join(map(repr, _SCALED)))
    read_a, read_b, factors = _SCALED[block_scale_type]
    a, b = read_a("a", a, dims), read_b("b", b, 3)
    given.same("b", _elements(b), "a", _elements(a), "K")
    return a, b, factors


def _elements(x: torch.Tensor) -> int:
    """Elements of a row: bytes are two e2m1."""
    return x.shape[-1] * (2 if x.dtype == torch.uint8 else 1)


@checked
@answering()
def group_gemm_fp8_nt_groupwise_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    validate_indices: bool = False,
) -> torch.Tensor:
    """``a[r] @ b[m_indices[r]].T`` for each row r, in e4m3 with float32 scales for blocks, of sorted rows.

    Parameters
    ----------
    a : torch.Tensor
        [M, K] float8_e4m3fn, rows contiguous. K a multiple of 128.
    b : torch.Tensor
        [groups, N, K], the same. N a multiple of 128.
    a_scale, b_scale : torch.Tensor
        float32 [M, K / 128] and [groups, N / 128, K / 128], any strides.
    m_indices : torch.Tensor
        [M] int32, the group of each row. Rows of -1, or of no group, are not written. Any order is computed; next to
        each other, and from a multiple of 128 on, rows of a group are computed once.
    scale_granularity_mnk : tuple of int
        Only (1, 128, 128).
    out : torch.Tensor, optional
        [M, N] bfloat16, rows contiguous.
    out_dtype : torch.dtype, optional
        Only bfloat16. Not read where `out` is given.
    validate_indices : bool
        Read m_indices on the host, and refuse what is not sorted, not a group, or begins elsewhere than at a multiple
        of 128.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N].

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above; with `validate_indices` indices too.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> rows, scales = torch.tensor([0, 1, 1]).int(), (torch.ones(3, 1), torch.ones(2, 1, 1))
    >>> flashinfer.gemm.group_gemm_fp8_nt_groupwise_contiguous(a, b, *scales, rows)[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    for name, x in (("a", a), ("b", b)):
        require(x.dtype == torch.float8_e4m3fn, name, x.dtype, "float8_e4m3fn")
        require(x.shape[-1] % 128 == 0, name, tuple(x.shape), "K a multiple of 128")
    require(b.dim() == 3 and b.shape[1] % 128 == 0, "b", tuple(b.shape), "[groups, N, K] with N a multiple of 128")
    mnk = tuple(scale_granularity_mnk)
    require(mnk == (1, 128, 128), "scale_granularity_mnk", mnk, "(1, 128, 128)")
    require(out is not None or out_dtype in (None, torch.bfloat16), "out_dtype", out_dtype, "torch.bfloat16")
    require(out is None or out.dtype == torch.bfloat16, "out", None if out is None else out.dtype, "torch.bfloat16")
    require_fit("m_indices", m_indices, m_indices.shape == a.shape[:1], f"[{a.shape[0]}], the rows of a", torch.int32)
    if validate_indices:
        _check_sorted(m_indices.tolist(), len(b))
    return _groupwise(a, b, a_scale, b_scale, "indices", m_indices, out, torch.bfloat16, mnk, "K", None, "auto")


def _check_sorted(indices: list[int], groups: int) -> None:
    for row, index in enumerate(indices):
        require(0 <= index < groups, "m_indices", f"{index} in row {row}", f"0 to {groups - 1}")
        before = indices[row - 1] if row else index
        require(before <= index, "m_indices", f"{index} behind {before} in row {row}", "sorted indices")
        require(before == index or row % 128 == 0, "m_indices", f"{index} from row {row} on", "multiples of 128 rows")


def _check_most(max_m: int, max_m_device: torch.Tensor | None) -> None:
    require(max_m >= 0, "max_m", max_m, "0 or more")
    if max_m_device is not None:
        require(max_m_device.numel() == 1, "max_m_device", tuple(max_m_device.shape), "one element")


def _unscaled(a, b, out, groups, kind: str, columns_first: bool, expected: int, backend: str) -> torch.Tensor:
    grouped(
        a, b, None, None, None, out, groups, None, kind, columns_first=columns_first, expected=max(int(expected), 1),
        backend=given.variant_of(backend, _BACKENDS),
    )  # fmt: skip
    return out

"""Products in groups, as mixtures of experts and batches of adapters need them: each group of rows has its weight."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_fit
from flashinfer._core.literals import ScaleMajorMode
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import grouped
from flashinfer.gemm.groupwise import granularity
from flashinfer.ops import layouts
from flashinfer.ops.formats import FACTOR_DTYPES


@checked
@answering("auto", "trtllm", "cutlass")
def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: ScaleMajorMode = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "trtllm",
    segment_alignment: int = 1,
) -> torch.Tensor:
    """``a[m_indptr[g] : m_indptr[g + 1]] @ b[g].T`` for each group g, in FP8 with float32 scales for blocks.

    Parameters
    ----------
    a, scale_granularity_mnk, mma_sm, out, out_dtype
        As in `flashinfer.gemm.gemm_fp8_nt_groupwise`.
    b : torch.Tensor
        [groups, N, K]; the same.
    a_scale, b_scale : torch.Tensor
        float32, what codes are multiplied with. With (gm, gn, gk) the granularity, [ceil(M / gm), ceil(K / gk)] and
        [groups, ceil(N / gn), ceil(K / gk)] for `scale_major_mode` "K", with the last two exchanged for "MN"; any
        strides.
    m_indptr : torch.Tensor
        [groups + 1] int32, on the device: from 0, not decreasing, up to M. Groups may be empty and of any length. Rows
        past the last are not written. It is read by the kernel alone.
    scale_major_mode : str
        "MN" or "K".
    backend : str
        "trtllm", "cutlass" or "auto": one result. Or a variant's name.
    segment_alignment : int
        What the caller promises that offsets are multiples of, 1 or more. Any offsets are taken.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N].

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3, https://arxiv.org/abs/2412.19437

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> groups, scales = torch.tensor([0, 1, 3]).int(), (torch.ones(3, 1), torch.ones(2, 1, 1))
    >>> flashinfer.gemm.group_gemm_fp8_nt_groupwise(a, b, *scales, groups, scale_major_mode="K")[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    require(mma_sm in (1, 2), "mma_sm", mma_sm, "1, 2")
    require(scale_major_mode in ("MN", "K"), "scale_major_mode", scale_major_mode, "'MN', 'K'")
    require(segment_alignment >= 1, "segment_alignment", segment_alignment, "1 or more")
    _check_indptr(m_indptr, b)
    backend = given.variant_of(backend, ("trtllm", "cutlass"))
    mnk = granularity(scale_granularity_mnk)
    return _groupwise(a, b, a_scale, b_scale, "offsets", m_indptr, out, out_dtype, mnk, scale_major_mode, None, backend)


@checked
@answering()
def group_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``a[r] @ b[m_indices[r]].T`` for each row r, in FP8 with float32 scales for blocks.

    Rows of a group next to each other, in any order of groups and of any number, are computed together.

    Parameters
    ----------
    a, scale_granularity_mnk, out, out_dtype
        As in `flashinfer.gemm.gemm_fp8_nt_groupwise`.
    b : torch.Tensor
        [groups, N, K]; the same.
    a_scale, b_scale : torch.Tensor
        float32 [ceil(M / gm), ceil(K / gk)] and [groups, ceil(N / gn), ceil(K / gk)] with (gm, gn, gk) the granularity;
        any strides.
    m_indices : torch.Tensor
        [M] int32. Rows of -1, or of no group, are not written.

    Returns
    -------
    torch.Tensor
        [M, N]. Rows of no group are not written.

    Raises
    ------
    ValueError
        As `group_gemm_fp8_nt_groupwise` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 32, 128).to(torch.float8_e4m3fn)
    >>> rows, scales = torch.tensor([0, 1, 1]).int(), (torch.ones(3, 1), torch.ones(2, 1, 1))
    >>> flashinfer.gemm.group_deepgemm_fp8_nt_groupwise(a, b, *scales, rows)[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    require(m_indices.shape == a.shape[:1], "m_indices", tuple(m_indices.shape), f"{list(a.shape[:1])}, the rows of a")
    require(m_indices.dtype == torch.int32, "m_indices", m_indices.dtype, "int32")
    mnk = granularity(scale_granularity_mnk)
    return _groupwise(a, b, a_scale, b_scale, "indices", m_indices, out, out_dtype, mnk, "K", None, "auto")


@checked
@answering("deepgemm", denied=("cake",))
def batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "deepgemm",
) -> torch.Tensor:
    """``a[g, : masked_m[g]] @ b[g].T`` for each group g, in FP8 with float32 scales for blocks.

    Parameters
    ----------
    a : torch.Tensor
        [groups, M, K]; float8_e4m3fn or float8_e5m2, rows contiguous.
    b : torch.Tensor
        [groups, N, K]; the same.
    a_scale, b_scale : torch.Tensor
        float32 [groups, ceil(M / gm), ceil(K / gk)] and [groups, ceil(N / gn), ceil(K / gk)] with (gm, gn, gk) the
        granularity; any strides.
    masked_m : torch.Tensor
        [groups] int32, on the device: how many rows of each group count. The others are not written.
    expected_m : int
        About how many those are; it chooses the tile, and has no effect on which rows are computed.
    scale_granularity_mnk : tuple of int
        Rows of a, rows of b, and elements of K to a scale. The last is a power of two, 32 or more.
    out : torch.Tensor, optional
        [groups, M, N], rows contiguous.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default bfloat16. Not read where `out` is given.
    backend : str
        "deepgemm" or "auto": one result. Or a variant's name.

    Returns
    -------
    torch.Tensor
        [groups, M, N]. Rows that do not count are not written.

    Raises
    ------
    ValueError
        As `group_gemm_fp8_nt_groupwise` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(2, 4, 128).to(torch.float8_e4m3fn), torch.ones(2, 32, 128).to(torch.float8_e4m3fn)
    >>> counts, scales = torch.tensor([4, 1]).int(), (torch.ones(2, 4, 1), torch.ones(2, 1, 1))
    >>> flashinfer.gemm.batch_deepgemm_fp8_nt_groupwise(a, b, *scales, counts, 3)[1, 0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    require(masked_m.shape == b.shape[:1], "masked_m", tuple(masked_m.shape), f"{list(b.shape[:1])}, the groups of b")
    require(masked_m.dtype == torch.int32, "masked_m", masked_m.dtype, "int32")
    require(expected_m > 0, "expected_m", expected_m, "a positive number")
    backend = given.variant_of(backend, ("deepgemm",))
    mnk = granularity(scale_granularity_mnk)
    return _groupwise(a, b, a_scale, b_scale, "counts", masked_m, out, out_dtype, mnk, "K", expected_m, backend)


@checked
@answering()
def group_gemm_mxfp8_mxfp4_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    mma_sm: int = 1,
    tile_m: int = 128,
    tile_n: int = 128,
    tile_k: int = 128,
    swap_ab: bool = True,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``a[m_indptr[g] : m_indptr[g + 1]] @ b[g].T`` for each group g, of MXFP8 activations and MXFP4 weights.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float8_e4m3fn or float8_e5m2, rows contiguous. K a multiple of 32.
    b : torch.Tensor
        [groups, N, K / 2] uint8, two e2m1 in a byte, rows contiguous.
    a_scale : torch.Tensor
        uint8, ue8m0, in 128x4 tiles, any shape: the factors of group g begin with a tile, at row
        (m_indptr[g] + 127 g) // 128 * 128 of (M + 127 groups) // 128 * 128 or more.
    b_scale : torch.Tensor
        uint8, ue8m0: for each weight its factors in 128x4 tiles, any shape.
    m_indptr : torch.Tensor
        [groups + 1] int32, on the device: from 0, not decreasing, up to M. Groups may be empty and of any length.
    mma_sm, tile_m, tile_n, tile_k, swap_ab
        How upstream tiles its kernel; they have no effect on results, nor on the tiles here.
    out, out_dtype
        As in `group_gemm_fp8_nt_groupwise`, and so are result and errors.

    Returns
    -------
    torch.Tensor
        [M, N] of out_dtype.

    Raises
    ------
    ValueError
        As `group_gemm_fp8_nt_groupwise` raises it.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.full((2, 32, 64), 0x22).byte()  # e2m1 of 1
    >>> ones = torch.full((3 * 128, 4), 127).byte(), torch.full((2, 128, 4), 127).byte()  # 2^0, in 128x4 tiles
    >>> flashinfer.gemm.group_gemm_mxfp8_mxfp4_nt_groupwise(a, b, *ones, torch.tensor([0, 1, 3]).int())[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    require(mma_sm in (1, 2), "mma_sm", mma_sm, "1, 2")
    a = given.fp8("a", a)
    _check_indptr(m_indptr, b)
    b, factors = given.fp4("b", b, 3), Factors("ue8m0", 32, padded=True)
    return _blocks(a, b, a_scale, b_scale, m_indptr, None, out, out_dtype, factors)


group_gemm_mxfp4_nt_groupwise = group_gemm_mxfp8_mxfp4_nt_groupwise


@checked
@answering()
def group_gemm_nvfp4_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    tile_k: int = 128,
    swap_ab: bool = True,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``alpha[g] * a[m_indptr[g] : m_indptr[g + 1]] @ b[g].T`` for each group g, of NVFP4 matrices.

    Parameters
    ----------
    a : torch.Tensor
        [M, K / 2] uint8, two e2m1 in a byte, rows contiguous. K a multiple of 16.
    b : torch.Tensor
        [groups, N, K / 2]; the same.
    a_scale, b_scale : torch.Tensor
        Factors in e4m3, uint8 or float8_e4m3fn, where `group_gemm_mxfp8_mxfp4_nt_groupwise` has them.
    m_indptr, tile_m, tile_n, tile_k, swap_ab, out, out_dtype
        As in `group_gemm_mxfp8_mxfp4_nt_groupwise`.
    alpha : torch.Tensor, optional
        float32 [groups].

    Returns
    -------
    torch.Tensor
        [M, N] of out_dtype.

    Raises
    ------
    ValueError
        As `group_gemm_mxfp8_mxfp4_nt_groupwise` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.full((3, 64), 0x22).byte(), torch.full((2, 32, 64), 0x22).byte()  # e2m1 of 1
    >>> ones = torch.full((3 * 128, 8), 0x38).byte(), torch.full((2, 128, 8), 0x38).byte()  # e4m3 of 1, in 128x4 tiles
    >>> flashinfer.gemm.group_gemm_nvfp4_nt_groupwise(a, b, *ones, torch.tensor([0, 1, 3]).int())[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    a = given.fp4("a", a)
    _check_indptr(m_indptr, b)
    alpha = given.alpha_of(alpha, a, len(b))
    b, factors = given.fp4("b", b, 3), Factors("ue4m3", 16, padded=True)
    return _blocks(a, b, a_scale, b_scale, m_indptr, alpha, out, out_dtype, factors)


def _check_indptr(m_indptr: torch.Tensor, b: torch.Tensor) -> None:
    require(b.dim() == 3, "b", tuple(b.shape), "[groups, N, K]")
    require_fit("m_indptr", m_indptr, m_indptr.shape == (len(b) + 1,), f"[{len(b) + 1}], groups + 1", torch.int32)


def _groupwise(a, b, a_scale, b_scale, kind, groups, out, out_dtype, mnk, major, expected, backend) -> torch.Tensor:
    """Groups of FP8 with float32 scales. expected : rows of a group, or None."""
    a, b = given.fp8("a", a, 3 if kind == "counts" else 2), given.fp8("b", b, 3)
    given.same("b", b.shape[-1], "a", a.shape[-1], "K")
    if kind == "counts":
        given.same("b", b.shape[0], "a", a.shape[0], "groups")
    rows, columns, width = mnk
    blocks = -(-a.shape[-1] // width)
    a_scale = given.scales("a_scale", a_scale, -(-a.shape[-2] // rows), blocks, major, tuple(a.shape[:-2]))
    b_scale = given.scales("b_scale", b_scale, -(-b.shape[1] // columns), blocks, major, (len(b),))
    out = given.result(out, (*a.shape[:-1], b.shape[1]), out_dtype if out is None else None, a)
    grouped(
        a, b, a_scale, b_scale, None, out, groups, None, kind, "fp32", width=width, rows=rows, columns=columns,
        expected=expected or -(-a.shape[-2] // max(len(b), 1)), backend=backend,
    )  # fmt: skip
    return out


class Factors(NamedTuple):
    """scale : format of a byte. width : elements of K to each. padded : those of each group begin with a tile."""

    scale: str
    width: int
    padded: bool = False


def _blocks(a, b, a_scale, b_scale, m_indptr, alpha, out, out_dtype, factors, backend="auto") -> torch.Tensor:
    """Groups of rows of blocks with factors."""
    scale, width, padded = factors
    per_a, per_b = (2 if x.dtype == torch.uint8 else 1 for x in (a, b))
    given.same("b", b.shape[2] * per_b, "a", a.shape[1] * per_a, "K")
    blocks = given.blocks_of("a", a.shape[1] * per_a, width)
    rows = a.shape[0] + 127 * len(b) if padded else -(-a.shape[0] // 128) * 128
    a_scale = _factors_of_rows(a_scale, rows // 128 * 128, blocks)
    b_scale = given.factors("b_scale", b_scale, b.shape[1], blocks, "128x4", len(b))
    out = given.result(out, (a.shape[0], b.shape[1]), out_dtype if out is None else None, a)
    grouped(
        a, b, a_scale, b_scale, alpha, out, m_indptr, None, "offsets", scale, width=width, padded=padded,
        expected=-(-a.shape[0] // max(len(b), 1)), backend=backend,
    )  # fmt: skip
    return out


def _factors_of_rows(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The factors of a in 128x4 tiles, at least those of `rows` rows, flat."""
    require(scale.dtype in FACTOR_DTYPES, "a_scale", scale.dtype, "uint8, float8_e4m3fn, float8_e8m0fnu")
    wide = layouts.padded(1, blocks, "128x4")[1]
    fits = scale.numel() >= rows * wide and scale.numel() % (128 * wide) == 0
    require(fits, "a_scale", tuple(scale.shape), f"{rows} x {wide} factors or more, in whole tiles of 128 rows")
    require(scale.is_contiguous(), "a_scale", f"strides {scale.stride()}", "contiguous")
    return scale.view(torch.uint8).view(-1)

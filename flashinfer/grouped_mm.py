"""Products in groups for mixtures of experts: ``a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer._core.literals import ScaleMajorMode
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import grouped
from flashinfer.gemm.grouped import Factors, _blocks, _check_indptr, _groupwise
from flashinfer.ops import layouts

__all__ = [
    "grouped_mm_bf16",
    "grouped_mm_fp4",
    "grouped_mm_fp8",
    "grouped_mm_mxfp8",
    "moe_gemm_fp8_nt_groupwise",
    "moe_gemm_mxfp8_nt_groupwise",
]


@checked
@answering("cudnn")
def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """``a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e, in bfloat16 or float16.

    Parameters
    ----------
    a : torch.Tensor
        [M, K] bfloat16 or float16, rows contiguous.
    b : torch.Tensor
        [experts, N, K]; dtype of a, rows contiguous.
    m_indptr : torch.Tensor
        [experts + 1] int32, on the device: from 0, not decreasing, up to M. Experts may have no rows, or any number.
        Rows past the last are not written. It is read by the kernel alone.
    out : torch.Tensor, optional
        [M, N]; bfloat16, float16 or float32, rows contiguous.
    out_dtype : torch.dtype
        bfloat16, float16 or float32. Not read where `out` is given.
    backend : str
        "cudnn" or "auto", or a variant's name.
    tactic : int
        One of cuDNN's plans; it has no effect here.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N]. Summed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b, m_indptr = torch.ones(3, 64).bfloat16(), torch.ones(2, 32, 64).bfloat16(), torch.tensor([0, 1, 3]).int()
    >>> flashinfer.grouped_mm_bf16(a, b, m_indptr)[:, 0]
    tensor([64., 64., 64.], dtype=torch.bfloat16)
    """
    given.check_matrix("a", a, 2, (torch.bfloat16, torch.float16))
    given.check_matrix("b", b, 3, (a.dtype,))
    return _unscaled(a, b, m_indptr, None, out, out_dtype, backend)


@checked
@answering("cudnn")
def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """``alpha * a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e, in FP8.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float8_e4m3fn or float8_e5m2, rows contiguous.
    b : torch.Tensor
        [experts, N, K]; the same.
    m_indptr, out, out_dtype, backend, tactic
        As in `grouped_mm_bf16`.
    alpha : torch.Tensor, optional
        One element (float32, float16 or bfloat16) on either device: a factor of the result.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N] of `out_dtype`.

    Raises
    ------
    ValueError
        As `grouped_mm_bf16` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 64).to(torch.float8_e4m3fn), torch.ones(2, 32, 64).to(torch.float8_e4m3fn)
    >>> flashinfer.grouped_mm_fp8(a, b, torch.tensor([0, 1, 3]).int(), torch.ones(1)).shape
    torch.Size([3, 32])
    """
    a, b = given.fp8("a", a), given.fp8("b", b, 3)
    return _unscaled(a, b, m_indptr, given.alpha_of(alpha, a), out, out_dtype, backend)


@checked
@named(a_scale="a_descale", b_scale="b_descale")
@answering("cudnn")
def grouped_mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """``a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e, in MXFP8.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float8_e4m3fn or float8_e5m2, rows contiguous. K a multiple of 32.
    b : torch.Tensor
        [experts, N, K]; the same.
    a_descale : torch.Tensor
        uint8, ue8m0: the factors of all rows of a together, in 128x4 tiles, any shape.
    b_descale : torch.Tensor
        uint8, ue8m0: for each expert the factors of its weight in 128x4 tiles, any shape.
    m_indptr, out, out_dtype, backend, tactic
        As in `grouped_mm_bf16`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N] of `out_dtype`.

    Raises
    ------
    ValueError
        As `grouped_mm_bf16` raises it.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 32, 128).to(torch.float8_e4m3fn)
    >>> ones = torch.full((128 * 4,), 127).byte(), torch.full((2, 128 * 4), 127).byte()  # 2^0, in 128x4 tiles
    >>> flashinfer.grouped_mm_mxfp8(a, b, *ones, torch.tensor([0, 1, 3]).int())[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    a, b = given.fp8("a", a), given.fp8("b", b, 3)
    _check_indptr(m_indptr, b)
    backend = given.variant_of(backend, ("cudnn",))
    factors = Factors("ue8m0", 32)
    return _blocks(a, b, a_descale, b_descale, m_indptr, None, out, out_dtype, factors, backend)


@checked
@named(a_scale="a_descale", b_scale="b_descale")
@answering("cudnn")
def grouped_mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """``alpha * a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e, in NVFP4 or MXFP4.

    Parameters
    ----------
    a : torch.Tensor
        [M, K / 2]; uint8 or float4_e2m1fn_x2, two values in a byte, rows contiguous.
    b : torch.Tensor
        [experts, N, K / 2]; the same.
    a_descale : torch.Tensor
        The factors of all rows of a together, in 128x4 tiles, any shape; e4m3 for a `block_size` of 16, ue8m0 for 32.
    b_descale : torch.Tensor
        For each expert the factors of its weight, the same.
    m_indptr, out, out_dtype, backend, tactic
        As in `grouped_mm_bf16`.
    alpha : torch.Tensor, optional
        One element (float32, float16 or bfloat16) on either device: a factor of the result.
    block_size : int
        Elements to a factor: 16 or 32.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N] of `out_dtype`.

    Raises
    ------
    ValueError
        As `grouped_mm_bf16` raises it.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023; NVIDIA, Pretraining LLMs with NVFP4, 2025,
    https://arxiv.org/abs/2509.25149

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.full((3, 64), 0x22).byte(), torch.full((2, 32, 64), 0x22).byte()  # e2m1 of 1
    >>> ones = torch.full((128 * 8,), 0x38).byte(), torch.full((2, 128 * 8), 0x38).byte()  # e4m3 of 1, in 128x4 tiles
    >>> flashinfer.grouped_mm_fp4(a, b, *ones, torch.tensor([0, 1, 3]).int())[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    require(block_size in (16, 32), "block_size", block_size, "16, 32")
    a, b = given.fp4("a", a), given.fp4("b", b, 3)
    _check_indptr(m_indptr, b)
    factors = Factors("ue4m3" if block_size == 16 else "ue8m0", block_size)
    backend = given.variant_of(backend, ("cudnn",))
    alpha = given.alpha_of(alpha, a)
    return _blocks(a, b, a_descale, b_descale, m_indptr, alpha, out, out_dtype, factors, backend)


def _unscaled(a, b, m_indptr, alpha, out, out_dtype, backend) -> torch.Tensor:
    given.same("b", b.shape[2], "a", a.shape[1], "K")
    _check_indptr(m_indptr, b)
    out = given.result(out, (a.shape[0], b.shape[1]), out_dtype if out is None else None, a)
    grouped(
        a, b, None, None, alpha, out, m_indptr, None, "offsets", expected=-(-a.shape[0] // max(len(b), 1)),
        backend=given.variant_of(backend, ("cudnn",)),
    )  # fmt: skip
    return out


@checked
@answering("cute")
def moe_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: ScaleMajorMode = "MN",
    backend: str = "cute",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """``a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e, in e4m3 with float32 scales for blocks.

    Parameters
    ----------
    a : torch.Tensor
        [M, K] float8_e4m3fn, rows contiguous: the rows of all experts.
    b : torch.Tensor
        [experts, N, K], the same.
    a_scale : torch.Tensor
        float32 [ceil(K / 128), (M + 3 * experts) // 4 * 4]. The scales of the rows of expert e begin in column
        (m_indptr[e] + 3 * e) // 4 * 4: with 5, 0 and 7 rows in columns 0, 8 and 8. What lies between is not read.
    b_scale : torch.Tensor
        float32 [experts, ceil(K / 128), ceil(N / 128)], one for 128 x 128 of b.
    m_indptr : torch.Tensor
        [experts + 1] int32, on the device: from 0, not decreasing, up to M.
    scale_granularity_mnk : tuple of int
        Only (1, 128, 128).
    scale_major_mode : str
        Only "MN".
    backend : str
        "cute" or "auto": one result. Or a variant's name.
    out : torch.Tensor, optional
        [M, N] bfloat16, or [M, N / 2] with `is_gated`; rows contiguous.
    out_dtype : torch.dtype, optional
        Only bfloat16.
    is_gated : bool
        The first half of a product's columns, times SiLU of the second.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor. Rows from m_indptr[experts] on are not defined.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> groups, scales = torch.tensor([0, 1, 3]).int(), (torch.ones(1, 8), torch.ones(2, 1, 1))
    >>> flashinfer.grouped_mm.moe_gemm_fp8_nt_groupwise(a, b, *scales, groups)[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    mnk = tuple(scale_granularity_mnk)
    require(mnk == (1, 128, 128), "scale_granularity_mnk", mnk, "(1, 128, 128)")
    _check_moe(a, b, m_indptr, scale_major_mode, out_dtype)
    blocks = -(-a.shape[1] // 128)
    wide = (len(a) + 3 * len(b)) // 4 * 4
    require(a_scale.shape == (blocks, wide), "a_scale", tuple(a_scale.shape), f"[{blocks}, {wide}]")
    scale = a_scale[:, _places(m_indptr, len(a), wide)].mT
    backend = given.variant_of(backend, ("cute",))
    # Scales of b are [experts, K blocks, N blocks]: the other order of what a product takes.
    require(b_scale.dim() == 3, "b_scale", tuple(b_scale.shape), "[experts, K blocks, N blocks]")
    made = None if is_gated else out
    dtype = torch.float32 if is_gated else torch.bfloat16
    made = _groupwise(a, b, scale, b_scale.mT, "offsets", m_indptr, made, dtype, mnk, "K", None, backend)
    return _gated(made, out) if is_gated else made


@checked
@answering("cute")
def moe_gemm_mxfp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 1, 128),
    scale_major_mode: ScaleMajorMode = "MN",
    backend: str = "cute",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """`moe_gemm_fp8_nt_groupwise` with ue8m0 factors for 32 or 128 of each row of a and of b.

    Parameters
    ----------
    a, b, m_indptr, scale_major_mode, backend, out, out_dtype, is_gated
        As in `moe_gemm_fp8_nt_groupwise`.
    a_scale : torch.Tensor
        int32 [(M + 3 * experts) // 4 * 4, ceil(K / (4 * gk))], any strides: four factors of a row in a word, the first
        in its lowest byte. Rows of expert e begin at (m_indptr[e] + 3 * e) // 4 * 4.
    b_scale : torch.Tensor
        int32 [experts, N, ceil(K / (4 * gk))], any strides: the same of each row of b.
    scale_granularity_mnk : tuple of int
        (1, 1, gk) with gk 32 or 128. K is a multiple of gk.

    Returns
    -------
    torch.Tensor
        As of `moe_gemm_fp8_nt_groupwise`.

    Raises
    ------
    ValueError
        As `moe_gemm_fp8_nt_groupwise` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> groups, ones = torch.tensor([0, 1, 3]).int(), torch.full((1,), 127).int()  # a byte of 2^0, for K = 128
    >>> flashinfer.grouped_mm.moe_gemm_mxfp8_nt_groupwise(a, b, ones.expand(8, 1), ones.expand(2, 128, 1), groups)[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    mnk = tuple(scale_granularity_mnk)
    require(mnk in ((1, 1, 32), (1, 1, 128)), "scale_granularity_mnk", mnk, "(1, 1, 32), (1, 1, 128)")
    _check_moe(a, b, m_indptr, scale_major_mode, out_dtype)
    (count, n, k), width = b.shape, mnk[2]
    given.blocks_of("a", k, width)
    words, high = -(-k // (4 * width)), (len(a) + 3 * count) // 4 * 4
    for name, scale, shape in (("a_scale", a_scale, (high, words)), ("b_scale", b_scale, (count, n, words))):
        require(scale.dtype == torch.int32, name, scale.dtype, "int32")
        require(scale.shape == shape, name, tuple(scale.shape), f"{list(shape)}")
    of_a = layouts.arrange(_factors(a_scale[_places(m_indptr, len(a), high)], k, width), "128x4")
    of_b = layouts.arrange(_factors(b_scale, k, width), "128x4")
    made, dtype = (None, torch.float32) if is_gated else (out, torch.bfloat16)
    backend = given.variant_of(backend, ("cute",))
    made = _blocks(a, b, of_a, of_b, m_indptr, None, made, dtype, Factors("ue8m0", 32), backend)
    return _gated(made, out) if is_gated else made


def _check_moe(a, b, m_indptr, major, out_dtype) -> None:
    for name, x, dims in (("a", a, 2), ("b", b, 3)):
        given.check_matrix(name, x, dims, (torch.float8_e4m3fn,))
    given.same("b", b.shape[2], "a", a.shape[1], "K")
    _check_indptr(m_indptr, b)
    require(major == "MN", "scale_major_mode", major, "MN")
    require(out_dtype in (None, torch.bfloat16), "out_dtype", out_dtype, "torch.bfloat16")


def _places(m_indptr: torch.Tensor, rows: int, most: int) -> torch.Tensor:
    """Where the scales of each row are: each expert's from a multiple of 4 on. Read on the device alone."""
    if most == 0:
        return torch.zeros(rows, dtype=torch.int64, device=m_indptr.device)
    row = torch.arange(rows, dtype=torch.int64, device=m_indptr.device)
    expert = torch.searchsorted(m_indptr[1:].contiguous(), row, right=True).clamp_(max=len(m_indptr) - 2)
    begin = m_indptr.long()[expert]
    # A row of no expert is never read: any valid place will do.
    return ((begin + 3 * expert) // 4 * 4 + row - begin).clamp_(0, most - 1)


def _factors(words: torch.Tensor, k: int, width: int) -> torch.Tensor:
    """Bytes of int32 [.., words] as factors [.., K / 32]."""
    factors = words.contiguous().view(torch.uint8)[..., : k // width]
    return factors.repeat_interleave(width // 32, -1)


def _gated(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The first half of float32 columns times SiLU of the second, in bfloat16."""
    require(made.shape[1] % 2 == 0, "b", f"N = {made.shape[1]}", "an even N with is_gated")
    up, gate = made.chunk(2, 1)
    out = given.result(out, tuple(up.shape), torch.bfloat16, made)
    return out.copy_(torch.nn.functional.silu(gate) * up)

"""Products in groups for mixtures of experts: ``a[m_indptr[e] : m_indptr[e + 1]] @ b[e].T`` for each expert e."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import grouped
from flashinfer.gemm.grouped import Factors, _blocks, _check_indptr

__all__ = ["grouped_mm_bf16", "grouped_mm_fp4", "grouped_mm_fp8", "grouped_mm_mxfp8"]


@checked
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
        [M, N] in `out_dtype`, rows contiguous.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
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
    """
    given.check_matrix("a", a, 2, (torch.bfloat16, torch.float16))
    given.check_matrix("b", b, 3, (a.dtype,))
    return _unscaled(a, b, m_indptr, None, out, out_dtype, backend)


@checked
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
    alpha : torch.Tensor, optional
        float32, one element: a factor of the result.
    m_indptr, out, out_dtype, backend, tactic
        As in `grouped_mm_bf16`, as are result and errors.
    """
    a, b = given.fp8("a", a), given.fp8("b", b, 3)
    return _unscaled(a, b, m_indptr, given.alpha_of(alpha, a), out, out_dtype, backend)


@checked
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
        As in `grouped_mm_bf16`, as are result and errors.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023
    """
    a, b = given.fp8("a", a), given.fp8("b", b, 3)
    _check_indptr(m_indptr, b)
    backend = given.variant_of(backend, ("cudnn",))
    factors = Factors("ue8m0", 32)
    return _blocks(a, b, a_descale, b_descale, m_indptr, None, out, out_dtype, factors, backend)


@checked
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
    alpha : torch.Tensor, optional
        float32, one element: a factor of the result.
    block_size : int
        Elements to a factor: 16 or 32.
    m_indptr, out, out_dtype, backend, tactic
        As in `grouped_mm_bf16`, as are result and errors.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023; NVIDIA, Pretraining LLMs with NVFP4, 2025,
    https://arxiv.org/abs/2509.25149
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
    out = given.result(out, (a.shape[0], b.shape[1]), out_dtype, a)
    grouped(
        a, b, None, None, alpha, out, m_indptr, None, "offsets", expected=-(-a.shape[0] // max(len(b), 1)),
        backend=given.variant_of(backend, ("cudnn",)),
    )  # fmt: skip
    return out

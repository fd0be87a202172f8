"""Products that upstream has with a limit on the multiprocessors: the limit is taken, and has no effect."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, require
from flashinfer.gemm import gemm_alpha_beta

__all__ = ["gemm", "gemm_descriptor_persistent", "gemm_persistent"]


@checked
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``alpha * (a @ b) + beta * c``, in c if it is given.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float16, bfloat16, float32 or float8_e4m3fn, any strides.
    b : torch.Tensor
        [K, N], dtype of a, any strides.
    c : torch.Tensor, optional
        [M, N] in `out_dtype`, any strides; receives the result. Without it `beta` has nothing to multiply.
    alpha, beta : float
        Factors of the product and of c.
    out_dtype : torch.dtype, optional
        float16, bfloat16, float32 or float8_e4m3fn, which saturates; by default that of a, and bfloat16 for FP8.

    Returns
    -------
    torch.Tensor
        c, or a new tensor. The product is summed in float32; it is scaled, added and rounded once. A GPU rounds
        float32 operands to TF32, as upstream's kernels do.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.triton.sm_constraint_gemm import gemm
    >>> gemm(torch.ones(2, 16), torch.ones(16, 3), alpha=0.5)
    tensor([[8., 8., 8.],
            [8., 8., 8.]])
    """
    return _product(a, b, c, alpha, beta, out_dtype, None, False)


@checked
def gemm_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
) -> torch.Tensor:
    """`gemm` with upstream's most multiprocessors.

    Parameters
    ----------
    a, b, c, alpha, beta, out_dtype
        As in `gemm`.
    num_sms : int, optional
        1 or more. It has no effect on the result, and none on the launch; `flashinfer.green_ctx` has streams that keep
        kernels to a part of the GPU.

    Returns
    -------
    torch.Tensor
        As `gemm` returns it.

    Raises
    ------
    ValueError
        As `gemm` raises it; fewer than one multiprocessor.
    """
    return _product(a, b, c, alpha, beta, out_dtype, num_sms, False)


@checked
def gemm_descriptor_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
    EPILOGUE_SUBTILE: bool = False,
) -> torch.Tensor:
    """`gemm_persistent` of a and the transpose of b, ``alpha * (a @ b.T) + beta * c``.

    Parameters
    ----------
    a, c, alpha, beta, out_dtype, num_sms
        As in `gemm_persistent`.
    b : torch.Tensor
        [N, K], dtype of a, any strides.
    EPILOGUE_SUBTILE : bool
        How upstream writes the result; it has no effect.

    Returns
    -------
    torch.Tensor
        As `gemm` returns it.

    Raises
    ------
    ValueError
        As `gemm_persistent` raises it.
    """
    return _product(a, b, c, alpha, beta, out_dtype, num_sms, True)


def _product(a, b, c, alpha, beta, out_dtype, num_sms, transposed) -> torch.Tensor:
    for name, x in (("a", a), ("b", b)):
        require(x.dim() == 2, name, tuple(x.shape), "two dimensions")
    dtype = out_dtype or (torch.bfloat16 if a.dtype == torch.float8_e4m3fn else a.dtype)
    if c is None:
        c = torch.empty(a.shape[0], b.shape[0 if transposed else 1], dtype=dtype, device=a.device)
        beta = 0.0
    require(c.dtype == dtype, "c", c.dtype, f"{dtype}, the dtype of the result")
    if dtype != torch.float8_e4m3fn:
        return gemm_alpha_beta(a, b, c, False, transposed, alpha, beta, num_sms)
    check_apart([("c", c)], [("a", a), ("b", b)], in_place=())
    wide = gemm_alpha_beta(a, b, c.float(), False, transposed, alpha, beta, num_sms)
    most = torch.finfo(dtype).max
    return c.copy_(wide.clamp(-most, most))

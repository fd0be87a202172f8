"""Router scores for few tokens, under upstream's names: one function for all, and one for each of some sizes."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.compat.queries import answering
from flashinfer.gemm.dense import linear

_DOC = """Router scores of {n} experts for few tokens: ``out = mat_a @ mat_b``, in {dtype}.

    Parameters
    ----------
    mat_a : torch.Tensor
        [m, {k}] bfloat16, m from 1 to 16.
    mat_b : torch.Tensor
        [{k}, {n}] bfloat16; column-major is fast.
    out : torch.Tensor
        [m, {n}] {dtype}, receives the result. Summed in float32 and rounded once.
    launch_with_pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.gemm import {name}
    >>> out = torch.empty(2, {n}, dtype=torch.{dtype})
    >>> {name}(torch.ones(2, {k}, dtype=torch.bfloat16), torch.ones({n}, {k}, dtype=torch.bfloat16).T, out)
    >>> bool((out == {k}).all())
    True
    """


def _router(k: int, n: int, dtype: torch.dtype, name: str):
    @checked
    def run(mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True) -> None:
        fits = mat_a.dim() == 2 and 1 <= mat_a.shape[0] <= 16 and mat_a.shape[1] == k
        require(fits, "mat_a", tuple(mat_a.shape), f"[1 to 16, {k}]")
        require(mat_b.shape == (k, n), "mat_b", tuple(mat_b.shape), f"({k}, {n})")
        linear("mat_a", mat_a, "mat_b", mat_b, out, dtype, None)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = _DOC.format(k=k, n=n, dtype=str(dtype).removeprefix("torch."), name=name)
    return answering()(run)


@answering()
@checked
def mm_M1_16(mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool = True) -> None:
    """Router scores of any number of experts for few tokens: ``out = mat_a @ mat_b``.

    Parameters
    ----------
    mat_a : torch.Tensor
        [m, k] bfloat16, m from 1 to 16.
    mat_b : torch.Tensor
        [k, n] bfloat16; column-major is fast.
    out : torch.Tensor
        [m, n] float32 or bfloat16, receives the result. Summed in float32 and rounded once.
    launch_with_pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.gemm import mm_M1_16
    >>> out = torch.empty(2, 3)
    >>> mm_M1_16(torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16().T, out)
    >>> out.unique()
    tensor([8.])
    """
    require(mat_a.dim() == 2 and 1 <= mat_a.shape[0] <= 16, "mat_a", tuple(mat_a.shape), "[1 to 16, k]")
    require(out.dtype in (torch.float32, torch.bfloat16), "out", out.dtype, "float32, bfloat16")
    linear("mat_a", mat_a, "mat_b", mat_b, out, out.dtype, None)


mm_M1_16_K6144_N256 = _router(6144, 256, torch.float32, "mm_M1_16_K6144_N256")
mm_M1_16_K7168_N128 = _router(7168, 128, torch.bfloat16, "mm_M1_16_K7168_N128")
mm_M1_16_K7168_N256 = _router(7168, 256, torch.float32, "mm_M1_16_K7168_N256")
mm_M1_16_K7168_N256_bf16 = _router(7168, 256, torch.bfloat16, "mm_M1_16_K7168_N256_bf16")
mm_M1_16_K7168_N384 = _router(7168, 384, torch.float32, "mm_M1_16_K7168_N384")
mm_M1_16_K7168_N384_bf16 = _router(7168, 384, torch.bfloat16, "mm_M1_16_K7168_N384_bf16")
mm_M1_16_K7168_N896 = _router(7168, 896, torch.float32, "mm_M1_16_K7168_N896")
mm_M1_16_K7168_N896_bf16 = _router(7168, 896, torch.bfloat16, "mm_M1_16_K7168_N896_bf16")

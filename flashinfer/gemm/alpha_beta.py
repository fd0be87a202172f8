"""A product that is added to what is there."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import check_apart, require, same_device
from flashinfer._core.literals import Backend
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm.dense import _product

_OPERANDS = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@answering("cutile")
@checked
@named(out="c")
def gemm_alpha_beta(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = True,
    alpha: float = 1.0,
    beta: float = 0.0,
    num_sms: int | None = None,
    backend: Backend = "cutile",
) -> torch.Tensor:
    """``c = alpha * (a @ b) + beta * c``, in place.

    Parameters
    ----------
    a : torch.Tensor
        [M, K], or [K, M] with `trans_a`; float16, bfloat16, float32 or float8_e4m3fn, any strides.
    b : torch.Tensor
        [K, N], or [N, K] with `trans_b`; dtype of a, any strides.
    c : torch.Tensor
        [M, N] in float16, bfloat16 or float32, any strides that do not overlap. It is read unless `beta` is 0.
    trans_a, trans_b : bool
        Which of the two shapes a and b have.
    alpha, beta : float
        Factors of the product and of c.
    num_sms : int, optional
        Upstream's most multiprocessors, 1 or more. It has no effect on the result, and none on the launch.
    backend : str
        "cutile" or "auto": one result. Or a variant's name.

    Returns
    -------
    torch.Tensor
        c. The product is summed in float32; it is scaled, added and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b, c = torch.randn(4, 64), torch.randn(32, 64), torch.ones(4, 32)
    >>> flashinfer.gemm.gemm_alpha_beta(a, b, c, beta=0.5) is c
    True
    """
    require(a.dtype in _OPERANDS, "a", a.dtype, ", ".join(map(str, _OPERANDS)))
    require(b.dtype == a.dtype, "b", b.dtype, f"{a.dtype}, the dtype of a")
    require(c.dtype in given.OUT, "c", c.dtype, ", ".join(map(str, given.OUT)))
    require(num_sms is None or num_sms >= 1, "num_sms", num_sms, "None, or 1 or more")
    for name, x in (("a", a), ("b", b), ("c", c)):
        require(x.dim() == 2, name, tuple(x.shape), "two dimensions")
    same_device(a=a, b=b, c=c)
    check_apart([("c", c)], [("a", a), ("b", b)], in_place=())
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    given.same("b", b.shape[0], "a", a.shape[1], "K")
    require(c.shape == (a.shape[0], b.shape[1]), "c", tuple(c.shape), f"[{a.shape[0]}, {b.shape[1]}]")
    variant = given.variant_of(backend, ("cutile",))
    if alpha == 1 and beta == 0:
        _product(a, b, c, None, None, None, variant)
        return c
    made = torch.empty(c.shape, dtype=torch.float32, device=c.device)
    _product(a, b, made, None, None, None, variant)
    made *= alpha
    # Not added where beta is 0: c may hold anything.
    if beta != 0:
        made += beta * c.float()
    return c.copy_(made)

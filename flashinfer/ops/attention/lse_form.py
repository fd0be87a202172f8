"""The log-sum-exp in the base and the layout that a caller asks for. Kernels write base 2, [rows, heads]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flashinfer._core.checks import require


def is_plain(lse_base: str, lse_layout: str = "NH") -> bool:
    """Whether kernels write it so. ValueError for a base or a layout that there is not."""
    if lse_base == "log2" and lse_layout == "NH":
        return True
    require(lse_base in ("log2", "ln"), "lse_base", repr(lse_base), "'log2' or 'ln'")
    require(lse_layout in ("NH", "HN"), "lse_layout", repr(lse_layout), "'NH' (rows, heads) or 'HN' (heads, rows)")
    return False


def in_form(attend: Callable, q: torch.Tensor, lse: torch.Tensor | None, return_lse: bool, lse_base: str,
            lse_layout: str = "NH"):  # fmt: skip
    """The result of `attend(lse, return_lse)` for q [rows, heads, dim], whose log-sum-exp has another form.

    `lse` is the caller's, in that form, and is written where it is given.
    """
    if not return_lse and lse is None:
        return attend(None, False)
    turned = lse_layout == "HN"
    if turned and lse is not None:
        shape = q.shape[1], q.shape[0]
        require(tuple(lse.shape) == shape, "lse", tuple(lse.shape), f"{shape}, with lse_layout='HN'")
        require(lse.dtype == torch.float32, "lse", lse.dtype, "torch.float32")
        require(lse.device == q.device, "lse", f"a tensor on {lse.device}", str(q.device))
    out, found = attend(None if turned else lse, True)
    if lse_base == "ln":
        found.mul_(math.log(2.0))
    if turned:
        found = found.t().contiguous() if lse is None else lse.copy_(found.t())
    return (out, found) if return_lse else out

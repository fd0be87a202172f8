"""What the products with scaled operands share: checks of codes, scales and results, and upstream's backend names."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._core.backends import variants_of
from flashinfer._core.checks import dtype_name, require
from flashinfer._core.scalars import scales as scales_of
from flashinfer.ops import layouts
from flashinfer.ops.formats import FACTOR_DTYPES

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT = (torch.bfloat16, torch.float16, torch.float32)
_FP4 = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))


def variant_of(backend: str, upstream: tuple[str, ...]) -> str:
    """The variants that `backend` admits: upstream's names of its own implementations promise a result, so all do."""
    if backend in upstream:
        return "auto"
    # Here, for a product without rows asks no op.
    variants_of(backend)
    return backend


def choice_of(op, problem, device: torch.device, backend: str):
    """The Choice of `op` for what `variant_of` gave."""
    return op(problem, device) if backend == "auto" else op(problem, device, backend)


def check_matrix(name: str, x: torch.Tensor, dims: int, dtypes: tuple[torch.dtype, ...], transposed=False) -> None:
    """A matrix, or a batch of them, with contiguous rows, or columns where it is given `transposed`."""
    words = "[K, N]" if transposed else "[rows, K]"
    require(x.dim() == dims, name, tuple(x.shape), words if dims == 2 else f"[batch, {words[1:]}")
    require(x.dtype in dtypes, name, x.dtype, ", ".join(str(d) for d in dtypes))
    along = x.mT if transposed else x
    contiguous = along.stride(-1) == 1 or along.shape[-1] <= 1
    require(contiguous, name, f"strides {x.stride()}", f"contiguous {'columns' if transposed else 'rows'}")


def fp4(name: str, x: torch.Tensor, dims: int = 2, transposed: bool = False) -> torch.Tensor:
    """Codes of e2m1, two in a byte, as uint8 with the bytes of a row side by side."""
    check_matrix(name, x, dims, _FP4, transposed)
    return (x.mT if transposed else x).view(torch.uint8)


def fp8(name: str, x: torch.Tensor, dims: int = 2, transposed: bool = False) -> torch.Tensor:
    """Codes of e4m3 or e5m2 with the elements of a row side by side."""
    check_matrix(name, x, dims, FP8, transposed)
    return x.mT if transposed else x


def same(name: str, value: int, other: str, expected: int, what: str) -> None:
    require(value == expected, name, f"{what} {value}", f"{expected}, as {other} has")


def blocks_of(name: str, columns: int, width: int) -> int:
    """The blocks of `width` in a row of K elements, which divides into them."""
    require(columns % width == 0, name, f"K = {columns}", f"a multiple of {width}, the elements of a scale factor")
    return columns // width


def scales(name: str, scale: torch.Tensor, rows: int, columns: int, major: str = "K", batch: tuple = ()):
    """float32 scales of (row blocks, column blocks), or transposed if MN-major, as [.., row blocks, column blocks]."""
    shape = (*batch, rows, columns) if major == "K" else (*batch, columns, rows)
    require(scale.dtype == torch.float32, name, scale.dtype, "float32")
    require(tuple(scale.shape) == shape, name, tuple(scale.shape), f"{list(shape)}")
    return scale if major == "K" else scale.mT


def factors(name: str, scale: torch.Tensor, rows: int, blocks: int, layout: str, entries: int = 1) -> torch.Tensor:
    """Factors of `entries` matrices in a layout, as uint8 [entries, .].

    They are given with any shape, where what counts are the bytes, or as the transpose of [.., rows, blocks].
    """
    require(scale.dtype in FACTOR_DTYPES, name, scale.dtype, "uint8, float8_e4m3fn, float8_e8m0fnu")
    high, wide = layouts.padded(rows, blocks, layout)
    each = "" if entries == 1 else f" for each of {entries} matrices"
    allowed = f"{high} x {wide} factors{each}: {rows} rows of {blocks}, in the {layout} layout"
    require(scale.numel() == entries * high * wide, name, tuple(scale.shape), allowed)
    if scale.shape[-2:] == (wide, high) and not scale.is_contiguous():
        scale = scale.mT
    require(scale.is_contiguous(), name, f"strides {scale.stride()}", "contiguous, or the transpose of what is")
    return scale.view(torch.uint8).view(entries, high * wide)


def alpha_of(alpha: torch.Tensor | None, a: torch.Tensor, *counts: int) -> Any:
    """The factors of the result, float32, as many as one of `counts`, or 1; one element may be on the other device."""
    if alpha is None:
        return None
    counts = counts or (1,)
    allowed = " or ".join(map(str, counts))
    require(alpha.numel() in counts, "alpha", tuple(alpha.shape), f"{allowed} element{'s' if allowed != '1' else ''}")
    return scales_of("alpha", alpha, a.device, alpha.numel()).contiguous()


def result(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None, like: torch.Tensor
) -> torch.Tensor:
    """`out`, checked, or a new tensor; where neither says the dtype it is bfloat16.

    Upstream reads out_dtype of some functions where there is no `out` only: these give None for it where there is one.
    """
    dtype = dtype or (torch.bfloat16 if out is None else out.dtype)
    require(dtype in OUT, "out_dtype", dtype, ", ".join(str(d) for d in OUT))
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    require(tuple(out.shape) == shape, "out", tuple(out.shape), f"{list(shape)}")
    require(out.dtype == dtype, "out", out.dtype, f"{dtype}, the out_dtype")
    require(out.stride(-1) == 1 or shape[-1] <= 1, "out", f"strides {out.stride()}", "contiguous rows")
    return out


def encoding_of(x: torch.Tensor) -> str:
    """The Problem's name of a format: bytes are two e2m1."""
    name = dtype_name(x.dtype)
    return "e2m1" if name == "u8" else name

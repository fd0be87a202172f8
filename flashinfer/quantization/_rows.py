"""What the public quantisation functions share: checks, outputs, choice of kernel, and the ops that compilers see."""

from __future__ import annotations

import math

import torch

from flashinfer._core.backends import variants_of
from flashinfer._core.checks import dtype_name, is_aligned, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.scalars import scales
from flashinfer.ops import layouts
from flashinfer.ops import quantize as room
from flashinfer.ops.formats import FACTOR_DTYPES, FORMATS
from flashinfer.tllm_enums import SfLayout

_ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
# These two name upstream's implementations of one function; any variant of ours answers to them.
_UPSTREAM_BACKENDS = ("cuda", "cute-dsl")


def layout_name(argument: str, layout: SfLayout) -> str:
    """ "128x4", "8x4" or "linear" of an SfLayout, or of its number."""
    if type(layout) is int and layout in [each.value for each in SfLayout]:
        layout = SfLayout(layout)
    require(isinstance(layout, SfLayout), argument, layout, ", ".join(map(repr, SfLayout)))
    return layout.name.removeprefix("layout_")


def as_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [1, rows, n]."""
    require(x.dim() >= 2, name, tuple(x.shape), "two dimensions or more")
    return x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])


def is_column_major(x: torch.Tensor) -> bool:
    """Whether not the rows of x [..., m, n] are contiguous but its columns."""
    return x.dim() >= 2 and x.shape[-1] > 1 and x.stride(-1) != 1 and x.stride(-2) == 1


def scale_tensor(argument: str, scale, x: torch.Tensor, entries: int = 1) -> torch.Tensor:
    """A global scale, given as a tensor or a number, as float32 [1] or [entries], where x is."""
    return scales(argument, scale, x.device, entries)


def quantize(
    name: str,
    x: torch.Tensor,
    kind: str,
    layout: str,
    global_scale: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    columns: int | None = None,
    score: str = "",
    row_scale: bool = False,
    inverse: bool = False,
    backend: str = "auto",
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise the rows of x [batch, rows, n], the argument `name` of the caller.

    Returns codes, uint8 [batch, rows, .]; factors, uint8 [batch, padded rows x padded blocks]; and with `row_scale`
    float32 [batch, rows]. `columns` is the length that rows are padded to.
    """
    require(x.dtype in _ROW_DTYPES, name, x.dtype, "bfloat16, float16, float32, float8_e4m3fn")
    batch, rows, n = x.shape
    columns = n if columns is None else columns
    width = FORMATS[kind].width
    require(columns % width == 0, name, tuple(x.shape), f"a last dimension that is a multiple of {width}")
    require(n > 0, name, tuple(x.shape), "a last dimension above 0")
    require(n == 1 or x.stride(-1) == 1, name, f"strides {x.stride()}", "contiguous rows")
    codes = torch.empty(batch, rows, FORMATS[kind].code_bytes(columns), dtype=torch.uint8, device=x.device)
    padded_rows, padded_blocks = layouts.padded(rows, columns // width, layout)
    factors = torch.empty(batch, padded_rows * padded_blocks, dtype=torch.uint8, device=x.device)
    row_scales = torch.empty(batch, rows, dtype=torch.float32, device=x.device) if row_scale else None
    _quantize(x, global_scale, counts, codes, factors, row_scales, kind, layout, score, inverse, backend, pdl)
    return codes, factors, row_scales


@custom_op("flashinfer::quantize_blocks", mutates_args=("codes", "factors", "row_scales"))
def _quantize(
    x: torch.Tensor,
    global_scale: torch.Tensor | None,
    counts: torch.Tensor | None,
    codes: torch.Tensor,
    factors: torch.Tensor,
    row_scales: torch.Tensor | None,
    kind: str,
    layout: str,
    score: str,
    inverse: bool,
    backend: str,
    pdl: bool,
) -> None:
    same_device(input=x, global_scale=global_scale, mask=counts)
    _check_backend(backend)
    if factors.numel() == 0:
        return
    longest = padded_length(codes, factors, kind)
    block = max(1 << (longest - 1).bit_length(), 64)
    problem = room.Problem(
        kind=kind,
        dtype=dtype_name(x.dtype),
        layout=layout,
        block=min(block, 8192 if row_scales is not None and not score else 1024),
        aligned=x.shape[-1] * x.element_size() % 16 == 0 and is_aligned(x),
        score=score,
        row_scale=row_scales is not None,
        inverse=inverse,
        counted=counts is not None,
        pdl=pdl,
    )
    choice_of(room.quantize, problem, x.device, backend).run(x, global_scale, counts, codes, factors, row_scales)


@custom_op("flashinfer::quantize_groups", mutates_args=("codes", "factors"))
def quantize_groups(
    x: torch.Tensor,
    size: int,
    least: float,
    codes: torch.Tensor,
    factors: torch.Tensor,
    out: str,
    power_of_two: bool,
    backend: str,
) -> None:
    """Rows [rows, n] to codes, bytes of their shape, and float32 factors [rows, n / size]."""
    _check_backend(backend)
    if x.numel() == 0:
        return
    aligned = size * x.element_size() % 16 == 0 and size % 16 == 0 and is_aligned(x, codes)
    problem = room.Groups(dtype_name(x.dtype), out, max(1 << (size - 1).bit_length(), 16), power_of_two, aligned)
    choice_of(room.quantize_groups, problem, x.device, backend).run(x, size, least, codes, factors)


def padded_length(codes: torch.Tensor, factors: torch.Tensor, kind: str) -> int:
    """Elements that a row's codes and their padding of factors stand for."""
    four = 4 * FORMATS[kind].width
    return -(-codes.shape[-1] // FORMATS[kind].code_bytes(four)) * four


def dequantize(
    names: tuple[str, str],
    codes: torch.Tensor,
    factors: torch.Tensor,
    global_scale: torch.Tensor | None,
    element: str,
    factor: str,
    width: int,
    layout: str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Codes [rows, .] and factors, the arguments `names` of the caller, to [rows, n]."""
    require(codes.dim() == 2, names[0], tuple(codes.shape), "two dimensions")
    narrow = torch.float4_e2m1fn_x2 if element == "e2m1" else torch.float8_e4m3fn
    require(codes.dtype in (torch.uint8, narrow), names[0], codes.dtype, f"uint8, {narrow}")
    require(factors.dtype in FACTOR_DTYPES, names[1], factors.dtype, "uint8, float8_e4m3fn, float8_e8m0fnu")
    rows, columns = codes.shape[0], codes.shape[1] * (2 if element == "e2m1" else 1)
    require(columns % width == 0, names[0], tuple(codes.shape), f"rows of a multiple of {width} values")
    high, wide = layouts.padded(rows, columns // width, layout)
    allowed = f"{high} x {wide} factors, for {layout} of {rows} rows of {columns}"
    fits = layouts.holds(factors, rows, columns // width, layout)
    require(fits, names[1], tuple(factors.shape), allowed)
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    codes, factors = (x.contiguous().view(torch.uint8) for x in (codes, factors))
    _dequantize(codes, factors.view(-1), global_scale, out, element, factor, width, layout)
    return out


def float_of_fp4(names, codes, factors, global_scale, factor: str, width: int, layout: str) -> torch.Tensor:
    """FP4 codes as float32."""
    return dequantize(names, codes, factors, global_scale, "e2m1", factor, width, layout)


@custom_op("flashinfer::dequantize_blocks", mutates_args=("out",))
def _dequantize(
    codes: torch.Tensor,
    factors: torch.Tensor,
    global_scale: torch.Tensor | None,
    out: torch.Tensor,
    element: str,
    factor: str,
    width: int,
    layout: str,
) -> None:
    same_device(codes=codes, factors=factors, global_scale=global_scale)
    if out.numel() == 0:
        return
    block = min(max(1 << (out.shape[1] - 1).bit_length(), width), 1024)
    problem = room.Dequantize(
        element, factor, width, layout, dtype_name(out.dtype), block, global_scale is not None, is_aligned(codes)
    )
    choice_of(room.dequantize, problem, codes.device).run(codes, factors, global_scale, out)


@custom_op("flashinfer::interleave_factors", mutates_args=("out",))
def interleave(factors: torch.Tensor, out: torch.Tensor) -> None:
    """Factors [batch, rows, blocks] to 128x4 tiles, out [batch, .]."""
    same_device(unswizzled_sf=factors, out=out)
    if out.numel():
        problem = room.Interleave(dtype_name(factors.dtype), "128x4")
        # The kernel writes 16 bytes at a time.
        target = torch.empty_like(out) if out.data_ptr() % 16 else out
        choice_of(room.interleave, problem, factors.device).run(factors, target)
        if target is not out:
            out.copy_(target)


def _check_backend(backend: str) -> None:
    """Refuse what is no backend, where there may be nothing to choose one for."""
    if backend not in _UPSTREAM_BACKENDS:
        variants_of(backend)


def choice_of(op, problem, device: torch.device, backend: str = "auto"):
    """The Choice of `op`, where upstream's names of its own implementations admit every variant."""
    if backend == "auto" or backend in _UPSTREAM_BACKENDS:
        return op(problem, device)
    return op(problem, device, backend)

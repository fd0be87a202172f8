"""Small kernels, and ops made of them, for the tests of the spine."""

from dataclasses import dataclass

import triton
import triton.language as tl

from flashinfer._core.dispatch import Op, Variant
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin


@dataclass(frozen=True)
class Problem:
    dtype: str
    weighted: bool = False
    offset: int = 0


@dataclass(frozen=True)
class Config:
    block: int = 128


@triton.jit
def shift(x, OFFSET: tl.constexpr):
    return x + OFFSET


@triton.jit
def scale_kernel(x, weight, out, n, scale, OFFSET: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = shift(tl.load(x + at, at < n, other=0).to(tl.float32) * scale, OFFSET)
    if WEIGHTED:
        value *= tl.load(weight + at, at < n, other=0)
    tl.store(out + at, value, at < n)


def build_scale(problem, config):
    types = {"x": f"*{problem.dtype}:16", "weight": "*fp32", "out": "*fp32:16", "n": "i32", "scale": "fp32"}
    constants = {"OFFSET": problem.offset, "WEIGHTED": problem.weighted, "BLOCK": config.block}
    return Build(scale_kernel, types, constants)


scale = Launcher("scale", build_scale)


@triton.jit
def copy_kernel(x, out, n, PDL: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    tl.store(out + at, tl.load(x + at, at < n), at < n)


def build_copy(problem, config):
    """A kernel that begins by waiting, but for an offset."""
    types = {"x": f"*{problem.dtype}", "out": f"*{problem.dtype}", "n": "i32"}
    return Build(copy_kernel, types, {"PDL": problem.offset == 0, "BLOCK": config.block})


copy = Launcher("copy", build_copy)


@triton.jit
def kinds_kernel(byte, flag, a, b, c, narrow, wide, single, double, out):
    total = tl.load(byte).to(tl.float64) + a + b + c + narrow + wide + single + double
    if flag:
        total += 1
    tl.store(out, total)


def build_kinds(problem, config):
    types = {"byte": "*u8", "flag": "i1", "a": "i8", "b": "u8", "c": "i16", "narrow": "i32", "wide": "i64:8"}
    return Build(kinds_kernel, types | {"single": "fp32", "double": "fp64", "out": "*fp64"}, {})


kinds = Launcher("kinds", build_kinds)


@triton.jit
def tile_kernel(x, y, out, rows, BLOCK: tl.constexpr):
    """out = x @ y for one tile of `BLOCK` columns and rows; through more shared memory than needs no asking."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    a = tl.load(x + i[:, None] * BLOCK + j[None, :], (i < rows)[:, None], other=0)
    b = tl.load(y + i[:, None] * BLOCK + j[None, :])
    tl.store(out + i[:, None] * BLOCK + j[None, :], tl.dot(a, b), (i < rows)[:, None])


def build_tile(problem, config):
    types = {"x": "*bf16:16", "y": "*bf16:16", "out": "*fp32:16", "rows": "i32"}
    return Build(tile_kernel, types, {"BLOCK": config.block}, num_warps=8)


tile = Launcher("tile", build_tile)


@triton.jit
def described_kernel(source, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copies a matrix tile by tile through a tensor map."""
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    value = source.load([row, column])
    i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out + i[:, None] * columns + j[None, :], value, inside)


def build_described(problem, config):
    block = f"{config.block}, {config.block}"
    types = {"source": f"tensordesc<{problem.dtype}[{block}]>", "out": f"*{problem.dtype}:16"}
    types |= {"rows": "i32", "columns": "i32"}
    return Build(described_kernel, types, {"ROWS": config.block, "COLUMNS": config.block})


described = Launcher("described", build_described)
IMPLEMENTATION = Implementation(scale, (scale,))


def _narrow(problem, target):
    return "no fp32 before Hopper" if problem.dtype == "fp32" and target.capability < 90 else ""


def _config(problem, target):
    return Config(256 if target.capability >= 90 else 128)


scaling = Op(
    "scaling",
    Problem,
    (Variant("portable", "tests.core.samples", _narrow, _config), Variant("reference", "tests.core.samples")),
    lambda: (Problem("bf16"), Problem("bf16", weighted=True), Problem("fp32")),
)


@triton.jit
def record_kernel(x, n, size, none):
    """x.out = (x.first + x.second) * size.TIMES, where there is a second."""
    at = tl.program_id(0) * size.BLOCK + tl.arange(0, size.BLOCK)
    y = tl.load(x.first + at, at < n, other=0)
    if x.second is not None:
        y += tl.load(x.second + at, at < n, other=0)
    if size.KIND == "times" and none.value is None:
        y *= size.TIMES
    tl.store(x.out + at, y, at < n)


def build_record(problem, config):
    types = {"x.first": "*fp32:16"} | ({"x.second": "*fp32"} if problem.weighted else {})
    types |= {"x.out": "*fp32", "n": "i32"}
    constants = {} if problem.weighted else {"x.second": None}
    constants |= {"size.BLOCK": config.block, "size.KIND": "times", "size.TIMES": 3, "none.value": None}
    return Build(record_kernel, types, constants)


record = Launcher("record", build_record)

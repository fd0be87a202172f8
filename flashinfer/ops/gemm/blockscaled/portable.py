"""Block-scaled GEMM in Triton, for every chip: out = alpha A B^T, with a factor for each block of K.

Grid: gemm_kernel (tiles of [BM, BN], K slices, batch); sum_kernel (blocks of columns, rows), which adds the K slices.
Warps: all share a tile. Shared memory: operand tiles of Triton's software pipeline.
Inputs: a [batch, m, k] and b [batch, n, k] as codes or 16 bits, their factors in the layouts of
`flashinfer/ops/layouts.py` or float32 for blocks of ROWS or COLUMNS by WIDTH, alpha [1] or [m].
Outputs: out [batch, m, n]; with K slices float32 [slices, batch, m, n].
Method: OCP Microscaling Formats (MX) Specification 1.0, 2023; docs/rooms/gemm-blockscaled.md.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops import layouts
from flashinfer.ops._device.rows import multiple
from flashinfer.ops.gemm import operands
from flashinfer.ops.gemm._device.scaled import (
    COMPUTE,
    blocked_product,
    promoted_product,
    store_tile,
    tile_of,
)
from flashinfer.ops.gemm.blockscaled.config import splits
from flashinfer.ops.gemm.tiles import element, unit


@triton.jit
def gemm_kernel(
    a, b, out, alpha, M, N, K,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, ALPHA: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """A program computes a tile [BM, BN] of the result for one K slice."""
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    slice_index = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = row_tile * BM + tl.arange(0, BM)
    column = column_tile * BN + tl.arange(0, BN)
    row_ok = row < M
    column_ok = column < multiple(N, out.UNIT)
    span = tl.cdiv(tl.cdiv(K, BK), tl.num_programs(1)) * BK
    begin = slice_index * span
    end = tl.minimum(begin + span, K)
    at_a = a.codes + batch * multiple(a.batch, a.UNIT) + row.to(tl.int64) * multiple(a.row, a.UNIT)
    at_b = b.codes + batch * multiple(b.batch, b.UNIT) + column.to(tl.int64) * multiple(b.row, b.UNIT)
    a_scale = a.scale
    if a.scale is not None:
        a_scale += batch * a.scale_batch
    b_scale = b.scale
    if b.scale is not None:
        b_scale += batch * b.scale_batch
    if SCALE == "fp32":
        UNIFORM: tl.constexpr = COLUMNS % BN == 0
        a_scale += (row // ROWS).to(tl.int64) * a.scale_row
        if UNIFORM:
            b_scale += (column_tile * BN // COLUMNS).to(tl.int64) * b.scale_row
        else:
            b_scale += (column // COLUMNS).to(tl.int64) * b.scale_row
        sum = promoted_product(
            at_a, row_ok, a_scale, a.scale_block, at_b, column_ok, b_scale, b.scale_block, begin, end, K,
            a.FORMAT, b.FORMAT, WIDTH, COMPUTE, UNIFORM, WHOLE, ALIGNED, BM, BN, BK, CAPABILITY,
        )  # fmt: skip
    else:
        sum = blocked_product(
            at_a, row_ok, row, a_scale, at_b, column_ok, column, b_scale, begin, end, K, a.scale_row, b.scale_row,
            a.FORMAT, b.FORMAT, SCALE, WIDTH, a.LAYOUT, b.LAYOUT, ALIGNED, COMPUTE, WHOLE, BM, BN, BK, CAPABILITY,
        )  # fmt: skip
    if ALPHA == "one":
        sum *= tl.load(alpha)
    elif ALPHA == "rows":
        sum *= tl.load(alpha + row, row_ok, other=0)[None, :]
    to = out.rows + batch * multiple(out.batch, out.UNIT) + slice_index * multiple(out.slice_index, out.UNIT)
    store_tile(to, sum, row, row_ok, column, column_ok, multiple(out.row, out.UNIT), out.SHUFFLED)


@triton.jit
def sum_kernel(
    slices, alpha, out, rows, N, M, count, out_batch, out_row,
    UNIT: tl.constexpr, ALPHA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of `count` K slices [count, rows, N] in order, times alpha, of all or of each row. A batch
    entry has M rows."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    N = multiple(N, UNIT)
    mask = column < N
    sum = tl.zeros([BLOCK], tl.float32)
    for slice_index in range(count):
        sum += tl.load(slices + (slice_index * rows + row) * N + column, mask, other=0)
    if ALPHA == "one":
        sum *= tl.load(alpha)
    elif ALPHA == "rows":
        sum *= tl.load(alpha + row % M)
    out += row // M * multiple(out_batch, UNIT) + row % M * multiple(out_row, UNIT)
    tl.store(out + column, sum.to(out.dtype.element_ty), mask)


def build(problem, config):
    types = {
        **_fields_of("a", problem.a, problem.a_layout, problem, config),
        **_fields_of("b", problem.b, problem.b_layout, problem, config),
        "out.rows": f"*{problem.out}{':16' if problem.aligned else ''}",
        **dict.fromkeys(("out.batch", "out.slice_index", "out.row"), "i64"),
        "alpha": "*fp32" if problem.alpha else None,
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }
    constants = {
        "a.FORMAT": problem.a,
        "a.LAYOUT": problem.a_layout,
        "a.UNIT": unit(problem.a, problem.aligned),
        "b.FORMAT": problem.b,
        "b.LAYOUT": problem.b_layout,
        "b.UNIT": unit(problem.b, problem.aligned),
        "out.SHUFFLED": problem.shuffled,
        "out.UNIT": unit(problem.out, problem.aligned),
        "SCALE": problem.scale,
        "WIDTH": problem.width,
        "ROWS": problem.rows,
        "COLUMNS": problem.columns,
        "ALIGNED": problem.aligned,
        "COMPUTE": COMPUTE[config.compute],
        "WHOLE": problem.whole,
        "GROUP": config.group,
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "ALPHA": problem.alpha,
        "CAPABILITY": config.capability,
    }
    return Build(gemm_kernel, types, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def _fields_of(name: str, encoding: str, layout: str, problem, config) -> dict:
    """The run-time parameters of operand "a" or "b"."""
    scale = None
    if problem.scale == "fp32":
        scale = "*fp32"
    elif layout:
        scale = "*u8:4" if problem.aligned else "*u8"
    return {
        f"{name}.codes": f"*{element(encoding, config.compute)}{':16' if problem.aligned else ''}",
        f"{name}.scale": scale,
        **{f"{name}.{step}": "i64" for step in ("batch", "row", "scale_batch", "scale_row", "scale_block")},
    }


# Columns of a program: 4 float32 for each of 128 threads, which are 16-byte loads. The slices are in the L2 cache.
_SUM_BLOCK = 512


def build_sum(problem, config):
    by = ":16" if problem.aligned else ""
    types = {"slices": f"*fp32{by}", "alpha": "*fp32" if problem.alpha else None, "out": f"*{problem.out}{by}"}
    types |= {"rows": "i64", "N": "i32", "M": "i32", "count": "i32", "out_batch": "i64", "out_row": "i64"}
    constants = {"UNIT": 8 if problem.aligned else 1, "ALPHA": problem.alpha, "BLOCK": _SUM_BLOCK}
    return Build(sum_kernel, types, constants, num_warps=4)


# Bytes of stack a thread may use. With 8 warps and mma.sync, ptxas keeps to 128 registers, so that a multiprocessor
# holds two programs, and spills up to 24 bytes.
STACK_BUDGET = 40

launch = Launcher("gemm_blockscaled", build)
launch_sum = Launcher("gemm_blockscaled_sum", build_sum)


def partial(problem):
    """The problem of one K slice: a float32 result, which `sum_kernel` reads."""
    return replace(problem, out="fp32", alpha="")


def kernels(problem, config):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield launch, problem, config
    if problem.tokens <= 128:
        yield launch, partial(problem), config
        yield launch_sum, problem, config


def run(problem, config, a, b, a_scale, b_scale, alpha, out):
    batch, M, N = out.shape
    K = a.shape[-1] * operands.PER_BYTE[problem.a]
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    slices = 1
    if problem.tokens <= 128:
        slices = splits(tiles * batch, triton.cdiv(K, config.block_k), target_of(out.device).sms)
    if slices == 1:
        _launch(problem, config, (tiles, 1, batch), K, a, b, a_scale, b_scale, alpha, out[None])
        return
    sums = torch.empty(slices, batch, M, N, dtype=torch.float32, device=out.device)
    _launch(partial(problem), config, (tiles, slices, batch), K, a, b, a_scale, b_scale, None, sums)
    tensors = [sums, *(() if alpha is None else (alpha,)), out]
    grid = (triton.cdiv(N, _SUM_BLOCK), batch * M, 1)
    launch_sum(problem, config, grid, *tensors, batch * M, N, M, slices, out.stride(0), out.stride(1))


def _launch(problem, config, grid, K: int, a, b, a_scale, b_scale, alpha, out):
    """Launch gemm_kernel; out is [K slices, batch, M, N]."""
    arguments = (
        *_values_of(problem, config, K, a, a_scale, problem.a, problem.a_layout),
        *_values_of(problem, config, K, b, b_scale, problem.b, problem.b_layout),
        out, out.stride(1), out.stride(0), out.stride(2), alpha, *out.shape[2:], K,
    )  # fmt: skip
    # The kernel is compiled without the parameters that are None.
    launch(problem, config, grid, *(x for x in arguments if x is not None))


def _values_of(problem, config, K: int, codes, scale, encoding: str, layout: str) -> tuple:
    """The arguments of the parameters that `_fields_of` lists."""
    if problem.scale == "fp32":
        steps = scale.stride()
    elif layout:
        # Factors are flat: the stride of a batch entry, and the number in a row of the layout.
        steps = scale.stride(0), layouts.padded(1, K // problem.width, layout)[1], 0
    else:
        steps = 0, 0, 0
    return codes.view(torch_dtype(element(encoding, config.compute))), scale, *codes.stride()[:2], *steps


IMPLEMENTATION = Implementation(run, (launch, launch_sum), kernels=kernels, stack_budget=STACK_BUDGET)

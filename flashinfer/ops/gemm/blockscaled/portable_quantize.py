"""Quantizes 16-bit rows to e4m3 with float32 block scales, the operands of a block-scaled GEMM, in Triton.

Grid: (blocks of 128 columns, blocks of ROWS rows). Warps: all share a block. Shared memory: the reduction of its
largest magnitude.
Inputs: x [n, K]. Outputs: codes [n, K], scale float32 [ceil(n / ROWS), ceil(K / 128)].
Method: the fine-grained scales of DeepSeek-V3, 2024.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import quantize_fp8


@triton.jit
def quantize_kernel(
    x, codes, scale, rows, columns, x_row, blocks,
    ROWS: tl.constexpr, UNIT: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """A program quantizes one block [ROWS, 128]."""
    block_row = tl.program_id(1)
    block = tl.program_id(0)
    row = block_row * ROWS + tl.arange(0, ROWS)[:, None]
    column = block * 128 + tl.arange(0, 128)[None, :]
    mask = (row < rows) & (column < columns)
    at = row.to(tl.int64) * multiple(x_row, UNIT) + column
    y = tl.load(x + at, mask, other=0).to(tl.float32)
    # quantize_fp8 has scales for parts of a row, so the block is passed as one row with one scale.
    code, factor = quantize_fp8(tl.reshape(y, [1, ROWS * 128]), ROWS * 128, "fp8e4nv", False, CAPABILITY)
    at = row.to(tl.int64) * multiple(columns, UNIT) + column
    tl.store(codes + at, tl.reshape(code, [ROWS, 128]), mask)
    scale_offset = block_row.to(tl.int64) * blocks + block + tl.zeros([1, 1], tl.int64)
    tl.store(scale + scale_offset, factor)


def build(problem, config):
    types = {"x": pointer(problem.dtype, problem.aligned), "codes": "*u8:16" if problem.aligned else "*u8"}
    types |= {"scale": "*fp32", "rows": "i32", "columns": "i32", "x_row": "i64", "blocks": "i32"}
    constants = {"ROWS": problem.rows, "UNIT": unit(problem.dtype, problem.aligned), "CAPABILITY": config.capability}
    return Build(quantize_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack a thread may use. A block of 128 rows that is loaded element by element by 16 warps takes them.
STACK_BUDGET = 32

launch = Launcher("gemm_quantize", build)


def run(problem, config, x, codes, scale):
    """x [n, K] to e4m3 codes [n, K], and float32 scales [ceil(n / rows), ceil(K / 128)]; both contiguous."""
    rows, columns = x.shape
    blocks = triton.cdiv(columns, 128)
    grid = (blocks, triton.cdiv(rows, problem.rows), 1)
    launch(problem, config, grid, x, codes.view(torch.uint8), scale, rows, columns, x.stride(0), blocks)


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

"""Groups of a row to eight bits, each with a float32 scale, in Triton: a program takes several groups.

Grid: rows * groups of a row / ROWS. Warps: all share the groups. Shared memory: the reductions of their magnitudes.
Inputs: x [rows, n], contiguous. Outputs: codes [rows, n], int8 or e4m3; scales float32 [rows, n / size].
Method: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2, https://arxiv.org/abs/2412.19437.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops._device.scales import block_amax
from flashinfer.ops.formats import ELEMENTS


@triton.jit
def groups_kernel(
    x, codes, scales, groups, per_row, size, least, scale_row, scale_group,
    OUT: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    size = multiple(size, UNIT)
    inside = (group < groups)[:, None] & (column < size)
    begin(PDL)
    at = group[:, None] * size + column
    y = tl.load(x + at, inside, other=0).to(tl.float32)
    amax = block_amax(y, BLOCK).to(tl.float32, bitcast=True)
    # Not tl.maximum, which would lose a NaN.
    scale = tl.div_rn(tl.where(amax < least, least, amax), tl.full([ROWS, 1], LARGEST, tl.float32))
    if POWER_OF_TWO:
        scale = tl.where(scale < 1e-10, 1e-10, scale)
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(scale < float("inf"), (bits + 0x7FFFFF) & 0x7F800000, bits).to(tl.float32, bitcast=True)
    y = tl.div_rn(y, tl.broadcast_to(scale, [ROWS, BLOCK]))
    if OUT == "i8":
        y = tl.minimum(tl.maximum(tl.where(y == y, y, 0.0), -128.0), 127.0)
        # To nearest even: at 1.5 * 2^23 a float32 counts ones.
        code = ((y + 12582912.0) - 12582912.0).to(tl.int32).to(tl.uint8)
    else:
        code = to_fp8(y, OUT, CAPABILITY)
    tl.store(codes + at, code, inside)
    to = group // per_row * scale_row + group % per_row * scale_group
    tl.store(scales + to[:, None], scale, (group < groups)[:, None])


def build(problem, config):
    types = {"x": pointer(problem.dtype, problem.aligned), "codes": pointer("u8", problem.aligned)}
    types |= {"scales": "*fp32", "groups": "i64", "per_row": "i32", "size": "i32", "least": "fp32"}
    types |= {"scale_row": "i64", "scale_group": "i64"}
    constants = {
        "OUT": problem.out,
        "LARGEST": ELEMENTS[problem.out].largest,
        "POWER_OF_TWO": problem.power_of_two,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(groups_kernel, types, constants, num_warps=config.num_warps)


# Bytes of stack that a thread may use: what the call of an IEEE division saves (ptxas).
STACK_BUDGET = 16

launch = Launcher("quantize_groups", build)


def run(problem, config, x, size, least, codes, scales):
    """x [rows, n], contiguous, to codes, bytes of its shape, and scales [rows, n / size]."""
    rows, n = x.shape
    per_row = n // size
    groups = rows * per_row
    grid = (triton.cdiv(groups, config.rows), 1, 1)
    launch(problem, config, grid, x, codes, scales, groups, per_row, size, least, *scales.stride())


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

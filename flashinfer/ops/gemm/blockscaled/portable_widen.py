"""Widens an operand of a block-scaled GEMM to bfloat16, in Triton, for a product by the dense kernels.

Grid: (blocks of K, tiles of rows, batch). Warps: all share a tile. Shared memory: none but for changes of layout.
Inputs: codes [batch, rows, .], factors in the layouts of `flashinfer/ops/layouts.py`.
Outputs: out bfloat16 [batch, rows, K], codes times factors.
Method: OCP Microscaling Formats (MX) Specification 1.0, 2023; docs/rooms/gemm-blockscaled.md.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops import layouts
from flashinfer.ops._device.rows import multiple
from flashinfer.ops._device.widen import halves, load_factors, widen_blocks
from flashinfer.ops.gemm._device.scaled import load_codes, unshuffled


@triton.jit
def widen_kernel(
    codes, scale, out, rows, K, codes_batch, codes_row, scale_batch, blocks,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr, SHUFFLED: tl.constexpr,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, ARRANGED: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):  # fmt: skip
    """A program widens ROWS x BK elements. `blocks` factors are in a row of the layout; K is a multiple of 16."""
    UNIT: tl.constexpr = (8 if FORMAT == "bf16" else 16) if ALIGNED else 1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    batch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BK
    at = codes + batch * multiple(codes_batch, UNIT) + row.to(tl.int64) * multiple(codes_row, UNIT)
    found = load_codes(at, ok, start, K, FORMAT, BK, WHOLE, ALIGNED)
    if scale is not None:
        scale += batch * scale_batch
        factors = load_factors(scale, row, ok, start // WIDTH, blocks, blocks, 1, LAYOUT, BK // WIDTH, 1, ALIGNED)
    if FORMAT == "bf16":
        wide = found
    elif FORMAT == "e2m1":
        even, odd = halves(found, factors, SCALE, WIDTH, tl.bfloat16, CAPABILITY)
        wide = tl.reshape(tl.join(even, odd), [ROWS, BK])
    else:
        wide = widen_blocks(found, factors, FORMAT, SCALE, WIDTH, tl.bfloat16, CAPABILITY)
    if ARRANGED:
        # Of 128 columns, 32 c + 2 ARRANGED j + ARRANGED e + i goes to 8 ARRANGED j + 8 i + 2 c + e.
        pairs = tl.reshape(wide, [ROWS, BK // 128, 4, 16 // ARRANGED, 2, ARRANGED])
        wide = tl.reshape(tl.permute(pairs, (0, 1, 3, 5, 2, 4)), [ROWS, BK])
    column = start + tl.arange(0, BK)
    K = multiple(K, 16)
    if SHUFFLED:
        row = unshuffled(row)
    out += (batch * rows + row.to(tl.int64))[:, None] * K + column[None, :]
    tl.store(out, wide.to(out.dtype.element_ty), ok[:, None] & (column < K)[None, :])


def build(problem, config) -> Build:
    by = ":16" if problem.aligned else ""
    codes = "bf16" if problem.encoding == "bf16" else "u8"
    scale = "*u8:4" if problem.aligned else "*u8"
    out = "*fp16:16" if problem.half else "*bf16:16"
    types = {"codes": f"*{codes}{by}", "scale": scale if problem.scale else None, "out": out}
    types |= {"rows": "i32", "K": "i32"} | dict.fromkeys(("codes_batch", "codes_row", "scale_batch", "blocks"), "i64")
    constants = {
        "FORMAT": problem.encoding,
        "SCALE": problem.scale,
        "WIDTH": problem.width,
        "LAYOUT": problem.layout,
        "SHUFFLED": problem.shuffled,
        "ALIGNED": problem.aligned,
        "WHOLE": problem.whole,
        "ARRANGED": problem.arranged,
        "ROWS": config.rows,
        "BK": config.block_k,
        "CAPABILITY": config.capability,
    }
    return Build(widen_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("gemm_widen", build)


def run(problem, config, codes, scale, out):
    """Codes [batch, rows, .] and their flat factors [batch, .] to `out` [batch, rows, K], contiguous."""
    batch, rows, K = out.shape
    grid = (triton.cdiv(K, config.block_k), triton.cdiv(rows, config.rows), batch)
    factors, scale_batch, blocks = (), 0, 0
    if problem.scale:
        codes = codes.view(torch.uint8)
        factors, scale_batch = (scale,), scale.stride(0)
        blocks = layouts.padded(1, K // problem.width, problem.layout)[1]
    launch(problem, config, grid, codes, *factors, out, rows, K, *codes.stride()[:2], scale_batch, blocks)


IMPLEMENTATION = Implementation(run, (launch,))

"""Finalize in Triton: the weighted sum of a token's rows.

Grid: tokens x blocks of columns. Warps: all share the columns. Shared memory: none.
Inputs: y [rows, hidden], pair_row int32 [tokens, top_k], -1 for none, weights [tokens, top_k] or none.
Outputs: out [tokens, hidden]. Method: float32 sums in the order of the choices.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.rows import multiple, pointer, unit


@triton.jit
def finalize_kernel(
    y, pair_row, weights, out, y_row, pair_row_row, weights_row, out_row, hidden, blocks, top_k,
    TOGETHER: tl.constexpr, Y_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < multiple(hidden, max(Y_UNIT, OUT_UNIT))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, top_k, TOGETHER):
        for i in tl.static_range(TOGETHER):
            choice = start + i
            row = tl.load(pair_row + token * pair_row_row + choice, choice < top_k, other=-1)
            row_ok = row >= 0
            at = tl.maximum(row, 0).to(tl.int64) * multiple(y_row, Y_UNIT)
            term = tl.load(y + at + column, inside & row_ok, other=0).to(tl.float32)
            if weights is not None:
                term *= tl.load(weights + token * weights_row + choice, row_ok, other=0).to(tl.float32)
            total += term
    tl.store(out + token * multiple(out_row, OUT_UNIT) + column, total.to(out.dtype.element_ty), inside)


def build(problem, config):
    types = {"y": pointer(problem.dtype, problem.aligned), "pair_row": "*i32"}
    types |= {"weights": f"*{problem.weights}" if problem.weights else None}
    types |= {"out": pointer(problem.out, problem.aligned)}
    types |= dict.fromkeys(("y_row", "pair_row_row", "weights_row", "out_row"), "i64")
    types["weights_row"] = "i64" if problem.weights else None
    types |= dict.fromkeys(("hidden", "blocks", "top_k"), "i32")
    constants = {
        "TOGETHER": problem.together,
        "Y_UNIT": unit(problem.dtype, problem.aligned),
        "OUT_UNIT": unit(problem.out, problem.aligned),
        "BLOCK": config.block,
    }
    return Build(finalize_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("moe_finalize", build)


def run(problem, config, y, pair_row, weights, out):
    """Write out [tokens, hidden] of y [rows, hidden] and of pair_row and weights (or None) [tokens, top_k]."""
    tokens, hidden = out.shape
    blocks = triton.cdiv(hidden, config.block)
    tensors = [y, pair_row, weights, out]
    strides = [tensor.stride(0) for tensor in tensors if tensor is not None]
    tensors = [tensor for tensor in tensors if tensor is not None]
    launch(problem, config, (tokens * blocks, 1, 1), *tensors, *strides, hidden, blocks,
           pair_row.shape[1])  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))

"""Elements that are not 0 as bits of bytes, in Triton: a thread makes a byte of eight elements.

Grid: bytes / BLOCK. Warps: each has bytes of its own. Shared memory: none.
Inputs: x [n], bytes; indptr and packed_indptr [segments + 1] or none. Outputs: out, bytes.
Method: a byte is the sum of its eight shifted bits.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import pointer


@triton.jit
def packbits_kernel(
    x, indptr, packed_indptr, out, n, segments, count,
    LITTLE: tl.constexpr, SEGMENTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = byte < count
    bit = tl.arange(0, 8)[None, :]
    if SEGMENTED:
        segment = request_of(packed_indptr, segments, tl.where(there, byte, 0))
        begin = tl.load(indptr + segment, there, other=0).to(tl.int64)
        begin += (byte - tl.load(packed_indptr + segment, there, other=0)) * 8
        end = tl.load(indptr + segment + 1, there, other=0).to(tl.int64)
        at = begin[:, None] + bit
        element = tl.load(x + at, there[:, None] & (at < end[:, None]), other=0)
    else:
        # Eight elements that are all there are one read; the last byte may have fewer.
        at = byte[:, None] * 8 + bit
        whole = (byte < n // 8)[:, None]
        element = tl.load(x + at, whole, other=0) | tl.load(x + at, (whole == 0) & (at < n), other=0)
    place = bit if LITTLE else 7 - bit
    tl.store(out + byte, tl.sum((element != 0).to(tl.int32) << place, 1).to(tl.uint8), there)


def build(problem, config):
    index = problem.index or "i32"
    types = {"x": pointer("u8", problem.aligned), "indptr": f"*{index}", "packed_indptr": f"*{index}", "out": "*u8:16"}
    types |= {"n": "i64", "segments": "i32", "count": "i64"}
    constants = {"LITTLE": problem.little, "SEGMENTED": problem.index != "", "BLOCK": config.rows}
    return Build(packbits_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("packbits", build)


def run(problem, config, x, indptr, packed_indptr, out):
    """x, bytes [n], to out, bytes; segment i from indptr[i] on, to out from packed_indptr[i] on."""
    segments = 1 if indptr is None else indptr.numel() - 1
    grid = (triton.cdiv(out.numel(), config.rows), 1, 1)
    launch(problem, config, grid, x, indptr, packed_indptr, out, x.numel(), segments, out.numel())


IMPLEMENTATION = Implementation(run, (launch,))

"""out = A B * scales + bias on Hopper, for 16-bit and FP8 operands that TMA can copy.

Grid: any number of persistent blocks, which loop over tiles of the result, and over K slices where K is split.
Warps: two consumer warpgroups multiply with wgmma, one producer warp copies tiles of A and B. The warpgroups share the
tile's B and have 64 rows of A each, or, for few rows, share its A and have half of B's columns each. While they store a
tile, the producer loads the first stages of the next. Shared memory: the ring of STAGES tiles of A and B, and a staging
buffer for 16-bit output.

Inputs: a [batch, m, k]; b [batch, n, k] or [batch, k, n], by its map; bias [n]. Outputs: out [batch, m, n].
Method: CUTLASS's persistent warp-specialised products, with split K by atomic counters.
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, Settings, make_ring
from flashinfer.ops._device.sm90.store import make_staging
from flashinfer.ops.gemm._device.sm90_slices import consume, produce, size_of


@gluon.jit
def dense_sm90_kernel(
    a_map, b_map, out, bias, a_scale, b_scale, partial, arrived, M, N, K, batch, slices, out_entry, out_row,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    B_MAJOR: gl.constexpr, SPLIT: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """a_map is of [batch, m, k], b_map of [batch, n, k] or [batch, k, n].

    With B_MAJOR "blocks" b_map is of [k / 128, n / 32, 8, 4, 128]. `shuffle_matrix_a` stores row 4 j + i of each 32
    rows as row 8 i + j; the map has j before i, so a box comes in the order of n. With SPLIT, `partial` has room for
    2 * tiles * slices warpgroup tiles, and `arrived` 2 * tiles counters, all 0.
    """
    DTYPE: gl.constexpr = a_map.dtype
    OUT: gl.constexpr = out.dtype.element_ty
    A_PARTS: gl.constexpr = BLOCK_M // ROWS
    B_PARTS: gl.constexpr = 3 - A_PARTS
    settings = Settings(
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, A_PARTS=A_PARTS, B_PARTS=B_PARTS, BOX=BOX, GROUP=GROUP,
        B_MAJOR=B_MAJOR, SPLIT=SPLIT, SCALES=SCALES, BIAS=BIAS, UNROLL=1,
    )  # fmt: skip
    ring = make_ring(DTYPE, settings)
    staging = make_staging(OUT, min(BLOCK_N // B_PARTS, 128))
    size = size_of(M, N, K, batch, slices, settings)
    tensors = (out, bias, a_scale, b_scale, partial, arrived)
    sizes = (M, N, out_entry, out_row)
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), tensors, sizes, ring, size, staging)),
            (consume, (gl.constexpr(1), tensors, sizes, ring, size, staging)),
            (produce, (a_map, b_map, ring, size)),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip

"""One tile of a GEMM with scaled operands, out = a b^T: three main loops in Triton, with float32 accumulators.

Tiles are transposed, [BN, BM]: rows of the weight b by tokens of a. The first operand of a tensor core instruction has
64 or 128 rows, which weights fill; the second may have as few as 16, which few tokens fill.
"""

import triton
import triton.language as tl

from flashinfer.ops._device.rows import multiple
from flashinfer.ops._device.widen import halves, load_factors, widen, widen_blocks

# Triton dtypes of Config.compute
COMPUTE = {"": "", "bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


@triton.jit
def tile_of(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """The (row, column) of tile `index`. GROUP columns of tiles are computed row by row, so that operands stay in the
    L2 cache.

    With 3 rows, 4 columns and GROUP 2, the rows have the tiles 0 1 6 7, 2 3 8 9 and 4 5 10 11.
    """
    first = index // (GROUP * row_tiles) * GROUP
    width = tl.minimum(column_tiles - first, GROUP)
    inside = index % (GROUP * row_tiles)
    return inside // width, first + inside % width


@triton.jit
def load_codes(
    at, ok, start, K, FORMAT: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Codes of elements `start` to start + BK of rows at the addresses `at` [ROWS]; 0 past K.

    ALIGNED rows begin at multiples of 16 bytes and have whole 16 bytes. WHOLE: K is a multiple of BK.
    """
    PER: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    UNIT: tl.constexpr = 1 if not ALIGNED else (8 if FORMAT == "bf16" or FORMAT == "fp16" else 16)
    column = start // PER + tl.arange(0, BK // PER)
    mask = ok[:, None]
    if not WHOLE:
        mask = mask & (column < multiple(K // PER, UNIT))[None, :]
    return tl.load(at[:, None] + column[None, :], mask, other=0.0)


@triton.jit
def promoted_product(
    a, a_ok, a_scale, a_step, b, b_ok, b_scale, b_step, begin, end, K,
    A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr, UNIFORM: tl.constexpr,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM]: the sum over K blocks of b_scale * a_scale * (b codes @ a codes.T) ("promotion": each block's
    product is scaled and added in float32). begin and end are multiples of BK.

    a [BM] and b [BN] are addresses of rows; a_scale [BM] and b_scale [BN] of their scales of block 0, with a_step and
    b_step to the next block's. With UNIFORM, b_scale is one address for all rows. COMPUTE is "" where tl.dot takes the
    codes.
    """
    sum = tl.zeros([BN, BM], tl.float32)
    for start in range(begin, end, BK):
        left = load_codes(b, b_ok, start, K, B, BK, WHOLE, ALIGNED)
        right = load_codes(a, a_ok, start, K, A, BK, WHOLE, ALIGNED)
        block = start // WIDTH
        scale = tl.load(a_scale + block * a_step, a_ok, other=0)
        if COMPUTE != "":
            left = widen(left, B, COMPUTE, CAPABILITY)
            right = widen(right, A, COMPUTE, CAPABILITY)
        part = tl.dot(left, tl.trans(right), input_precision="ieee")
        if UNIFORM:
            sum += part * (scale * tl.load(b_scale + block * b_step))[None, :]
        else:
            sum += part * tl.load(b_scale + block * b_step, b_ok, other=0)[:, None] * scale[None, :]
    return sum


@triton.jit
def blocked_product(
    a, a_ok, a_row, a_scale, b, b_ok, b_row, b_scale, begin, end, K, blocks_a, blocks_b,
    A: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, A_LAYOUT: tl.constexpr,
    B_LAYOUT: tl.constexpr, ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM]: b @ a.T over the elements from begin to end, multiples of BK, with one factor for WIDTH
    elements.

    a [BM] and b [BN] are addresses of rows; a_row and b_row the row numbers of their factors. Factors are at a_scale
    and b_scale in A_LAYOUT and B_LAYOUT, with blocks_a and blocks_b to a row; a_scale is None where a has none. COMPUTE
    is "" where tl.dot_scaled takes codes and factors, else the dtype that both operands are widened to.
    """
    sum = tl.zeros([BN, BM], tl.float32)
    COUNT: tl.constexpr = BK // WIDTH
    A_NAME: tl.constexpr = "e4m3" if A == "fp8e4nv" else ("e5m2" if A == "fp8e5" else A)
    B_NAME: tl.constexpr = "e4m3" if B == "fp8e4nv" else ("e5m2" if B == "fp8e5" else B)
    for start in range(begin, end, BK):
        left_factors = load_factors(
            b_scale, b_row, b_ok, start // WIDTH, blocks_b, blocks_b, 1, B_LAYOUT, COUNT, 1, ALIGNED
        )  # fmt: skip
        if a_scale is not None:
            right_factors = load_factors(
                a_scale, a_row, a_ok, start // WIDTH, blocks_a, blocks_a, 1, A_LAYOUT, COUNT, 1, ALIGNED
            )  # fmt: skip
        if not WHOLE:
            # The padding of a layout may hold NaN, which a code of 0 does not cancel.
            inside = (start // WIDTH + tl.arange(0, COUNT) < tl.cdiv(K, WIDTH))[None, :]
            left_factors = tl.where(inside, left_factors, 0)
            if a_scale is not None:
                right_factors = tl.where(inside, right_factors, 0)
        left = load_codes(b, b_ok, start, K, B, BK, WHOLE, ALIGNED)
        right = load_codes(a, a_ok, start, K, A, BK, WHOLE, ALIGNED)
        if COMPUTE == "":
            if SCALE == "ue4m3":
                left_factors = left_factors.to(tl.float8e4nv, bitcast=True)
                right_factors = right_factors.to(tl.float8e4nv, bitcast=True)
            sum = tl.dot_scaled(left, left_factors, B_NAME, tl.trans(right), right_factors, A_NAME, sum)
        elif B == "e2m1":
            # A sum over K may take columns in any order. The low codes of the bytes are multiplied with a's even
            # columns, the high codes with the odd ones, so the codes of a byte need no interleaving.
            left, left_odd = halves(left, left_factors, SCALE, WIDTH, COMPUTE, CAPABILITY)
            if A == "e2m1":
                right, right_odd = halves(right, right_factors, SCALE, WIDTH, COMPUTE, CAPABILITY)
            else:
                if a_scale is not None:
                    right = widen_blocks(right, right_factors, A, SCALE, WIDTH, COMPUTE, CAPABILITY)
                else:
                    right = right.to(COMPUTE)
                right, right_odd = tl.split(tl.reshape(right, [BM, BK // 2, 2]))
            sum = tl.dot(left, tl.trans(right), sum, input_precision="ieee")
            sum = tl.dot(left_odd, tl.trans(right_odd), sum, input_precision="ieee")
        else:
            left = widen_blocks(left, left_factors, B, SCALE, WIDTH, COMPUTE, CAPABILITY)
            if a_scale is not None:
                right = widen_blocks(right, right_factors, A, SCALE, WIDTH, COMPUTE, CAPABILITY)
            else:
                right = right.to(COMPUTE)
            sum = tl.dot(left, tl.trans(right), sum, input_precision="ieee")
    return sum


@triton.jit
def unscaled_product(
    a, a_ok, b, b_ok, b_step, K,
    A: tl.constexpr, B: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM]: b @ a.T, without scales.

    a [BM] and b [BN] are addresses of rows. With COLUMNS b is stored [K, N]: its row's next element is b_step further.
    COMPUTE is "" where tl.dot takes the codes.
    """
    sum = tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        if COLUMNS:
            k = start + tl.arange(0, BK)
            at = b[:, None] + (k.to(tl.int64) * b_step)[None, :]
            left = tl.load(at, b_ok[:, None] & (k < K)[None, :], other=0.0)
        else:
            left = load_codes(b, b_ok, start, K, B, BK, WHOLE, ALIGNED)
        right = load_codes(a, a_ok, start, K, A, BK, WHOLE, ALIGNED)
        if COMPUTE != "":
            left = widen(left, B, COMPUTE, CAPABILITY)
            right = widen(right, A, COMPUTE, CAPABILITY)
        sum = tl.dot(left, tl.trans(right), sum, input_precision="ieee")
    return sum


@triton.jit
def unshuffled(column):
    """The original row of each stored row of a weight that was shuffled in blocks of 32
    (get_shuffle_matrix_a_row_indices): stored row 8 i + j is row 4 j + i."""
    inside = column % 32
    return column - inside + inside % 8 * 4 + inside // 8


@triton.jit
def store_tile(
    out, sum, row, row_ok, column, column_ok, row_stride, SHUFFLED: tl.constexpr
):  # fmt: skip
    """Store a tile [BN, BM] to out [tokens, columns], transposed. `row_stride` is int64."""
    if SHUFFLED:
        column = unshuffled(column)
    at = out + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    tl.store(at, tl.trans(sum).to(out.dtype.element_ty), row_ok[:, None] & column_ok[None, :])

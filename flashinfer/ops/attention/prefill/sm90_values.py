"""Hopper prefill in FP8: the transposition of values in shared memory.

wgmma requires 8-bit operands with the summed dimension contiguous. P V sums over keys, but a tile of values
[keys, columns] has its columns contiguous, so extra warps transpose it. ldmatrix transposes 16-bit elements, here pairs
of columns; two byte permutations then separate the columns.

Keys and columns of the transposed tile are permuted. This costs nothing, because the other side uses the same order:

- Keys. The accumulator of S gives lane c of four the keys 8 j + 2 c + b of each 16 (j, b in 0, 1). The left operand of
  P V has keys 4 c to 4 c + 3 in that lane. So key 8 j + 2 c + b is stored at position 4 c + 2 j + b. Example: lane 1
  has weights of keys 2, 3, 10, 11 and multiplies them as keys 4, 5, 6, 7; positions 4 to 7 of V hold keys 2, 3, 10, 11.
- Columns. In each 16, even columns come before odd ones: column 2 g + e is stored in row 8 e + g, so that 8 rows of a
  matrix are stored without bank conflicts. Example: column 5 (g = 2, e = 1) is row 10. `sm90_finish._in_order` restores
  the order in the accumulator.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import block_barrier, fence_async_shared, gl, gluon, mbarrier, reinterpret
from flashinfer.ops._device.sm90.registers import opaque, program
from flashinfer.ops.attention._device.schedule import ITEM_KV_LEN, ITEM_WIDTH
from flashinfer.ops.attention.prefill.sm90_queue import TaskQueue, read_next, span
from flashinfer.ops.attention.prefill.sm90_settings import Ring, Settings, opaque_sum


@gluon.constexpr_function
def _pairs_layout(KEYS, PAIRS, WARPS):
    """The register layout of a transposing ldmatrix over [KEYS, PAIRS] 16-bit pairs of columns."""
    registers = [[1, 0], [8, 0]] + [[1 << i, 0] for i in range(4, KEYS.bit_length() - 1)]
    columns = [[0, 1 << i] for i in range(3, PAIRS.bit_length() - 1)]
    warps = columns[len(columns) - (WARPS.bit_length() - 1) :] if WARPS > 1 else []
    registers += columns[: len(columns) - len(warps)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [KEYS, PAIRS])


@gluon.jit
def _transpose_tile(values, transposed, start, kv_len, CLEAR: gl.constexpr, WARPS: gl.constexpr):
    """Transpose one tile. With CLEAR, values of keys past the end become zeros: weight 0 times NaN is NaN."""
    BLOCK_N: gl.constexpr = values.shape[0]
    PAIRS: gl.constexpr = values.shape[1] // 2
    # Keys at a time. With 32, four of a thread's addresses spill on Triton 3.9.
    SLICE: gl.constexpr = 16
    # The fragments of a transposing ldmatrix: a register has one pair of columns of two neighbouring keys, the next
    # register the same pair 8 keys further.
    LAYOUT: gl.constexpr = _pairs_layout(SLICE, PAIRS, WARPS)
    IN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, PAIRS], gl.int16)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * PAIRS, BLOCK_N // 2], gl.int16)
    pairs = reinterpret(values, gl.int16, [BLOCK_N, PAIRS], IN)
    to = reinterpret(transposed, gl.int16, [2 * PAIRS, BLOCK_N // 2], OUT)
    for i in gl.static_range(BLOCK_N // SLICE):
        x = pairs.slice(i * SLICE, SLICE, dim=0).load(LAYOUT)
        if CLEAR:
            key = opaque_sum(start + i * SLICE, gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT)), 8)
            x = gl.where((key < kv_len)[:, None], x, 0).to(gl.int16)
        # Bytes 0, 2, 4, 6 of two registers are the even column for four keys, bytes 1, 3, 5, 7 the odd one.
        x = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [x], dtype=gl.int16,
            is_pure=True, pack=4,
        )  # fmt: skip
        # Rows of x are 16 a + 8 e + 2 c + j, where e is now the parity of V's column and j one of a lane's two pairs of
        # keys. Columns of x are 8 h + g, pairs of V's columns. Rows of the result are 16 h + 8 e + g.
        x = x.reshape([SLICE // 16, 2, 4, 2, PAIRS // 8, 8]).permute([4, 1, 5, 0, 2, 3])
        to.slice(i * SLICE // 2, SLICE // 2, dim=1).store(x.reshape([2 * PAIRS, SLICE // 2]))


@gluon.jit
def transpose_values(
    raw: Ring, v: Ring, queue: TaskQueue, items, counts, num_kv_heads, window_left, settings: Settings
):
    """A few warps: transpose each tile of values of `raw` [keys, columns] into a stage of `v` [columns, keys]."""
    BLOCK_N: gl.constexpr = raw.tiles.shape[1]
    tasks = gl.load(counts) * num_kv_heads
    step = 0
    task = program()
    wave = 0
    while task < tasks:
        record = items + task // num_kv_heads * ITEM_WIDTH
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, settings)
        kv_len = gl.load(record + ITEM_KV_LEN)
        start = begin + (blocks - 1) * BLOCK_N
        i = 0
        # Without loop-invariant code motion, whose sixteen kept addresses would spill.
        while tl.condition(i < blocks, disable_licm=True):
            stage = opaque(step % settings.STAGES)
            phase = (step // settings.STAGES) & 1
            mbarrier.wait(raw.channel.full.index(stage), phase)
            mbarrier.wait(v.channel.empty.index(stage), phase ^ 1)
            tile, to = raw.tiles.index(stage), v.tiles.index(stage)
            if start + BLOCK_N > kv_len:
                _transpose_tile(tile, to, start, kv_len, True, settings.TRANSPOSE_WARPS)
            else:
                _transpose_tile(tile, to, start, kv_len, False, settings.TRANSPOSE_WARPS)
            # Orders the threads' stores before wgmma's reads.
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(raw.channel.empty.index(stage), count=1)
            mbarrier.arrive(v.channel.full.index(stage), count=1)
            start -= BLOCK_N
            step += 1
            i += 1
        task, retry = read_next(queue, wave)
        wave += 1

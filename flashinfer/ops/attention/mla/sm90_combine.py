"""Split-KV results of latent attention on Hopper, merged by a launch of its own."""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.combine import combine_rows
from flashinfer.ops.attention._device.schedule import read_item

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _combine_share(
    out, lse, partial_out, partial_lse, sinks, record, share, shares, o_stride_n, o_stride_h, HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """Combine one of `shares` shares of a tile: ROWS rows of PIECES pieces at a time, or a row in PARTS."""
    q_row, q_len, tile_row, first_slot, pieces = record
    rows = tl.minimum(q_len * HEADS - tile_row, BLOCK_M)
    for i in range(share, tl.cdiv(rows, ROWS) * PARTS, shares):
        # Of the log-sum-exp all parts of a row write the same.
        d = i % PARTS * (D // PARTS) + tl.arange(0, D // PARTS)
        combine_rows(
            partial_out, partial_lse, out, lse, sinks, first_slot, pieces,
            (i // PARTS * ROWS + tl.arange(0, ROWS))[None, :], tl.arange(0, PIECES)[:, None], d[None, None, :],
            tile_row, q_row, q_len, 0, 1, o_stride_n, o_stride_h, HEADS, D, BLOCK_M, SINKS, LSE, True,
            LN2 if BASE_E else 1.0,
        )  # fmt: skip


@triton.jit
def combine_latent_kernel(
    out, lse, partial_out, partial_lse, items, counts, sinks, o_stride_n, o_stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """Combine all split tiles. Persistent: any number of programs.

    Programs are dealt out to work items, and those of a tile's pieces share its rows: nobody searches, and a tile of
    more pieces has more programs. A row of PIECES pieces is read at a time, ROWS rows of so many times fewer pieces, or
    one of PARTS parts of a row of so many times more.

    A launch of its own, where a tile of 64 rows and 512 columns has so much to add up that one block of threads would
    take longer than all together and the launch. D is a power of two.
    """
    count = tl.load(counts)
    # Programs of an item. Where there are more items than programs, these go from item to item.
    helpers = tl.maximum(tl.num_programs(0) // tl.maximum(count, 1), 1)
    for i in range(tl.program_id(0), count * helpers, tl.num_programs(0)):
        q_row, q_len, _, _, tile_row, _, _, slot, first_slot, pieces = read_item(items, i % count)
        if slot >= 0:
            record = q_row, q_len, tile_row, first_slot, pieces
            # Pieces before helpers: where there is less to do than programs, every multiprocessor has some of it.
            share = i // count * pieces + (slot - first_slot)
            if pieces <= PIECES // ROWS:
                _combine_share(
                    out, lse, partial_out, partial_lse, sinks, record, share, pieces * helpers, o_stride_n, o_stride_h,
                    HEADS, D, BLOCK_M, ROWS, PIECES // ROWS, 1, SINKS, LSE, BASE_E,
                )  # fmt: skip
            elif pieces <= PIECES:
                _combine_share(
                    out, lse, partial_out, partial_lse, sinks, record, share, pieces * helpers, o_stride_n, o_stride_h,
                    HEADS, D, BLOCK_M, 1, PIECES, 1, SINKS, LSE, BASE_E,
                )  # fmt: skip
            else:
                _combine_share(
                    out, lse, partial_out, partial_lse, sinks, record, share, pieces * helpers, o_stride_n, o_stride_h,
                    HEADS, D, BLOCK_M, 1, PIECES * PARTS, PARTS, SINKS, LSE, BASE_E,
                )  # fmt: skip

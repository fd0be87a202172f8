"""Latent attention on Hopper: combines the splits of each tile, in a launch of its own.

Grid: any number of programs; 8 on a multiprocessor. Warps: both share some rows, or a part of a row, of all splits.
Shared memory: reductions over splits.
Inputs: partial_out [slots, 64, 512] and partial_lse [slots, 64], float32, and the work items that wrote them.
Outputs: out [tokens, heads, 512], lse [tokens, heads].
Method: split-KV as in Flash-Decoding (Dao et al., 2023).
"""

import triton
import triton.language as tl

from flashinfer.ops.attention._device.combine import combine_rows
from flashinfer.ops.attention._device.schedule import read_item

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _combine_share(
    out, lse, partial_out, partial_lse, sinks, record, share, shares, o_stride_n, o_stride_h, HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """Combine share `share` of `shares` of a tile: ROWS rows with SPLITS splits at a time, or a row in PARTS parts."""
    q_row, q_len, tile_row, first_slot, splits = record
    rows = tl.minimum(q_len * HEADS - tile_row, BLOCK_M)
    for i in range(share, tl.cdiv(rows, ROWS) * PARTS, shares):
        # All parts of a row write the same LSE.
        d = i % PARTS * (D // PARTS) + tl.arange(0, D // PARTS)
        combine_rows(
            partial_out, partial_lse, out, lse, sinks, first_slot, splits,
            (i // PARTS * ROWS + tl.arange(0, ROWS))[None, :], tl.arange(0, SPLITS)[:, None], d[None, None, :],
            tile_row, q_row, q_len, 0, 1, o_stride_n, o_stride_h, HEADS, D, BLOCK_M, SINKS, LSE, True,
            LN2 if BASE_E else 1.0,
        )  # fmt: skip


@triton.jit
def combine_latent_kernel(
    out, lse, partial_out, partial_lse, items, counts, sinks, o_stride_n, o_stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """Combine all split tiles. Any number of persistent programs. D is a power of two.

    All work items have the same number of programs, and the programs of a tile's splits share its rows. So no program
    searches the work list, and a tile with more splits has more programs. At a time a program loads ROWS rows of
    SPLITS / ROWS splits, one row of SPLITS splits, or one of PARTS parts of a row of SPLITS * PARTS splits.

    It is a launch of its own, because one thread block would take longer for a tile of 64 rows and 512 columns than all
    thread blocks and the launch together.
    """
    count = tl.load(counts)
    # Programs of an item. With more items than programs, a program loops over items.
    helpers = tl.maximum(tl.num_programs(0) // tl.maximum(count, 1), 1)
    for i in range(tl.program_id(0), count * helpers, tl.num_programs(0)):
        q_row, q_len, _, _, tile_row, _, _, slot, first_slot, splits = read_item(items, i % count)
        if slot >= 0:
            record = q_row, q_len, tile_row, first_slot, splits
            # Consecutive programs have different items, so that all multiprocessors have work even if a tile has fewer
            # shares than programs.
            share = i // count * splits + (slot - first_slot)
            if splits <= SPLITS // ROWS:
                _combine_share(
                    out, lse, partial_out, partial_lse, sinks, record, share, splits * helpers, o_stride_n, o_stride_h,
                    HEADS, D, BLOCK_M, ROWS, SPLITS // ROWS, 1, SINKS, LSE, BASE_E,
                )  # fmt: skip
            elif splits <= SPLITS:
                _combine_share(
                    out, lse, partial_out, partial_lse, sinks, record, share, splits * helpers, o_stride_n, o_stride_h,
                    HEADS, D, BLOCK_M, 1, SPLITS, 1, SINKS, LSE, BASE_E,
                )  # fmt: skip
            else:
                _combine_share(
                    out, lse, partial_out, partial_lse, sinks, record, share, splits * helpers, o_stride_n, o_stride_h,
                    HEADS, D, BLOCK_M, 1, SPLITS * PARTS, PARTS, SINKS, LSE, BASE_E,
                )  # fmt: skip

"""A program's work item: of a list, or from lengths for small batches, whose list would take longer to make.

From lengths, every program reads all lengths and finds its own item, which is the one that `schedule_kernel` puts in
its place. The batch has `work.BATCH` requests at most: one, whose numbers are scalars, or 64, two to a lane, the same
in every warp.
"""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops.attention._device.schedule import (
    ITEM_FIRST_SLOT,
    ITEM_KV_BASE,
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_SLOT,
    ITEM_SPLITS,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
    lengths_at,
    split_length,
    splits_of,
)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sum(x, BATCH: gl.constexpr):
    if BATCH == 1:
        return x
    else:
        return gl.sum(x, 0)


@gluon.jit
def item_of_list(item, work):
    """What item_of_lengths returns, from a work list."""
    record = work.items + item * ITEM_WIDTH
    # Volatile, so that the compiler does not move these loads behind the branch that ends programs without an item.
    q_row = gl.load(record + ITEM_Q_ROW, volatile=True)
    q_len = gl.load(record + ITEM_Q_LEN, volatile=True)
    kv_base = gl.load(record + ITEM_KV_BASE, volatile=True)
    kv_len = gl.load(record + ITEM_KV_LEN, volatile=True)
    tile_row = gl.load(record + ITEM_TILE_ROW, volatile=True)
    kv_begin = gl.load(record + ITEM_KV_BEGIN, volatile=True)
    kv_end = gl.load(record + ITEM_KV_END, volatile=True)
    slot = gl.load(record + ITEM_SLOT, volatile=True)
    first_slot = gl.load(record + ITEM_FIRST_SLOT, volatile=True)
    splits = gl.load(record + ITEM_SPLITS, volatile=True)
    items = gl.load(work.counts)
    return q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits, items


@gluon.jit
def item_of_lengths(item, work, window_left, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, GRAIN: gl.constexpr):
    """The fields of work item `item`, and the number of items: q_row, q_len, kv_base, kv_len, tile_row, kv_begin,
    kv_end, slot, first_slot, splits, items. Past the last item they mean nothing."""
    BATCH: gl.constexpr = work.BATCH
    if BATCH == 1:
        j = item * 0
    else:
        LANES: gl.constexpr = gl.BlockedLayout([BATCH // 32, 1], [32, 1], [1, gl.num_warps()], [1, 0])
        j = gl.arange(0, BATCH, gl.SliceLayout(1, LANES))
    q_len, kv_len, tiles, first = lengths_at(
        j, work.batch, work.kv_lens, work.kv_lens, work.kv_lens, work.kv_lens, work.q_len, GROUP, BLOCK_M, 1,
        window_left, GRAIN, "uniform", "padded",
    )  # fmt: skip
    span = kv_len - first
    tile_work = tiles.to(gl.int64) * span
    is_short = span <= work.whole
    longest = gl.where(is_short & (tiles > 0), span, 0)
    if BATCH > 1:
        longest = gl.max(longest, 0)
    chunk, whole = split_length(
        _sum(tile_work, BATCH), _sum(gl.where(is_short, tile_work, 0), BATCH), longest, GRAIN, work.least,
        work.least_alone, work.share, work.whole, work.abreast,
    )  # fmt: skip
    splits, length = splits_of(span, chunk, whole, GRAIN, False)
    count = tiles * splits
    n = item
    first_slot = item * 0
    items = count
    request = item * 0
    if BATCH > 1:
        # The same elements in the same lanes, in a layout that scans take.
        FLAT: gl.constexpr = gl.BlockedLayout([BATCH // 32], [32], [gl.num_warps()], [0])
        end = gl.associative_scan(gl.convert_layout(count, FLAT), 0, _add)
        end = gl.convert_layout(end, gl.SliceLayout(1, LANES))
        items = gl.sum(count, 0)
        mine = (end > item) & (end - count <= item)
        first_slot = gl.sum(gl.where((end <= item) & (splits > 1), count, 0), 0)
        n = item - gl.sum(gl.where(mine, end - count, 0), 0)
        request = gl.sum(gl.where(mine, j, 0), 0)
        kv_len = gl.sum(gl.where(mine, kv_len, 0), 0)
        first = gl.sum(gl.where(mine, first, 0), 0)
        length = gl.sum(gl.where(mine, length, 0), 0)
        tiles = gl.sum(gl.where(mine, tiles, 0), 0)
        # At least one, to divide by.
        splits = gl.maximum(gl.sum(gl.where(mine, splits, 0), 0), 1)
    tile = n // splits
    kv_begin = first + n % splits * length
    return (
        request * work.q_len, work.q_len, request * work.kv_stride, kv_len, (tiles - 1 - tile) * BLOCK_M, kv_begin,
        gl.minimum(kv_begin + length, kv_len), gl.where(splits > 1, first_slot + n, -1), first_slot + tile * splits,
        splits, items,
    )  # fmt: skip

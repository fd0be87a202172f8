"""Builds the work list on the device: no host sync, and a replayed graph builds the list of its current batch.

Grid: one program a request. Warps: all share blocks of requests; each program reads and sums all lengths itself.
Shared memory: reductions and scans.
Inputs: lengths or offsets of queries and keys, int32 [batch] or [batch + 1].
Outputs: items, int32 [work items, 16], one record for each tile of query rows and range of keys; counts [1], their
number; arrivals, zeroed for the splits of each tile.
Method: split-KV as in Flash-Decoding (Dao et al., 2023); `flashinfer/ops/attention/split.py` has the policy.
"""

import triton
import triton.language as tl

# Fields of one work item, int32 each. A record is one 64-byte line, so a program reads all of it at once.
ITEM_WIDTH = tl.constexpr(16)
ITEM_Q_ROW = tl.constexpr(0)  # first query row of the request, in q
ITEM_Q_LEN = tl.constexpr(1)
ITEM_KV_BASE = tl.constexpr(2)  # first entry of kv_indices, or row of k and v, of the request
ITEM_KV_LEN = tl.constexpr(3)
ITEM_TILE_ROW = tl.constexpr(4)  # first row of the tile, counted in (token, head of the group) pairs
ITEM_KV_BEGIN = tl.constexpr(5)
ITEM_KV_END = tl.constexpr(6)
ITEM_SLOT = tl.constexpr(7)  # slot of the partial result; -1 for a tile that is not split
ITEM_REQUEST = tl.constexpr(8)
ITEM_FIRST_SLOT = tl.constexpr(9)  # a split tile's partial results are in ITEM_SPLITS slots from this one on
ITEM_SPLITS = tl.constexpr(10)
# In the first record only: the counter of tasks that blocks took after their first one; 0 between launches.
ITEM_TAKEN = tl.constexpr(11)


@triton.jit
def item_and_head(num_kv_heads, NEAR: tl.constexpr):
    """The work item and the KV head of a program, in the grid of `flashinfer.ops.attention.portable.grid`.

    NEAR heads vary fastest, because the rows of neighbouring heads of a token are adjacent in a page. Items vary next:
    requests that share a prefix then read its keys at about the same time, from L2. With 4 heads, NEAR 2 and items 0,
    1, programs (0, 0), (1, 0), (2, 0), (3, 0) have item 0 heads 0, 1 and item 1 heads 0, 1.
    """
    near = tl.where(tl.num_programs(1) > 1, NEAR, num_kv_heads)
    return tl.program_id(0) // near, tl.program_id(1) * near + tl.program_id(0) % near


@triton.jit
def read_item(items, item):
    """The fields of a work item, loaded together: q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot,
    first_slot, splits."""
    record = items + item * ITEM_WIDTH
    q_len = tl.load(record + ITEM_Q_LEN)
    kv_len = tl.load(record + ITEM_KV_LEN)
    kv_base = tl.load(record + ITEM_KV_BASE)
    tile_row = tl.load(record + ITEM_TILE_ROW)
    kv_begin = tl.load(record + ITEM_KV_BEGIN)
    kv_end = tl.load(record + ITEM_KV_END)
    q_row = tl.load(record + ITEM_Q_ROW)
    slot = tl.load(record + ITEM_SLOT)
    first_slot = tl.load(record + ITEM_FIRST_SLOT)
    splits = tl.load(record + ITEM_SPLITS)
    return q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits


@triton.jit
def lengths_at(
    j, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_len, group, tile_rows, page_size, window_left, grain,
    Q: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Query length, key length, query tiles and first visible key of requests `j`; zeros past the batch.

    `Q` and `KV` are the fields of Table.encoding.
    """
    in_batch = j < batch
    if Q == "uniform":
        q_len = tl.where(in_batch, q_len, 0)
    elif Q == "indptr":
        q_len = tl.load(q_indptr + j + 1, mask=in_batch, other=0) - tl.load(q_indptr + j, mask=in_batch, other=0)
    else:
        q_len = tl.maximum(tl.load(q_lens + j, mask=in_batch, other=0), 0)
    if KV == "indptr" or KV == "pages":
        kv_len = tl.load(kv_indptr + j + 1, mask=in_batch, other=0) - tl.load(kv_indptr + j, mask=in_batch, other=0)
        if KV == "pages":
            last = tl.load(kv_lens + j, mask=in_batch, other=0)
            kv_len = tl.where(kv_len > 0, (kv_len - 1) * page_size + last, 0)
    else:
        kv_len = tl.maximum(tl.load(kv_lens + j, mask=in_batch, other=0), 0)
    tiles = (q_len * group + tile_rows - 1) // tile_rows
    first = tl.where(window_left >= 0, tl.maximum(kv_len - q_len - window_left, 0), 0)
    first = tl.minimum(first, kv_len) // grain * grain
    return q_len, kv_len, tiles, first


@triton.jit
def split_length(total, short_work, longest, grain, least, least_alone, share, whole, abreast):
    """The keys of a split, and the most of a request that is not split, of a batch of `total` work (tiles x keys).

    `short_work` is that of requests of up to `whole` keys, and `longest` the keys of the longest of them.
    """
    fills = 3 * short_work >= 2 * abreast.to(tl.int64) * longest
    whole = tl.where(fills, whole, 0)
    # The quotient is computed in float32, because a 64-bit division is a function call. The factor 1.000001 makes it no
    # less than the exact quotient. Without splitting (share 0), a split is as long as any request can be.
    keys = total.to(tl.float32) * 1.000001
    quotient = tl.ceil(keys / tl.maximum(share, 1).to(tl.float32))
    chunk = tl.where(share > 0, tl.minimum(quotient, 1073741824.0), 1073741824.0).to(tl.int32)
    alone = tl.minimum(tl.ceil(keys / tl.maximum(abreast, 1).to(tl.float32)), 1073741824.0).to(tl.int32)
    least = tl.minimum(least, tl.maximum(alone, least_alone))
    return tl.maximum((chunk + grain - 1) // grain * grain, least), whole


@triton.jit
def splits_of(span, chunk, whole, grain, FIXED: tl.constexpr):
    """The number of splits of `span` keys, and their length. Up to `whole` keys are one split.

    The count is rounded to the nearest: rounded up, the last split could be too short to be worth its combination.
    FIXED chunks are counted from the first key, so that splits do not depend on the rest of the batch. With chunk 512
    and grain 64, 700 keys are one split, and 1000 keys two splits of 512 and 488.
    """
    if FIXED:
        splits = tl.maximum((span + chunk - 1) // chunk, 1)
        return splits, chunk + span * 0
    splits = tl.where(span <= whole, 1, tl.maximum((span + chunk // 2) // chunk, 1))
    length = ((span + splits - 1) // splits + grain - 1) // grain * grain
    length = tl.maximum(length, grain)
    return tl.maximum((span + length - 1) // length, 1), length


@triton.jit
def schedule_kernel(
    items,
    counts,
    arrivals,
    q_indptr,
    q_lens,
    kv_indptr,
    kv_lens,
    batch,
    q_stride,
    kv_stride,
    kv_heads,
    group,
    tile_rows,
    page_size,
    window_left,
    grain,
    least,
    least_alone,
    share,
    whole,
    abreast,
    fixed_chunk,
    Q: tl.constexpr,
    KV: tl.constexpr,
    FIXED: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per request: writes its work items, and zeroes the counts of its split tiles.

    `share` is the number of work items per KV head that fills the chip; 0 splits no request. The length of a split is
    the total work (tiles x keys) over `share`. It is at least `least` keys; or at least `least_alone`, if splits of the
    total work over `abreast` are shorter than `least`. `abreast` is the number of items per KV head that gives each
    multiprocessor one. Every program reads all lengths, so that offsets need no second launch. Table.lengths and
    Table.encoding describe the lengths' tensors.

    Requests of up to `whole` keys are not split if together they have at least two thirds of the work of `abreast`
    requests of the longest one's length. They keep memory busy then, and nothing has to be combined. The condition is
    on work, because many short requests alone do not keep memory busy.

    With MIXED, items of the first and of the last requests alternate. In a batch with prefills first and decodes last,
    compute-bound and memory-bound blocks then run side by side.
    """
    i = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)

    chunk = fixed_chunk
    if not FIXED:
        work = tl.zeros([BLOCK], tl.int64)
        short_work = tl.zeros([BLOCK], tl.int64)
        longest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, batch, BLOCK):
            q_len, kv_len, tiles, first = lengths_at(
                start + lanes, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_stride, group, tile_rows, page_size,
                window_left, grain, Q, KV,
            )  # fmt: skip
            tile_work = tiles.to(tl.int64) * (kv_len - first)
            short = kv_len - first <= whole
            work += tile_work
            short_work += tl.where(short, tile_work, 0)
            longest = tl.maximum(longest, tl.where(short & (tiles > 0), kv_len - first, 0))
        chunk, whole = split_length(
            tl.sum(work, 0), tl.sum(short_work, 0), tl.max(longest, 0), grain, least, least_alone, share, whole, abreast
        )

    item_at = tl.zeros([BLOCK], tl.int32)
    slot_at = tl.zeros([BLOCK], tl.int32)
    q_at = tl.zeros([BLOCK], tl.int32)
    kv_at = tl.zeros([BLOCK], tl.int32)
    all_items = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch if MIXED else i + 1, BLOCK):
        j = start + lanes
        q_len, kv_len, tiles, first = lengths_at(
            j, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_stride, group, tile_rows, page_size, window_left, grain,
            Q, KV,
        )  # fmt: skip
        splits, length = splits_of(kv_len - first, chunk, whole, grain, FIXED)
        before = j < i
        if MIXED:
            all_items += tiles * splits
        item_at += tl.where(before, tiles * splits, 0)
        slot_at += tl.where(before & (splits > 1), tiles * splits, 0)
        if Q == "packed":
            q_at += tl.where(before, q_len, 0)
        if KV == "packed":
            kv_at += tl.where(before, kv_len, 0)
    first_item = tl.sum(item_at, 0)
    first_slot = tl.sum(slot_at, 0)

    q_len, kv_len, tiles, first = lengths_at(
        i, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_stride, group, tile_rows, page_size, window_left, grain,
        Q, KV,
    )  # fmt: skip
    splits, length = splits_of(kv_len - first, chunk, whole, grain, FIXED)
    if Q == "uniform" or Q == "padded":
        q_row = i * q_stride
    elif Q == "packed":
        q_row = tl.sum(q_at, 0)
    else:
        q_row = tl.load(q_indptr + i)
    if KV == "padded":
        kv_base = i * kv_stride
    elif KV == "packed":
        kv_base = tl.sum(kv_at, 0)
    else:
        kv_base = tl.load(kv_indptr + i)

    number = tl.arange(0, LANES)
    for start in range(0, tiles * splits, LANES):
        n = start + number
        in_batch = n < tiles * splits
        # Last tiles first: under a causal mask they are the longest, and the longest items should start first.
        tile_row = (tiles - 1 - n // splits) * tile_rows
        begin = first + n % splits * length
        index = first_item + n
        if MIXED:
            count = tl.sum(all_items, 0)
            index = tl.where(index < (count + 1) // 2, 2 * index, 2 * (count - 1 - index) + 1)
        record = items + index * ITEM_WIDTH
        tl.store(record + ITEM_Q_ROW, q_row, mask=in_batch)
        tl.store(record + ITEM_Q_LEN, q_len, mask=in_batch)
        tl.store(record + ITEM_KV_BASE, kv_base, mask=in_batch)
        tl.store(record + ITEM_KV_LEN, kv_len, mask=in_batch)
        tl.store(record + ITEM_TILE_ROW, tile_row, mask=in_batch)
        tl.store(record + ITEM_KV_BEGIN, begin, mask=in_batch)
        tl.store(record + ITEM_KV_END, tl.minimum(begin + length, kv_len), mask=in_batch)
        tl.store(record + ITEM_SLOT, tl.where(splits > 1, first_slot + n, -1), mask=in_batch)
        tl.store(record + ITEM_REQUEST, i, mask=in_batch)
        tl.store(record + ITEM_FIRST_SLOT, first_slot + n // splits * splits, mask=in_batch)
        tl.store(record + ITEM_SPLITS, splits, mask=in_batch)
        tl.store(record + ITEM_TAKEN, 0, mask=in_batch)
    if splits > 1:
        # Counters of finished splits, and of groups of them, for each KV head, at slots of their tile.
        for start in range(0, tiles * splits * kv_heads, LANES):
            n = start + number
            tl.store(arrivals + first_slot * kv_heads + n, 0, mask=n < tiles * splits * kv_heads)

    if i == batch - 1:
        tl.store(counts, first_item + tiles * splits)

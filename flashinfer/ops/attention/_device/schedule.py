"""The work list, made on the device: no host sync, and a captured graph makes one for each batch that it replays.

Grid: one program a request. Warps: all share blocks of requests, whose lengths each program reads and sums for itself.
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
ITEM_SLOT = tl.constexpr(7)  # where the partial result goes; -1 for a tile that is not split
ITEM_REQUEST = tl.constexpr(8)
ITEM_FIRST_SLOT = tl.constexpr(9)  # of a split tile: its splits lie in ITEM_SPLITS slots from here on
ITEM_SPLITS = tl.constexpr(10)
# In the first record: how many tasks blocks took beside those that they begin with; 0 between launches.
ITEM_TAKEN = tl.constexpr(11)


@triton.jit
def item_and_head(num_kv_heads, NEAR: tl.constexpr):
    """The work item and the KV head of a program, in a grid as `flashinfer.ops.attention.portable.grid` makes it.

    NEAR heads vary fastest, since what they have of a token lies side by side in a page, then items: of requests that
    share a prefix, whoever reads a key first leaves it in L2 for the others.
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
def _lengths(
    j, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_len, group, tile_rows, page_size, window_left, grain,
    Q: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Query length, key length, query tiles and first visible key of requests `j`; zeros past the batch.

    `Q` and `KV` are as Table.encoding has them.
    """
    there = j < batch
    if Q == "uniform":
        q_len = tl.where(there, q_len, 0)
    elif Q == "indptr":
        q_len = tl.load(q_indptr + j + 1, mask=there, other=0) - tl.load(q_indptr + j, mask=there, other=0)
    else:
        q_len = tl.maximum(tl.load(q_lens + j, mask=there, other=0), 0)
    if KV == "indptr" or KV == "pages":
        kv_len = tl.load(kv_indptr + j + 1, mask=there, other=0) - tl.load(kv_indptr + j, mask=there, other=0)
        if KV == "pages":
            last = tl.load(kv_lens + j, mask=there, other=0)
            kv_len = tl.where(kv_len > 0, (kv_len - 1) * page_size + last, 0)
    else:
        kv_len = tl.maximum(tl.load(kv_lens + j, mask=there, other=0), 0)
    tiles = (q_len * group + tile_rows - 1) // tile_rows
    first = tl.where(window_left >= 0, tl.maximum(kv_len - q_len - window_left, 0), 0)
    first = tl.minimum(first, kv_len) // grain * grain
    return q_len, kv_len, tiles, first


@triton.jit
def _split(span, chunk, whole, grain, FIXED: tl.constexpr):
    """The number of splits of `span` keys, and their length. Up to `whole` keys are one split.

    Rounding to the nearest count keeps splits even: rounded up, the last ones would be too short to be worth their
    combination. Fixed chunks are counted from the front, so that a split does not depend on what else is in the batch.
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

    `share` is the number of work items per KV head that fills the chip: total work (tiles x keys) over it is the length
    of a split, but at least `least` keys, or `least_alone` where all work in such splits leaves each of them a
    multiprocessor of its own. 0 leaves every request whole. Every program reads all lengths, so that offsets need no
    second launch. Lengths lie as `Table.lengths` has them, and `Table.encoding` says which of them count.
    Requests of up to `whole` keys stay so where they are as much work as two thirds of `abreast` of the longest of
    them, `abreast` being the items per KV head that give each multiprocessor one: that many keep memory busy, and
    nothing is to be combined. It is work that counts, for many requests of a few keys keep nothing busy.
    With MIXED, items of the first and of the last requests take turns: blocks of threads that multiply run beside
    blocks that wait for memory where prefills stand before decodes.
    """
    i = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)

    chunk = fixed_chunk
    if not FIXED:
        work = tl.zeros([BLOCK], tl.int64)
        short_work = tl.zeros([BLOCK], tl.int64)
        longest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, batch, BLOCK):
            q_len, kv_len, tiles, first = _lengths(
                start + lanes, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_stride, group, tile_rows, page_size,
                window_left, grain, Q, KV,
            )  # fmt: skip
            its = tiles.to(tl.int64) * (kv_len - first)
            short = kv_len - first <= whole
            work += its
            short_work += tl.where(short, its, 0)
            longest = tl.maximum(longest, tl.where(short & (tiles > 0), kv_len - first, 0))
        fills = 3 * tl.sum(short_work, 0) >= 2 * abreast.to(tl.int64) * tl.max(longest, 0)
        whole = tl.where(fills, whole, 0)
        total = tl.sum(work, 0)
        # Without splitting, a split is as long as any request can be.
        # In float32: a 64-bit division is a call. A millionth more than the quotient is not less than it.
        keys = total.to(tl.float32) * 1.000001
        quotient = tl.ceil(keys / tl.maximum(share, 1).to(tl.float32))
        chunk = tl.where(share > 0, tl.minimum(quotient, 1073741824.0), 1073741824.0).to(tl.int32)
        alone = tl.minimum(tl.ceil(keys / tl.maximum(abreast, 1).to(tl.float32)), 1073741824.0).to(tl.int32)
        least = tl.minimum(least, tl.maximum(alone, least_alone))
        chunk = tl.maximum((chunk + grain - 1) // grain * grain, least)

    item_at = tl.zeros([BLOCK], tl.int32)
    slot_at = tl.zeros([BLOCK], tl.int32)
    q_at = tl.zeros([BLOCK], tl.int32)
    kv_at = tl.zeros([BLOCK], tl.int32)
    all_items = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch if MIXED else i + 1, BLOCK):
        j = start + lanes
        q_len, kv_len, tiles, first = _lengths(
            j, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_stride, group, tile_rows, page_size, window_left, grain,
            Q, KV,
        )  # fmt: skip
        splits, length = _split(kv_len - first, chunk, whole, grain, FIXED)
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

    q_len, kv_len, tiles, first = _lengths(
        i, batch, q_indptr, q_lens, kv_indptr, kv_lens, q_stride, group, tile_rows, page_size, window_left, grain,
        Q, KV,
    )  # fmt: skip
    splits, length = _split(kv_len - first, chunk, whole, grain, FIXED)
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
        there = n < tiles * splits
        # Last tiles first: under a causal mask they are the longest, and long work should not start last.
        tile_row = (tiles - 1 - n // splits) * tile_rows
        begin = first + n % splits * length
        place = first_item + n
        if MIXED:
            count = tl.sum(all_items, 0)
            place = tl.where(place < (count + 1) // 2, 2 * place, 2 * (count - 1 - place) + 1)
        record = items + place * ITEM_WIDTH
        tl.store(record + ITEM_Q_ROW, q_row, mask=there)
        tl.store(record + ITEM_Q_LEN, q_len, mask=there)
        tl.store(record + ITEM_KV_BASE, kv_base, mask=there)
        tl.store(record + ITEM_KV_LEN, kv_len, mask=there)
        tl.store(record + ITEM_TILE_ROW, tile_row, mask=there)
        tl.store(record + ITEM_KV_BEGIN, begin, mask=there)
        tl.store(record + ITEM_KV_END, tl.minimum(begin + length, kv_len), mask=there)
        tl.store(record + ITEM_SLOT, tl.where(splits > 1, first_slot + n, -1), mask=there)
        tl.store(record + ITEM_REQUEST, i, mask=there)
        tl.store(record + ITEM_FIRST_SLOT, first_slot + n // splits * splits, mask=there)
        tl.store(record + ITEM_SPLITS, splits, mask=there)
        tl.store(record + ITEM_TAKEN, 0, mask=there)
    if splits > 1:
        # How many splits of (tile, KV head) are done, counted at the tile's first slot.
        for start in range(0, tiles * splits * kv_heads, LANES):
            n = start + number
            tl.store(arrivals + first_slot * kv_heads + n, 0, mask=n < tiles * splits * kv_heads)

    if i == batch - 1:
        tl.store(counts, first_item + tiles * splits)

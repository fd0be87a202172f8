"""Latent attention on Hopper: a block of latents lies once in shared memory, as keys and as values.

A block of threads is persistent and walks over work items, 64 query rows each. Keys come two blocks at a time. Each of
two warpgroups computes the scores and the softmax of one block, and passes its weights on through shared memory, since
each owns one half of the output columns and so multiplies both blocks' weights: scores are computed once, and 64 x 256
float32 of the output fit the registers of a warpgroup (the split of FlashMLA, DeepSeek, 2025). While one is at its
softmax, the other's products keep the tensor cores busy. Weights take the place of the positional keys that they came
from, which no value is read from.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async,
    cp_async_arrive,
    cp_async_commit,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.registers_sm90 import anew, lane
from flashinfer.ops.attention._device.logits import LOG2E
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BASE,
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_SLOT,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention._device.widen_sm90 import load_words, store_widened

LN2 = gl.constexpr(0.6931471805599453)
# Query rows of a tile, and keys of a block: what one wgmma takes, and 64 columns, below which reading the queries from
# shared memory for each product takes longer than the product.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
# Columns of a latent row that a warpgroup has of the output.
HALF = gl.constexpr(256)
# Columns that are waited for at a time: products start when the first ones are there.
PART = gl.constexpr(128)
# Columns of a positional row.
REST = gl.constexpr(64)
# Four warps copy 16 rows of 64 columns at a time: eight lanes a row, whose 128 bytes fill all banks. A thread has the
# same few rows of any tile.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class Form:
    """What the kernel is compiled for."""

    HEADS: gl.constexpr
    PAGE_SIZE: gl.constexpr
    # Whether entries of the table are tokens, as in attend_latent.py.
    SPARSE: gl.constexpr
    # Whether keys are gathered row by row, and not copied in boxes.
    GATHER: gl.constexpr
    # Whether keys have a positional row.
    POSITIONAL: gl.constexpr
    # The FP8 formats of keys and queries, which are widened on their way; "" for the type that is multiplied.
    KV_FP8: gl.constexpr
    Q_FP8: gl.constexpr
    CAUSAL: gl.constexpr
    SINKS: gl.constexpr
    DEVICE_SCALES: gl.constexpr
    # Whether logits are more than products times a positive scale, which is folded into the exponent.
    TRANSFORM: gl.constexpr
    LSE: gl.constexpr
    BASE_E: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, *, HEADS, PAGE_SIZE, SPARSE, GATHER, POSITIONAL, KV_FP8, Q_FP8, CAUSAL, SINKS, DEVICE_SCALES, TRANSFORM,
        LSE, BASE_E,
    ):  # fmt: skip
        self.HEADS = gl.constexpr(HEADS)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.SPARSE = gl.constexpr(SPARSE)
        self.GATHER = gl.constexpr(GATHER)
        self.POSITIONAL = gl.constexpr(POSITIONAL)
        self.KV_FP8 = gl.constexpr(KV_FP8)
        self.Q_FP8 = gl.constexpr(Q_FP8)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.SINKS = gl.constexpr(SINKS)
        self.DEVICE_SCALES = gl.constexpr(DEVICE_SCALES)
        self.TRANSFORM = gl.constexpr(TRANSFORM)
        self.LSE = gl.constexpr(LSE)
        self.BASE_E = gl.constexpr(BASE_E)


@aggregate
class Tiles:
    """Shared memory: queries, and two blocks of keys, each in a left and a right half and positional rows.

    Each half of a block is freed as a whole, and comes in two parts (barriers 2 * block + part). Positional rows come
    with the half whose weights' reader frees them: the right one of the first block, the left one of the second.
    """

    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    left_empty: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    # What a warpgroup tells the other: that its weights are there, with the maximum and factor of each row; and sums.
    ready: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    keeps: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    # Of keys named one by one: 0, or -inf where there is none, and a barrier that says that it is there.
    bias: gl.shared_memory_descriptor
    bias_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, *, q_left, q_right, q_rest, left, right, rest, left_full, left_empty, right_full, right_empty, ready, met,
        tops, keeps, sums, bias, bias_full,
    ):  # fmt: skip
        self.q_left = q_left
        self.q_right = q_right
        self.q_rest = q_rest
        self.left = left
        self.right = right
        self.rest = rest
        self.left_full = left_full
        self.left_empty = left_empty
        self.right_full = right_full
        self.right_empty = right_empty
        self.ready = ready
        self.met = met
        self.tops = tops
        self.keeps = keeps
        self.sums = sums
        self.bias = bias
        self.bias_full = bias_full


@gluon.jit
def _work(wave):
    """The wave-th work item of this block of threads; every other wave runs backwards, as in attend_sm90.py."""
    blocks = gl.num_programs(0)
    at = gl.program_id(0)
    return wave * blocks + gl.where(wave % 2 == 0, at, blocks - 1 - at)


@gluon.jit
def _span(record, form: Form):
    """First key, end, and pairs of blocks; keys before `plain_end` are seen by every row of the tile."""
    q_len = gl.load(record + ITEM_Q_LEN)
    before = gl.load(record + ITEM_KV_LEN) - q_len
    tile_row = gl.load(record + ITEM_TILE_ROW)
    begin = gl.load(record + ITEM_KV_BEGIN)
    end = gl.load(record + ITEM_KV_END)
    plain_end = end
    if form.CAUSAL:
        end = gl.minimum(end, gl.minimum((tile_row + ROWS - 1) // form.HEADS, q_len - 1) + before + 1)
        plain_end = gl.minimum(plain_end, tile_row // form.HEADS + before + 1)
    pairs = (gl.maximum(end - begin, 0) + 2 * KEYS - 1) // (2 * KEYS)
    return begin, end, pairs, plain_end


@gluon.jit
def _pages(table, start, end, PAGE_SIZE: gl.constexpr):
    """The page ids of one block of keys. Past the end, the page of the last key: what is read there is masked."""
    pages = ()
    BOXES: gl.constexpr = (KEYS + PAGE_SIZE - 1) // PAGE_SIZE
    for box in gl.static_range(BOXES):
        page = gl.minimum(start + box * PAGE_SIZE, end - 1) // PAGE_SIZE
        pages += (gl.load(table + page),)
    return pages


@gluon.jit
def _copy(source, to, full, pages, start, page_rows, col, PAGE_SIZE: gl.constexpr):
    """Start copying columns `col` ... of a block of keys, a box a page."""
    if PAGE_SIZE >= KEYS:
        tma_load(source, [pages[0] * page_rows + start % PAGE_SIZE, col], full, to)
    else:
        for box in gl.static_range(KEYS // PAGE_SIZE):
            tma_load(source, [pages[box] * page_rows, col], full, to.slice(box * PAGE_SIZE, PAGE_SIZE, dim=0))


@gluon.jit
def _copy_half(
    BLOCK: gl.constexpr, LEFT: gl.constexpr, ckv_map, kpe_map, tiles: Tiles, pages, start, end, ckv_page, kpe_page,
    phase, form: Form,
):  # fmt: skip
    """The half that comes free first, or the other one with the positional rows in front of it."""
    mbarrier.wait((tiles.left_empty if LEFT else tiles.right_empty).index(BLOCK), phase)
    to = (tiles.left if LEFT else tiles.right).index(BLOCK)
    for part in gl.static_range(2):
        full = (tiles.left_full if LEFT else tiles.right_full).index(2 * BLOCK + part)
        if start < end:
            if form.POSITIONAL and LEFT == (BLOCK == 1) and part == 0:
                mbarrier.expect(full, 2 * KEYS * (PART + REST))
                _copy(kpe_map, tiles.rest.index(BLOCK), full, pages, start, kpe_page, 0, form.PAGE_SIZE)
            else:
                mbarrier.expect(full, 2 * KEYS * PART)
            col = (0 if LEFT else HALF) + part * PART
            _copy(ckv_map, to.slice(part * PART, PART, dim=1), full, pages, start, ckv_page, col, form.PAGE_SIZE)
        else:
            mbarrier.arrive(full, count=1)


@gluon.jit
def _produce(
    BLOCK: gl.constexpr, ckv_map, kpe_map, tiles: Tiles, items, counts, kv_indices, ckv_page, kpe_page, form: Form
):
    """One warp: copies the first or the second block of each pair of each work item, as halves come free."""
    works = gl.load(counts)
    phase = 1
    for wave in range(gl.cdiv(works, gl.num_programs(0))):
        work = _work(wave)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = _span(record, form)
            table = kv_indices + gl.load(record + ITEM_KV_BASE).to(gl.int64)
            start = begin + (pairs * 2 - 2 + BLOCK) * KEYS
            for i in range(pairs):
                # Asked for before the wait, which hides the trip to memory.
                pages = _pages(table, start, end, form.PAGE_SIZE)
                # In the order in which they come free.
                for part in gl.static_range(2):
                    _copy_half(
                        BLOCK, part == BLOCK, ckv_map, kpe_map, tiles, pages, start, end, ckv_page, kpe_page, phase,
                        form,
                    )  # fmt: skip
                start -= 2 * KEYS
                phase ^= 1


@gluon.jit
def _entries(table, start, end, form: Form):
    """Entries of the table for a block of keys, slice by slice as _gather_tile wants them; -1 past the end."""
    SLICE: gl.constexpr = 16
    entries = ()
    for i in gl.static_range(KEYS // SLICE):
        position = start + i * SLICE + gl.arange(0, SLICE, gl.SliceLayout(1, COPY))
        at = position if form.SPARSE else position // form.PAGE_SIZE
        entries += (gl.load(table + at, mask=position < end, other=-1),)
    return entries


@gluon.jit
def _gather_tile(to, source, entries, start, page, step, form: Form):
    """Start copying the rows of one tile from wherever they lie; zeros where there is no key."""
    SLICE: gl.constexpr = 16
    d = gl.arange(0, to.shape[1], gl.SliceLayout(0, COPY))
    for i in gl.static_range(KEYS // SLICE):
        entry = entries[i]
        row = start + i * SLICE + gl.arange(0, SLICE, gl.SliceLayout(1, COPY))
        if form.SPARSE:
            row = entry
            entry = entry // form.PAGE_SIZE
        # Where there is no key, nothing is read.
        at = entry.to(gl.int64) * page + (row % form.PAGE_SIZE).to(gl.int64) * step
        cp_async(to.slice(i * SLICE, SLICE, dim=0), source + at[:, None] + d[None, :], mask=(entries[i] >= 0)[:, None])


@gluon.jit
def _gather_half(
    BLOCK: gl.constexpr, LEFT: gl.constexpr, ckv, kpe, tiles: Tiles, entries, start, ckv_page, ckv_step, kpe_page,
    kpe_step, phase, form: Form,
):  # fmt: skip
    mbarrier.wait((tiles.left_empty if LEFT else tiles.right_empty).index(BLOCK), phase)
    to = (tiles.left if LEFT else tiles.right).index(BLOCK)
    for part in gl.static_range(2):
        if form.POSITIONAL and LEFT == (BLOCK == 1) and part == 0:
            _gather_tile(tiles.rest.index(BLOCK), kpe, entries, start, kpe_page, kpe_step, form)
        source = ckv + ((0 if LEFT else HALF) + part * PART)
        _gather_tile(to.slice(part * PART, PART, dim=1), source, entries, start, ckv_page, ckv_step, form)
        full = (tiles.left_full if LEFT else tiles.right_full).index(2 * BLOCK + part)
        cp_async_arrive(full, increment_count=False)


@gluon.jit
def _tell_gaps(BLOCK: gl.constexpr, tiles: Tiles, table, start, end, phase):
    """Say which keys of a block there are not."""
    position = start + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))
    entry = gl.load(table + position, mask=position < end, other=-1)
    # The half that comes free first was read by the owner of the block, who had read these before.
    mbarrier.wait((tiles.left_empty if BLOCK == 0 else tiles.right_empty).index(BLOCK), phase)
    tiles.bias.index(BLOCK).store(gl.where(entry >= 0, 0.0, float("-inf")))
    block_barrier()
    mbarrier.arrive(tiles.bias_full.index(BLOCK), count=1)


@gluon.jit
def _gather(ckv, kpe, tiles: Tiles, items, counts, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step, form: Form):
    """Four warps: copy keys that no box takes, row by row with cp.async: pages of a few tokens, tokens by name."""
    works = gl.load(counts)
    phase = 1
    for wave in range(gl.cdiv(works, gl.num_programs(0))):
        work = _work(wave)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = _span(record, form)
            table = kv_indices + gl.load(record + ITEM_KV_BASE).to(gl.int64)
            start = begin + (pairs - 1) * 2 * KEYS
            for i in range(pairs):
                for block in gl.static_range(2):
                    # All asked for before the wait, which hides the trip to memory.
                    entries = _entries(table, start, end, form)
                    if form.SPARSE:
                        _tell_gaps(block, tiles, table, start, end, phase)
                    for part in gl.static_range(2):
                        _gather_half(
                            block, part == block, ckv, kpe, tiles, entries, start, ckv_page, ckv_step, kpe_page,
                            kpe_step, phase, form,
                        )  # fmt: skip
                    start += KEYS
                start -= 4 * KEYS
                phase ^= 1


@gluon.jit
def _rows_of(table, start, begin, end, form: Form):
    """Entries of the table for a block of keys, row by row; -1 where there is no key."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    position = start + anew(gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT)))
    at = position if form.SPARSE else position // form.PAGE_SIZE
    return gl.load(table + at, mask=(position >= begin) & (position < end), other=-1)


@gluon.jit
def _offsets(entries, start, page, step, form: Form):
    """Where the rows of a block are, from entries of the table."""
    row = start + gl.arange(0, KEYS, entries.type.layout)
    if form.SPARSE:
        row = entries
        entries = entries // form.PAGE_SIZE
    return entries.to(gl.int64) * page + (row % form.PAGE_SIZE).to(gl.int64) * step


@gluon.constexpr_function
def _is_left(BLOCK, PART_AT):
    """Whether the PART_AT-th part of a block that comes free is one of its left half."""
    return (PART_AT < 2) == (BLOCK == 0)


@gluon.jit
def _load_part(BLOCK: gl.constexpr, AT: gl.constexpr, ckv, at, there):
    FIRST: gl.constexpr = ((0 if _is_left(BLOCK, AT) else HALF) + AT % 2 * PART) // 4
    return load_words(ckv, at, there, FIRST, PART // 4)


@gluon.jit
def _widen_part(BLOCK: gl.constexpr, AT: gl.constexpr, tiles: Tiles, words, rest, phase, form: Form):
    """Store a part as soon as its place is free, the positional rows before the third."""
    LEFT: gl.constexpr = _is_left(BLOCK, AT)
    if AT % 2 == 0:
        mbarrier.wait((tiles.left_empty if LEFT else tiles.right_empty).index(BLOCK), phase)
    if form.POSITIONAL and AT == 2:
        store_widened(tiles.rest.index(BLOCK), 0, rest, form.KV_FP8)
    store_widened((tiles.left if LEFT else tiles.right).index(BLOCK), AT % 2 * PART, words, form.KV_FP8)
    # The fence behind which tensor cores see it is left to who multiplies: here it would wait for loads on their way.
    block_barrier()
    mbarrier.arrive((tiles.left_full if LEFT else tiles.right_full).index(2 * BLOCK + AT % 2), count=1)


@gluon.jit
def _widen(ckv, kpe, tiles: Tiles, items, counts, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step, form: Form):
    """Four warps: FP8 keys through registers, part by part, while the next ones are on their way.

    Each thread has two rows of a block. Caches come as words of four elements, steps in words.
    """
    # Parts on their way.
    AHEAD: gl.constexpr = 2
    works = gl.load(counts)
    phase = 1
    for wave in range(gl.cdiv(works, gl.num_programs(0))):
        work = _work(wave)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = _span(record, form)
            table = kv_indices + gl.load(record + ITEM_KV_BASE).to(gl.int64)
            start = begin + (pairs - 1) * 2 * KEYS
            entries = _rows_of(table, start, begin, end, form)
            after = _rows_of(table, start + KEYS, begin, end, form)
            at = _offsets(entries, start, ckv_page, ckv_step, form)
            flight = ()
            for part in gl.static_range(AHEAD):
                flight += (_load_part(0, part, ckv, at, entries >= 0),)
            for i in range(pairs):
                for block in gl.static_range(2):
                    following = start + (KEYS if block == 0 else -3 * KEYS)
                    if form.SPARSE:
                        _tell_gaps(block, tiles, table, start, end, phase)
                    next_at = _offsets(after, following, ckv_page, ckv_step, form)
                    if form.POSITIONAL:
                        rest_at = _offsets(entries, start, kpe_page, kpe_step, form)
                        rest = load_words(kpe, rest_at, entries >= 0, 0, REST // 4)
                    later = _rows_of(table, following + (-3 * KEYS if block == 0 else KEYS), begin, end, form)
                    for part in gl.static_range(4):
                        if form.POSITIONAL and part == 2:
                            _widen_part(block, part, tiles, flight[0], rest, phase, form)
                        else:
                            _widen_part(block, part, tiles, flight[0], flight[0], phase, form)
                        if part + AHEAD < 4:
                            words = _load_part(block, part + AHEAD, ckv, at, entries >= 0)
                        else:
                            words = _load_part(1 - block, part + AHEAD - 4, ckv, next_at, after >= 0)
                        flight = flight[1:] + (words,)
                    at = next_at
                    entries = after
                    after = later
                    start = following
                phase ^= 1


@gluon.jit
def _fetch_fp8(tile, q, record, stride_n, stride_h, form: Form):
    """_fetch of FP8 queries, words of four elements, through registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    packed = gl.load(record + ITEM_TILE_ROW) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = packed // form.HEADS
    at = (gl.load(record + ITEM_Q_ROW) + token).to(gl.int64) * stride_n + (packed % form.HEADS) * stride_h
    words = load_words(q, at, token < gl.load(record + ITEM_Q_LEN), 0, tile.shape[1] // 4)
    store_widened(tile, 0, words, form.Q_FP8)


@gluon.jit
def _fetch(tile, q, record, stride_n, stride_h, form: Form):
    """Start copying columns of a tile's query rows; zeros past the last one."""
    if form.Q_FP8 != "":
        _fetch_fp8(tile, q, record, stride_n, stride_h, form)
        return
    SLICE: gl.constexpr = 16
    d = gl.arange(0, tile.shape[1], gl.SliceLayout(0, COPY))
    first = gl.load(record + ITEM_TILE_ROW) + anew(gl.arange(0, SLICE, gl.SliceLayout(1, COPY)))
    for i in gl.static_range(ROWS // SLICE):
        packed = first + i * SLICE
        token = packed // form.HEADS
        at = (gl.load(record + ITEM_Q_ROW) + token).to(gl.int64) * stride_n + (packed % form.HEADS) * stride_h
        there = token < gl.load(record + ITEM_Q_LEN)
        cp_async(tile.slice(i * SLICE, SLICE, dim=0), q + at[:, None] + d[None, :], mask=there[:, None])


@gluon.jit
def _wait_half(barriers, BLOCK: gl.constexpr, phase, form: Form):
    for part in gl.static_range(2):
        mbarrier.wait(barriers.index(2 * BLOCK + part), phase)
    if form.GATHER:
        # What threads and cp.async wrote, the tensor cores see behind this fence.
        fence_async_shared()


@gluon.jit
def _half_scores(LEFT: gl.constexpr, BLOCK: gl.constexpr, s, tiles: Tiles, step, ADD: gl.constexpr, form: Form):
    """Start products with half of the columns, part by part as they come."""
    # 0, which the compiler does not know: else it makes the 72 operand descriptors before the loop, and spills them.
    none = step >> 30
    q = (tiles.q_left if LEFT else tiles.q_right).index(none)
    keys = (tiles.left if LEFT else tiles.right).index(BLOCK + none)
    for part in gl.static_range(2):
        mbarrier.wait((tiles.left_full if LEFT else tiles.right_full).index(2 * BLOCK + part), step & 1)
        if form.GATHER:
            fence_async_shared()
        k = keys.slice(part * PART, PART, dim=1).permute([1, 0])
        s = warpgroup_mma(q.slice(part * PART, PART, dim=1), k, s, use_acc=ADD or part > 0, is_async=True)
    return s


@gluon.jit
def _rest_scores(BLOCK: gl.constexpr, s, tiles: Tiles, step, ADD: gl.constexpr):
    """Start products of positional rows."""
    none = step >> 30
    rest = tiles.rest.index(BLOCK + none).permute([1, 0])
    return warpgroup_mma(tiles.q_rest.index(none), rest, s, use_acc=ADD, is_async=True)


@gluon.jit
def _scores(BLOCK: gl.constexpr, zeros, tiles: Tiles, step, pe_ratio, form: Form):
    """Start S = Q K^T of a block, the half that comes first first."""
    RATIO: gl.constexpr = form.POSITIONAL and form.TRANSFORM
    s = zeros
    if RATIO:
        # What has a factor of its own goes before.
        _wait_half(tiles.right_full if BLOCK == 0 else tiles.left_full, BLOCK, step & 1, form)
        s = _rest_scores(BLOCK, s, tiles, step, False)
        s = warpgroup_mma_wait(0, [s]) * pe_ratio
    s = _half_scores(BLOCK == 0, BLOCK, s, tiles, step, RATIO, form)
    s = _half_scores(BLOCK == 1, BLOCK, s, tiles, step, True, form)
    if form.POSITIONAL and not RATIO:
        s = _rest_scores(BLOCK, s, tiles, step, True)
    return s


@gluon.jit
def _clear_tail(tile, start, end):
    """Zero the rows of a tile past the last key: their weight is 0, and 0 times what lies there may be NaN."""
    SLICE: gl.constexpr = 16
    row = gl.arange(0, SLICE, gl.SliceLayout(1, COPY))
    for i in gl.static_range(KEYS // SLICE):
        if start + (i + 1) * SLICE > end:
            # 16 bytes a thread at a time: few registers beside the output's.
            for j in gl.static_range(HALF // 64):
                part = tile.slice(i * SLICE, SLICE, dim=0).slice(j * 64, 64, dim=1)
                x = part.load(COPY)
                part.store(gl.where((start + i * SLICE + row < end)[:, None], x, 0.0).to(x.dtype))


@gluon.jit
def _hidden(WG: gl.constexpr, s, keys, last, form: Form):
    """Logits of a block that has `keys` keys, of which a row sees those up to number `last`.

    A thread has columns 8 i + 2 lane + j. Taken apart like this, it compares constants with one number of its own; as
    numbers of columns, the compiler has 16 registers hold them over the whole loop.
    """
    LAYOUT: gl.constexpr = s.type.layout
    s = s.reshape([ROWS, KEYS // 8, 4, 2])
    APART: gl.constexpr = s.type.layout
    i = gl.arange(0, KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, APART))))
    j = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, APART))))
    col = (8 * i)[None, :, None, None] + j[None, None, None, :]
    if WG == 0 or form.KV_FP8 == "":
        # No register is left to keep a place for all items, but in the second warpgroup beside FP8 keys, where this
        # takes 1 % longer.
        first = 2 * (lane() & 3)
    else:
        LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, APART)))
        first = 2 * anew(gl.arange(0, 4, LANES))[None, None, :, None]
    s = gl.where(col < keys - first, s, float("-inf"))
    if form.CAUSAL:
        last = gl.convert_layout(last, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, APART))))
        s = gl.where(col <= last[:, None, None, None] - first, s, float("-inf"))
    return gl.convert_layout(s.reshape([ROWS, KEYS]), LAYOUT)


@gluon.jit
def _masked(WG: gl.constexpr, s, start, end, plain_end, position, tiles: Tiles, phase, form: Form):
    """Logits of keys that a row does not see are -inf."""
    if form.SPARSE:
        # Past the end there is none either.
        mbarrier.wait(tiles.bias_full.index(WG), phase)
        s += tiles.bias.index(WG).load(gl.SliceLayout(0, s.type.layout))[None, :]
    if form.CAUSAL or not form.SPARSE:
        if start + KEYS > plain_end:
            s = _hidden(WG, s, end - start, position - start, form)
    return s


@gluon.jit
def _softmax(s, top, factor):
    """One block of the online softmax in base 2: weights, maximum, and the factor of what was summed before."""
    new_top = gl.maximum(top, gl.max(s, 1))
    # A row that has seen no key yet has top = -inf, and inf - inf is NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * factor - (base * factor)[:, None])
    return p, new_top, gl.exp2((top - base) * factor)


@gluon.jit
def _by_threads(p, form: Form):
    """Where rows are gathered, and registers are few, the sums of what a thread has of each row: so many less until
    lanes add theirs. Elsewhere p itself: with it two query tokens, and FP8 keys, take 0.7 % longer on one H100."""
    if form.GATHER and form.KV_FP8 == "":
        p = gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)
    return p


@gluon.jit
def _per_row(x, like):
    """One number per row, as a column beside the tile `like`."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _publish(WG: gl.constexpr, tiles: Tiles, weights, top, keep, start, end, form: Form):
    """Store weights where positional keys were, with their rows' maxima and factors, and tell the other warpgroup."""
    tiles.rest.index(WG).store(weights)
    tiles.tops.index(WG).store(top)
    tiles.keeps.index(WG).store(keep)
    if not form.GATHER:
        if start + KEYS > end:
            _clear_tail(tiles.left.index(WG), start, end)
            _clear_tail(tiles.right.index(WG), start, end)
    # The tensor cores see what threads wrote behind this fence.
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(tiles.ready.index(WG), count=1)


@gluon.jit
def _first_steps(
    acc, top, sums, step, pairs, begin, end, plain_end, position, zeros, tiles: Tiles, factor, scale,
    pe_ratio, form: Form,
):  # fmt: skip
    """The warpgroup of first blocks, and of the left half of the output, over all pairs from the last to the first."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    start = begin + (pairs - 1) * 2 * KEYS
    for i in range(pairs):
        phase = step & 1
        none = step >> 30
        s = _scores(0, zeros, tiles, step, pe_ratio, form)
        s = warpgroup_mma_wait(0, [s])
        if form.TRANSFORM:
            s = s * scale
        s = _masked(0, s, start, end, plain_end, position, tiles, phase, form)
        p, top, keep = _softmax(s, top, factor)
        parts = _by_threads(p, form)
        weights = p.to(tiles.rest.dtype)
        _publish(0, tiles, weights, top, keep, start, end, form)
        acc = acc * _per_row(keep, acc)
        operand = gl.convert_layout(weights, P_LAYOUT)
        acc = warpgroup_mma(operand, tiles.left.index(none), acc, is_async=True)
        sums = sums * keep + gl.convert_layout(gl.sum(parts, 1), sums.type.layout)
        mbarrier.wait(tiles.ready.index(1), phase)
        _wait_half(tiles.left_full, 1, phase, form)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(tiles.left_empty.index(0), count=1)
        top = tiles.tops.index(1).load(top.type.layout)
        keep = tiles.keeps.index(1).load(top.type.layout)
        sums = sums * keep
        acc = acc * _per_row(keep, acc)
        acc = warpgroup_mma(tiles.rest.index(1 + none), tiles.left.index(1 + none), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(tiles.left_empty.index(1), count=1)
        start -= 2 * KEYS
        step += 1
    return acc, top, sums, step


@gluon.jit
def _second_steps(
    acc, top, sums, step, pairs, begin, end, plain_end, position, zeros, tiles: Tiles, factor, scale,
    pe_ratio, form: Form,
):  # fmt: skip
    """The warpgroup of second blocks, and of the right half of the output."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    start = begin + (pairs * 2 - 1) * KEYS
    for i in range(pairs):
        phase = step & 1
        none = step >> 30
        s = _scores(1, zeros, tiles, step, pe_ratio, form)
        mbarrier.wait(tiles.ready.index(0), phase)
        _wait_half(tiles.right_full, 0, phase, form)
        top = tiles.tops.index(0).load(top.type.layout)
        keep = tiles.keeps.index(0).load(top.type.layout)
        sums = sums * keep
        acc = acc * _per_row(keep, acc)
        pv = warpgroup_mma(tiles.rest.index(none), tiles.right.index(none), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        if form.TRANSFORM:
            s = s * scale
        s = _masked(1, s, start, end, plain_end, position, tiles, phase, form)
        p, top, keep = _softmax(s, top, factor)
        parts = _by_threads(p, form)
        weights = p.to(tiles.rest.dtype)
        _publish(1, tiles, weights, top, keep, start, end, form)
        operand = gl.convert_layout(weights, P_LAYOUT)
        # Over already. It is a branch, in front of which the assembler does not move the wait for the products that are
        # to run beside the softmax.
        mbarrier.wait(tiles.right_full.index(2), phase)
        acc = warpgroup_mma_wait(0, [pv])
        mbarrier.arrive(tiles.right_empty.index(0), count=1)
        acc = acc * _per_row(keep, acc)
        acc = warpgroup_mma(operand, tiles.right.index(1 + none), acc, is_async=True)
        sums = sums * keep + gl.convert_layout(gl.sum(parts, 1), sums.type.layout)
        acc, operand = warpgroup_mma_wait(0, [acc, operand])
        mbarrier.arrive(tiles.right_empty.index(1), count=1)
        start -= 2 * KEYS
        step += 1
    return acc, top, sums, step


@gluon.jit
def _meet(tiles: Tiles, phase):
    """Both warpgroups wait for each other; what either wrote before, threads and tensor cores see after."""
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(tiles.met, count=1)
    mbarrier.wait(tiles.met, phase)


@gluon.jit
def _rows(LAYOUT: gl.constexpr):
    """The rows of a tile, found anew: a thread's are 8 apart."""
    index = gl.arange(0, ROWS, LAYOUT)
    return anew(index & -9) + (index & 8)


@gluon.jit
def _consume(WG: gl.constexpr, tensors, numbers, tiles: Tiles, form: Form):
    """One warpgroup. `tensors` and `numbers` are the kernel's arguments."""
    q_nope, q_pe, out, lse, partial_out, partial_lse, items, counts, sinks, qk_scale = tensors[:10]
    v_scale = tensors[10]
    q_nope_n, q_nope_h, q_pe_n, q_pe_h, o_stride_n, o_stride_h, sm_scale, out_scale, pe_ratio = numbers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    scale = sm_scale * LOG2E
    if form.DEVICE_SCALES:
        scale *= gl.load(qk_scale)
        out_scale *= gl.load(v_scale)
    factor = 1.0 if form.TRANSFORM else scale
    works = gl.load(counts)
    step = 0
    wave = 0
    # What is the same for all items is made for each: the loop over keys has no registers to keep it.
    while tl.condition(wave < gl.cdiv(works, gl.num_programs(0)), disable_licm=True):
        work = _work(wave)
        wave += 1
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = _span(record, form)
            packed = gl.load(record + ITEM_TILE_ROW) + _rows(S_ROWS)
            position = packed // form.HEADS + (gl.load(record + ITEM_KV_LEN) - gl.load(record + ITEM_Q_LEN))
            acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
            top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
            total = gl.zeros([ROWS], gl.float32, S_ROWS)
            if pairs > 0:
                # The other warpgroup is done with the last tile's queries: its last weights were waited for.
                if WG == 0:
                    _fetch(tiles.q_left.index(0), q_nope, record, q_nope_n, q_nope_h, form)
                    if form.POSITIONAL:
                        _fetch(tiles.q_rest.index(0), q_pe, record, q_pe_n, q_pe_h, form)
                else:
                    q_right = q_nope + (HALF if form.Q_FP8 == "" else HALF // 4)
                    _fetch(tiles.q_right.index(0), q_right, record, q_nope_n, q_nope_h, form)
                cp_async_commit()
                cp_async_wait(0)
                _meet(tiles, 0)
                if WG == 0:
                    acc, top, total, step = _first_steps(
                        acc, top, total, step, pairs, begin, end, plain_end, position, zeros, tiles, factor,
                        scale, pe_ratio, form,
                    )  # fmt: skip
                else:
                    acc, top, total, step = _second_steps(
                        acc, top, total, step, pairs, begin, end, plain_end, position, zeros, tiles, factor,
                        scale, pe_ratio, form,
                    )  # fmt: skip
                tiles.sums.index(WG).store(total)
                _meet(tiles, 1)
                # Both from shared memory, so that either warpgroup has the same sum, bit by bit.
                total = tiles.sums.index(0).load(total.type.layout) + tiles.sums.index(1).load(total.type.layout)

            q_row = gl.load(record + ITEM_Q_ROW)
            q_len = gl.load(record + ITEM_Q_LEN)
            tile_row = gl.load(record + ITEM_TILE_ROW)
            slot = gl.load(record + ITEM_SLOT)
            # Found again, and not kept: the loop over keys needs the registers.
            rows = _rows(S_ROWS)
            packed = tile_row + rows
            token = packed // form.HEADS
            head = packed % form.HEADS
            row_ok = token < q_len
            top *= factor
            if form.SINKS:
                # The combination adds the sink of a split tile, once.
                if slot < 0:
                    sink = gl.load(sinks + head, mask=row_ok, other=float("-inf")) * LOG2E
                    new_top = gl.maximum(top, sink)
                    base = gl.where(new_top == float("-inf"), 0.0, new_top)
                    keep = gl.exp2(top - base)
                    acc = acc * _per_row(keep, acc)
                    total = total * keep + gl.exp2(sink - base)
                    top = new_top
            # Not `> 0`: a NaN among the logits has to come out.
            seen = total != 0
            inverse = gl.where(seen, out_scale / gl.where(seen, total, 1.0), 0.0)
            # 0 * NaN is NaN: a row that saw no key must not show what the accumulator picked up.
            acc = gl.where(_per_row(seen, acc), acc * _per_row(inverse, acc), 0.0)
            state = gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))

            o_rows = _rows(gl.SliceLayout(1, O_LAYOUT))
            o_cols = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
            flat = tile_row + o_rows
            o_ok = (flat // form.HEADS < q_len)[:, None]
            if slot >= 0:
                row = slot.to(gl.int64) * ROWS
                gl.store(partial_out + (row + o_rows)[:, None] * (2 * HALF) + o_cols[None, :], acc, mask=o_ok)
                if WG == 0:
                    gl.store(partial_lse + row + rows, state, mask=row_ok)
            else:
                at = (q_row + flat // form.HEADS).to(gl.int64) * o_stride_n + (flat % form.HEADS) * o_stride_h
                gl.store(out + at[:, None] + o_cols[None, :], acc.to(out.dtype.element_ty), mask=o_ok)
                if form.LSE and WG == 0:
                    lse_at = (q_row + token).to(gl.int64) * form.HEADS + head
                    gl.store(lse + lse_at, state * LN2 if form.BASE_E else state, mask=row_ok)


@gluon.jit
def attend_latent_sm90_kernel(
    q_nope, q_pe, ckv_map, kpe_map, out, lse, partial_out, partial_lse, items, counts, kv_indices, sinks,
    qk_scale, v_scale, q_nope_stride_n, q_nope_stride_h, q_pe_stride_n, q_pe_stride_h, ckv_page, ckv_step, kpe_page,
    kpe_step, o_stride_n, o_stride_h, sm_scale, out_scale, pe_ratio,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SPARSE: gl.constexpr, GATHER: gl.constexpr, POSITIONAL: gl.constexpr,
    KV_FP8: gl.constexpr, Q_FP8: gl.constexpr, CAUSAL: gl.constexpr, SINKS: gl.constexpr, DEVICE_SCALES: gl.constexpr,
    TRANSFORM: gl.constexpr, LSE: gl.constexpr, BASE_E: gl.constexpr, REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent: any number of blocks of threads. Split tiles are left to combine_latent_kernel. Latent rows have
    2 * HALF columns, positional rows REST or none.

    Keys are the rows of matrices (kv_layout.Matrix), *_page rows from page to page. With GATHER they are anywhere: the
    maps are pointers, and *_page and *_step are elements from page to page and row to row. FP8 comes in words of four
    elements, gathered, and steps are words.
    """
    DTYPE: gl.constexpr = q_nope.dtype.element_ty if Q_FP8 == "" else gl.float16
    form = Form(
        HEADS=HEADS, PAGE_SIZE=PAGE_SIZE, SPARSE=SPARSE, GATHER=GATHER, POSITIONAL=POSITIONAL,
        KV_FP8=KV_FP8, Q_FP8=Q_FP8, CAUSAL=CAUSAL, SINKS=SINKS, DEVICE_SCALES=DEVICE_SCALES, TRANSFORM=TRANSFORM,
        LSE=LSE, BASE_E=BASE_E,
    )  # fmt: skip
    Q_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], DTYPE)
    Q_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], DTYPE)
    K_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], DTYPE)
    K_REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, REST], DTYPE)
    A_ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        q_left=gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_HALF),
        q_right=gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_HALF),
        q_rest=gl.allocate_shared_memory(DTYPE, [1, ROWS, REST], Q_REST),
        left=gl.allocate_shared_memory(DTYPE, [2, KEYS, HALF], K_HALF),
        right=gl.allocate_shared_memory(DTYPE, [2, KEYS, HALF], K_HALF),
        rest=gl.allocate_shared_memory(DTYPE, [2, KEYS, REST], K_REST),
        left_full=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        left_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        right_full=gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        right_empty=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        ready=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        met=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        tops=gl.allocate_shared_memory(gl.float32, [2, ROWS], A_ROW),
        keeps=gl.allocate_shared_memory(gl.float32, [2, ROWS], A_ROW),
        sums=gl.allocate_shared_memory(gl.float32, [2, ROWS], A_ROW),
        bias=gl.allocate_shared_memory(gl.float32, [2, KEYS], A_ROW),
        bias_full=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    # Every thread that gathers says so; of copies in boxes, the copy engine does.
    WRITERS: gl.constexpr = 128 if GATHER and KV_FP8 == "" else 1
    for part in gl.static_range(4):
        mbarrier.init(tiles.left_full.index(part), count=WRITERS)
        mbarrier.init(tiles.right_full.index(part), count=WRITERS)
    for block in gl.static_range(2):
        mbarrier.init(tiles.left_empty.index(block), count=1)
        mbarrier.init(tiles.right_empty.index(block), count=1)
        mbarrier.init(tiles.ready.index(block), count=1)
        if GATHER:
            # Without a use, its place is another's.
            mbarrier.init(tiles.bias_full.index(block), count=1)
    mbarrier.init(tiles.met, count=2)
    tensors = (
        q_nope, q_pe, out, lse, partial_out, partial_lse, items, counts, sinks, qk_scale, v_scale,
    )  # fmt: skip
    numbers = (
        q_nope_stride_n, q_nope_stride_h, q_pe_stride_n, q_pe_stride_h, o_stride_n, o_stride_h, sm_scale, out_scale,
        pe_ratio,
    )  # fmt: skip
    if GATHER:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, numbers, tiles, form)),
                (_consume, (gl.constexpr(1), tensors, numbers, tiles, form)),
                (_gather if KV_FP8 == "" else _widen, (
                    ckv_map, kpe_map, tiles, items, counts, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step, form,
                )),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), tensors, numbers, tiles, form)),
                (_consume, (gl.constexpr(1), tensors, numbers, tiles, form)),
                (_produce, (
                    gl.constexpr(0), ckv_map, kpe_map, tiles, items, counts, kv_indices, ckv_page, kpe_page, form,
                )),
                (_produce, (
                    gl.constexpr(1), ckv_map, kpe_map, tiles, items, counts, kv_indices, ckv_page, kpe_page, form,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip

"""Latent attention on Hopper: what a block of threads works at, and how keys and queries reach its shared memory."""

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async,
    cp_async_arrive,
    gl,
    gluon,
    mbarrier,
    tma_load,
)
from flashinfer.ops._device.registers_sm90 import anew
from flashinfer.ops.attention._device.fixed_shift_sm90 import read_word
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BASE,
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention.mla.sm90_widen import load_words, store_widened

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
# Work items that a block of threads makes twice, at most. Past them it tries no fixed shift any more.
MOST_FAILED = gl.constexpr(64)
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
    # Whether blocks without a mask take weights of a fixed shift: in bf16, which has the range of float32.
    FIXED: gl.constexpr
    LSE: gl.constexpr
    BASE_E: gl.constexpr



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
    # Work items at which a fixed shift failed, their number behind them, and a barrier that says that all are there.
    failed: gl.shared_memory_descriptor
    judged: gl.shared_memory_descriptor



@gluon.jit
def work_of(wave, waves, tiles: Tiles, form: Form):
    """The wave-th work item of this block of threads; every other wave runs backwards, as in attend_sm90.py. Behind
    the last one come those that failed."""
    blocks = gl.num_programs(0)
    at = gl.program_id(0)
    work = wave * blocks + gl.where(wave % 2 == 0, at, blocks - 1 - at)
    if form.FIXED:
        if wave >= waves:
            work = read_word(tiles.failed.index(wave - waves))
    return work


@gluon.jit
def more_work(wave, waves, tiles: Tiles, form: Form):
    """How much work is to be made again, once that of all waves is done."""
    more = 0
    if form.FIXED:
        if wave == waves:
            mbarrier.wait(tiles.judged, 0)
            more = read_word(tiles.failed.index(MOST_FAILED))
    return more


@gluon.jit
def span(record, form: Form):
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
def produce(
    BLOCK: gl.constexpr, ckv_map, kpe_map, tiles: Tiles, items, counts, kv_indices, ckv_page, kpe_page, form: Form
):
    """One warp: copies the first or the second block of each pair of each work item, as halves come free."""
    works = gl.load(counts)
    phase = 1
    waves = gl.cdiv(works, gl.num_programs(0))
    last = waves
    wave = 0
    while wave < last:
        work = work_of(wave, waves, tiles, form)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, form)
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
        wave += 1
        last += more_work(wave, waves, tiles, form)


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
def gather(ckv, kpe, tiles: Tiles, items, counts, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step, form: Form):
    """Four warps: copy keys that no box takes, row by row with cp.async: pages of a few tokens, tokens by name."""
    works = gl.load(counts)
    phase = 1
    waves = gl.cdiv(works, gl.num_programs(0))
    last = waves
    wave = 0
    while wave < last:
        work = work_of(wave, waves, tiles, form)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, form)
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
        wave += 1
        last += more_work(wave, waves, tiles, form)


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
def widen(ckv, kpe, tiles: Tiles, items, counts, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step, form: Form):
    """Four warps: FP8 keys through registers, part by part, while the next ones are on their way.

    Each thread has two rows of a block. Caches come as words of four elements, steps in words.
    """
    # Parts on their way.
    AHEAD: gl.constexpr = 2
    works = gl.load(counts)
    phase = 1
    waves = gl.cdiv(works, gl.num_programs(0))
    last = waves
    wave = 0
    while wave < last:
        work = work_of(wave, waves, tiles, form)
        if work < works:
            record = items + work * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, form)
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
        wave += 1
        last += more_work(wave, waves, tiles, form)


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
def fetch(tile, q, record, stride_n, stride_h, form: Form):
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

"""Latent attention on Hopper: copies of queries and keys to shared memory.

- `produce`, one warp for each block of a pair: TMA copies, a box for each page.
- `gather`, four warps: cp.async row by row, for sparse tokens and page sizes that are no TMA box. FP8 keys:
  sm90_widen.py.
- `fetch`: the query rows of a tile; by `gather`, else by the consumers, each warpgroup its half of the columns.
"""

from flashinfer._core.gluon_compat import (
    cp_async,
    cp_async_arrive,
    gl,
    gluon,
    mbarrier,
    tma_load,
)
from flashinfer.ops._device.sm90.registers import opaque
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BASE,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention.mla.sm90_settings import (
    COPY,
    HALF,
    KEYS,
    PART,
    REST,
    ROWS,
    Scalars,
    Settings,
    Shared,
    Tensors,
)
from flashinfer.ops.attention.mla.sm90_widen import fetch_fp8, publish_bias
from flashinfer.ops.attention.mla.sm90_work import entries_of, item_of, offsets_of, retries, span


@gluon.jit
def _pages(table, start, end, PAGE_SIZE: gl.constexpr):
    """The page ids of one block of keys. Past the end it is the last key's page, whose data is masked."""
    pages = ()
    BOXES: gl.constexpr = (KEYS + PAGE_SIZE - 1) // PAGE_SIZE
    for box in gl.static_range(BOXES):
        page = gl.minimum(start + box * PAGE_SIZE, end - 1) // PAGE_SIZE
        pages += (gl.load(table + page),)
    return pages


@gluon.jit
def _copy(source, to, full, pages, start, page_rows, col, PAGE_SIZE: gl.constexpr):
    """Start copying the columns from `col` on of a block of keys, a box for each page."""
    if PAGE_SIZE >= KEYS:
        tma_load(source, [pages[0] * page_rows + start % PAGE_SIZE, col], full, to)
    else:
        for box in gl.static_range(KEYS // PAGE_SIZE):
            tma_load(source, [pages[box] * page_rows, col], full, to.slice(box * PAGE_SIZE, PAGE_SIZE, dim=0))


@gluon.jit
def _copy_half(
    BLOCK: gl.constexpr, LEFT: gl.constexpr, ckv_map, kpe_map, shared: Shared, pages, start, end, ckv_page, kpe_page,
    phase, settings: Settings,
):  # fmt: skip
    """Start copying a half of a block once it is released. One of the halves is preceded by the positional rows."""
    mbarrier.wait((shared.left_empty if LEFT else shared.right_empty).index(BLOCK), phase)
    to = (shared.left if LEFT else shared.right).index(BLOCK)
    for part in gl.static_range(2):
        full = (shared.left_full if LEFT else shared.right_full).index(2 * BLOCK + part)
        if start < end:
            if settings.POSITIONAL and LEFT == (BLOCK == 1) and part == 0:
                mbarrier.expect(full, 2 * KEYS * (PART + REST))
                _copy(kpe_map, shared.rest.index(BLOCK), full, pages, start, kpe_page, 0, settings.PAGE_SIZE)
            else:
                mbarrier.expect(full, 2 * KEYS * PART)
            col = (0 if LEFT else HALF) + part * PART
            _copy(ckv_map, to.slice(part * PART, PART, dim=1), full, pages, start, ckv_page, col, settings.PAGE_SIZE)
        else:
            mbarrier.arrive(full, count=1)


@gluon.jit
def produce(
    BLOCK: gl.constexpr, ckv_map, kpe_map, shared: Shared, items, counts, kv_indices, ckv_page, kpe_page,
    settings: Settings,
):  # fmt: skip
    """Producer warp: copies block BLOCK of each pair of each work item, as halves are released."""
    count = gl.load(counts)
    phase = 1
    waves = gl.cdiv(count, gl.num_programs(0))
    last = waves
    wave = 0
    while wave < last:
        item = item_of(wave, waves, shared, settings)
        if item < count:
            record = items + item * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, settings)
            table = kv_indices + gl.load(record + ITEM_KV_BASE).to(gl.int64)
            start = begin + (pairs * 2 - 2 + BLOCK) * KEYS
            for i in range(pairs):
                # Loaded before the wait for a release, which hides the latency.
                pages = _pages(table, start, end, settings.PAGE_SIZE)
                # In the order of their release.
                for part in gl.static_range(2):
                    _copy_half(
                        BLOCK, part == BLOCK, ckv_map, kpe_map, shared, pages, start, end, ckv_page, kpe_page, phase,
                        settings,
                    )  # fmt: skip
                start -= 2 * KEYS
                phase ^= 1
        wave += 1
        last += retries(wave, waves, shared, settings)


@gluon.jit
def _gather_tile(to, source, entries, start, page, step, settings: Settings):
    """Start copying the rows of one tile; rows without a key become zeros.

    All rows in one copy: the compiler puts a barrier of the four warps between two copies to one buffer.
    """
    d = gl.arange(0, to.shape[1], gl.SliceLayout(0, COPY))
    at = offsets_of(entries, start, page, step, settings)
    cp_async(to, source + at[:, None] + d[None, :], mask=(entries >= 0)[:, None])


@gluon.jit
def _gather_half(
    BLOCK: gl.constexpr, LEFT: gl.constexpr, ckv, kpe, shared: Shared, entries, start, ckv_page, ckv_step, kpe_page,
    kpe_step, phase, settings: Settings,
):  # fmt: skip
    mbarrier.wait((shared.left_empty if LEFT else shared.right_empty).index(BLOCK), phase)
    to = (shared.left if LEFT else shared.right).index(BLOCK)
    for part in gl.static_range(2):
        if settings.POSITIONAL and LEFT == (BLOCK == 1) and part == 0:
            _gather_tile(shared.rest.index(BLOCK), kpe, entries, start, kpe_page, kpe_step, settings)
        source = ckv + ((0 if LEFT else HALF) + part * PART)
        _gather_tile(to.slice(part * PART, PART, dim=1), source, entries, start, ckv_page, ckv_step, settings)
        full = (shared.left_full if LEFT else shared.right_full).index(2 * BLOCK + part)
        cp_async_arrive(full, increment_count=False)


@gluon.jit
def gather(
    ckv, kpe, shared: Shared, tensors: Tensors, scalars: Scalars, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step,
    settings: Settings,
):  # fmt: skip
    """Four producer warps: copy keys row by row with cp.async, for sparse tokens and pages that are no TMA box, and
    each tile's queries."""
    TILE: gl.constexpr = gl.SliceLayout(1, COPY)
    count = gl.load(tensors.counts)
    phase = 1
    q_phase = 1
    waves = gl.cdiv(count, gl.num_programs(0))
    last = waves
    wave = 0
    while wave < last:
        item = item_of(wave, waves, shared, settings)
        if item < count:
            record = tensors.items + item * ITEM_WIDTH
            begin, end, pairs, plain_end = span(record, settings)
            table = kv_indices + gl.load(record + ITEM_KV_BASE).to(gl.int64)
            start = begin + (pairs - 1) * 2 * KEYS
            entries = entries_of(TILE, table, start, begin, end, settings)
            after = entries_of(TILE, table, start + KEYS, begin, end, settings)
            for i in range(pairs):
                for block in gl.static_range(2):
                    # Loaded a pair ahead: a table is read once, so its entries come from memory, not from L2.
                    later = entries_of(TILE, table, start - 2 * KEYS, begin, end, settings)
                    for half in gl.static_range(2):
                        _gather_half(
                            block, half == block, ckv, kpe, shared, entries, start, ckv_page, ckv_step, kpe_page,
                            kpe_step, phase, settings,
                        )  # fmt: skip
                        if settings.SPARSE and half == 0:
                            publish_bias(block, shared, entries, phase)
                    if block == 0:
                        if i == 0:
                            # After the keys of the first block, which are released earlier.
                            mbarrier.wait(shared.q_read, q_phase)
                            _fetch_all(record, shared, tensors, scalars, settings)
                            q_phase ^= 1
                    entries = after
                    after = later
                    start += KEYS if block == 0 else -3 * KEYS
                phase ^= 1
        wave += 1
        last += retries(wave, waves, shared, settings)


@gluon.jit
def fetch(tile, q, record, stride_n, stride_h, settings: Settings):
    """Start copying columns of a tile's query rows; zeros past the last row. FP8 is widened in registers."""
    if settings.Q_FP8 != "":
        fetch_fp8(tile, q, record, stride_n, stride_h, settings)
        return
    d = gl.arange(0, tile.shape[1], gl.SliceLayout(0, COPY))
    packed = gl.load(record + ITEM_TILE_ROW) + opaque(gl.arange(0, ROWS, gl.SliceLayout(1, COPY)))
    token = packed // settings.HEADS
    at = (gl.load(record + ITEM_Q_ROW) + token).to(gl.int64) * stride_n + (packed % settings.HEADS) * stride_h
    there = token < gl.load(record + ITEM_Q_LEN)
    cp_async(tile, q + at[:, None] + d[None, :], mask=there[:, None])


@gluon.jit
def _fetch_all(record, shared: Shared, tensors: Tensors, scalars: Scalars, settings: Settings):
    """Producers' fetch of a tile's queries, once both warpgroups have multiplied the previous tile's."""
    by_n, by_h = scalars.q_nope_stride_n, scalars.q_nope_stride_h
    fetch(shared.q_left.index(0), tensors.q_nope, record, by_n, by_h, settings)
    fetch(shared.q_right.index(0), tensors.q_nope + HALF, record, by_n, by_h, settings)
    if settings.POSITIONAL:
        by_n, by_h = scalars.q_pe_stride_n, scalars.q_pe_stride_h
        fetch(shared.q_rest.index(0), tensors.q_pe, record, by_n, by_h, settings)
    cp_async_arrive(shared.q_full, increment_count=False)

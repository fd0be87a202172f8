"""Hopper prefill: copies of queries, keys and values to shared memory.

- `produce`, a warp for keys and one for values, or two for each where a tile has many pages: TMA copies, a box for each
  page.
- `gather`, four warps: cp.async row by row, for page sizes that are no TMA box (below 16 tokens, or no power of two).
  FP8 under wider queries: sm90_widen.py.
- `fetch_queries`, by each consumer warpgroup: cp.async of its own 64 query rows of the next task.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import cp_async, cp_async_arrive, cp_async_commit, gl, gluon, tma_load
from flashinfer.ops._device.sm90.registers import opaque, program
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BASE,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention.prefill.sm90_queue import TaskQueue, publish_next, read_to_end, span
from flashinfer.ops.attention.prefill.sm90_settings import (
    ROWS,
    Ring,
    Settings,
    opaque_sum,
    places_of_rows,
)


@gluon.jit
def _pages(kv_indices, kv_base, start, kv_len, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """The page ids of KEYS keys from `start` on; none for ragged keys. Past the end it is the last key's page, whose
    data is masked."""
    pages = ()
    if PAGE_SIZE > 0:
        BOXES: gl.constexpr = (KEYS + PAGE_SIZE - 1) // PAGE_SIZE
        for box in gl.static_range(BOXES):
            page = gl.minimum(start + box * PAGE_SIZE, kv_len - 1) // PAGE_SIZE
            pages += (gl.load(kv_indices + kv_base + page),)
    return pages


@gluon.jit
def _load_box(source, row, head, column, full, to, settings: Settings):
    """Start copying rows of a head from a column of it on. `head` is its first column in the matrix; BY_HEAD it is its
    number, and what is past the head becomes zeros."""
    if settings.BY_HEAD:
        tma_load(source, [head, row, column], full, to)
    else:
        tma_load(source, [row, head + column], full, to)


@gluon.jit
def produce(OPERAND: gl.constexpr, PART: gl.constexpr, maps, ring: Ring, tasks_of, settings: Settings):
    """Producer warp: copy the keys, or the values, of each task, one block after another, last block first. Of
    settings.COPIERS warps it is number PART, and copies the PART-th share of each block's rows.

    The first warp of keys publishes the next task after it has issued all copies of this one. The atomic's latency is
    hidden, because no stage is empty yet.

    OPERAND : "k" or "v". maps : of keys, also that of the second part of their columns, which settings.TWO have.
    tasks_of : what finds tasks, and the steps of pages and heads.
    """
    queue, items, counts, kv_indices, num_kv_heads, window_left, page_rows, head_rows, head_cols = tasks_of
    TWO: gl.constexpr = OPERAND == "k" and settings.TWO
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    SPLIT_AT: gl.constexpr = ring.tiles.shape[2]
    COLUMNS: gl.constexpr = SPLIT_AT + (ring.rest.shape[2] if TWO else 0)
    KEYS: gl.constexpr = BLOCK_N // settings.COPIERS
    FIRST: gl.constexpr = PART * KEYS
    SIZE: gl.constexpr = ring.tiles.dtype.primitive_bitwidth // 8 * KEYS * COLUMNS
    tasks = gl.load(counts) * num_kv_heads
    step = 0
    task = program()
    waiting = -1
    wave = 0
    n = 0
    while task < tasks:
        record = items + task // num_kv_heads * ITEM_WIDTH
        kv_head = task % num_kv_heads
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, settings)
        kv_base = gl.load(record + ITEM_KV_BASE)
        kv_len = gl.load(record + ITEM_KV_LEN)
        start = begin + (blocks - 1) * BLOCK_N
        for i in range(blocks):
            # Loaded before the wait for an empty stage, which hides the latency.
            pages = _pages(kv_indices, kv_base, start + FIRST, kv_len, settings.PAGE_SIZE, KEYS)
            stage, full = ring.channel.expect(step, SIZE)
            row = kv_head * head_rows
            head = kv_head * head_cols
            if settings.PAGE_SIZE == 0:
                row += kv_base + start
            elif settings.PAGE_SIZE >= BLOCK_N:
                row += pages[0] * page_rows + start % settings.PAGE_SIZE
            if settings.PAGE_SIZE == 0 or settings.PAGE_SIZE >= BLOCK_N:
                _load_box(maps[0], row, head, 0, full, ring.tiles.index(stage), settings)
                if TWO:
                    _load_box(maps[1], row, head, SPLIT_AT, full, ring.rest.index(stage), settings)
            else:
                for box in gl.static_range(KEYS // settings.PAGE_SIZE):
                    at = row + pages[box] * page_rows
                    to = ring.tiles.index(stage).slice(FIRST + box * settings.PAGE_SIZE, settings.PAGE_SIZE, dim=0)
                    _load_box(maps[0], at, head, 0, full, to, settings)
                    if TWO:
                        to = ring.rest.index(stage).slice(FIRST + box * settings.PAGE_SIZE, settings.PAGE_SIZE, dim=0)
                        _load_box(maps[1], at, head, SPLIT_AT, full, to, settings)
            start -= BLOCK_N
            step += 1
        if OPERAND == "k" and PART == 0:
            task, _, n, waiting = publish_next(queue, n, wave, waiting, items, tasks, settings)
        else:
            task, _, n = read_to_end(queue, n, tasks, settings)
        wave += 1


@gluon.jit
def _key_rows(start, kv_base, kv_len, kv_indices, COUNT: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The pages of COUNT keys, or their rows in a ragged tensor; past the end those of the last key. The layout is that
    of tiles of D columns, see _gather_tile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    position = gl.minimum(opaque_sum(start, gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT)), 1024 // D), kv_len - 1)
    if PAGE_SIZE == 0:
        return kv_base + position
    return gl.load(kv_indices + kv_base + position // PAGE_SIZE)


@gluon.jit
def wide_product(number, step):
    """number * step in 64 bits; neither is negative. As unsigned values, ptxas multiplies and adds in one
    instruction."""
    if step.dtype.primitive_bitwidth == 32:
        step = step.to(gl.uint32)
    return number.to(gl.uint32).to(gl.int64) * step.to(gl.int64)


@gluon.jit
def _gather_tile(to, source, key_rows, start, kv_len, page, step, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Start copying the rows of one tile; `key_rows` is the result of _found.

    The tile is one copy, because the compiler inserts a barrier between copies to slices of one buffer. Steps are in
    bytes, so that an address takes one instruction.
    """
    D: gl.constexpr = to.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    key_rows = gl.convert_layout(key_rows, gl.SliceLayout(1, LAYOUT))
    if PAGE_SIZE == 0:
        at = wide_product(key_rows, step)
    else:
        at = wide_product(key_rows, page)
        if PAGE_SIZE > 1:
            # Opaque, so that the copies of keys and of values compute it each; kept, it would spill.
            number = opaque_sum(opaque(start), gl.arange(0, to.shape[0], gl.SliceLayout(1, LAYOUT)), 1024 // D)
            position = gl.minimum(number, kv_len - 1)
            at += wide_product(position % PAGE_SIZE, step)
    columns = (source + d[None, :]).to(gl.pointer_type(gl.int8))
    pointers = (columns + at[:, None]).to(gl.pointer_type(to.dtype))
    # The pointer cast drops the alignment information: each thread reads 16 aligned bytes.
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])
    if COLUMNS < D:
        cp_async(to, pointers, mask=(d < COLUMNS)[None, :])
    else:
        cp_async(to, pointers)


@gluon.jit
def _gather_keys(k: Ring, source, count, key_rows, start, kv_len, page, step, settings: Settings):
    """Start copying the count-th block of keys once its stage is empty."""
    stage = k.channel.acquire(count)
    D: gl.constexpr = k.tiles.shape[2]
    _gather_tile(k.tiles.index(stage), source, key_rows, start, kv_len, page, step, D, settings.PAGE_SIZE)
    if settings.TWO:
        rest = k.rest.index(stage)
        _gather_tile(rest, source + D, key_rows, start, kv_len, page, step, settings.REST, settings.PAGE_SIZE)
    cp_async_arrive(k.channel.full.index(stage), increment_count=False)


@gluon.jit
def _gather_values(v: Ring, source, count, key_rows, start, kv_len, page, step, settings: Settings):
    """Start copying the count-th block of values once its stage is empty."""
    stage = v.channel.acquire(count)
    _gather_tile(v.tiles.index(stage), source, key_rows, start, kv_len, page, step, settings.D_VO, settings.PAGE_SIZE)
    cp_async_arrive(v.channel.full.index(stage), increment_count=False)


@gluon.jit
def gather(
    k_source, v_source, k: Ring, v: Ring, queue: TaskQueue, items, counts, kv_indices, num_kv_heads, window_left,
    k_page, k_head, k_step, v_page, v_head, v_step, settings: Settings,
):  # fmt: skip
    """Four warps: copy the keys and values of each task row by row, and publish the next task."""
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    D: gl.constexpr = k.tiles.shape[2]
    PAGE_SIZE: gl.constexpr = settings.PAGE_SIZE
    tasks = gl.load(counts) * num_kv_heads
    step = 0
    task = program()
    waiting = -1
    wave = 0
    n = 0
    while tl.condition(task < tasks, disable_licm=True):
        record = items + task // num_kv_heads * ITEM_WIDTH
        kv_head = (task % num_kv_heads).to(gl.int64)
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, settings)
        kv_base = gl.load(record + ITEM_KV_BASE)
        kv_len = gl.load(record + ITEM_KV_LEN)
        start = begin + (blocks - 1) * BLOCK_N
        if blocks > 0:
            keys = k_source + kv_head * k_head
            values = v_source + kv_head * v_head
            key_rows = _key_rows(start, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
            _gather_keys(k, keys, step, key_rows, start, kv_len, k_page, k_step, settings)
            # Keys are one block ahead of values, because their stage becomes empty half a step earlier. Page ids are
            # loaded twice: kept, they would take registers from the consumers (Triton 3.9).
            for i in range(1, blocks):
                before = start
                start -= BLOCK_N
                key_rows = _key_rows(start, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
                _gather_keys(k, keys, step + 1, key_rows, start, kv_len, k_page, k_step, settings)
                key_rows = _key_rows(before, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
                _gather_values(v, values, step, key_rows, before, kv_len, v_page, v_step, settings)
                step += 1
            key_rows = _key_rows(start, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
            _gather_values(v, values, step, key_rows, start, kv_len, v_page, v_step, settings)
            step += 1
        task, _, n, waiting = publish_next(queue, n, wave, waiting, items, tasks, settings)
        wave += 1


@gluon.jit
def _fetch_part(WG, tile, q, record, kv_head, q_stride_n, q_stride_h, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """fetch_queries for one part of head_dim. Columns from COLUMNS on become zeros."""
    D: gl.constexpr = tile.shape[1]
    VEC: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // D, D // VEC], [4, 1], [1, 0])
    # In slices, each in a branch: the addresses of all rows together would spill.
    STEP: gl.constexpr = min(128 * VEC // D, ROWS)
    SLICE: gl.constexpr = min(4 * STEP, ROWS)
    first = gl.load(record + ITEM_TILE_ROW) + WG * ROWS
    q_row = gl.load(record + ITEM_Q_ROW)
    q_len = gl.load(record + ITEM_Q_LEN)
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    # Computed once, before the branches: otherwise the thread's part of it would be kept in a register for all tasks.
    index = gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
    number = opaque_sum(first, index & (STEP - 1), STEP)
    for i in gl.static_range(ROWS // SLICE):
        if first + i * SLICE < q_len * GROUP:
            later = (index & -STEP) + i * SLICE
            token, at = places_of_rows(number, later, q_row, kv_head, q_stride_n, q_stride_h, STEP, GROUP, VEC)
            mask = (token < q_len)[:, None]
            if COLUMNS < D:
                mask = mask & (d < COLUMNS)[None, :]
            cp_async(tile.slice(i * SLICE, SLICE, dim=0), q + at[:, None] + d[None, :], mask=mask)


@gluon.jit
def fetch_queries(
    WG, tiles, rests, q, items, item, kv_head, exists, q_stride_n, q_stride_h, settings: Settings
):  # fmt: skip
    """Start copying a warpgroup's query rows of a work item, if it `exists`. Rows past q_len become zeros."""
    if exists:
        record = items + item * ITEM_WIDTH
        D: gl.constexpr = tiles.shape[2]
        _fetch_part(WG, tiles.index(WG), q, record, kv_head, q_stride_n, q_stride_h, D, settings.GROUP)
        if settings.TWO:
            _fetch_part(
                WG, rests.index(WG), q + D, record, kv_head, q_stride_n, q_stride_h, settings.REST, settings.GROUP
            )  # fmt: skip
    cp_async_commit()

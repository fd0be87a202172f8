"""Hopper prefill with FP8 caches under bf16 or fp16 queries: keys and values are widened on their way to shared memory.

Two warps widen K and two widen V, each through its own ring, block after block as `sm90_loads.produce` copies
them. Shared memory has no room, and no time, to stage FP8, so rows go through registers: 16 codes a load, converted
exactly, stored in the swizzled 16-bit tile that the consumers read in any case.

A block is made in slices of 2048 codes, 8 words of each thread. While a slice is converted and stored, the loads of
the LEAD slices after it are in flight, and the page ids of the two slices after those. Example, 128 keys of head_dim
128 and LEAD 4: a slice is 16 keys, a block 8 slices. While slice 3 of block 7 is stored, slices 4 to 7 are in flight,
and with them the page ids of slices 0 and 1 of block 6.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import block_barrier, gl, gluon
from flashinfer.ops._device.sm90.registers import program
from flashinfer.ops.attention._device.schedule import ITEM_KV_BASE, ITEM_KV_LEN, ITEM_WIDTH
from flashinfer.ops.attention._device.sm90_widen import lanes, store_widened
from flashinfer.ops.attention.prefill.sm90_loads import wide_product
from flashinfer.ops.attention.prefill.sm90_queue import publish_next, read_to_end, span
from flashinfer.ops.attention.prefill.sm90_settings import Ring, Settings, opaque_sum

# Warps that widen K, and as many that widen V.
WARPS = gl.constexpr(2)
# Codes of a slice.
CODES = gl.constexpr(2048)


@gluon.jit
def _positions(start, kv_len, ROWS_IN: gl.constexpr):
    """The keys of a slice; past the request's end its last key, whose data is masked."""
    rows = gl.arange(0, ROWS_IN, gl.SliceLayout(1, lanes(WARPS)))
    return gl.minimum(opaque_sum(start, rows, 8 * WARPS), kv_len - 1)


@gluon.jit
def _pages(kv_indices, start, kv_base, kv_len, ROWS_IN: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The page ids of a slice; none for ragged keys."""
    pages = kv_base
    if PAGE_SIZE > 0:
        pages = gl.load(kv_indices + kv_base + _positions(start, kv_len, ROWS_IN) // PAGE_SIZE)
    return pages


@gluon.jit
def _load(source, pages, start, kv_base, kv_len, page, step, ROWS_IN: gl.constexpr, D: gl.constexpr,
          PAGE_SIZE: gl.constexpr):  # fmt: skip
    """Start loading the words of a slice."""
    position = _positions(start, kv_len, ROWS_IN)
    if PAGE_SIZE == 0:
        at = wide_product(kv_base + position, step)
    else:
        at = wide_product(pages, page)
        if PAGE_SIZE > 1:
            at += wide_product(position % PAGE_SIZE, step)
    d = 4 * gl.arange(0, D // 4, gl.SliceLayout(0, lanes(WARPS)))
    pointers = (source.to(gl.pointer_type(gl.int8)) + d[None, :] + at[:, None]).to(gl.pointer_type(gl.int32))
    # The pointer cast drops the alignment information: each thread reads 16 aligned bytes.
    return gl.load(gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 4]))


@gluon.jit
def widen(OPERAND: gl.constexpr, source, ring: Ring, tasks_of, settings: Settings):
    """Producer warps: widen the keys, or the values, of each task, one block after another, last block first.

    The warps of keys publish the next task after they have stored all blocks of this one. OPERAND and tasks_of are as
    in `produce`.
    """
    queue, items, counts, kv_indices, num_kv_heads, window_left, page, head, step_bytes = tasks_of
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    D: gl.constexpr = ring.tiles.shape[2]
    ROWS_IN: gl.constexpr = min(BLOCK_N, CODES // D)
    SLICES: gl.constexpr = BLOCK_N // ROWS_IN
    LEAD: gl.constexpr = min(settings.LEAD, SLICES)
    # Slices whose page ids are loaded before their words.
    PAGES: gl.constexpr = min(2, SLICES)
    PAGE_SIZE: gl.constexpr = settings.PAGE_SIZE
    tasks = gl.load(counts) * num_kv_heads
    step = 0
    task = program()
    waiting = -1
    wave = 0
    n = 0
    while tl.condition(task < tasks, disable_licm=True):
        record = items + task // num_kv_heads * ITEM_WIDTH
        rows = source + (task % num_kv_heads).to(gl.int64) * head
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, settings)
        kv_base = gl.load(record + ITEM_KV_BASE)
        kv_len = gl.load(record + ITEM_KV_LEN)
        if blocks > 0:
            start = begin + (blocks - 1) * BLOCK_N
            # Past the first block, slices of it are loaded again and not stored.
            after = gl.maximum(start - BLOCK_N, begin)
            words = ()
            pages = ()
            for i in gl.static_range(LEAD + PAGES):
                at = (start, after)[i // SLICES] + i % SLICES * ROWS_IN
                pages += (_pages(kv_indices, at, kv_base, kv_len, ROWS_IN, PAGE_SIZE),)
            for i in gl.static_range(LEAD):
                at = start + i * ROWS_IN
                words += (_load(rows, pages[i], at, kv_base, kv_len, page, step_bytes, ROWS_IN, D, PAGE_SIZE),)
            pages = pages[LEAD:]
            for block in range(blocks):
                starts = start, after, gl.maximum(after - BLOCK_N, begin)
                stage = ring.channel.acquire(step)
                for i in gl.static_range(SLICES):
                    at = starts[(i + LEAD) // SLICES] + (i + LEAD) % SLICES * ROWS_IN
                    words += (_load(rows, pages[0], at, kv_base, kv_len, page, step_bytes, ROWS_IN, D, PAGE_SIZE),)
                    at = starts[(i + LEAD + PAGES) // SLICES] + (i + LEAD + PAGES) % SLICES * ROWS_IN
                    pages = pages[1:] + (_pages(kv_indices, at, kv_base, kv_len, ROWS_IN, PAGE_SIZE),)
                    store_widened(ring.tiles.index(stage), i * ROWS_IN, 0, words[0], settings.WIDEN)
                    words = words[1:]
                # Consumers execute the fence that orders these stores before wgmma's reads. Here it would wait for the
                # loads in flight.
                block_barrier()
                ring.channel.commit(step)
                start, after = starts[1], starts[2]
                step += 1
        if OPERAND == "k":
            task, _, n, waiting = publish_next(queue, n, wave, waiting, items, tasks, settings)
        else:
            task, _, n = read_to_end(queue, n, tasks, settings)
        wave += 1

"""Hopper prefill: which task a block has next, and which keys a task has.

A task is a pair of a work item and a KV head. Blocks take tasks from a counter in global memory as they become free:
dealt out in advance, requests of one length would leave some blocks with the longest tiles of each.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon, mbarrier
from flashinfer.ops.attention._device.fixed_shift_sm90 import one_word, read_word
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_TAKEN,
    ITEM_TILE_ROW,
)
from flashinfer.ops.attention.prefill.sm90_settings import Settings, block_count

# A word of the queue is a task's number; from this bit on, the warpgroups that are to retry it (1 the first, 2 the
# second, 3 both). Tasks are fewer: each work item has a record in memory.
RETRY_BIT = gl.constexpr(29)


@aggregate
class Queue:
    """The next task of the block, published in shared memory by one warp and read by all others; two slots.

    With settings.FIXED, each consumer warpgroup reports whether it failed at a task, and a task that failed is
    published once more, as a retry.
    """

    tasks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    # For each of two tasks and two warpgroups: the task if the warpgroup failed at it, else -1; and their barriers.
    failed: gl.shared_memory_descriptor
    reported: gl.shared_memory_descriptor


@gluon.jit
def make_queue(READERS: gl.constexpr, FIXED: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tasks = gl.allocate_shared_memory(gl.int32, [2, 1], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    failed = tasks
    reported = full
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    if FIXED:
        failed = gl.allocate_shared_memory(gl.int32, [4, 1], LAYOUT)
        reported = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(4):
            failed.index(i).store(one_word(-1))
            mbarrier.init(reported.index(i), count=1)
    return Queue(tasks, full, empty, failed, reported)


@gluon.jit
def report(queue: Queue, WG, wave, task, failed):
    """A warpgroup says whether it failed at the block's wave-th task, before it reads the next one."""
    slot = wave % 2 * 2 + WG
    queue.failed.index(slot).store(one_word(gl.where(failed, task, -1)))
    mbarrier.arrive(queue.reported.index(slot), count=1)


@gluon.jit
def _retry(queue: Queue, wave, is_last):
    """The word of a task to retry, or -1: the one before the block's wave-th, or that one itself if it `is_last`."""
    word = -1
    for back in gl.static_range(1, -1, -1):
        if (word < 0) & ((back == 1) | is_last):
            slot = (wave + back) % 2 * 2
            # The phase before the first counts as over, as the task before the first does.
            phase = ((wave - back + 2) // 2 & 1) ^ 1
            mbarrier.wait(queue.reported.index(slot), phase)
            mbarrier.wait(queue.reported.index(slot + 1), phase)
            first = read_word(queue.failed.index(slot))
            second = read_word(queue.failed.index(slot + 1))
            if gl.maximum(first, second) >= 0:
                who = (first >= 0).to(gl.int32) + 2 * (second >= 0).to(gl.int32)
                word = gl.maximum(first, second) | who << RETRY_BIT
                queue.failed.index(slot).store(one_word(-1))
                queue.failed.index(slot + 1).store(one_word(-1))
    return word


@gluon.jit
def publish_next(queue: Queue, wave, waiting, items, tasks, settings: Settings):
    """Take the task after the block's wave-th and publish it for `read_next`. From `tasks` on there is none.

    Returns it, and the task that waits while another is retried, or -1: the caller passes it in as `waiting` next time.

    Each block begins with the task of its number, then asks once for each task that it has had. So all blocks ask
    `tasks` times together: the last one resets the counter.
    """
    task = waiting
    if waiting < 0:
        taken = gl.atomic_add(items + ITEM_TAKEN, 1, sem="relaxed")
        if taken == tasks - 1:
            gl.store(items + ITEM_TAKEN, 0)
        task = block_count() + taken
    slot = wave % 2
    mbarrier.wait(queue.empty.index(slot), ((wave // 2) & 1) ^ 1)
    waiting = -1
    if settings.FIXED:
        word = _retry(queue, wave, task >= tasks)
        if word >= 0:
            waiting = task
            task = word
    queue.tasks.index(slot).store(one_word(task))
    mbarrier.arrive(queue.full.index(slot), count=1)
    return task & ((1 << RETRY_BIT) - 1), waiting


@gluon.jit
def read_next(queue: Queue, wave):
    """The task after the block's wave-th, and who retries it: 0 nobody, 1 the first warpgroup, 2 the second, 3 both."""
    slot = wave % 2
    mbarrier.wait(queue.full.index(slot), (wave // 2) & 1)
    word = read_word(queue.tasks.index(slot))
    mbarrier.arrive(queue.empty.index(slot), count=1)
    return word & ((1 << RETRY_BIT) - 1), word >> RETRY_BIT


@gluon.jit
def span(record, window_left, BLOCK_N: gl.constexpr, settings: Settings):
    """A work item's first key and number of key blocks; blocks [plain_from, plain_to) need no mask in any row."""
    q_len = gl.load(record + ITEM_Q_LEN)
    kv_len = gl.load(record + ITEM_KV_LEN)
    tile_row = gl.load(record + ITEM_TILE_ROW)
    begin = gl.load(record + ITEM_KV_BEGIN)
    end = gl.load(record + ITEM_KV_END)
    first_pos = tile_row // settings.GROUP + kv_len - q_len
    last_pos = gl.minimum((tile_row + settings.BLOCK_M - 1) // settings.GROUP, q_len - 1) + kv_len - q_len
    if settings.WINDOW:
        begin += gl.maximum(first_pos - window_left - begin, 0) // BLOCK_N * BLOCK_N
    plain_end = end
    if settings.CAUSAL:
        end = gl.minimum(end, last_pos + 1)
        plain_end = gl.minimum(plain_end, first_pos + 1)
    blocks = (gl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    plain_to = gl.maximum(plain_end - begin, 0) // BLOCK_N
    plain_from = 0
    if settings.WINDOW:
        plain_from = (gl.maximum(last_pos - window_left - begin, 0) + BLOCK_N - 1) // BLOCK_N
    if settings.CUSTOM or settings.MASK is not None:
        plain_to = 0
    plain_to = gl.minimum(plain_to, blocks)
    return begin, blocks, gl.minimum(plain_from, plain_to), plain_to

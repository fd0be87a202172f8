"""Hopper prefill: the queue of tasks, and a task's key blocks.

A task is a pair of a work item and a KV head. Thread blocks take tasks from a counter in global memory as they become
free. With a static assignment, equal requests would give some thread blocks the longest tile of each.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon, mbarrier
from flashinfer.ops._device.sm90.publish import Queue, Slots, make_queue, make_slots
from flashinfer.ops._device.sm90.ring import make_barriers
from flashinfer.ops._device.sm90.walk import draw
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_TAKEN,
    ITEM_TILE_ROW,
)
from flashinfer.ops.attention.prefill.sm90_settings import Settings

# A word of the queue is a task's number plus, from this bit on, which warpgroups retry it (1 the first, 2 the second,
# 3 both). Tasks are fewer than 2^29: each work item has a 64-byte record in memory.
RETRY_BIT = gl.constexpr(29)


@aggregate
class TaskQueue:
    """The next task of a thread block, written to shared memory by one warp and read by all others. Word n is in slot
    n % 2. A word of the number of tasks or more means that no task is left.

    With settings.FIXED each consumer warpgroup reports at the end of a task whether its fixed shift failed. A failed
    task is published again as a retry, usually after the following task, which has begun by then. Therefore the first
    word without a task is not the end: after the report of the last task another word follows, a retry or the end.

    An example in which task 7 is the block's last and task 5 fails: the words are 5, 7, retry of 5, none, none.
    """

    words: Queue
    # For the last two tasks and each warpgroup: the task if it failed, else -1; and the mbarriers of these reports.
    failed: Slots
    reported: gl.shared_memory_descriptor


@gluon.jit
def make_task_queue(READERS: gl.constexpr, FIXED: gl.constexpr):
    words = make_queue(READERS)
    failed = words.slots
    reported = words.channel.full
    if FIXED:
        failed = make_slots(4, 1)
        reported = make_barriers(4)
        for i in gl.static_range(4):
            failed.write(i, (-1,))
    return TaskQueue(words, failed, reported)


@gluon.jit
def report(queue: TaskQueue, WG, wave, task, failed):
    """Warpgroup WG reports whether the block's wave-th task failed."""
    slot = wave % 2 * 2 + WG
    queue.failed.write(slot, (gl.where(failed, task, -1),))
    mbarrier.arrive(queue.reported.index(slot), count=1)


@gluon.jit
def _retry(queue: TaskQueue, wave):
    """Wait for both reports of the block's wave-th task: the word that retries it, or -1 if no warpgroup failed."""
    # The phase before an mbarrier's first counts as complete, which serves the wave -1 before the first task.
    slot = (wave + 2) % 2 * 2
    phase = ((wave + 2) // 2 & 1) ^ 1
    mbarrier.wait(queue.reported.index(slot), phase)
    mbarrier.wait(queue.reported.index(slot + 1), phase)
    first = queue.failed.read(slot)
    second = queue.failed.read(slot + 1)
    word = -1
    if gl.maximum(first, second) >= 0:
        flags = (first >= 0).to(gl.int32) + 2 * (second >= 0).to(gl.int32)
        word = gl.maximum(first, second) | flags << RETRY_BIT
        queue.failed.write(slot, (-1,))
        queue.failed.write(slot + 1, (-1,))
    return word


@gluon.jit
def publish_next(queue: TaskQueue, n, wave, waiting, items, tasks, settings: Settings):
    """Take the task after the block's wave-th and publish it as word n.

    Returns the task, its retry flags (see read_next), the next n, and a task that was taken but is published after a
    retry, or -1; the caller passes it as `waiting` to the next call.
    """
    word = waiting
    if waiting < 0:
        word = draw(items + ITEM_TAKEN, tasks)
    waiting = -1
    if settings.FIXED:
        retried = _retry(queue, wave - 1)
        if (retried < 0) & (word >= tasks):
            # Consumers need a word to finish the current task, after which they report it.
            queue.words.publish(n, (word,))
            n += 1
            retried = _retry(queue, wave)
        if retried >= 0:
            waiting = word
            word = retried
    queue.words.publish(n, (word,))
    return word & ((1 << RETRY_BIT) - 1), word >> RETRY_BIT, n + 1, waiting


@gluon.jit
def read_next(queue: TaskQueue, n):
    """The task of word n, and its retry flags: 0 none, 1 the first warpgroup retries, 2 the second, 3 both."""
    word = queue.words.take(n)
    return word & ((1 << RETRY_BIT) - 1), word >> RETRY_BIT


@gluon.jit
def read_to_end(queue: TaskQueue, n, tasks, settings: Settings):
    """read_next, which skips the word without a task that is not the end. Also returns the next n."""
    task, retry = read_next(queue, n)
    n += 1
    if settings.FIXED:
        if task >= tasks:
            task, retry = read_next(queue, n)
            n += 1
    return task, retry, n


@gluon.jit
def span(record, window_left, BLOCK_N: gl.constexpr, settings: Settings):
    """A work item's first key and its number of key blocks; blocks plain_from to plain_to - 1 need no mask in any
    row, and under a soft cap are not the first."""
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
    if settings.FIXED and settings.SOFT_CAP:
        # An attention sink may be past what the short form of tanh takes.
        plain_from = gl.maximum(plain_from, 1)
    if settings.CUSTOM or settings.MASK is not None:
        plain_to = 0
    plain_to = gl.minimum(plain_to, blocks)
    return begin, blocks, gl.minimum(plain_from, plain_to), plain_to

"""Hopper prefill: which task a block has next, and which keys a task has.

A task is a pair of a work item and a KV head. Blocks take tasks from a counter in global memory as they become free:
dealt out in advance, requests of one length would leave some blocks with the longest tiles of each.
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

# A word of the queue is a task's number; from this bit on, the warpgroups that are to retry it (1 the first, 2 the
# second, 3 both). Tasks are fewer: each work item has a record in memory.
RETRY_BIT = gl.constexpr(29)
# Blocks without a mask from which on block 0 is moved in front of them, see seed_of.
SEED_FROM = gl.constexpr(8)


@aggregate
class TaskQueue:
    """The next task of the block, published in shared memory by one warp and read by all others; two slots.

    Word n is in slot n % 2. A word from the number of tasks on says that no task is left.

    With settings.FIXED, each consumer warpgroup reports at the end of a task whether it failed, and a task that failed
    is published once more, as a retry: as a rule after the task that follows it, which has begun by then. So the first
    word without a task is no end: another one follows once the last task is reported, a retry or the end.
    """

    words: Queue
    # For each of two tasks and two warpgroups: the task if the warpgroup failed at it, else -1; and their barriers.
    failed: Slots
    reported: gl.shared_memory_descriptor


@gluon.jit
def make_task_queue(READERS: gl.constexpr, FIXED: gl.constexpr):
    words = make_queue(2, 1, READERS)
    failed = words.slots
    reported = words.channel.full
    if FIXED:
        failed = make_slots(4, 1)
        reported = make_barriers(4, 1)
        for i in gl.static_range(4):
            failed.write(i, (-1,))
    return TaskQueue(words, failed, reported)


@gluon.jit
def report(queue: TaskQueue, WG, wave, task, failed):
    """A warpgroup reports whether it failed at the block's wave-th task."""
    slot = wave % 2 * 2 + WG
    queue.failed.write(slot, (gl.where(failed, task, -1),))
    mbarrier.arrive(queue.reported.index(slot), count=1)


@gluon.jit
def _retry(queue: TaskQueue, wave):
    """The word that retries the block's wave-th task, or -1 if both warpgroups served it. Waits for their reports."""
    # The phase before the first counts as over, as the task before the first (wave -1) does.
    slot = (wave + 2) % 2 * 2
    phase = ((wave + 2) // 2 & 1) ^ 1
    mbarrier.wait(queue.reported.index(slot), phase)
    mbarrier.wait(queue.reported.index(slot + 1), phase)
    first = queue.failed.read(slot)
    second = queue.failed.read(slot + 1)
    word = -1
    if gl.maximum(first, second) >= 0:
        who = (first >= 0).to(gl.int32) + 2 * (second >= 0).to(gl.int32)
        word = gl.maximum(first, second) | who << RETRY_BIT
        queue.failed.write(slot, (-1,))
        queue.failed.write(slot + 1, (-1,))
    return word


@gluon.jit
def publish_next(queue: TaskQueue, n, wave, waiting, items, tasks, settings: Settings):
    """Take the task after the block's wave-th and publish it as word n.

    Returns the task, who retries it (see read_next), the next n, and the task that waits while another is retried, or
    -1: the caller passes it in as `waiting` next time.
    """
    word = waiting
    if waiting < 0:
        word = draw(items + ITEM_TAKEN, tasks)
    waiting = -1
    if settings.FIXED:
        retried = _retry(queue, wave - 1)
        if (retried < 0) & (word >= tasks):
            # Consumers read that no task is left, and go on to the end and the report of this one.
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
    """The task of word n, and who retries it: 0 nobody, 1 the first warpgroup, 2 the second, 3 both."""
    word = queue.words.take(n)
    return word & ((1 << RETRY_BIT) - 1), word >> RETRY_BIT


@gluon.jit
def read_to_end(queue: TaskQueue, n, tasks, settings: Settings):
    """read_next, past a word without a task that is not the end. Returns the next n, too."""
    task, retry = read_next(queue, n)
    n += 1
    if settings.FIXED:
        if task >= tasks:
            task, retry = read_next(queue, n)
            n += 1
    return task, retry, n


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


@gluon.jit
def seed_of(blocks, plain_to, retry, settings: Settings):
    """Where in the walk over a task's blocks block 0 comes; `blocks` if in its own place, at the end.

    The walk goes from the last block to the first. With a fixed shift, block 0 follows the blocks with a mask, so that
    the shift is no less than the logits of the first keys: attention sinks, which outweigh all others, are there. It
    costs the maximum of one block more; SEED_FROM blocks without a mask are worth it.
    """
    seed = blocks
    if settings.SEEDED:
        plain = gl.minimum(plain_to, blocks - 1)
        seed = gl.where((plain >= SEED_FROM) & (retry == 0), blocks - plain, blocks)
    return seed


@gluon.jit
def start_of(i, begin, blocks, seed, BLOCK_N: gl.constexpr, settings: Settings):
    """The first key of the i-th block of the walk. Example: blocks 0 ... 9 of which 8 and 9 have a mask, seed 2: the
    walk is 9, 8, 0, 7, 6, 5, 4, 3, 2, 1."""
    number = blocks - 1 - i
    if settings.SEEDED:
        number = gl.where(i == seed, 0, number + (i > seed).to(gl.int32))
    return begin + number * BLOCK_N

"""Latent attention on Hopper with FP8 caches: keys are widened to bf16 or fp16 before they are stored in shared memory.

Shared memory has no room to stage FP8. Four warps load words of four elements into registers, convert them exactly, and
store them where copies would store keys of the wider dtype. The consumers are the same.
"""

from flashinfer._core.gluon_compat import block_barrier, gl, gluon, mbarrier
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BASE,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)
from flashinfer.ops.attention._device.sm90_widen import lanes, store_widened
from flashinfer.ops.attention.mla.sm90_settings import HALF, KEYS, PART, REST, ROWS, Scalars, Settings, Shared, Tensors
from flashinfer.ops.attention.mla.sm90_work import entries_of, item_of, offsets_of, retries, span


@gluon.jit
def load_words(source, at, there, FIRST: gl.constexpr, WORDS: gl.constexpr):
    """Words FIRST to FIRST + WORDS - 1 of the rows at offsets `at`; zeros for rows that are not `there`."""
    LAYOUT: gl.constexpr = lanes(4)
    d = FIRST + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    return gl.load(source + at[:, None] + d[None, :], mask=there[:, None], other=0)


@gluon.jit
def publish_bias(BLOCK: gl.constexpr, shared: Shared, entries, phase):
    """Store the bias of a sparse block, 0 for keys that exist and -inf for others, and signal the consumers."""
    # The block's own warpgroup reads the bias before it releases its first half, so after that release the bias is
    # free.
    mbarrier.wait((shared.left_empty if BLOCK == 0 else shared.right_empty).index(BLOCK), phase)
    shared.bias.index(BLOCK).store(gl.where(entries >= 0, 0.0, float("-inf")))
    block_barrier()
    mbarrier.arrive(shared.bias_full.index(BLOCK), count=1)


@gluon.constexpr_function
def _is_left(BLOCK, PART_AT):
    """Whether part PART_AT of a block, in the order of their release, is in the left half."""
    return (PART_AT < 2) == (BLOCK == 0)


@gluon.jit
def _load_part(BLOCK: gl.constexpr, AT: gl.constexpr, ckv, at, there):
    """Load the FP8 words of part AT of a block, in the order of their release."""
    FIRST: gl.constexpr = ((0 if _is_left(BLOCK, AT) else HALF) + AT % 2 * PART) // 4
    return load_words(ckv, at, there, FIRST, PART // 4)


@gluon.jit
def _widen_part(BLOCK: gl.constexpr, AT: gl.constexpr, shared: Shared, words, rest, phase, settings: Settings):
    """Store part AT once its half is released; before part 2 the positional rows."""
    LEFT: gl.constexpr = _is_left(BLOCK, AT)
    if AT % 2 == 0:
        mbarrier.wait((shared.left_empty if LEFT else shared.right_empty).index(BLOCK), phase)
    if settings.POSITIONAL and AT == 2:
        store_widened(shared.rest.index(BLOCK), 0, 0, rest, settings.KV_FP8)
    store_widened((shared.left if LEFT else shared.right).index(BLOCK), 0, AT % 2 * PART, words, settings.KV_FP8)
    # The consumers execute the fence that orders these stores before wgmma's reads. Here it would wait for the loads in
    # flight.
    block_barrier()
    mbarrier.arrive((shared.left_full if LEFT else shared.right_full).index(2 * BLOCK + AT % 2), count=1)


@gluon.jit
def widen(
    ckv, kpe, shared: Shared, tensors: Tensors, scalars: Scalars, kv_indices, ckv_page, ckv_step, kpe_page, kpe_step,
    settings: Settings,
):  # fmt: skip
    """Four producer warps: load FP8 keys, convert them in registers, and store them, one part after another, with the
    loads of the next parts in flight.

    Each thread has two rows of a block. Caches are read as words of four elements, and steps are in words.
    """
    TILE: gl.constexpr = gl.SliceLayout(1, lanes(4))
    # Parts whose loads are in flight.
    AHEAD: gl.constexpr = 2
    count = gl.load(tensors.counts)
    phase = 1
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
            at = offsets_of(entries, start, ckv_page, ckv_step, settings)
            in_flight = ()
            for part in gl.static_range(AHEAD):
                in_flight += (_load_part(0, part, ckv, at, entries >= 0),)
            for i in range(pairs):
                for block in gl.static_range(2):
                    following = start + (KEYS if block == 0 else -3 * KEYS)
                    if settings.SPARSE:
                        # Loaded again, an entry a thread: storing a thread's rows of the tile takes more registers.
                        flat = entries_of(gl.BlockedLayout([1], [32], [4], [0]), table, start, begin, end, settings)
                        publish_bias(block, shared, flat, phase)
                    next_at = offsets_of(after, following, ckv_page, ckv_step, settings)
                    if settings.POSITIONAL:
                        rest_at = offsets_of(entries, start, kpe_page, kpe_step, settings)
                        rest = load_words(kpe, rest_at, entries >= 0, 0, REST // 4)
                    later = entries_of(TILE, table, start - 2 * KEYS, begin, end, settings)
                    for part in gl.static_range(4):
                        if settings.POSITIONAL and part == 2:
                            _widen_part(block, part, shared, in_flight[0], rest, phase, settings)
                        else:
                            _widen_part(block, part, shared, in_flight[0], in_flight[0], phase, settings)
                        if part + AHEAD < 4:
                            words = _load_part(block, part + AHEAD, ckv, at, entries >= 0)
                        else:
                            words = _load_part(1 - block, part + AHEAD - 4, ckv, next_at, after >= 0)
                        in_flight = in_flight[1:] + (words,)
                    at = next_at
                    entries = after
                    after = later
                    start = following
                phase ^= 1
        wave += 1
        last += retries(wave, waves, shared, settings)


@gluon.jit
def fetch_fp8(tile, q, record, stride_n, stride_h, settings: Settings):
    """Store FP8 query rows, read as words of four elements, widened; zeros past the last row."""
    LAYOUT: gl.constexpr = lanes(4)
    packed = gl.load(record + ITEM_TILE_ROW) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = packed // settings.HEADS
    at = (gl.load(record + ITEM_Q_ROW) + token).to(gl.int64) * stride_n + (packed % settings.HEADS) * stride_h
    words = load_words(q, at, token < gl.load(record + ITEM_Q_LEN), 0, tile.shape[1] // 4)
    store_widened(tile, 0, 0, words, settings.Q_FP8)

"""Latent attention on Hopper: the order of a thread block's work items, and the keys of an item."""

from flashinfer._core.gluon_compat import gl, gluon, mbarrier
from flashinfer.ops._device.sm90.publish import read_word
from flashinfer.ops._device.sm90.registers import opaque
from flashinfer.ops._device.sm90.walk import snake
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_TILE_ROW,
)
from flashinfer.ops.attention.mla.sm90_settings import KEYS, MOST_FAILED, ROWS, Settings, Shared


@gluon.jit
def item_of(wave, waves, shared: Shared, settings: Settings):
    """The thread block's work item in wave `wave`, in the order of `snake`. Retries follow the last wave."""
    item = snake(wave)
    if settings.FIXED:
        if wave >= waves:
            item = read_word(shared.failed.index(wave - waves))
    return item


@gluon.jit
def retries(wave, waves, shared: Shared, settings: Settings):
    """The number of work items to retry, once, when all waves are done; 0 in all other waves."""
    more = 0
    if settings.FIXED:
        if wave == waves:
            mbarrier.wait(shared.reported, 0)
            more = read_word(shared.failed.index(MOST_FAILED))
    return more


@gluon.jit
def span(record, settings: Settings):
    """A work item's first key, end of keys, pairs of key blocks, and plain_end: all rows see the keys before it."""
    q_len = gl.load(record + ITEM_Q_LEN)
    before = gl.load(record + ITEM_KV_LEN) - q_len
    tile_row = gl.load(record + ITEM_TILE_ROW)
    begin = gl.load(record + ITEM_KV_BEGIN)
    end = gl.load(record + ITEM_KV_END)
    plain_end = end
    if settings.CAUSAL:
        end = gl.minimum(end, gl.minimum((tile_row + ROWS - 1) // settings.HEADS, q_len - 1) + before + 1)
        plain_end = gl.minimum(plain_end, tile_row // settings.HEADS + before + 1)
    pairs = (gl.maximum(end - begin, 0) + 2 * KEYS - 1) // (2 * KEYS)
    return begin, end, pairs, plain_end


@gluon.jit
def entries_of(LAYOUT: gl.constexpr, table, start, begin, end, settings: Settings):
    """Table entries of a block of keys, one for each row; -1 for rows without a key."""
    position = start + opaque(gl.arange(0, KEYS, LAYOUT))
    at = position if settings.SPARSE else position // settings.PAGE_SIZE
    return gl.load(table + at, mask=(position >= begin) & (position < end), other=-1)


@gluon.jit
def offsets_of(entries, start, page, step, settings: Settings):
    """Offsets of the rows of a block, from its table entries; meaningless where there is no key."""
    row = start + gl.arange(0, KEYS, entries.type.layout)
    if settings.SPARSE:
        row = entries
        entries = entries // settings.PAGE_SIZE
    return entries.to(gl.int64) * page + (row % settings.PAGE_SIZE).to(gl.int64) * step

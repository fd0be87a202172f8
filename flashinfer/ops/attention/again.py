"""A plan that is like the last one: its tables are checked and sent, and nothing else is looked at again."""

from __future__ import annotations

from ctypes import c_char, memmove
from dataclasses import replace

import torch

from flashinfer._core.alike import like
from flashinfer._core.driver import copy_to_device
from flashinfer.ops.attention.batch import Batch, limits_of
from flashinfer.ops.attention.options import MOST_ROWS, tile_rows
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, QO_INDPTR, Stage

# Where the tables that tell lengths stand in Table.lengths().
_TOLD = {QO_INDPTR: 0, KV_INDPTR: 2, LENGTHS: 3}


def _bytes(count: int):
    return (c_char * count).from_address


class LastPlan:
    """What a plan leaves to the next: one that asks for the same, of tables that lie and are laid out as its are.

    What the tables hold may differ, and how many page ids there are. The next plan takes over the room, the work lists
    and the launches of this one.

    Parameters
    ----------
    tables : tuple of Tensor
        In the order of `tables.NAMES`: None for what the batch does not have.
    stage : Stage
        Of those on the host.
    tile_q : int
        The query length that its tile was chosen by.
    batch : Batch
        As planned.
    """

    def __init__(self, tables: tuple, stage: Stage, tile_q: int, batch: Batch):
        self._stage, self._batch = stage, batch
        self._group = batch.options.group
        # None where no values tell the tile.
        told = stage.counts[QO_INDPTR] and not batch.request.longest_q
        self._tile = tile_rows(tile_q, self._group) if told else None
        self._page_size = batch.options.page_size
        there = [i for i, t in enumerate(tables) if t is not None]
        self._there = slice(there[0], there[-1] + 1)
        self._like = like(*tables[self._there], free=[place for place, i in enumerate(there) if i == KV_INDICES])
        staged = [(i, stage.places[i], 4 * stage.counts[i]) for i in _TOLD if stage.counts[i]]
        # Bytes at an address, copied in a third of the time of memmove.
        self._copies = [(i, _bytes(size)(place), _bytes(size)) for i, place, size in staged]
        self._most_ids = stage.counts[KV_INDICES]
        self._elsewhere = [i for i in there if not stage.counts[i]]
        names = "qo_indptr", "kv_indptr", "last_page_len" if batch.table.kv_lens is None else "kv_lens"
        self._moving = [(i, names[i], _TOLD[i]) for i in self._elsewhere if i != KV_INDICES]
        self._addresses = batch.table.addresses()

    @staticmethod
    def may_follow(tables: tuple, stage: Stage, batch: Batch) -> bool:
        """Whether what is kept of a plan may do for the next: no table was converted, and buffers hang on no values."""
        plain = all(t is None or (t.dtype == torch.int32 and t.is_contiguous()) for t in tables)
        lengths = [0 if t is None or t.is_cuda else t.shape[0] for t in tables[:KV_INDICES]]
        # In CUDA-graph mode, tables as long as their buffers.
        whole = list(stage.counts[:KV_INDICES]) == lengths
        return plain and whole and batch.is_scheduled and not batch.options.splits and batch.table.mask is None

    def repeat(self, tables: tuple, stream: int, alone: bool) -> bool:
        """Plan a batch if it is like the last, which it replaces. False where it is not; then nothing has changed.

        `alone` says that the wrapper has no other batch, which may have been filled from the table of this one.
        """
        if not self._like(*tables[self._there]):
            return False
        for i, room, bytes_at in self._copies:
            room.raw = bytes_at(tables[i].data_ptr())
        ids = tables[KV_INDICES]
        count = None if ids is None else ids.shape[0]
        if self._most_ids:
            if count > self._most_ids:
                return False
            memmove(self._stage.places[KV_INDICES], ids.data_ptr(), 4 * count)
        told = self._batch.request.check(self._stage, count)
        return self._follow(tables, count, told, stream, alone)

    def _same_tile(self, rows: int, requests: int) -> bool:
        # The longest query is at least the average: most often that says enough.
        if self._tile == MOST_ROWS and 2 * rows * self._group > MOST_ROWS * requests:
            return True
        return tile_rows(self._stage.longest_step(QO_INDPTR), self._group) == self._tile

    def _follow(self, tables: tuple, count: int | None, told: tuple[int, int], stream: int, alone: bool) -> bool:
        stage, batch = self._stage, self._batch
        rows, entries = told
        if self._tile is not None and not self._same_tile(rows, batch.limits.batch):
            return False
        if stage.parts:
            stage.send(stream)
        table = batch.table if alone else replace(batch.table)
        if not self._most_ids:
            table.kv_indices = tables[KV_INDICES]
        elif count != table.kv_indices.shape[0]:
            table.kv_indices = stage.parts[KV_INDICES][:count]
        for i, name, place in self._moving:
            setattr(table, name, tables[i])
            self._addresses[place] = tables[i].data_ptr()
        request, limits = batch.request, batch.limits
        if rows != request.rows or (count is None and entries != request.kv_entries):
            request.rows, request.kv_entries = rows, entries
            batch.fill(request, table, limits_of(request, table))
            return True
        if count is not None and count * self._page_size != limits.kv_tokens:
            limits = limits._replace(kv_tokens=count * self._page_size)
        request.kv_entries = entries
        batch.refill(table, limits, self._addresses)
        return True


class LastFixedPlan(LastPlan):
    """The same in CUDA-graph mode; `fixed` are its buffers, in the order of `tables`."""

    def __init__(self, tables: tuple, stage: Stage, tile_q: int, batch: Batch, fixed: tuple):
        super().__init__(tables, stage, tile_q, batch)
        self._sends = [(fixed[i].data_ptr(), stage.places[i], 4 * stage.counts[i]) for i in _TOLD if stage.counts[i]]
        self._buffers = [(i, fixed[i], fixed[i].data_ptr()) for i in self._elsewhere]
        self._room = 0 if fixed[KV_INDICES] is None else fixed[KV_INDICES].shape[0]

    def _follow(self, tables: tuple, count: int | None, told: tuple[int, int], stream: int, alone: bool) -> bool:
        batch = self._batch
        request, table = batch.request, batch.table
        rows, entries = told
        if not alone or rows > batch.limits.q_rows or (count is not None and count > self._room):
            return False
        for i, buffer, at in self._buffers:
            if tables[i].data_ptr() != at:
                buffer[: tables[i].shape[0]].copy_(tables[i], non_blocking=True)
        for to, place, size in self._sends:
            copy_to_device(to, place, size, stream)
        if self._most_ids:
            copy_to_device(table.kv_indices.data_ptr(), self._stage.places[KV_INDICES], 4 * count, stream)
        same = rows == request.rows and (count is not None or entries == request.kv_entries)
        request.rows, request.kv_entries = rows, entries
        if same:
            batch.refill(table, batch.limits, self._addresses)
        else:
            batch.fill(request, table, batch.limits)
        return True

"""Replay: launches that serve every call like an earlier one, and plans like an earlier one.

Calls are alike if their tensors have the same class, shapes, strides, dtypes, devices and alignment, and all else that
a kernel or a check depends on is equal. Plans are alike if they ask for the same of tables that lie and are laid out
alike, on one stream. What was checked of the first then holds for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char, memmove
from dataclasses import dataclass, replace

import torch

from flashinfer._core.alike import like
from flashinfer._core.driver import copy_to_device
from flashinfer.ops.attention.host_tables import MOST_KEPT, HostTables
from flashinfer.ops.attention.options import MOST_ROWS, tile_rows
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, QO_INDPTR

# Launches kept per plan: keys, and launches of one key. Layers share a launch, unless each has its own scales, window
# or sinks: these are part of the key. Shapes are not, and a key's launches are tried one after another.
_MOST_REPLAYS, _MOST_ALIKE = 256, 16
# Numbers of requests whose plans replay. Each keeps at most 128 KiB of tables (MOST_KEPT), half of them on the device.
MOST_PLANS = 64
# Where the tables of lengths stand in Table.lengths().
_PLACES = {QO_INDPTR: 0, KV_INDPTR: 2, LENGTHS: 3}


@dataclass
class Replay:
    """A launch that serves every call like the one that it was made for.

    Attributes
    ----------
    launch : callable
        Takes the addresses of `Inputs.addresses`.
    like : callable
        Whether tensors of a call are like those that the launch was made for.
    v_offset : int
        Bytes from the K of a cache in one tensor to its V.
    like_q : bool
        Whether the output has q's shape and dtype, and q is contiguous.
    extents, of_lse : tuple of int
        `extents_of` the output and what is read, and of a given log-sum-exp, what is read and the output.
    kept : tuple
        Tensors that the launch reads beside those that move.
    """

    launch: Callable
    like: Callable[..., bool]
    v_offset: int = 0
    like_q: bool = False
    extents: tuple[int, ...] = (0,) * 6
    of_lse: tuple[int, ...] = (0,) * 6
    kept: tuple = ()


def keep(replays: dict[tuple, list[Replay]], key: tuple, replay: Replay) -> None:
    """Add a replay to those of calls with its key, the latest first."""
    if len(replays) >= _MOST_REPLAYS:
        replays.clear()
    latest = replays.setdefault(key, [])
    latest.insert(0, replay)
    del latest[_MOST_ALIKE:]


def extents_of(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Bytes from the first to the last element of each of six tensors, 0 for those that are not there.

    Example
    -------
    >>> extents_of(torch.empty(4, 2, 8)[:, 0], torch.empty(0))
    (224, 0, 0, 0, 0, 0)
    """
    found = [
        (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))) * t.element_size()
        if t is not None and t.numel()
        else 0
        for t in tensors
    ]
    return tuple(found + [0] * (6 - len(found)))


def lie_apart(extents: tuple[int, ...], out: int, first: int, second: int, third: int, fourth: int = 0,
              fifth: int = 0) -> bool:  # fmt: skip
    """Whether an output's addresses are outside those of the other tensors, as of most calls. If not, their memory may
    meet, and each call is checked for that."""
    of_out, of_first, of_second, of_third, of_fourth, of_fifth = extents
    end = out + of_out
    return (
        (first >= end or first + of_first <= out)
        and (second >= end or second + of_second <= out)
        and (third >= end or third + of_third <= out)
        and (fourth >= end or fourth + of_fourth <= out)
        and (fifth >= end or fifth + of_fifth <= out)
    )


def identity(t: torch.Tensor | None) -> tuple | None:
    """What a replay depends on of a tensor that does not move."""
    return None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)


def _bytes(count: int):
    return (c_char * count).from_address


class PlanReplays:
    """The replays of a wrapper's plans that ask for the same, one for each number of requests.

    A batch of 60 requests, one of 64, and so on in turn: each replays from the third of its size on.

    Parameters
    ----------
    asked : tuple
        What the plans ask for: without tensors.
    most : int
        Numbers of requests that are kept.

    Attributes
    ----------
    replays : dict
        By the elements of kv_indptr.
    of : callable
        The replay of plans whose kv_indptr has so many elements; None if there is none.
    """

    def __init__(self, asked: tuple, most: int):
        self.asked, self._most = asked, most
        self.replays: dict[int, PlanReplay] = {}
        self.of = self.replays.get
        # Of plans in full, the room of their host tables: the second in the same room leaves a replay.
        self._rooms: dict[int, HostTables] = {}

    def comes_again(self, tables: tuple, host: HostTables) -> bool:
        """Whether the last plan in full with as many requests had its tables in the same room. Notes this one."""
        if sum(host.counts) > MOST_KEPT:
            # No other plan gets its room.
            return False
        return self._keep(self._rooms, tables, host) is host

    def add(self, tables: tuple, replay: PlanReplay) -> None:
        self._keep(self.replays, tables, replay)

    def drop(self) -> None:
        """Keep no replay: other work may read their buffers now, on another stream or in a captured graph."""
        self.replays.clear()

    def _keep(self, kept: dict, tables: tuple, value):
        """Keep a value as the latest, by the elements of kv_indptr. Returns the one before."""
        size = tables[KV_INDPTR].numel()
        before = kept.pop(size, None)
        if len(kept) >= self._most:
            del kept[next(iter(kept))]
        kept[size] = value
        return before


class PlanReplay:
    """What a plan leaves to the next of as many requests, which asks for the same, of tables that lie and are laid out
    as its are.

    What the tables hold may differ, and how many page ids there are. The next plan takes over the room, the work lists
    and the launches of this one. Plans of other sizes may come between: they share the Plan, which is filled again.

    Parameters
    ----------
    tables : tuple of Tensor
        In the order of `tables.NAMES`: None for what the batch does not have.
    host : HostTables
        Of those on the host.
    tile_q : int
        The query length that its tile was chosen by.
    plan : Plan
        As planned.
    fixed : tuple of Tensor, optional
        The buffers of CUDA-graph mode, in the order of `tables`.

    Attributes
    ----------
    broken : bool
        Whether a plan ended with an error after its first table was sent.
    """

    def __init__(self, tables: tuple, host: HostTables, tile_q: int, plan, fixed: tuple | None):
        self.plan = plan
        self._filling, self._limits = plan.keep_filling(), plan.limits
        self._host, self._fixed = host, fixed
        self._group, self._page_size = plan.options.group, plan.options.page_size
        # None where the tile follows from no values, or a captured graph keeps it.
        from_values = host.counts[QO_INDPTR] and not plan.table.longest_q and fixed is None
        self._tile = tile_rows(tile_q, self._group) if from_values else None
        there = [i for i, t in enumerate(tables) if t is not None]
        self._there = slice(there[0], there[-1] + 1)
        self._like = like(*tables[self._there], free=[place for place, i in enumerate(there) if i == KV_INDICES])
        staged = [(i, host.places[i], 4 * host.counts[i]) for i in _PLACES if host.counts[i]]
        # Bytes at an address, copied in a third of the time of memmove.
        self._copies = [(i, _bytes(size)(place), _bytes(size)) for i, place, size in staged]
        self._most_ids = host.counts[KV_INDICES]
        elsewhere = [i for i in there if not host.counts[i]]
        names = "qo_indptr", "kv_indptr", "last_page_len" if plan.table.kv_lens is None else "kv_lens"
        self._moving = [(i, names[i], _PLACES[i]) for i in elsewhere if i != KV_INDICES]
        self._addresses = plan.table.addresses()
        table = plan.table
        self.broken = False
        self._known, self._requests = (table.rows, table.kv_entries, table.first_row), table.batch_size
        # What tables of later plans begin as. It keeps no tensor of the caller's.
        callers = [] if fixed is not None else ["kv_indices", *[name for _, name, _ in self._moving]]
        self._bare = replace(table, **dict.fromkeys(callers))
        # How many page ids the last plan had; and where they are, if they were on the host.
        self._count = None if table.kv_indices is None else table.kv_indices.shape[0]
        self._ids = table.kv_indices if self._most_ids else None
        if fixed is not None:
            self._sends = [(fixed[i].data_ptr(), place, size) for i, place, size in staged]
            self._buffers = [(i, fixed[i], fixed[i].data_ptr()) for i in elsewhere]
            self._most_ids_fixed = 0 if fixed[KV_INDICES] is None else fixed[KV_INDICES].shape[0]

    @staticmethod
    def may_follow(tables: tuple, host: HostTables, plan) -> bool:
        """Whether the next plan may reuse this one: no table was converted, no choice depends on values of tables."""
        if not plan.is_scheduled or plan.options.splits or plan.table.mask is not None:
            return False
        lengths = [0 if t is None or t.is_cuda else t.shape[0] for t in tables[:KV_INDICES]]
        # In CUDA-graph mode, tables as long as their buffers.
        whole = list(host.counts[:KV_INDICES]) == lengths
        return whole and all(t is None or (t.dtype == torch.int32 and t.is_contiguous()) for t in tables)

    def repeat(self, tables: tuple, stream: int, alone: bool) -> bool:
        """Plan a batch if it is like the one of this replay. False where it is not; then nothing has changed. After an
        error that left the tables of two plans mixed the replay is `broken`.

        `alone` says that the wrapper has no other Plan, which may have been filled from the table of this one.
        """
        plan = self.plan
        # Whether the last plan was of this replay. In CUDA-graph mode, it knows only what it has left in the buffers
        # itself.
        again = alone and plan.filling is self._filling
        if not (again or self._fixed is None) or self.broken or not self._like(*tables[self._there]):
            return False
        for i, room, bytes_at in self._copies:
            room.raw = bytes_at(tables[i].data_ptr())
        ids = tables[KV_INDICES]
        count = None if ids is None else ids.numel()
        if self._most_ids:
            if count > self._most_ids:
                return False
            memmove(self._host.places[KV_INDICES], ids.data_ptr(), 4 * count)
        before = known = self._known
        if self._copies:
            known = self._host.check(self._page_size, count, before)
        if self._tile is not None and not self._same_tile(known[0]):
            return False
        table = plan.table if again else self._bare.copy()
        if self._fixed is None:
            self.broken = True
            if self._host.parts:
                self._host.send(stream)
            if count != self._count:
                self._count, self._limits = count, self._limits._replace(kv_tokens=count * self._page_size)
                if self._most_ids:
                    self._ids = self._host.parts[KV_INDICES][:count]
            table.kv_indices = self._ids if self._most_ids else ids
            for i, name, place in self._moving:
                setattr(table, name, tables[i])
                self._addresses[place] = tables[i].data_ptr()
        elif known[0] > self._limits.q_rows or (count is not None and count > self._most_ids_fixed):
            return False
        else:
            self.broken = True
            self._send(tables, count, stream)
        if self._copies:
            table.rows, table.kv_entries, table.first_row = known
        same = known[0] == before[0] and (count is not None or known[1] == before[1])
        if not (same and plan.refill(table, self._limits, self._addresses, self._filling)):
            limits = self._limits if self._fixed is not None else table.limits(self._page_size)
            plan.fill(table, limits)
            self._filling, self._limits = plan.keep_filling(), limits
        self._known, self.broken = known, False
        return True

    def _same_tile(self, rows: int) -> bool:
        # The longest query is no shorter than the average, which usually decides.
        if self._tile == MOST_ROWS and 2 * rows * self._group > MOST_ROWS * self._requests:
            return True
        return tile_rows(self._host.longest_step(QO_INDPTR), self._group) == self._tile

    def _send(self, tables: tuple, count: int | None, stream: int) -> None:
        """Copy tables into the buffers of CUDA-graph mode."""
        for i, buffer, at in self._buffers:
            if tables[i].data_ptr() != at:
                buffer[: tables[i].shape[0]].copy_(tables[i], non_blocking=True)
        for to, place, size in self._sends:
            copy_to_device(to, place, size, stream)
        if self._most_ids:
            copy_to_device(self._fixed[KV_INDICES].data_ptr(), self._host.places[KV_INDICES], 4 * count, stream)

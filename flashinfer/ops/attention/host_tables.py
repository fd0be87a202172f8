"""Tables of a plan on their way to the device: checked on the host, sent in one copy."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import torch

from flashinfer._core import driver
from flashinfer._core.checks import check_indptr, require
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, NAMES, QO_INDPTR

_INTEGERS = (torch.int32, torch.int64)
_INTEGER_TABLE = "a tensor of int32 or int64, one dimension"
# Room is kept for tables of so many sets of lengths, an engine's batch sizes, with so many elements at most.
_MOST_ROOMS, MOST_KEPT = 256, 1 << 14
# Page ids of a batch grow from step to step: room for them is made in steps of so many, 4 KiB.
_MORE_PAGES = 1024


class HostTables:
    """Room for host tables of given lengths, side by side: checked there, and sent in one copy.

    Parameters
    ----------
    counts : tuple of int
        Length of each table; 0 for one that is on the device or None.
    device : torch.device
        Where they go; a CPU for tables that go into buffers of CUDA-graph mode.
    names : tuple of str
        What errors call the tables.
    in_tokens : bool
        Whether the third has numbers of keys, not of the tokens in last pages.

    Attributes
    ----------
    values : list of int32 array
        One per table.
    places : list of int
        Their addresses.
    parts : tuple of int32 Tensor
        Where each goes on the device.
    send : callable (stream)
        Copies all to the device, in the order of the stream. The copy is from pageable memory, which the driver has
        read when it returns, without waiting for the device: the host side is free for the next plan at once. (CUDA
        driver API, "API synchronization behavior".)
    """

    def __init__(self, counts: tuple[int, ...], device: torch.device, names: tuple[str, ...] = NAMES,
                 in_tokens: bool = False):  # fmt: skip
        self.counts, self.names, self._in_tokens = counts, names, in_tokens
        total = sum(counts)
        self._host = torch.empty(total, dtype=torch.int32, device="cpu")
        flat, begin = self._host.numpy(), self._host.data_ptr()
        ends = np.cumsum(counts).tolist()
        self.values = [flat[end - n : end] for n, end in zip(counts, ends, strict=True)]
        self.places = [begin + 4 * (end - n) for n, end in zip(counts, ends, strict=True)]
        # Elements as Python's integers: reading one takes a quarter of the time that an array's element takes.
        self._integers = [memoryview(x) for x in self.values]
        # A verdict per element, in bytes: searching bytes takes a tenth of the time of reducing an array.
        self._verdicts = [bytearray(n) for n in counts]
        self._flags = [np.frombuffer(verdict, dtype=np.bool_) for verdict in self._verdicts]
        # As unsigned, a negative number is larger than any other. The views (offsets, and the offsets before them) are
        # kept, because making one takes as long as comparing it.
        self._unsigned = [x.view(np.uint32) for x in self.values]
        self._steps = [(x[1:], x[:-1], flags[1:]) for x, flags in zip(self._unsigned, self._flags, strict=True)]
        self._differences = [np.empty_like(x[1:]) for x in self._unsigned[:LENGTHS]]
        # Limits of lengths as arrays: NumPy takes longer to convert a number than to compare.
        self._page_size, self._page_sizes = 0, np.zeros(counts[LENGTHS], np.uint32)
        self._most_keys = np.full(counts[LENGTHS], (1 << 31) - 1, np.uint32)
        self.parts: tuple[torch.Tensor, ...] = ()
        if device.type == "cuda" and total:
            there = torch.empty(total, dtype=torch.int32, device=device)
            self.parts = there.split(counts)
            self.send = partial(driver.copy_to_device, there.data_ptr(), begin, 4 * total)

    def take(self, i: int, table: torch.Tensor) -> None:
        """Copy a host table in. Where it is shorter than its room, lengths are 0; of others, the last is repeated."""
        values, n, begin = self.values[i], table.shape[0], table.data_ptr()
        if n and not begin:
            require(False, self.names[i], "a tensor without memory, as under fake tensors", "one with values")
        if table.dtype == torch.int32 and table.is_contiguous():
            ctypes.memmove(self.places[i], begin, 4 * n)
        else:
            given = table.numpy()
            wide = given[given != given.astype(np.int32)][:1].tolist() if table.dtype == torch.int64 else []
            require(not wide, self.names[i], wide and wide[0], "values of int32")
            values[:n] = given
        if n < self.counts[i]:
            values[n:] = values[n - 1] if n and i != LENGTHS else 0

    def check(self, page_size: int, page_ids: int | None, known: tuple[int, int, int]) -> tuple[int, int, int]:
        """Check the values, `page_ids` being the length of kv_indices. Returns (rows, kv_entries, first_row) of Table;
        of tables that are not here, what is `known`.

        Offsets are not negative and do not decrease; those of keys end within the page ids. The first may be any:
        offsets of some requests of a larger batch still count its rows, or its page ids. A last page has 0 ...
        page_size tokens. Numbers of keys are 0 or more, and fit the pages that kv_indptr gives each request, if it is
        here.
        """
        qo, kv, lens, _ = self.counts
        rows, entries, first_row = known
        if qo:
            integers = self._integers[QO_INDPTR]
            first_row, rows = integers[0], integers[-1]
            np.less(*self._steps[QO_INDPTR])
            if first_row < 0 or rows < 0 or 1 in self._verdicts[QO_INDPTR]:
                check_indptr(self.names[QO_INDPTR], self.values[QO_INDPTR], sliced=True)
        if kv:
            integers = self._integers[KV_INDPTR]
            first, entries = integers[0], integers[-1]
            np.less(*self._steps[KV_INDPTR])
            if first < 0 or entries < 0 or 1 in self._verdicts[KV_INDPTR] or not (
                page_ids is None or entries <= page_ids
            ):
                of_ids = f"the length of {self.names[KV_INDICES]}"
                check_indptr(self.names[KV_INDPTR], self.values[KV_INDPTR], page_ids, of_ids, sliced=True)
        if lens:
            if page_size != self._page_size:
                self._page_size = page_size
                self._page_sizes.fill(page_size)
            most = self._key_limits(page_size, page_ids) if self._in_tokens else self._page_sizes
            np.greater(self._unsigned[LENGTHS], most, self._flags[LENGTHS])
            if 1 in self._verdicts[LENGTHS]:
                self._refuse_lengths(page_size)
        return rows, entries, first_row

    def _key_limits(self, page_size: int, page_ids: int) -> np.ndarray:
        """The most keys of each request, by its pages."""
        if not self.counts[KV_INDPTR]:
            return self._most_keys
        pages = self._difference(KV_INDPTR)
        if page_ids * page_size < 1 << 31:
            return np.multiply(pages, self._page_sizes, pages)
        return pages.astype(np.int64) * page_size

    def _refuse_lengths(self, page_size: int) -> None:
        name, values = self.names[LENGTHS], self.values[LENGTHS]
        if not self._in_tokens:
            require(False, name, f"{values.min()} ... {values.max()}", f"0 ... {page_size}, the page size")
        at = self._verdicts[LENGTHS].find(1)
        require(values[at] >= 0, name, values[at], "no negative length")
        require(False, name, f"{values[at]} of request {at}",
                f"what its entries of {self.names[KV_INDICES]} hold, pages of {page_size}")  # fmt: skip

    def pairs(self, page_size: int, q_len: int) -> torch.Tensor | None:
        """Queries times keys of each request, int64; None where a table that says them is not here.

        `q_len` is the query length of every request, in the place of qo_indptr; 0 for none.
        """
        qo, kv, lens, _ = self.counts
        if not kv or not (qo or q_len) or page_size and not lens:
            return None
        # Room for offsets may be that of a larger batch, whose further requests are empty.
        batch = lens or kv - 1
        keys = np.diff(self.values[KV_INDPTR])[:batch].astype(np.int64)
        if self._in_tokens:
            keys = self.values[LENGTHS].astype(np.int64)
        elif page_size:
            keys = np.maximum((keys - 1) * page_size + self.values[LENGTHS], 0)
        return torch.from_numpy(keys * (np.diff(self.values[QO_INDPTR])[:batch] if qo else q_len))

    def longest_step(self, i: int) -> int:
        """The most from one checked offset to the next, at least 1."""
        if self.counts[i] < 2:
            return 1
        steps = self._difference(i)
        # NumPy's argmax takes a third of the time of its max.
        return int(steps[steps.argmax()]) or 1

    def _difference(self, i: int) -> np.ndarray:
        ends, begins, _ = self._steps[i]
        return np.subtract(ends, begins, self._differences[i])

    def send_into(self, i: int, buffer: torch.Tensor, count: int, stream: int) -> None:
        """Copy the first elements of a table to the begin of a device buffer."""
        if count:
            driver.copy_to_device(buffer.data_ptr(), self.places[i], 4 * count, stream)


class TableStore:
    """Where the tables of a wrapper's plans go: room for those on the host, kept by length and stream, and constants.

    Parameters
    ----------
    device : torch.device
    names : tuple of str
        What errors call the tables.
    in_tokens : bool
        As of HostTables.
    fixed : bool
        CUDA-graph mode: tables go into buffers that are never replaced.
    """

    def __init__(self, device: torch.device, names: tuple[str, ...], in_tokens: bool, fixed: bool):
        self._device, self._names, self._in_tokens, self._fixed = device, names, in_tokens, fixed
        self._rooms: dict[tuple, HostTables] = {}
        # Constants on the device, by stream: work on another may not have written them yet.
        self._uniform: dict[tuple, torch.Tensor] = {}

    def room(self, lengths: tuple[int, ...], stream: int | None) -> HostTables:
        """Room for host tables of these lengths, and for more page ids."""
        *others, pages = lengths
        if pages % _MORE_PAGES:
            lengths = *others, pages + -pages % _MORE_PAGES
        room = self._rooms.get((lengths, stream))
        if room is None:
            to = torch.device("cpu") if self._fixed else self._device
            room = HostTables(lengths, to, self._names, self._in_tokens)
            if sum(lengths) <= MOST_KEPT:
                if len(self._rooms) >= _MOST_ROOMS:
                    self._rooms.clear()
                self._rooms[lengths, stream] = room
        return room

    def bring(self, tables: tuple, host: HostTables, stream: int | None) -> list[torch.Tensor | None]:
        """Tables as int32 on the compute device; those on the host in one copy."""
        if host.parts:
            host.send(stream)
        brought = []
        for i, table in enumerate(tables):
            if host.parts and host.counts[i]:
                n = table.shape[0]
                table = host.parts[i] if n == host.counts[i] else host.parts[i][:n]
            elif table is not None and (table.device != self._device or table.dtype != torch.int32):
                here = not table.is_cuda or table.device == self._device
                require(here, self._names[i], f"a tensor on {table.device}", f"the host, or {self._device}")
                table = table.to(self._device, torch.int32)
            elif table is not None and not table.is_cuda and i != KV_INDICES:
                # Callers fill their tables again after plan(). As on a GPU, lengths are those at plan(), page ids those
                # at run().
                table = table.clone()
            brought.append(table if table is None or table.is_contiguous() else table.contiguous())
        return brought

    def uniform_indptr(self, requests: int, q_len: int, stream: int | None, capturing: bool) -> torch.Tensor:
        """Offsets of requests of `q_len` queries each. What a graph was captured over is never replaced."""
        key = requests, q_len, None if self._fixed else stream
        indptr = self._uniform.get(key)
        if indptr is None or (capturing and not self._fixed):
            indptr = torch.arange(0, (requests + 1) * q_len, q_len, dtype=torch.int32, device=self._device)
            if not capturing:
                self._uniform[key] = indptr
        return indptr


def host_lengths(tables: tuple, names: tuple[str, ...], page_size: int, q_len: int) -> tuple[int, ...]:
    """The length of each table that is on the host; 0 for the others. Checks what needs no values.

    Parameters
    ----------
    tables : tuple of Tensor
        In the order of NAMES; None for what the batch does not have.
    names : tuple of str
        What the caller calls them.
    page_size : int
        0 for ragged.
    q_len : int
        The query length of every request, in the place of qo_indptr; 0 for none.
    """
    counts = []
    for table in tables:
        if table is None:
            at = len(counts)
            missing = at == KV_INDPTR or at == QO_INDPTR and not q_len or at == KV_INDICES and page_size
            require(not missing, names[len(counts)], None, _INTEGER_TABLE)
            counts.append(0)
            continue
        if not isinstance(table, torch.Tensor) or table.dtype not in _INTEGERS or table.dim() != 1:
            of_tensor = isinstance(table, torch.Tensor)
            value = f"{table.dtype} {tuple(table.shape)}" if of_tensor else f"a {type(table).__name__}"
            require(False, names[len(counts)], value, _INTEGER_TABLE)
        on_host = not table.is_cuda
        if on_host and table.device.type != "cpu":
            require(False, names[len(counts)], f"a tensor on {table.device}", "a tensor on the host or the device")
        counts.append(table.numel() if on_host else 0)
    qo, kv, lens, _ = tables
    batch = kv.numel() - 1
    if batch < 0 or not q_len and qo.numel() != batch + 1:
        expected = 1 if qo is None else max(qo.numel(), 1)
        allowed = f"[{expected}], batch_size + 1, as {names[QO_INDPTR]}"
        require(False, names[KV_INDPTR], f"[{batch + 1}]", allowed)
    if lens is None and page_size:
        require(False, names[LENGTHS], None, _INTEGER_TABLE)
    if lens is not None and lens.numel() != batch:
        require(False, names[LENGTHS], f"[{lens.numel()}]", f"[{batch}]")
    return tuple(counts)


def lengths_in_buffers(fixed: tuple, tables: tuple, counts: tuple, names: tuple, in_tokens: bool) -> tuple[int, ...]:
    """The lengths of host tables as they go into the buffers `fixed`: requests past the batch are empty."""
    most, batch = fixed[KV_INDPTR].shape[0] - 1, tables[KV_INDPTR].numel() - 1
    if batch > most and not in_tokens:
        require(False, "batch_size", batch, f"at most {most}, what the CUDA-graph buffers hold")
    lengths = list(counts)
    for i, (buffer, given) in enumerate(zip(fixed, tables, strict=True)):
        if given is not None and given.shape[0] > buffer.shape[0]:
            n, most = given.shape[0], buffer.shape[0]
            require(False, names[i], f"{n} elements", f"at most {most}, the buffer's length")
        if counts[i] and (i in (QO_INDPTR, KV_INDPTR) or i == LENGTHS and in_tokens):
            lengths[i] = buffer.shape[0]
    return tuple(lengths)


def fill_buffers(fixed: tuple, tables: tuple, counts: tuple, host: HostTables, stream: int | None, in_tokens: bool,
                 on_gpu: bool) -> None:  # fmt: skip
    """Copy tables into the buffers `fixed`."""
    for i, (buffer, given) in enumerate(zip(fixed, tables, strict=True)):
        if given is None:
            continue
        if counts[i] and on_gpu:
            # Offsets past the batch are sent, too; of page ids only those that there are.
            host.send_into(i, buffer, counts[i] if i == KV_INDICES else host.counts[i], stream)
            continue
        n = given.shape[0]
        if buffer.data_ptr() != given.data_ptr():
            buffer[:n].copy_(given, non_blocking=True)
        if i in (QO_INDPTR, KV_INDPTR) and n < buffer.shape[0]:
            buffer[n:].copy_(buffer[n - 1 : n].expand(buffer.shape[0] - n))
        elif i == LENGTHS and in_tokens:
            buffer[n:].zero_()

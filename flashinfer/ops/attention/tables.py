"""Tables of a plan on their way to the device: checked on the host, sent in one copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from flashinfer._core import driver
from flashinfer._core.checks import check_indptr, require

# The order of tables here and in a Request: qo_indptr, kv_indptr, last_page_len or kv_len_arr, kv_indices. A caller may
# have other names for them.
NAMES = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
QO_INDPTR, KV_INDPTR, LENGTHS, KV_INDICES = range(4)


class Stage:
    """Room for host tables of given lengths, side by side; a length of 0 for a table that is on the device or None.
    `names` are what errors call the tables.

    Attributes
    ----------
    values : list of int32 array
        One per table.
    places : list of int
        Their addresses.
    parts : tuple of int32 Tensor
        Where each goes on the device.
    """

    def __init__(self, counts: tuple[int, ...], device: torch.device, names: tuple[str, ...] = NAMES):
        self.counts, self.names = counts, names
        total = sum(counts)
        self._host = torch.empty(total, dtype=torch.int32, device="cpu")
        flat, self._from = self._host.numpy(), self._host.data_ptr()
        ends = np.cumsum(counts).tolist()
        self.values = [flat[end - n : end] for n, end in zip(counts, ends, strict=True)]
        self.places = [self._from + 4 * (end - n) for n, end in zip(counts, ends, strict=True)]
        # The same as Python's integers, a quarter of the time of an array's element.
        self._integers = [memoryview(x) for x in self.values]
        # A verdict per element, in bytes: to search them costs a tenth of reducing an array.
        self._verdicts = [bytearray(n) for n in counts]
        self._flags = [np.frombuffer(verdict, dtype=np.bool_) for verdict in self._verdicts]
        # As unsigned, a negative number is larger than any other. Views cost as much as what is done with them: offsets
        # and those before them.
        self._unsigned = [x.view(np.uint32) for x in self.values]
        self._steps = [(x[1:], x[:-1], flags[1:]) for x, flags in zip(self._unsigned, self._flags, strict=True)]
        self._differences = [np.empty_like(x[1:]) for x in self._unsigned[:LENGTHS]]
        self._number, self._numbers = 0, np.zeros(counts[LENGTHS], np.uint32)
        self._bytes = 4 * total
        self.parts: tuple[torch.Tensor, ...] = ()
        if device.type == "cuda" and total:
            there = torch.empty(total, dtype=torch.int32, device=device)
            self.parts, self._to = there.split(counts), there.data_ptr()

    def take(self, i: int, table: torch.Tensor) -> None:
        """Copy a host table in. Where it is shorter than its room, lengths are 0; of others, the last is repeated."""
        values, n = self.values[i], table.shape[0]
        if table.dtype == torch.int32 and table.is_contiguous():
            ctypes.memmove(self.places[i], table.data_ptr(), 4 * n)
        else:
            given = table.numpy()
            wide = given[given != given.astype(np.int32)][:1].tolist() if table.dtype == torch.int64 else []
            require(not wide, self.names[i], wide and wide[0], "values of int32")
            values[:n] = given
        if n < self.counts[i]:
            values[n:] = values[n - 1] if n and i != LENGTHS else 0

    def check_indptr(self, i: int, most: int | None = None, what: str = "") -> int:
        """Check offsets: not negative and not decreasing, up to `most`, which is `what`. Returns the last.

        The first may be any: offsets of some requests of a larger batch still count its rows, or its page ids.
        """
        integers = self._integers[i]
        np.less(*self._steps[i])
        last = integers[-1]
        if integers[0] < 0 or last < 0 or 1 in self._verdicts[i] or (most is not None and last > most):
            check_indptr(self.names[i], self.values[i], most, what, sliced=True)
        return last

    def first(self, i: int) -> int:
        """The first value of a table."""
        return self._integers[i][0]

    def check_last_page_len(self, page_size: int) -> None:
        """Check that all are 0 ... page_size."""
        np.greater(self._unsigned[LENGTHS], self._all(page_size), self._flags[LENGTHS])
        if 1 in self._verdicts[LENGTHS]:
            values = self.values[LENGTHS]
            allowed = f"0 ... {page_size}, the page size"
            require(False, self.names[LENGTHS], f"{values.min()} ... {values.max()}", allowed)

    def check_kv_lens(self, page_size: int, page_ids: int) -> None:
        """Check that numbers of keys are 0 or more, and fit the pages that kv_indptr gives each request, if it is
        here and was checked."""
        if not self.counts[KV_INDPTR]:
            room = self._all((1 << 31) - 1)
        elif page_ids * page_size < 1 << 31:
            room = self._difference(KV_INDPTR)
            np.multiply(room, self._all(page_size), room)
        else:
            room = self._difference(KV_INDPTR).astype(np.int64) * page_size
        np.greater(self._unsigned[LENGTHS], room, self._flags[LENGTHS])
        at = self._verdicts[LENGTHS].find(1)
        if at >= 0:
            length = self.values[LENGTHS][at]
            require(length >= 0, self.names[LENGTHS], length, "no negative length")
            require(False, self.names[LENGTHS], f"{length} of request {at}",
                    f"what its entries of {self.names[KV_INDICES]} hold, pages of {page_size}")  # fmt: skip

    def longest_step(self, i: int) -> int:
        """The most from one checked offset to the next, at least 1."""
        if self.counts[i] < 2:
            return 1
        steps = self._difference(i)
        # Where the largest is, NumPy finds in a third of the time that it takes for what it is.
        return int(steps[steps.argmax()]) or 1

    def _difference(self, i: int) -> np.ndarray:
        ends, begins, _ = self._steps[i]
        return np.subtract(ends, begins, self._differences[i])

    def _all(self, number: int) -> np.ndarray:
        """An array of a number for each request: a number becomes an array in longer than it takes to compare."""
        if number != self._number:
            self._number = number
            self._numbers.fill(number)
        return self._numbers

    def send(self, stream: int) -> None:
        """Copy all to the device, in the order of the stream.

        The copy is from pageable memory, which the driver has read when it returns, without waiting for the device: the
        host side is free for the next plan at once. (CUDA driver API, "API synchronization behavior".)
        """
        driver.copy_to_device(self._to, self._from, self._bytes, stream)

    def send_into(self, i: int, buffer: torch.Tensor, count: int, stream: int) -> None:
        """Copy the first elements of a table to the begin of a device buffer."""
        if count:
            driver.copy_to_device(buffer.data_ptr(), self.places[i], 4 * count, stream)

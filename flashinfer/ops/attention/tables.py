"""Tables of a plan on their way to the device: checked on the host, sent in one copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from flashinfer._core import driver
from flashinfer._core.checks import check_indptr, require

# The order of tables here and in a Table: qo_indptr, kv_indptr, last_page_len, kv_indices.
NAMES = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
QO_INDPTR, KV_INDPTR, LAST_PAGE_LEN, KV_INDICES = range(4)


class Stage:
    """Room for host tables of given lengths, side by side; a length of 0 for a table that is on the device or None.

    Attributes
    ----------
    values : list of int32 array
        One per table.
    parts : tuple of int32 Tensor
        Where each goes on the device.
    """

    def __init__(self, counts: tuple[int, ...], device: torch.device):
        self.counts = counts
        total = sum(counts)
        self._host = torch.empty(total, dtype=torch.int32)
        flat, self._from = self._host.numpy(), self._host.data_ptr()
        ends = np.cumsum(counts).tolist()
        self.values = [flat[end - n : end] for n, end in zip(counts, ends, strict=True)]
        self._places = [self._from + 4 * (end - n) for n, end in zip(counts, ends, strict=True)]
        # A verdict per element, in bytes: to search them costs a tenth of reducing an array.
        self._verdicts = [bytearray(n) for n in counts]
        self._flags = [np.frombuffer(verdict, dtype=np.bool_) for verdict in self._verdicts]
        # Views cost as much as what is done with them: offsets and those before them, and lengths as unsigned.
        self._steps = [(x[1:], x[:-1], flags[1:]) for x, flags in zip(self.values, self._flags, strict=True)]
        self._unsigned = [x.view(np.uint32) for x in self.values]
        self._bytes = 4 * total
        self.parts: tuple[torch.Tensor, ...] = ()
        if device.type == "cuda" and total:
            there = torch.empty(total, dtype=torch.int32, device=device)
            self.parts, self._to = there.split(counts), there.data_ptr()

    def take(self, i: int, table: torch.Tensor) -> None:
        """Copy a host table in. Where it is shorter than its room, its last value is repeated."""
        values, n = self.values[i], table.shape[0]
        if table.dtype == torch.int32 and table.is_contiguous():
            ctypes.memmove(self._places[i], table.data_ptr(), 4 * n)
        else:
            values[:n] = table.numpy()
        if n < self.counts[i]:
            values[n:] = values[n - 1] if n else 0

    def check_indptr(self, i: int, most: int | None = None, what: str = "") -> int:
        """Check offsets: from 0 and not decreasing, up to `most`, which is `what`. Returns the last."""
        values = self.values[i]
        here, before, falls = self._steps[i]
        np.less(here, before, out=falls)
        last = int(values[-1])
        if values[0] != 0 or 1 in self._verdicts[i] or (most is not None and last > most):
            check_indptr(NAMES[i], values, most, what)
        return last

    def check_lengths(self, i: int, most: int) -> None:
        """Check that all are 0 ... most."""
        # As unsigned, a negative length is larger than any other.
        np.greater(self._unsigned[i], most, out=self._flags[i])
        if 1 in self._verdicts[i]:
            values = self.values[i]
            require(False, NAMES[i], f"{values.min()} ... {values.max()}", f"0 ... {most}")

    def lengths_fit(self, i: int, indptr: int | None, page_size: int) -> bool:
        """Whether numbers of keys are 0 or more, and fit the pages that table `indptr` gives each request."""
        if indptr is None:
            np.less(self.values[i], 0, out=self._flags[i])
        else:
            ends, begins, _ = self._steps[indptr]
            room = np.subtract(ends, begins, dtype=np.int64)
            room *= page_size
            # As unsigned, a negative length is larger than any room.
            np.greater(self._unsigned[i], room, out=self._flags[i])
        return 1 not in self._verdicts[i]

    def check_kv_lens(self, i: int, indptr: int | None, page_size: int) -> None:
        """Check that numbers of keys are 0 or more, and fit the pages that table `indptr` gives each request."""
        if self.lengths_fit(i, indptr, page_size):
            return
        values = self.values[i]
        require(values.min(initial=0) >= 0, "kv_lens", f"{values.min(initial=0)}", "0 or more")
        if indptr is not None:
            room = np.diff(self.values[indptr]) * page_size
            worst = int((values - room).max(initial=0))
            require(worst <= 0, "kv_lens", f"{worst} keys more than its pages hold", "as many as the pages hold")

    def longest_step(self, i: int) -> int:
        ends, begins, _ = self._steps[i]
        return int((ends - begins).max(initial=1))

    def send(self, stream: int) -> None:
        """Copy all to the device, in the order of the stream.

        The copy is from pageable memory, which the driver has read when it returns, without waiting for the device: the
        host side is free for the next plan at once. (CUDA driver API, "API synchronization behavior".)
        """
        driver.copy_to_device(self._to, self._from, self._bytes, stream)

    def send_into(self, i: int, buffer: torch.Tensor, count: int, stream: int) -> None:
        """Copy the first elements of a table to the begin of a device buffer."""
        if count:
            driver.copy_to_device(buffer.data_ptr(), self._places[i], 4 * count, stream)

"""Tables of a plan on their way to the device."""

from __future__ import annotations

import numpy as np
import torch

from flashinfer._core import driver
from flashinfer._core.checks import require


class Upload:
    """Brings integer tables to the compute device as int32: those on the host in one copy, others as they are.

    The copy is from pageable memory, which the driver has read when it returns, without waiting for the device: the
    host side is free for the next plan at once. (CUDA driver API, "API synchronization behavior".) Device memory is
    kept for the next plan on the same stream, where work runs in order.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = None
        self._host = self._there = torch.empty(0, dtype=torch.int32)
        self._values = self._host.numpy()
        self._parts: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

    def __call__(self, tables: tuple, host: list[np.ndarray | None], stream: int | None) -> list:
        """`tables` (None stays None) on the device; `host` are the same as arrays, where they are on the host."""
        if self.device.type != "cuda":
            return [None if t is None else t.to(self.device, torch.int32).contiguous() for t in tables]
        counts = tuple([0 if values is None else len(values) for values in host])
        total = sum(counts)
        if total:
            parts = self._send(host, counts, total, stream)
        return [
            parts[i] if values is not None else self._as_it_is(table)
            for i, (table, values) in enumerate(zip(tables, host, strict=True))
        ]

    def copy_into(self, buffer: torch.Tensor, values: np.ndarray, stream: int) -> None:
        """Fill a whole device buffer from the host; its end repeats the last value."""
        n = len(values)
        if not len(buffer):
            return
        self._reserve_host(len(buffer))
        self._values[:n] = values
        self._values[n : len(buffer)] = values[-1]
        driver.copy_to_device(buffer.data_ptr(), self._host.data_ptr(), 4 * len(buffer), stream)

    def _send(self, host, counts, total: int, stream: int) -> tuple[torch.Tensor, ...]:
        self._reserve_host(total)
        if stream != self._stream or total > self._there.shape[0]:
            self._there = torch.empty(1 << (total - 1).bit_length(), dtype=torch.int32, device=self.device)
            self._stream = stream
            self._parts.clear()
        parts = self._parts.get(counts)
        if parts is None:
            if len(self._parts) == 64:
                self._parts.clear()
            parts = self._parts[counts] = self._there[:total].split(counts)
        at = 0
        for values in host:
            if values is not None:
                self._values[at : at + len(values)] = values
                at += len(values)
        driver.copy_to_device(self._there.data_ptr(), self._host.data_ptr(), 4 * total, stream)
        return parts

    def _reserve_host(self, total: int) -> None:
        if total > self._host.shape[0]:
            self._host = torch.empty(1 << (total - 1).bit_length(), dtype=torch.int32)
            self._values = self._host.numpy()

    def _as_it_is(self, table: torch.Tensor | None) -> torch.Tensor | None:
        if table is None:
            return None
        if table.device != self.device:
            require(False, "table", f"a tensor on {table.device}", f"the host, or {self.device}")
        return table if table.dtype == torch.int32 and table.is_contiguous() else table.to(torch.int32).contiguous()

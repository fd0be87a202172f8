"""K slices of a product: how many, their sums, and counts of those that are done.

Counts are zeros before a kernel and after it. Kernels of one stream run in order, so they share a row of them; a stream
that is captured finds its row made, since all rows of a device are made at once, outside of any capture. As with
workspaces, graphs captured on one stream must not be replayed at the same time.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch

# Up to so many rows a product is bound by reading B.
FEW_ROWS = 64

_STREAMS, _TILES = 64, 8192
_lock = threading.Lock()
_rows: dict[int, torch.Tensor] = {}
_row_of: dict[tuple[int, int], torch.Tensor] = {}


@lru_cache(maxsize=4096)
def slices_of(tiles: int, steps: int, sms: int, end: float, least: int = 1, most: int = 16) -> int:
    """Into how many slices of at least `least` steps K is cut, for the last multiprocessor to end soonest.

    end : steps that a slice takes beside its own: to store sums, and to add those of others.
    """

    def time(slices: int) -> float:
        waves = -(-tiles * slices // sms)
        return waves * (steps / slices + (end if slices > 1 else 0))

    return min(range(1, max(min(steps // least, most), 1) + 1), key=time)


def scratch(device: torch.device, floats: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [floats] with undefined contents, and int32 zeros, `tiles` or more, which a kernel leaves as zeros."""
    partial = torch.empty(floats, dtype=torch.float32, device=device)
    counts = _counts(device) if device.type == "cuda" and tiles <= _TILES else None
    return partial, torch.zeros(tiles, dtype=torch.int32, device=device) if counts is None else counts


def _counts(device: torch.device) -> torch.Tensor | None:
    """The current stream's row; None where there is none, and none can be made."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    row = _row_of.get(key)
    if row is not None:
        return row
    with _lock:
        rows = _rows.get(device.index)
        if rows is None:
            if torch.cuda.is_current_stream_capturing():
                return None
            rows = _rows[device.index] = torch.zeros(_STREAMS, _TILES, dtype=torch.int32, device=device)
            # Once in a process: another stream may be the next to use them.
            torch.cuda.synchronize(device)
        taken = sum(index == device.index for index, _ in _row_of)
        return _row_of.setdefault(key, rows[taken]) if taken < _STREAMS else None

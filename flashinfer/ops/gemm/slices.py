"""Split K: the number of K slices, the scratch memory of their sums, and the counters of finished slices.

Counters are zero before and after each kernel. Kernels of one stream run in order, so a stream has one row of counters
for all of them. The rows for all streams of a device are allocated together, outside of graph capture, so a captured
stream finds its row. As with workspaces, graphs captured on one stream must not be replayed at the same time.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch

from flashinfer.ops.gemm.operands import bucket

# Up to this many rows of A, a GEMM is bound by reading B.
FEW_ROWS = 64

# Rows of counters of a device, and counters in a row: 2 MiB. Other streams, and larger grids, allocate their own.
_STREAMS, _TILES = 64, 8192
_lock = threading.Lock()
_rows: dict[int, torch.Tensor] = {}
_row_of: dict[tuple[int, int], torch.Tensor] = {}


@lru_cache(maxsize=4096)
def slices_of(tiles: int, steps: int, sms: int, end: float) -> int:
    """The number of K slices, up to 16, with the shortest time of the whole grid.

    end : the cost of a slice's epilogue in steps: storing its sums, and adding those of the others.
    """

    def time(slices: int) -> float:
        waves = -(-tiles * slices // sms)
        return waves * (steps / slices + (end if slices > 1 else 0))

    return min(range(1, max(min(steps, 16), 1) + 1), key=time)


@lru_cache(maxsize=4096)
def choose_split(batch: int, m: int, n: int, k_bytes: int, sms: int, least: int = 32) -> tuple[int, int]:
    """Columns of a tile, `least` or more, and the number of K slices with the shortest estimated time.

    The estimate is in microseconds, from measurements on an H100. A step of 128 bytes of K takes a tile of 128 x 128
    0.3. Splitting K (store the sums, count, read them again) takes 4 where rows are few, else 6 and 0.033 for each
    128 x 128 of partial sums.
    """
    rows = bucket(m)
    steps = -(-k_bytes // 128)
    found = []
    for columns in (32, 64, 128) if rows <= FEW_ROWS else (128, 256):
        if columns < least:
            continue
        tiles = batch * -(-m // min(rows, 128)) * -(-n // columns)
        # A slice has at least four steps, which fill the pipeline. Tiles of 256 columns are for large problems, which
        # need no split.
        for slices in range(1, 2 if columns == 256 else min(max(steps // 4, 1), 16) + 1):
            waves = -(-tiles * slices // sms)
            if rows <= FEW_ROWS:
                # Bounds by bytes: B from memory for the whole chip at 3 TB/s, and both operands into the busiest
                # multiprocessor at 50 GB/s.
                moved = tiles * columns * k_bytes / 3e6
                time = max(moved, waves * steps / slices * 128 * (columns + rows / 2) / 5e4)
            else:
                time = waves * (steps / slices * {128: 0.3, 256: 0.52}[columns] + {128: 0.8, 256: 1.3}[columns])
            if slices > 1:
                time += 4 + 0.1 * slices if rows <= FEW_ROWS else 6 + 0.033 * tiles * slices
            found.append((time, -columns, slices))
    _, columns, slices = min(found)
    return -columns, slices


def scratch(device: torch.device, floats: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [floats] for partial sums, undefined, and `tiles` or more int32 counters: zeros, which the kernel has to
    leave as zeros."""
    partial = torch.empty(floats, dtype=torch.float32, device=device)
    counts = _counts(device) if device.type == "cuda" and tiles <= _TILES else None
    return partial, torch.zeros(tiles, dtype=torch.int32, device=device) if counts is None else counts


def _counts(device: torch.device) -> torch.Tensor | None:
    """The current stream's row of counters; None during capture if no rows exist yet, and past _STREAMS streams."""
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
            # Another stream may use its row before this stream has written the zeros. Once a device.
            torch.cuda.synchronize(device)
        taken = sum(index == device.index for index, _ in _row_of)
        return _row_of.setdefault(key, rows[taken]) if taken < _STREAMS else None

"""CUDA graph capture, whoever begins it.

torch.cuda.graph tells torch's allocator of a capture: memory that a call takes in it, even memory that the call frees,
stays in the graph's pool for as long as the graph. cudaStreamBeginCapture on a stream of the caller's tells it nothing:
what a call frees is given out again while the graph still writes it at each replay. So what this package allocates in
such a capture is kept, for the life of the process: nobody says when the graph ends. Its results are the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer._core import driver

_lock = threading.Lock()
# By the driver's number of a capture, which no other one gets.
_known: dict[int, bool] = {}
_kept: list[torch.Tensor] = []


def is_unknown(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured, and torch's allocator does not know it."""
    if not torch.cuda.is_current_stream_capturing():
        return False
    stream = torch._C._cuda_getCurrentRawStream(device.index if device.index is not None else 0)
    status, _, number, *_ = driver.bindings().cuStreamGetCaptureInfo(stream)
    if status:
        driver.fail(status, "capture of the current stream")
    number = int(number)
    with _lock:
        if number not in _known:
            _known[number] = not _in_a_pool(device)
        return _known[number]


def _in_a_pool(device: torch.device) -> bool:
    """Whether what torch allocates now is part of a graph's pool. A look through its segments: once for each graph."""
    at = torch.empty(1, dtype=torch.uint8, device=device).data_ptr()
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:
        # Another allocator is in the place of torch's, and does as it does.
        return True
    for segment in segments:
        if segment["address"] <= at < segment["address"] + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    return True


def keep(tensor: torch.Tensor) -> None:
    """Keep what was allocated in such a capture."""
    with _lock:
        _kept.append(tensor)


class Keeping(TorchDispatchMode):
    """Inside, what this thread allocates on a GPU is kept."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # For True, torch imports dynamo, which takes seconds.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # What is no view and is not written in place is new.
        if isinstance(result, torch.Tensor) and result.is_cuda and not (func.is_view or func._schema.is_mutable):
            keep(result)
        return result


def run(function: Callable, args: tuple, named: dict, device: torch.device):
    """The call, with what it allocates kept if its stream is captured and torch's allocator does not know it."""
    if is_unknown(device):
        with Keeping():
            return function(*args, **named)
    return function(*args, **named)

"""Memory allocated during CUDA graph capture, also in captures that torch does not know of.

torch.cuda.graph informs torch's allocator: memory that a call allocates in the capture, and even frees, stays in the
graph's pool as long as the graph. After cudaStreamBeginCapture on a caller's stream the allocator is not informed:
memory that a call frees is reused while each replay of the graph still writes it. Therefore memory that this package
allocates in such a capture is kept for the life of the process, because the end of the graph is unknown. The caller
owns results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer._core import driver

_lock = threading.Lock()
# {the driver's id of a capture: whether torch's allocator does not know it}. The ids are unique.
_known: dict[int, bool] = {}
_kept: list[torch.Tensor] = []


def is_unknown(device: torch.device) -> bool:
    """Whether the current stream is being captured without torch's allocator knowing it."""
    if not torch.cuda.is_current_stream_capturing():
        return False
    number = number_of(torch._C._cuda_getCurrentRawStream(device.index if device.index is not None else 0))
    with _lock:
        if number not in _known:
            _known[number] = not _in_a_pool(device)
        return _known[number]


def number_of(stream: int) -> int:
    """The driver's id of a stream's capture."""
    status, _, number, *_ = driver.bindings().cuStreamGetCaptureInfo(stream)
    if status:
        driver.fail(status, "capture of the current stream")
    return int(number)


def _in_a_pool(device: torch.device) -> bool:
    """Whether torch allocates in a graph's pool now, by a search of its segments; called once for each graph."""
    at = torch.empty(1, dtype=torch.uint8, device=device).data_ptr()
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:
        # Another allocator has replaced torch's; it has its own policy for captures.
        return True
    for segment in segments:
        if segment["address"] <= at < segment["address"] + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    return True


def keep(tensor: torch.Tensor) -> None:
    """Keep a tensor that was allocated in such a capture."""
    with _lock:
        _kept.append(tensor)


class Keeping(TorchDispatchMode):
    """A context that keeps the GPU memory that this thread allocates."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this were True torch would import dynamo, which takes seconds.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A result that is no view and is not written in place is newly allocated.
        if isinstance(result, torch.Tensor) and result.is_cuda and not (func.is_view or func._schema.is_mutable):
            keep(result)
        return result


def run(function: Callable, args: tuple, named: dict, device: torch.device):
    """Call the function; keep what it allocates if `is_unknown`."""
    if is_unknown(device):
        with Keeping():
            return function(*args, **named)
    return function(*args, **named)

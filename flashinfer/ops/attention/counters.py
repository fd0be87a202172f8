"""Counters that begin at zero and that kernels leave at zero, in captures too, without a launch that clears them."""

from __future__ import annotations

import threading

import torch

from flashinfer._core import capture
from flashinfer._core.sizes import power_of_two

# Counters of captures that are kept on each device: 1 MiB, those of some 500 graphs.
_ROOM = 1 << 18
_lock = threading.Lock()
_rooms: dict[torch.device, tuple[torch.Tensor, int]] = {}
_of_capture: dict[tuple[int, int], torch.Tensor] = {}


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """int32 [count] of zeros, which the launches that use it leave zero.

    Calls that one stream captures for one graph run in turn, and share counters. A graph replays as long as it likes,
    so its counters are of a room that is kept for the life of the process, and that a call outside of a capture has
    made. Without such a call, and past the room, the graph clears them at every replay.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _lock:
        if not torch.cuda.is_current_stream_capturing():
            if device not in _rooms:
                # From the host: this waits until they are there, so that work on any stream finds them.
                _rooms[device] = torch.zeros(_ROOM, dtype=torch.int32, device="cpu").to(device), 0
            return torch.zeros(count, dtype=torch.int32, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        key = capture.number_of(stream), stream
        kept = _of_capture.get(key)
        if kept is not None and kept.numel() >= count:
            return kept[:count]
        room, used = _rooms.get(device, (None, 0))
        size = power_of_two(count, 256)
        if room is None or used + size > _ROOM:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _rooms[device] = room, used + size
        kept = _of_capture[key] = room[used : used + size]
        return kept[:count]

"""Scratch memory of the GPU, one buffer per device and stream.

Work on one stream runs in order, so all launches of a stream share one buffer. Work on two streams may overlap, so they
have different buffers. A buffer grows to the largest request, but not during CUDA graph capture. A graph keeps the
address with which it was captured, so a buffer that was used in a capture is kept for the life of the process, even
after it was replaced by a larger one. Graphs captured on one stream share its buffer and must not be replayed at the
same time, unless the caller passes its own workspaces.
"""

from __future__ import annotations

import threading

import torch

from flashinfer._core import replay

_lock = threading.Lock()
_latest: dict[tuple[int, int], torch.Tensor] = {}
_captured: dict[int, torch.Tensor] = {}


def take(device: torch.device, nbytes: int, given: torch.Tensor | None = None) -> torch.Tensor:
    """At least `nbytes` of scratch on `device`, for work on its current stream.

    Parameters
    ----------
    device : torch.device
    nbytes : int
    given : Tensor, optional
        A caller's contiguous workspace, used if it is large enough.

    Returns
    -------
    Tensor
        uint8 [nbytes] with undefined contents. The alignment is that of `given`, or at least 256 bytes.

    Raises
    ------
    RuntimeError
        A larger buffer is needed inside a CUDA-graph capture.
    """
    replay.refuse()
    if given is not None and given.numel() * given.element_size() >= nbytes:
        return given.view(-1).view(torch.uint8)[:nbytes]
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with torch.cuda.device(device), _lock:
        key = (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
        buffer = _latest.get(key)
        capturing = torch.cuda.is_current_stream_capturing()
        if buffer is None or buffer.numel() < nbytes:
            if capturing:
                has = 0 if buffer is None else buffer.numel()
                raise RuntimeError(
                    f"workspace: got {has} bytes on the stream that is being captured; allowed: at least {nbytes}. Run "
                    "once on this stream before the capture, or pass a workspace of that size"
                )
            buffer = _latest[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if capturing:
            _captured[buffer.data_ptr()] = buffer
        return buffer[:nbytes]

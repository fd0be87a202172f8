"""The path by which callers of upstream reach the names of `flashinfer.gemm`, and the size of upstream's workspace."""

from __future__ import annotations

from typing import Any

import torch

# Bytes, upstream's number. Products here need no workspace.
DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024

__all__ = ["DEFAULT_WORKSPACE_SIZE"]

# By name and device; and those that grew too small, whose memory captured graphs may still name.
_buffers: dict[tuple[str, torch.device], torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []


def _get_cache_buf(name: str, num_bytes: int, device: torch.device, zero_init: bool = False) -> torch.Tensor:
    """Bytes that all callers of a name share: as many as asked for, or more. `zero_init` : zeros in new ones."""
    buffer = _buffers.get((name, device))
    if buffer is None or len(buffer) < num_bytes:
        if buffer is not None:
            _outgrown.append(buffer)
        allocate = torch.zeros if zero_init else torch.empty
        buffer = _buffers[name, device] = allocate(num_bytes, dtype=torch.uint8, device=device)
    return buffer


def __getattr__(name: str) -> Any:
    # When it is asked for: the package imports this module before its own.
    from flashinfer import gemm

    if name not in gemm.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(gemm, name)

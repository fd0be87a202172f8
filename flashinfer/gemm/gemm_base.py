"""The path by which callers of upstream reach the names of `flashinfer.gemm`, and the size of upstream's workspace."""

from __future__ import annotations

from typing import Any

from flashinfer.compat.buffers import _get_cache_buf as _get_cache_buf
from flashinfer.compat.paths import named

# Bytes, upstream's number. Products here need no workspace.
DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024

__all__ = ["DEFAULT_WORKSPACE_SIZE"]


def __getattr__(name: str) -> Any:
    return named(name, "flashinfer.gemm", __name__)

"""The path by which callers of upstream reach products of few rows, which are among the names of `flashinfer.gemm`."""

from __future__ import annotations

from typing import Any

from flashinfer.compat.paths import named


def __getattr__(name: str) -> Any:
    return named(name, "flashinfer.gemm", __name__)

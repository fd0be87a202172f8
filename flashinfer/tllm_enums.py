"""Enumerations whose names and values callers share with TensorRT-LLM's kernels."""

from __future__ import annotations

from enum import Enum


class SfLayout(Enum):
    """Where block scale factors lie: row-major, or in tiles of 128 or 8 rows and 4 factors, padded with zeros.

    `flashinfer/ops/layouts.py` states the layouts.
    """

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2

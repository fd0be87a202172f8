"""Logs the arguments and results of calls of public functions as text: FLASHINFER_LOGLEVEL 1, 3, 5 and 10.

Lines about arguments are written and flushed before the call, so that they are there if it ends the process.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from enum import Enum

import torch

from flashinfer._core import env
from flashinfer._core.dispatch import Op

_INDENT = "  "


def logger() -> logging.Logger:
    """The log of calls, which goes to FLASHINFER_LOGDEST alone: "stdout", "stderr" or a file, %i the process."""
    found = logging.getLogger("flashinfer.api")
    if not found.handlers:
        place = env.LOGDEST.get().replace("%i", str(os.getpid()))
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        handler = logging.StreamHandler(streams[place]) if place in streams else logging.FileHandler(place)
        handler.setFormatter(logging.Formatter("%(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.DEBUG)
        found.propagate = False
    return found


def before(name: str, arguments: dict, level: int) -> str:
    """The text that is written before a call."""
    lines = [f"[{datetime.now():%Y-%m-%d %H:%M:%S}] FlashInfer API Call: {name}"]
    if level >= 3:
        lines += _lines_of("input", arguments, level)
    return "\n".join(lines)


def after(name: str, result, choices: list, level: int) -> str:
    """The text that is written after a call: its result, and what was chosen to compute it."""
    lines = [f"FlashInfer API Return: {name}", *_lines_of("output", {"result": result}, level)]
    for choice in choices:
        lines.append(f"{_INDENT}ran {choice.op} on {choice.target.arch}: variant {choice.variant.name}")
        lines.append(f"{_INDENT * 2}{choice.problem}")
        lines.append(f"{_INDENT * 2}{choice.config}")
    return "\n".join(lines)


def _lines_of(what: str, values: dict, level: int) -> Iterator[str]:
    for name, value in values.items():
        yield from _lines(f"{_INDENT}{what} {name}", value, level)


def _lines(label: str, value, level: int) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"{label}: {_described(value)}" + (f" {_statistics(value)}" if level >= 5 else "")
    elif isinstance(value, (tuple, list)) and any(isinstance(x, (torch.Tensor, tuple, list)) for x in value):
        yield f"{label}: {type(value).__name__} of {len(value)}"
        for i, part in enumerate(value):
            yield from _lines(f"{label}[{i}]", part, level)
    elif isinstance(value, dict):
        yield f"{label}: dict of {len(value)}"
        for key, part in value.items():
            yield from _lines(f"{label}[{key!r}]", part, level)
    elif value is None or isinstance(value, (bool, int, float, str, tuple, list, Enum, torch.dtype, torch.device)):
        yield f"{label}: {value!r}"
    else:
        yield f"{label}: {type(value).__name__} object"


def _described(x: torch.Tensor) -> str:
    layout = "contiguous" if x.is_contiguous() else "strided"
    return f"Tensor shape={tuple(x.shape)} stride={tuple(x.stride())} dtype={x.dtype} device={x.device} {layout}"


def _statistics(x: torch.Tensor) -> str:
    if capturing(x):
        return "(values are not read while a graph is captured)"
    if x.is_meta:
        return "(a meta tensor has no values)"
    if x.numel() == 0:
        return "min=- max=- mean=- nan=0 inf=0"
    low, high, total, nan, inf, count = math.inf, -math.inf, 0.0, 0, 0, 0
    try:
        for part in _parts(torch.view_as_real(x) if x.dtype.is_complex else x.detach()):
            values = part.double()
            finite = values[values.isfinite()]
            nan, inf = nan + int(values.isnan().sum()), inf + int(values.isinf().sum())
            if finite.numel():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total, count = total + float(finite.sum()), count + finite.numel()
    except NotImplementedError:
        # Not RuntimeError: a fault of an earlier kernel arrives here, and is the caller's to see.
        return f"(torch does not read values of {x.dtype})"
    if not count:
        low = high = math.nan
    return f"min={low:.6g} max={high:.6g} mean={total / count if count else math.nan:.6g} nan={nan} inf={inf}"


# Elements that are looked at together, as float64: a KV cache takes most of the memory.
_PART = 1 << 22


def _parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in parts of at most `_PART` elements."""
    if x.numel() <= _PART:
        yield x
    elif x.shape[0] == 1:
        yield from _parts(x[0])
    else:
        for part in x.split(max(1, x.shape[0] * _PART // x.numel())):
            yield from _parts(part)


def capturing(x: torch.Tensor) -> bool:
    """Whether the values of `x` cannot be read now: a graph is captured on its device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Choices(threading.local):
    """What dispatch chose in this thread's call; None outside of one."""

    now: list | None = None


choices = _Choices()


def watch_choices() -> None:
    """From here on what `Op` chooses inside a logged call is noted in `choices.now`; nothing else pays for it."""
    choose = Op.__call__
    if getattr(choose, "notes_choices", False):
        return

    def noting(self, *args, **named):
        choice = choose(self, *args, **named)
        if choices.now is not None and choice not in choices.now:
            choices.now.append(choice)
        return choice

    noting.notes_choices = True
    Op.__call__ = noting

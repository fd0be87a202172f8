"""What the emulator raises, and where in a kernel it happened."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, TracebackType

# Code objects of emulated kernels carry this in front of their file's name.
MARK = "<emulated> "


class EmulationError(RuntimeError):
    """A kernel did what a GPU does not take, or what leaves its result undefined."""


class OutOfBounds(EmulationError):
    """A load or store outside the memory that the launch was given."""


class Hazard(EmulationError):
    """Shared memory that is read before it is written, or written before it is read."""


class BarrierError(EmulationError):
    """An mbarrier that is used against its rules."""


class Deadlock(EmulationError):
    """Everybody waits, and nothing is on its way."""


def here() -> str:
    """The line of the kernel that runs, and who called it."""
    return _innermost(_outwards(sys._getframe(1)))


def _outwards(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def of_traceback(traceback: TracebackType | None) -> str:
    """The innermost line of a kernel in a traceback."""
    places = []
    while traceback is not None:
        places.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _innermost(reversed(places))


def of_generator(generator) -> str:
    """Where a generator, and what it waits in, stands."""
    places = []
    while getattr(generator, "gi_frame", None) is not None:
        places.append((generator.gi_code, generator.gi_frame.f_lineno))
        generator = generator.gi_yieldfrom
    return _innermost(reversed(places))


def _innermost(places: Iterable[tuple[CodeType, int]]) -> str:
    """The line in the first function of a kernel among `places`, and where the function was called from."""
    found = ((code, line) for code, line in places if code.co_filename.startswith(MARK))
    (code, line), caller = next(found, (None, 0)), next(found, None)
    if code is None:
        return "no line of a kernel"
    text = linecache.getline(code.co_filename.removeprefix(MARK), line).strip()
    return f"{_place(code, line)}{f', from {_place(*caller)}' if caller else ''}: {text}"


def _place(code: CodeType, line: int) -> str:
    file = code.co_filename.removeprefix(MARK)
    return f"{file.rpartition('flashinfer/')[2]}:{line} in {code.co_name}"

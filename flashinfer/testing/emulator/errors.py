"""What the emulator raises, and where in a kernel it happened."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

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


def place(file: str, line: int, function: str) -> str:
    file = file.removeprefix(MARK)
    return f"{file.rpartition('flashinfer/')[2]}:{line} in {function}: {linecache.getline(file, line).strip()}"


def here() -> str:
    """The line of the kernel that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(MARK):
        frame = frame.f_back
    return place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else "outside of a kernel"


def of_traceback(traceback) -> str:
    """The innermost line of a kernel in a traceback."""
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(MARK):
            found = place(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def of_generator(generator) -> str:
    """Where a generator, and what it waits in, stands."""
    found = ""
    while generator is not None and getattr(generator, "gi_frame", None) is not None:
        code = generator.gi_code
        if code.co_filename.startswith(MARK):
            found = place(code.co_filename, generator.gi_frame.f_lineno, code.co_name)
        generator = generator.gi_yieldfrom
    return found

"""The environment variables of this package, in one table, and the one place that reads them.

Only `flashinfer.version` reads its own, DISABLE_VERSION_CHECK, itself: that is before anything else is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its default, and its effect."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name) or self.default

    def is_on(self) -> bool:
        """Whether a switch is on. ValueError for anything but 0 and 1."""
        value = self.get()
        if value not in ("0", "1"):
            raise ValueError(f"{self.name}: got {value!r}; allowed: 0, 1")
        return value == "1"

    def reader(self) -> Callable[[], bytes | None]:
        """A function that gives the value as it is, None where it is unset, for calls that count microseconds.

        `os.environ` says by an exception that a name is unset, which takes ten times as long as the look into its dict.
        """
        return partial(os.environ._data.get, os.environ.encodekey(self.name))


WORKSPACE_BASE = Variable("FLASHINFER_WORKSPACE_BASE", "~", "the folder that holds .cache/flashinfer")
PRECOMPILED_DIR = Variable(
    "FLASHINFER_PRECOMPILED_DIR",
    "",
    f"folders that `flashinfer precompile --out` wrote, {os.pathsep!r} between; read before the cache, not written",
)
FROZEN = Variable("FLASHINFER_FROZEN", "0", "1: a kernel that is not in a cache is an error, nothing is compiled")
DEBUG = Variable("FLASHINFER_DEBUG", "0", "1: check what is costly to check: page indices, alignment of each launch")
LINE_INFO = Variable("FLASHINFER_LINE_INFO", "0", "1: compile source lines into kernels, for profilers")
LOGLEVEL = Variable(
    "FLASHINFER_LOGLEVEL",
    "",
    "log calls: 1 names, 3 shapes, 5 values, 10 dumps; or debug, info, warning, error: this package's log to stderr",
)
LOGDEST = Variable("FLASHINFER_LOGDEST", "stdout", "where calls are logged: stdout, stderr, a file; %i: the process id")
DUMP_DIR = Variable("FLASHINFER_DUMP_DIR", "flashinfer_dumps", "the folder of dumped calls, of level 10")
DUMP_MAX_COUNT = Variable("FLASHINFER_DUMP_MAX_COUNT", "1000", "calls that a process dumps at most")
DUMP_MAX_SIZE_GB = Variable("FLASHINFER_DUMP_MAX_SIZE_GB", "20", "GiB that a process dumps at most")
DUMP_INCLUDE = Variable("FLASHINFER_DUMP_INCLUDE", "", "patterns of functions to dump, such as *decode*,*.run")
DUMP_EXCLUDE = Variable("FLASHINFER_DUMP_EXCLUDE", "", "patterns of functions that are not dumped")
TRACE_DUMP = Variable(
    "FLASHINFER_TRACE_DUMP", "0", "1 when this package is imported: calls write definitions (`flashinfer.fi_trace`)"
)
TRACE_DUMP_DIR = Variable("FLASHINFER_TRACE_DUMP_DIR", "", "the folder of definitions; of calls, fi_trace_out if unset")
DISABLE_JIT = Variable("FLASHINFER_DISABLE_JIT", "", "anything but 0: as FLASHINFER_FROZEN=1")
VALIDATE_INPUTS = Variable("FLASHINFER_VALIDATE_INPUTS", "", "anything but 0: FLASHINFER_DEBUG=1 from the import on")
DISABLE_VERSION_CHECK = Variable(
    "FLASHINFER_DISABLE_VERSION_CHECK", "", "anything: warn about an unsupported torch or Triton, and go on"
)
PUBLIC_VERSION = Variable(
    "FLASHINFER_PUBLIC_VERSION", "0.7.2.post1", "read where a wheel is built (setup.py): its public version; or 0.7.2"
)
NVFP4_4OVER6 = Variable(
    "FLASHINFER_NVFP4_4OVER6", "0", "1: NVFP4 quantisation tries 4 beside 6, where no argument says"
)
NVFP4_4OVER6_ERR_MODE = Variable(
    "FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAE", "MAE or MSE: the error that chooses between 4 and 6"
)
NVFP4_4OVER6_ERR_USE_FAST_MATH = Variable(
    "FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0", "1: float16 may be used for that error"
)
NVFP4_4OVER6_E4M3_USE_256 = Variable(
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "0", "1: global scales leave factors up to 256, not 448"
)
AUTOTUNE_CACHE_DIR = Variable(
    "FLASHINFER_AUTOTUNE_CACHE_DIR", "", "the folder of tuned choices (`autotune_v2`); unset: a folder of the cache"
)
AUTOTUNE_DIR = Variable("FLASHINFER_AUTOTUNE_DIR", "", "the same, where FLASHINFER_AUTOTUNE_CACHE_DIR is unset")
VARIABLES = (
    WORKSPACE_BASE, PRECOMPILED_DIR, AUTOTUNE_CACHE_DIR, AUTOTUNE_DIR, FROZEN, DISABLE_JIT, DEBUG,
    VALIDATE_INPUTS, LINE_INFO, LOGLEVEL, LOGDEST, DUMP_DIR, DUMP_MAX_COUNT, DUMP_MAX_SIZE_GB, DUMP_INCLUDE,
    DUMP_EXCLUDE, TRACE_DUMP, TRACE_DUMP_DIR, DISABLE_VERSION_CHECK, PUBLIC_VERSION, NVFP4_4OVER6,
    NVFP4_4OVER6_ERR_MODE, NVFP4_4OVER6_ERR_USE_FAST_MATH, NVFP4_4OVER6_E4M3_USE_256,
)  # fmt: skip

_LEVELS = ("debug", "info", "warning", "error")
_CALL_LEVELS = (0, 1, 3, 5, 10)


def table() -> list[dict[str, str]]:
    """Name, value, default and meaning of every variable, as `flashinfer show-config` prints them."""
    return [
        {"name": v.name, "value": os.environ.get(v.name, ""), "default": v.default, "meaning": v.meaning}
        for v in VARIABLES
    ]


def workspace_base() -> Path:
    """The folder that holds .cache; one that cannot be written where nothing says what home is."""
    try:
        return Path(WORKSPACE_BASE.get()).expanduser()
    except RuntimeError:
        # No HOME, and a user that the password file does not have.
        return Path(os.devnull)


def tuned_folder() -> Path | None:
    """The folder of tuned choices that a variable names; None where none does."""
    named = AUTOTUNE_CACHE_DIR.get() or AUTOTUNE_DIR.get()
    with suppress(RuntimeError):
        return Path(named).expanduser() if named else None
    return None


def precompiled_dirs() -> tuple[Path, ...]:
    found = []
    for part in PRECOMPILED_DIR.get().split(os.pathsep):
        with suppress(RuntimeError):
            found += [Path(part).expanduser()] if part else []
    return tuple(found)


def api_level() -> int:
    """Which of the levels 0, 1, 3, 5 and 10 calls are logged at: the one at or below the number that is asked for."""
    value = LOGLEVEL.get().strip()
    return max(level for level in _CALL_LEVELS if level <= int(value)) if value.isdecimal() else 0


def traces_calls() -> bool:
    """Whether calls write their definitions."""
    return TRACE_DUMP.get() != "0"


def trace_folder() -> str:
    """The folder of definitions; "" where none is asked for."""
    return TRACE_DUMP_DIR.get() or ("fi_trace_out" if traces_calls() else "")


def _logger() -> logging.Logger:
    logger = logging.getLogger("flashinfer")
    level = LOGLEVEL.get().strip().lower()
    if level in _LEVELS:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    elif level and not level.isdecimal():
        known = ", ".join((*map(str, _CALL_LEVELS), *_LEVELS))
        logger.warning("%s: got %r, which is taken for 0; known are %s", LOGLEVEL.name, level, known)
    return logger


logger = _logger()
if VALIDATE_INPUTS.get() not in ("", "0"):
    os.environ.setdefault(DEBUG.name, "1")

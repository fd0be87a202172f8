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
    """One environment variable: its name, what its absence means, and what it does."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name) or self.default

    def is_on(self) -> bool:
        """Of a switch. ValueError for anything but 0 and 1."""
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
LOGLEVEL = Variable("FLASHINFER_LOGLEVEL", "", "debug, info, warning or error: print this package's log to stderr")
DISABLE_VERSION_CHECK = Variable(
    "FLASHINFER_DISABLE_VERSION_CHECK", "0", "1: warn about an unsupported torch or Triton, and go on"
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
    WORKSPACE_BASE, PRECOMPILED_DIR, AUTOTUNE_CACHE_DIR, AUTOTUNE_DIR, FROZEN, DEBUG, LINE_INFO, LOGLEVEL,
    DISABLE_VERSION_CHECK, NVFP4_4OVER6,
    NVFP4_4OVER6_ERR_MODE, NVFP4_4OVER6_ERR_USE_FAST_MATH, NVFP4_4OVER6_E4M3_USE_256,
)  # fmt: skip

_LEVELS = ("debug", "info", "warning", "error")


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


def _logger() -> logging.Logger:
    logger = logging.getLogger("flashinfer")
    level = LOGLEVEL.get().lower()
    if level:
        if level not in _LEVELS:
            raise ValueError(f"{LOGLEVEL.name}: got {level!r}; allowed: {', '.join(_LEVELS)}")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    return logger


logger = _logger()

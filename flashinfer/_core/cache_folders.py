"""The folders from which compiled kernels are read and to which they are written: the cache, precompiled folders, and a
private one.

A cache that cannot be written, or that other users could have written, is replaced by a private temporary folder of
this process. Without one, kernels are kept in memory only.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashinfer._core import env, trusted
from flashinfer._core.env import logger
from flashinfer._core.trusted import Distrusted
from flashinfer.version import __version__


def root_of(base: Path) -> Path:
    """The folder of this version's entries under a workspace base or a folder that `precompile --out` wrote."""
    return Path(base) / ".cache" / "flashinfer" / __version__


@dataclass(frozen=True)
class Place:
    """A folder: the base that a user named, and the parts below it, which are checked (`trusted`)."""

    base: Path
    parts: tuple[str, ...]
    any_owner: bool = False

    @property
    def path(self) -> Path:
        return self.base.joinpath(*self.parts)

    def opened(self, *more: str, make: bool = False):
        return trusted.opened(self.base, *self.parts, *more, make=make, any_owner=self.any_owner)


def below_of(key: dict) -> tuple[str, ...]:
    return key["arch"], "cached_ops", key["name"]


def in_cache(base: Path, below: tuple[str, ...] = (), any_owner: bool = False) -> Place:
    return Place(Path(base) / ".cache", ("flashinfer", __version__, *below), any_owner)


def places_to_read(key: dict) -> Iterator[Place]:
    for base in env.precompiled_dirs():
        place = in_cache(base, below_of(key), any_owner=True)
        fault = fault_of(place)
        if fault:
            warn_once(f"precompiled kernels are not used: {fault}")
        else:
            yield place
    base = env.workspace_base()
    place = in_cache(base, below_of(key))
    fault = fault_of(place)
    private = _private_root(base, fault, below_of(key)) if fault else _private_now(base, below_of(key))
    if not fault:
        yield place
    if private is not None:
        yield private


def fault_of(place: Place) -> str:
    """Why a folder is not trusted; '' if it is, or does not exist."""
    try:
        with place.opened():
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except Distrusted as fault:
        return str(fault)
    except OSError as error:
        return f"{place.path} cannot be examined: {error}"


def writable_root() -> Path | None:
    """The folder of new entries: the cache, or a private temporary one; None if neither can be made."""
    place = writable(None)
    return None if place is None else place.path


def writable(key: dict | None) -> Place | None:
    """Make the folder of a key in the cache, or in a private folder if the cache cannot be written or trusted."""
    below = () if key is None else below_of(key)
    base = env.workspace_base()
    place = in_cache(base, below)
    try:
        with place.opened(make=True) as at:
            trusted.probe(at)
            return place
    except Distrusted as error:
        fault = str(error)
    except OSError as error:
        fault = f"{place.path} cannot be written: {error}"
    place = _private_root(base, fault, below)
    if place is None:
        return None
    try:
        with place.opened(make=True):
            return place
    except (Distrusted, OSError) as error:
        warn_once(f"compiled kernels are not kept: {error}")
        return None


_MEMORY = "/dev/shm"
_private: dict[Path, tuple[Path, int]] = {}
_private_lock = threading.Lock()


def _private_now(base: Path, below: tuple[str, ...]) -> Place | None:
    """`below` in this process's private folder that replaces `base`; None if it is gone, or is a parent process's.

    A forked process knows its parent's folder, but the parent removes that.
    """
    folder, owner = _private.get(base, (None, 0))
    if folder is None or owner != os.getpid() or not folder.is_dir():
        return None
    place = Place(folder.parent, (folder.name, *below))
    return None if fault_of(place) else place


def _private_root(base: Path, why: str, below: tuple[str, ...]) -> Place | None:
    with _private_lock:
        place = _private_now(base, below)
        if place is not None:
            return place
        find_temporary()
        try:
            folder = Path(tempfile.mkdtemp(prefix="flashinfer-"))
        except OSError as error:
            text = f"{why}; there is no temporary folder either ({error}), so compiled kernels are not kept"
            warn_once(text, about=base)
            return None
        atexit.register(_remove_private, folder, os.getpid())
        logger.warning("%s; compiled kernels are kept in %s until this process ends", why, folder)
        _private[base] = folder, os.getpid()
        return Place(folder.parent, (folder.name, *below))


def find_temporary() -> None:
    """Use memory for temporary files if no temporary folder can be written, as in a read-only container.

    Triton also passes files to its assembler.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        if os.access(_MEMORY, os.W_OK):
            tempfile.tempdir = _MEMORY


def _remove_private(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


# A child that is forked while another thread holds the lock gets a new one.
os.register_at_fork(after_in_child=lambda: globals().update(_private_lock=threading.Lock()))

_said: set = set()


def warn_once(text: str, about=None) -> None:
    """Log a warning once; warnings with the same `about` count as one."""
    if (about or text) not in _said:
        _said.add(about or text)
        logger.warning("%s", text)

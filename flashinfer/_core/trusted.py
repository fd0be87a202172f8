"""Opens folders and files that no other user can have written; ownership and mode are checked on the open descriptor.

Entries of a folder are opened relative to its descriptor. So a folder or file that is replaced between check and use is
not used. A symbolic link is followed only as the first step below the base.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Distrusted(Exception):
    """A folder or file is not trusted; the message says why."""


@contextmanager
def opened(base: Path, *parts: str, make: bool = False, any_owner: bool = False) -> Iterator[int]:
    """A descriptor of base/part/part/..., open inside the block.

    Parameters
    ----------
    base : Path
        The folder that a user named; it is not checked.
    *parts : str
        Names below it. Each has to belong to this process's user and to be writable by nobody else. The first may be
        a symbolic link that this user owns.
    make : bool
        Make missing folders, writable by their owner only, whatever the umask is.
    any_owner : bool
        Also trust other users' folders, if only their owners can write them.

    Raises
    ------
    Distrusted
        A folder is not trusted.
    OSError
        One is missing, or cannot be opened or made.
    """
    if make:
        for missing in reversed([base, *base.parents]):
            if not missing.is_dir():
                with suppress(FileExistsError):
                    missing.mkdir(mode=0o755)
    with ExitStack() as stack:
        at, place = os.open(base, _FOLDER), base
        stack.callback(os.close, at)
        for depth, part in enumerate(parts):
            place = place / part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=at)
            at = _step(at, part, place, may_be_link=depth == 0, any_owner=any_owner)
            stack.callback(os.close, at)
            _judge(os.fstat(at), place, any_owner)
        yield at


def _step(at: int, part: str, place: Path, may_be_link: bool, any_owner: bool) -> int:
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    link = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        state = os.fstat(link)
        if not stat.S_ISLNK(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        if not may_be_link:
            raise Distrusted(f"{place} is a link")
        if not any_owner and state.st_uid != os.getuid():
            raise Distrusted(f"{place} {_of_another(state)}")
        return os.open(os.readlink("", dir_fd=link), _FOLDER, dir_fd=at)
    finally:
        os.close(link)


def _judge(state: os.stat_result, place, any_owner: bool) -> None:
    if not any_owner and state.st_uid != os.getuid():
        raise Distrusted(f"{place} {_of_another(state)}")
    if state.st_mode & OTHERS_WRITE:
        mode = stat.filemode(state.st_mode)
        raise Distrusted(f"{place} can be written by users other than its owner ({mode}; chmod go-w helps)")


def _of_another(state: os.stat_result) -> str:
    return f"belongs to user {state.st_uid}, not to user {os.getuid()}"


def read(name: str | os.PathLike, most: int, at: int | None = None, any_owner: bool = False) -> bytes:
    """The bytes of a regular file that this user owns and nobody else can write.

    Parameters
    ----------
    name : str or path
    most : int
        The most bytes that are read; a larger file is not trusted, even if it is sparse.
    at : int, optional
        The folder's descriptor; links are then not followed.
    any_owner : bool
        As in `opened`.

    Raises
    ------
    Distrusted, OSError
    """
    handle = os.open(name, _FILE if at is None else _FILE | os.O_NOFOLLOW, dir_fd=at)
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise Distrusted(f"{os.fspath(name)} is not a regular file")
        _judge(state, os.fspath(name), any_owner)
        if state.st_size > most:
            raise Distrusted(f"{os.fspath(name)} has {state.st_size} bytes, more than {most}")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise Distrusted(f"{os.fspath(name)} grew past {most} bytes")
    return content


def replace(at: int, name: str, content: bytes) -> None:
    """Write a file in the folder of a descriptor by a rename, so that readers see the old or the new content."""
    temporary = f".{secrets.token_hex(8)}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=at)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise


def probe(at: int) -> None:
    """Raise OSError if no file can be written into the folder of a descriptor."""
    name = f".{secrets.token_hex(8)}.tmp"
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at))
    os.unlink(name, dir_fd=at)

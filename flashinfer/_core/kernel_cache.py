"""The disk cache of compiled kernels: `<base>/.cache/flashinfer/<version>/<arch>/cached_ops/<launcher>/`.

An entry is a JSON file and a cubin, both named by a hash of the key. Entries never change: the cubin is written first,
then the JSON, each by a rename. A reader accepts an entry only if its JSON parses, matches its own checksum and has the
requested key, and if the cubin has the hash that the JSON states; otherwise it is a miss. Nothing in the cache is
unpickled or executed on the host.

Processes that miss the same key wait for one of them to compile it. The lock is the operating system's (flock), so it
is released when its holder dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from flashinfer._core import env, trusted
from flashinfer._core.cache_folders import Place, places_to_read, root_of, warn_once, writable, writable_root
from flashinfer._core.env import logger
from flashinfer._core.trusted import Distrusted

__all__ = [
    "Entry", "FrozenError", "clear", "digest_of", "entries", "fields_of", "freeze", "frozen", "lookup", "obtain",
    "root_of", "verify", "writable_root",
]  # fmt: skip

# The most bytes of an entry's two files. The largest cubin of this library has less than 1 MiB.
_MOST_RECORD, _MOST_CUBIN = 1 << 20, 64 << 20
# How long a process waits for another one that compiles the same kernel. Compiling takes seconds.
_LOCK_SECONDS = 120.0
# The fields of an entry that a launch reads (`compiler.compile_kernel`), and their types.
_KERNEL = {
    "symbol": str, "threads": int, "shared": int, "waits": bool, "parameters": list, "tensor_maps": list,
    "global_scratch": int, "profile_scratch": int, "registers": int, "stack_bytes": int,
}  # fmt: skip


class FrozenError(RuntimeError):
    """A kernel is not in any cache, and frozen mode forbids compiling it."""


@dataclass(frozen=True)
class Entry:
    """A compiled kernel.

    Attributes
    ----------
    key : dict
    cubin : bytes
    kernel : dict
        The data of a launch, from `compiler.compile_kernel`.
    path : Path or None
        The path of its JSON; None if it could not be stored.
    cached : bool
        Whether it came from a cache.
    seconds : float
        The time of compiling; 0 if it came from a cache.
    """

    key: dict
    cubin: bytes
    kernel: dict
    path: Path | None
    cached: bool = True
    seconds: float = 0.0


def fields_of(record) -> dict | None:
    """The fields of a Problem or Config as plain data; TypeError for one that JSON would not keep unchanged."""
    if record is None:
        return None
    fields = asdict(record)
    for name, value in fields.items():
        if not isinstance(value, (str, int, float, bool)):
            kind = type(record).__name__
            raise TypeError(f"{kind}.{name}: got {value!r}; allowed: str, int, float or bool, for it is a compile key")
    return fields


def digest_of(key: dict) -> str:
    """The base name of a key's files."""
    return _sha256(_canonical(key))[:32]


def obtain(key: dict, compile_it: Callable[[], tuple[bytes, dict]]) -> Entry:
    """The entry of `key`, from a cache, or compiled by `compile_it` and stored.

    Raises
    ------
    FrozenError
        It is in no cache and frozen mode is on.
    """
    entry = lookup(key)
    if entry is not None:
        return entry
    digest = digest_of(key)
    if frozen():
        raise FrozenError(
            f"{key['name']}: no compiled kernel {digest} for sm_{key['arch']}, and frozen mode forbids compiling. "
            f"Compile it ahead (`flashinfer precompile`), or unset {env.FROZEN.name} and {env.DISABLE_JIT.name}. "
            f"Wanted: {_canonical(key)}"
        )
    place = writable(key)
    with ExitStack() as stack:
        stack.enter_context(_locked(place, digest))
        entry = place and _read(place, digest, key)
        if entry is not None:
            return entry
        start = time.perf_counter()
        cubin, kernel = compile_it()
        seconds = time.perf_counter() - start
        logger.info("compiled %s %s for sm_%s in %.2f s", key["name"], digest, key["arch"], seconds)
        path = None
        if place is not None:
            _write(place, digest, key, cubin, kernel)
            path = place.path / f"{digest}.json"
        return Entry(key, cubin, kernel, path, cached=False, seconds=seconds)


def lookup(key: dict) -> Entry | None:
    """The entry of `key`, from the precompiled folders in their order, then from the cache; None if it is missing."""
    digest = digest_of(key)
    for place in places_to_read(key):
        entry = _read(place, digest, key)
        if entry is not None:
            return entry
    return None


# -- frozen mode ------------------------------------------------------------------------------------------------------

_frozen_by_call = False


def freeze(on: bool = True) -> None:
    """Make a kernel that is in no cache an error from now on, as with FLASHINFER_FROZEN=1; `freeze(False)` ends it."""
    global _frozen_by_call
    _frozen_by_call = on


def frozen() -> bool:
    """Whether compiling is forbidden in this process."""
    return _frozen_by_call or env.FROZEN.is_on() or env.DISABLE_JIT.get() not in ("", "0")


# -- entries ----------------------------------------------------------------------------------------------------------


def _read(place: Place, digest: str, key: dict) -> Entry | None:
    path = place.path / f"{digest}.json"
    try:
        with place.opened() as at:
            record = _read_record(at, f"{digest}.json", place.any_owner)
            if record["key"] != json.loads(_canonical(key)):
                raise Distrusted("it holds another key")
            cubin = _read_cubin(at, f"{digest}.cubin", record, place.any_owner)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (Distrusted, OSError) as fault:
        warn_once(f"cache entry {path} is not used: {fault}")
        return None
    return Entry(key, cubin, record["kernel"], path)


def _read_record(at: int, name: str, any_owner: bool) -> dict:
    content = trusted.read(name, _MOST_RECORD, at, any_owner)
    try:
        record = json.loads(content)
        stated = record.pop("sha256")
        whole = stated == _sha256(_canonical(record)) and record.keys() == {"key", "kernel", "cubin_sha256"}
    # Deep nesting is a RecursionError.
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Distrusted(f"not a cache entry ({type(error).__name__}: {error})") from error
    if not whole:
        raise Distrusted("its checksum does not match")
    kernel = record["kernel"]
    if not _is_whole(kernel):
        raise Distrusted(f"its kernel has not what a launch needs: {', '.join(_KERNEL)}")
    if not isinstance(record["key"], dict):
        raise Distrusted("its key is no object")
    return record


def _is_whole(kernel) -> bool:
    """Whether all fields that a launch reads are present and have the right types."""
    if not isinstance(kernel, dict) or any(type(kernel.get(name)) is not kind for name, kind in _KERNEL.items()):
        return False
    numbers = [value for value in kernel.values() if type(value) is int]
    parameters = [tuple(map(type, part)) if isinstance(part, list) else part for part in kernel["parameters"]]
    return (
        min(numbers) >= 0
        and kernel["threads"] > 0
        and all(part == (str, int, int) for part in parameters)
        and all(isinstance(metadata, dict) for metadata in kernel["tensor_maps"])
    )


def _read_cubin(at: int, name: str, record: dict, any_owner: bool) -> bytes:
    try:
        cubin = trusted.read(name, _MOST_CUBIN, at, any_owner)
    except FileNotFoundError as error:
        raise Distrusted("its cubin is missing") from error
    if _sha256(cubin) != record["cubin_sha256"]:
        raise Distrusted("its cubin has another hash than the entry states")
    return cubin


def _write(place: Place, digest: str, key: dict, cubin: bytes, kernel: dict) -> None:
    record = {"key": key, "kernel": kernel, "cubin_sha256": _sha256(cubin)}
    record["sha256"] = _sha256(_canonical(record))
    try:
        with place.opened() as at:
            trusted.replace(at, f"{digest}.cubin", cubin)
            trusted.replace(at, f"{digest}.json", json.dumps(record, indent=1).encode())
    except (Distrusted, OSError) as error:
        warn_once(f"a compiled kernel could not be kept in {place.path}: {error}")


@contextmanager
def _locked(place: Place | None, digest: str) -> Iterator[None]:
    """Hold the lock for compiling this key, among threads and processes.

    Without a folder, without locks in the file system, or after the deadline, the block runs without the lock: the
    holder may be suspended, and compiling a kernel twice gives the same result.
    """
    with ExitStack() as stack:
        if place is not None:
            try:
                at = stack.enter_context(place.opened(".locks", make=True))
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                handle = os.open(digest, flags, 0o644, dir_fd=at)
                stack.callback(os.close, handle)
                if _flock(handle):
                    # Closing is not enough, because a child forked in between has the descriptor too.
                    stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
                else:
                    warn_once(
                        f"another process has been compiling {digest} in {place.path} for {_LOCK_SECONDS:g} s; "
                        "it is compiled here as well"
                    )
            except (Distrusted, OSError) as error:
                warn_once(f"{place.path} has no locks, so processes may compile the same kernel twice: {error}")
        yield


def _flock(handle: int) -> bool:
    """Take the lock before the deadline; whether it succeeded."""
    end, pause = time.monotonic() + _LOCK_SECONDS, 0.001
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _canonical(data) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _sha256(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


# -- for the command line ---------------------------------------------------------------------------------------------


# Steps from .cache/flashinfer to a folder of entries: version, architecture, "cached_ops", launcher.
_STEPS = 4
# An entry's files, and temporary files of a writer that was killed.
_OURS = re.compile(r"[0-9a-f]{32}\.(json|cubin)|\.[\w.-]+\.tmp")


def entries(base: Path | None = None) -> list[dict]:
    """Every entry of every version under `base` (default: the cache), as plain data, with its fault.

    Each is {"version", "arch", "op", "digest", "path", "bytes", "fault", "key", "kernel"}. `fault` is '' for a valid
    entry; `key` and `kernel` are empty if the JSON is not trusted. Entries under a given `base` may belong to another
    user, as precompiled ones do.
    """
    found = []
    for folder in _walk(base):
        for name in folder.names:
            digest, suffix = os.path.splitext(name)
            if suffix != ".json":
                continue
            fault, record = "", {"key": {}, "kernel": {}}
            try:
                record = _read_record(folder.at, name, base is not None)
                _read_cubin(folder.at, f"{digest}.cubin", record, base is not None)
                if digest_of(record["key"]) != digest:
                    raise Distrusted("it holds another key than its name says")
            except (Distrusted, OSError) as error:
                fault = str(error)
            pair = {name, f"{digest}.cubin"} & set(folder.names)
            found.append(
                {
                    "version": folder.version,
                    "arch": folder.arch,
                    "op": folder.op,
                    "digest": digest,
                    "path": str(folder.path / name),
                    "bytes": sum(folder.state(part).st_size for part in pair),
                    "fault": fault,
                    "key": record["key"],
                    "kernel": record["kernel"],
                }
            )
    return found


def verify(base: Path | None = None) -> list[dict]:
    """The entries that `lookup` would reject, and cubins without an entry: [{"path", "fault"}]; [] if there are
    none."""
    faults = [{"path": e["path"], "fault": e["fault"]} for e in entries(base) if e["fault"]]
    for folder in _walk(base):
        for name in folder.names:
            if name.endswith(".cubin") and name.removesuffix(".cubin") + ".json" not in folder.names:
                faults.append({"path": str(folder.path / name), "fault": "a cubin without its entry"})
    return faults


def clear(base: Path | None = None, arch: str | None = None, op: str | None = None) -> dict[str, int]:
    """Remove entries (of one architecture, of one launcher), and nothing else: {"files", "bytes"} removed.

    Links are not followed, and files or folders of other users stay.
    """
    removed = {"files": 0, "bytes": 0}
    for folder in _walk(base, ours=True):
        if (arch is None or folder.arch == arch) and (op is None or folder.op == op):
            for name in folder.names:
                state = folder.state(name)
                if _OURS.fullmatch(name) and state.st_uid == os.getuid() and not stat.S_ISDIR(state.st_mode):
                    removed["files"] += 1
                    removed["bytes"] += state.st_size
                    os.unlink(name, dir_fd=folder.at)
    return removed


@dataclass(frozen=True)
class _Open:
    """A folder of entries; `at` is its descriptor."""

    at: int
    path: Path

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.at))

    @property
    def version(self) -> str:
        return self.path.parts[-4]

    @property
    def arch(self) -> str:
        return self.path.parts[-3]

    @property
    def op(self) -> str:
        return self.path.parts[-1]

    def state(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.at, follow_symlinks=False)


def _walk(base: Path | None, ours: bool = False) -> Iterator[_Open]:
    """Every folder of entries under `base`, version by version; links and folders that are not trusted are skipped."""
    root = Place(Path(env.workspace_base() if base is None else base) / ".cache", ("flashinfer",))
    any_owner = base is not None and not ours

    def inner(*parts: str) -> Iterator[_Open]:
        try:
            with trusted.opened(root.base, *root.parts, *parts, any_owner=any_owner) as at:
                if len(parts) == _STEPS:
                    yield _Open(at, root.path.joinpath(*parts))
                    return
                names = sorted(os.listdir(at))
        except (Distrusted, OSError):
            return
        for name in names:
            if len(parts) != 2 or name == "cached_ops":
                yield from inner(*parts, name)

    return inner()

"""The disk cache of compiled kernels: `<base>/.cache/flashinfer/<version>/<arch>/cached_ops/<launcher>/`.

An entry is a JSON file, for people and for `lookup`, beside a cubin; a hash of the key names both. Entries never
change: the cubin is put in place first, then the JSON, each by a rename. A reader believes an entry only if its JSON
parses, matches its own checksum and holds the very key that was asked for, and the cubin has the hash that the JSON
states; anything else is a miss. Nothing in the cache is unpickled or executed on the host.

Processes that miss the same key wait for one of them to compile it; the lock is the kernel's (flock), so it ends with
its holder, however that dies.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flashinfer._core import env
from flashinfer._core.env import logger
from flashinfer.version import __version__

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
        What a launch must know, as `compiler.compile_kernel` gives it.
    path : Path
        Of its JSON.
    cached : bool
        It came from a cache.
    seconds : float
        Of compiling; 0 if it came from a cache.
    """

    key: dict
    cubin: bytes
    kernel: dict
    path: Path
    cached: bool = True
    seconds: float = 0.0


class _Fault(Exception):
    """Why an entry on disk is not believed."""


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
    """The name of a key's files."""
    return _sha256(_canonical(key))[:32]


def obtain(key: dict, compile_it: Callable[[], tuple[bytes, dict]]) -> Entry:
    """The entry of `key`, from a cache or compiled by `compile_it` and kept.

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
            f"Compile it ahead (`flashinfer precompile`), or unset {env.FROZEN.name}. Wanted: {_canonical(key)}"
        )
    folder = _writable(_place(key))
    with _locked(folder, digest):
        entry = _read(folder, digest, key)
        if entry is not None:
            return entry
        start = time.perf_counter()
        cubin, kernel = compile_it()
        seconds = time.perf_counter() - start
        logger.info("compiled %s %s for sm_%s in %.2f s", key["name"], digest, key["arch"], seconds)
        _write(folder, digest, key, cubin, kernel)
        return Entry(key, cubin, kernel, folder / f"{digest}.json", cached=False, seconds=seconds)


def lookup(key: dict) -> Entry | None:
    """The entry of `key`, from the precompiled folders in their order, then from the cache; None if it is missing."""
    digest = digest_of(key)
    for folder in _folders_to_read(key):
        entry = _read(folder, digest, key)
        if entry is not None:
            return entry
    return None


# -- frozen mode ------------------------------------------------------------------------------------------------------

_frozen_by_call = False


def freeze(on: bool = True) -> None:
    """From here on a kernel that is in no cache is an error, as with FLASHINFER_FROZEN=1; `freeze(False)` ends it."""
    global _frozen_by_call
    _frozen_by_call = on


def frozen() -> bool:
    """Whether compiling is forbidden in this process."""
    return _frozen_by_call or env.FROZEN.is_on()


# -- where ------------------------------------------------------------------------------------------------------------


def root_of(base: Path) -> Path:
    """The folder of this version's entries under a workspace base or a folder that `precompile --out` wrote."""
    return Path(base) / ".cache" / "flashinfer" / __version__


def _place(key: dict) -> Path:
    return Path(key["arch"]) / "cached_ops" / key["name"]


def _folders_to_read(key: dict) -> Iterator[Path]:
    for base in env.precompiled_dirs():
        folder = root_of(base) / _place(key)
        fault = _distrust(folder, any_owner=True)
        if fault:
            _warn_once(f"precompiled kernels are not used: {fault}")
        else:
            yield folder
    base = env.workspace_base()
    folder = root_of(base) / _place(key)
    fault = _distrust(folder)
    if fault:
        _private_root(base, fault)
    else:
        yield folder
    if base in _private:
        yield _private[base] / _place(key)


def writable_root() -> Path:
    """The folder that new entries go to: the cache, or a private temporary one (see `_writable`)."""
    return _writable(Path())


def _writable(place: Path) -> Path:
    """`place` in the cache; in a private temporary folder where the cache cannot be written, or others can write it."""
    base = env.workspace_base()
    folder = root_of(base) / place
    fault = _distrust(folder)
    if not fault:
        try:
            _make(folder)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            fault = f"{folder} cannot be written: {error}"
    folder = _private_root(base, fault) / place
    _make(folder)
    return folder


_private: dict[Path, Path] = {}
_private_lock = threading.Lock()


def _private_root(base: Path, why: str) -> Path:
    with _private_lock:
        if base not in _private:
            folder = Path(tempfile.mkdtemp(prefix="flashinfer-"))
            atexit.register(_remove_private, folder, os.getpid())
            logger.warning("%s; compiled kernels are kept in %s until this process ends", why, folder)
            _private[base] = folder
        return _private[base]


def _remove_private(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    """Make a folder and those above it, each for its owner alone to write, whatever the umask."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.is_dir():
            with suppress(FileExistsError):
                missing.mkdir(mode=0o755)


def _distrust(folder: Path, any_owner: bool = False) -> str:
    """Why `folder`, or one above it up to `.cache/flashinfer`, is not ours alone to write; '' if it is.

    A link is judged by its own owner and by what it points to. A folder that does not exist yet is no fault.
    """
    for place in (folder, *folder.parents):
        fault = _fault_of(place, any_owner)
        if fault:
            return f"{place} {fault}"
        if place.name == "flashinfer":
            break
    return ""


def _fault_of(folder: Path, any_owner: bool) -> str:
    try:
        states = [folder.lstat(), folder.stat()]
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"cannot be examined: {error}"
    if not any_owner and any(state.st_uid != os.getuid() for state in states):
        return f"belongs to user {states[0].st_uid}, not to user {os.getuid()}"
    if states[1].st_mode & _OTHERS_WRITE:
        return f"can be written by users other than its owner ({stat.filemode(states[1].st_mode)}; chmod go-w helps)"
    return ""


_said: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


# -- entries ----------------------------------------------------------------------------------------------------------


def _read(folder: Path, digest: str, key: dict) -> Entry | None:
    record_path = folder / f"{digest}.json"
    try:
        record = _read_record(record_path)
        if record["key"] != json.loads(_canonical(key)):
            raise _Fault("it holds another key")
        cubin = _read_cubin(folder / f"{digest}.cubin", record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (_Fault, OSError) as fault:
        _warn_once(f"cache entry {record_path} is not used: {fault}")
        return None
    return Entry(key, cubin, record["kernel"], record_path)


def _read_record(path: Path) -> dict:
    try:
        record = json.loads(_read_bytes(path))
        stated = record.pop("sha256")
        complete = {"key", "kernel", "cubin_sha256"} <= record.keys()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _Fault(f"not a cache entry ({type(error).__name__}: {error})") from error
    if not complete or stated != _sha256(_canonical(record)):
        raise _Fault("its checksum does not match")
    return record


def _read_cubin(path: Path, record: dict) -> bytes:
    try:
        cubin = _read_bytes(path)
    except FileNotFoundError as error:
        raise _Fault("its cubin is missing") from error
    if _sha256(cubin) != record["cubin_sha256"]:
        raise _Fault("its cubin has another hash than the entry states")
    return cubin


def _read_bytes(path: Path) -> bytes:
    """Bytes of a regular file: a link, pipe or device planted in its place is an OSError or a fault, never followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) or mode & _OTHERS_WRITE:
            raise _Fault(f"{path.name} is not a regular file that only its owner can write")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _write(folder: Path, digest: str, key: dict, cubin: bytes, kernel: dict) -> None:
    record = {"key": key, "kernel": kernel, "cubin_sha256": _sha256(cubin)}
    record["sha256"] = _sha256(_canonical(record))
    try:
        _replace(folder / f"{digest}.cubin", cubin)
        _replace(folder / f"{digest}.json", json.dumps(record, indent=1).encode())
    except OSError as error:
        _warn_once(f"a compiled kernel could not be kept in {folder}: {error}")


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def _locked(folder: Path, digest: str) -> Iterator[None]:
    """Alone, among threads and processes, in compiling this key; not alone where the file system has no locks."""
    with ExitStack() as stack:
        try:
            locks = folder / ".locks"
            _make(locks)
            handle = os.open(locks / digest, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Closing is not enough: a child forked meanwhile has the descriptor too.
            stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        except OSError as error:
            _warn_once(f"{folder} has no locks, so processes may compile the same kernel twice: {error}")
        yield


def _canonical(data) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _sha256(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


# -- for the command line ---------------------------------------------------------------------------------------------


def entries(base: Path | None = None) -> list[dict]:
    """Every entry of every version under `base` (default: the cache), as plain data, with what is wrong with it.

    Each is {"version", "arch", "op", "digest", "path", "bytes", "fault", "key", "kernel"}; `fault` is '' for a whole
    entry, and `key` and `kernel` are empty where the JSON cannot be read.
    """
    found = []
    for path in _files(base):
        if path.suffix != ".json":
            continue
        digest, fault, record = path.stem, "", {"key": {}, "kernel": {}}
        try:
            record = _read_record(path)
            _read_cubin(path.with_suffix(".cubin"), record)
            if digest_of(record["key"]) != digest:
                raise _Fault("it holds another key than its name says")
        except (_Fault, OSError) as error:
            fault = str(error)
        pair = (path, path.with_suffix(".cubin"))
        found.append(
            {
                "version": path.parts[-5],
                "arch": path.parts[-4],
                "op": path.parts[-2],
                "digest": digest,
                "path": str(path),
                "bytes": sum(p.lstat().st_size for p in pair if p.is_file()),
                "fault": fault,
                "key": record["key"],
                "kernel": record["kernel"],
            }
        )
    return found


def verify(base: Path | None = None) -> list[dict]:
    """The entries that `lookup` would not believe, and cubins without an entry: [{"path", "fault"}]; [] if whole."""
    faults = [{"path": e["path"], "fault": e["fault"]} for e in entries(base) if e["fault"]]
    for path in _files(base):
        if path.suffix == ".cubin" and not path.with_suffix(".json").exists():
            faults.append({"path": str(path), "fault": "a cubin without its entry"})
    return faults


def clear(base: Path | None = None, arch: str | None = None, op: str | None = None) -> dict[str, int]:
    """Remove entries (of one architecture, of one launcher), and nothing else: {"files", "bytes"} removed."""
    removed = {"files": 0, "bytes": 0}
    for path in _files(base):
        if (arch is None or path.parts[-4] == arch) and (op is None or path.parts[-2] == op):
            removed["files"] += 1
            removed["bytes"] += path.lstat().st_size
            path.unlink()
    return removed


def _files(base: Path | None) -> list[Path]:
    root = root_of(env.workspace_base() if base is None else base).parent
    return sorted(p for p in root.glob("*/*/cached_ops/*/*") if p.suffix in (".json", ".cubin", ".tmp"))

"""Where choices are kept: one file of a caller's, or a folder with a file to each choice."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from flashinfer._core import env, kernel_cache, trusted
from flashinfer._core.cache_folders import __version__
from flashinfer._core.env import logger

METADATA, RECORDS = "_metadata", "_records"


def environment(device: torch.device | None = None) -> dict[str, str]:
    """What choices depend on: versions, and the device."""
    on_gpu = torch.cuda.is_available()
    return {
        "flashinfer_version": __version__,
        "torch_version": torch.__version__,
        "cuda_version": str(torch.version.cuda),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
    }


# Bytes of a file of choices that are read at most: 100,000 choices have about 20 MB.
_MOST = 64 << 20


def as_tactic(value):
    """A tactic as JSON gave it back: lists are tuples."""
    return tuple(map(as_tactic, value)) if isinstance(value, list) else value


def as_choice(value) -> tuple[str, object] | None:
    """(runner's class name, tactic) of a file's value; None for what cannot be one.

    A tactic is a number, a string, or a tuple of such. Whether a runner has it, its `get_valid_tactics` says.
    """
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        return None
    tactic = as_tactic(value[1])
    return (value[0], tactic) if isinstance(tactic, (int, str, tuple)) and _is_plain(tactic) else None


def _is_plain(tactic) -> bool:
    return all(map(_is_plain, tactic)) if isinstance(tactic, tuple) else isinstance(tactic, (int, str))


def replace(path: Path, content: dict) -> None:
    """Write JSON and put it in place by a rename, so that readers see the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with trusted.opened(path.parent) as at:
        trusted.replace(at, path.name, json.dumps(content, indent=1, sort_keys=True).encode())


def read(path: Path) -> dict | None:
    """A file's content; None, with a warning, for one of another user's and one that is no JSON object."""
    try:
        content = json.loads(trusted.read(path, _MOST))
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Deep nesting is a RecursionError.
    except (OSError, ValueError, RecursionError, trusted.Distrusted) as error:
        logger.warning("tuned choices in %s are not used: %s", path, error)
        return None
    if not isinstance(content, dict):
        logger.warning("tuned choices in %s are not used: no object", path)
        return None
    return content


def records_of(content: dict) -> dict[str, dict]:
    """What a file holds under names of callers'; what is of another kind is left out."""
    kept = content.get(RECORDS)
    return {name: value for name, value in kept.items() if isinstance(value, dict)} if isinstance(kept, dict) else {}


def choices_of(content: dict) -> dict[str, tuple[str, object]]:
    """The choices of a file; what cannot be one is left out."""
    found = {key: as_choice(value) for key, value in content.items() if not key.startswith("_")}
    return {key: choice for key, choice in found.items() if choice is not None}


# What a writer says of what it could not find out.
_UNKNOWN = (None, "unknown", "None")


def foreign(content: dict) -> tuple[str, bool]:
    """How the environment that made a file differs from this one, '' if it does not; and whether it is known to."""
    made = content.get(METADATA)
    hard, soft = mismatches(made if isinstance(made, dict) else {}, environment())
    return ", ".join(f"{name} is {here}, there {there}" for name, (there, here) in (hard | soft).items()), bool(hard)


def mismatches(
    saved_meta: dict[str, str], current_meta: dict[str, str]
) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """What differs between two environments, {name: (saved, current)}: what the saved one says, and what it does not
    know. "*" agrees with all."""
    hard: dict[str, tuple] = {}
    soft: dict[str, tuple] = {}
    for name, current in current_meta.items():
        saved = saved_meta.get(name)
        if saved not in (current, "*"):
            (soft if saved in _UNKNOWN else hard)[name] = (saved, current)
    return hard, soft


class Folder:
    """A choice to a file: `<root>/v2/<hash of the environment>/entries/<hash of the key>.json`.

    Writers do not wait for each other: the last whole file stands. A file that cannot be read, or holds another key, is
    none. Each key is looked up once in a process.
    """

    def __init__(self, root: str | os.PathLike | None, policy: dict):
        content = environment() | {"schema": 1} | policy
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        base = Path(root) if root is not None else env.tuned_folder()
        if base is None:
            kept = kernel_cache.writable_root()
            base = None if kept is None else kept / "autotune"
        # None: there is no folder to write to, and choices last as long as the process.
        self.folder = None if base is None else base / "v2" / name
        self._manifest = content
        self._known: dict[str, tuple[str, Any] | None] = {}

    def _path(self, folder: Path, key: str) -> Path:
        return folder / "entries" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def find(self, key: str):
        """(runner's class name, tactic), or None."""
        if key not in self._known:
            content = {} if self.folder is None else read(self._path(self.folder, key)) or {}
            whole = content.get("key") == key
            self._known[key] = as_choice([content.get("runner"), content.get("tactic")]) if whole else None
        return self._known[key]

    def keep(self, key: str, runner: str, tactic) -> None:
        self._known[key] = (runner, tactic)
        if self.folder is None:
            return
        try:
            if not (self.folder / "manifest.json").exists():
                replace(self.folder / "manifest.json", self._manifest)
            replace(self._path(self.folder, key), {"key": key, "runner": runner, "tactic": tactic})
        except (OSError, trusted.Distrusted) as error:
            logger.warning("a tuned choice could not be kept in %s: %s", self.folder, error)

    def forget(self) -> None:
        """Look at the files again."""
        self._known.clear()

"""Where choices are kept: one file of a caller's, or a folder with a file to each choice."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from flashinfer._core import kernel_cache
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


def as_tactic(value):
    """A tactic as JSON gave it back: lists are tuples."""
    return tuple(map(as_tactic, value)) if isinstance(value, list) else value


def replace(path: Path, content: dict) -> None:
    """Write JSON and put it in place by a rename, so that readers see the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with open(handle, "w") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: Path) -> dict | None:
    """A file's content; None, with a warning, for one that is no JSON object."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("tuned choices in %s are not used: %s", path, error)
        return None
    if not isinstance(content, dict):
        logger.warning("tuned choices in %s are not used: no object", path)
        return None
    return content


def foreign(content: dict) -> str:
    """How the environment that made a file differs from this one; '' if it does not. "*" agrees with all."""
    made = content.get(METADATA) or {}
    differing, _ = mismatches(made, environment())
    return ", ".join(f"{name} is {here}, there {there}" for name, (there, here) in differing.items())


def mismatches(made: dict[str, str], here: dict[str, str]) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """What differs between two environments, {name: (made, here)}: what choices do not survive, and what they do."""
    hard = {name: (made.get(name), value) for name, value in here.items() if made.get(name) not in (value, "*")}
    return hard, {}


class Folder:
    """A choice to a file: `<root>/v2/<hash of the environment>/entries/<hash of the key>.json`.

    Writers do not wait for each other: the last whole file stands. A file that cannot be read, or holds another key, is
    none. Each key is looked up once in a process.
    """

    def __init__(self, root: str | os.PathLike | None, policy: dict):
        content = environment() | {"schema": 1} | policy
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        base = Path(root) if root is not None else kernel_cache.writable_root() / "autotune"
        self.folder = base / "v2" / name
        self._manifest = content
        self._known: dict[str, list | None] = {}

    def _path(self, key: str) -> Path:
        return self.folder / "entries" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def find(self, key: str):
        """(runner's class name, tactic), or None."""
        if key not in self._known:
            content = read(self._path(key))
            whole = content is not None and content.get("key") == key and {"runner", "tactic"} <= content.keys()
            self._known[key] = (content["runner"], as_tactic(content["tactic"])) if whole else None
        return self._known[key]

    def keep(self, key: str, runner: str, tactic) -> None:
        try:
            if not (self.folder / "manifest.json").exists():
                replace(self.folder / "manifest.json", self._manifest)
            replace(self._path(key), {"key": key, "runner": runner, "tactic": tactic})
        except OSError as error:
            logger.warning("a tuned choice could not be kept in %s: %s", self.folder, error)
        self._known[key] = (runner, tactic)

    def forget(self) -> None:
        """Look at the files again."""
        self._known.clear()

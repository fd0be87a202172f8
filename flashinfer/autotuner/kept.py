"""What a tuner keeps: choices, measured or read from files, and records that callers publish."""

from __future__ import annotations

import copy
import json
import os
import threading
from pathlib import Path

from flashinfer._core.checks import require
from flashinfer._core.env import logger
from flashinfer._core.trusted import Distrusted
from flashinfer.autotuner import store


class Kept:
    """Choices and records, in memory and in JSON files."""

    _lock = threading.RLock()
    folder: store.Folder | None = None

    def save_configs(self, path: str) -> None:
        """Write the choices to a JSON file, over those that it has, by a rename.

        A file made in another environment (versions, device) is left as it is, and one that cannot be written is not
        written, with a warning: what was measured stays in this process. One of an unknown environment is replaced.

        Parameters
        ----------
        path : str
            The file.
        """
        with self._lock:
            before = store.read(Path(path)) or {}
            why, known = store.foreign(before)
            if before and known:
                logger.warning("tuned choices are not saved to %s, which is another environment's: %s", path, why)
                return
            before = {} if why else before
            choices = {key: [runner, tactic] for key, (runner, tactic) in (self._loaded | self.profiling_cache).items()}
            records = {**store.records_of(before), **self._records}
            made = before.get(store.METADATA) if isinstance(before.get(store.METADATA), dict) else None
            content = before | choices | {store.METADATA: made or store.environment()}
            try:
                store.replace(Path(path), content | ({store.RECORDS: records} if records else {}))
            except (OSError, Distrusted) as error:
                logger.warning("tuned choices could not be saved to %s: %s", path, error)
                return
            self._dirty = False

    def load_configs(self, path: str) -> bool:
        """Take the choices of a file that `save_configs` wrote.

        A file that cannot be read, or of another environment or one that is not known, is not taken, with a warning.

        Parameters
        ----------
        path : str
            The file.

        Returns
        -------
        bool
            Whether they were taken.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        """
        if not os.path.exists(path):
            raise FileNotFoundError(f"path: got {str(path)!r}; allowed: a file of choices")
        with self._lock:
            content = store.read(Path(path))
            if content is None:
                return False
            if why := store.foreign(content)[0]:
                logger.warning("tuned choices in %s are another environment's, and not used: %s", path, why)
                return False
            for namespace, records in store.records_of(content).items():
                self._records.setdefault(namespace, {}).update(records)
            self._loaded |= store.choices_of(content)
            self._offered.clear()
            return True

    def get_namespaced_records(self, namespace: str) -> dict:
        """What was published under a name; it is saved and loaded with the choices.

        Parameters
        ----------
        namespace : str
            As in `publish_namespaced_records`.

        Returns
        -------
        dict
            A copy; empty if there is nothing.

        Raises
        ------
        ValueError
            A name that is empty or begins with "_".
        """
        _check_namespace(namespace)
        with self._lock:
            return copy.deepcopy(self._records.get(namespace, {}))

    def publish_namespaced_records(self, namespace: str, records: dict) -> None:
        """Put records in place of those under a name of the caller's.

        Parameters
        ----------
        namespace : str
            Not empty; names that begin with "_" are the tuner's.
        records : dict
            What JSON holds; copied.

        Raises
        ------
        ValueError
            A name that is empty or begins with "_".
        TypeError
            Records that JSON does not hold.
        """
        _check_namespace(namespace)
        if not isinstance(records, dict):
            raise TypeError(f"records: got {type(records).__name__}; allowed: a dict of what JSON holds")
        kept = json.loads(json.dumps(records))
        with self._lock:
            self._records[namespace] = kept
            self._dirty = True

    def clear_cache(self) -> None:
        """Forget all choices and records; files stay."""
        with self._lock:
            self.profiling_cache: dict[str, tuple[str, object]] = {}
            self._loaded: dict[str, tuple[str, object]] = {}
            self._records: dict[str, dict] = {}
            # Tactics of what was measured, best first; which choices of files their runners have.
            self._ranked: dict[str, list] = {}
            self._offered: dict[str, bool] = {}
            # Whether there is what no `save_configs` has written; engines read it (docs/engines.md).
            self._dirty = False
            if self.folder is not None:
                self.folder.forget()


def _check_namespace(name: str) -> None:
    plain = isinstance(name, str) and bool(name) and not name.startswith("_")
    require(plain, "namespace", repr(name), "a name that does not begin with '_'")

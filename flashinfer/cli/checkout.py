"""Folders that a source checkout has beside the package and an installed wheel has not."""

from __future__ import annotations

from pathlib import Path

import flashinfer


def folder(name: str) -> Path:
    """The checkout's folder `name`; FileNotFoundError, with what to do, where there is none."""
    found = Path(flashinfer.__file__).resolve().parent.parent / name
    if not found.is_dir():
        raise FileNotFoundError(
            f"{name}/ is in the source repository, not in the installed package: clone it and run this command there"
        )
    return found

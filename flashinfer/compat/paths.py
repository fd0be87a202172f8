"""Modules that upstream has where a package is here: their names are the package's."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def named(name: str, package: str, here: str) -> Any:
    """What `package` lists by that name, for the `__getattr__` of the module `here`, which the package may import."""
    found = import_module(package)
    if name not in found.__all__:
        raise AttributeError(f"module {here!r} has no attribute {name!r}")
    return getattr(found, name)

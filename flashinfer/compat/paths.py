"""Modules that upstream has where a package is here: their names are the package's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_of(package: str, here: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module `here`, which has what `package` lists. The package may import the module."""

    def get(name: str) -> Any:
        found = import_module(package)
        if name not in found.__all__:
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        return getattr(found, name)

    return get

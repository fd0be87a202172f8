"""Functions that torch.compile sees as one opaque op, and that eager code calls directly."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch


_libraries: list[torch.library.Library] = []


def custom_op(name: str, mutates_args: Iterable[str] = (), fake: Callable | None = None) -> Callable:
    """Register the decorated function as the torch custom op `name`; traced calls use the op, eager calls skip it.

    The function's annotations give the op's schema (Tensor, int, float, bool, str, their Optional and list forms).
    Inputs and outputs must not alias, as torch demands: write results into an argument named in `mutates_args` and
    return None, or return new tensors.

    Parameters
    ----------
    name : str
        "namespace::op", unique in the process.
    mutates_args : iterable of str
        Every tensor argument that the function writes.
    fake : callable, optional
        Same signature; returns tensors of the result's shape and dtype without computing. Required when the function
        returns something; one that returns None needs none.

    Raises
    ------
    TypeError
        The function returns something and `fake` is missing.
    """

    def decorate(function: Callable) -> Callable:
        returns_nothing = inspect.signature(function).return_annotation in (None, "None")
        if fake is None and not returns_nothing:
            raise TypeError(f"{name}: a function that returns tensors needs fake=")
        # Not torch.library.custom_op, which adds a backward and takes 3 ms of import each; this takes 1.
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        namespace, _, short = name.partition("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(short + schema)
        library.impl(short, function, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake or _returns_none, lib=library)
        op = getattr(getattr(torch.ops, namespace), short).default
        # It lives as long as the function: an op leaves with its library.
        _libraries.append(library)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if torch.compiler.is_compiling():
                return op(*args, **kwargs)
            return function(*args, **kwargs)

        call.op = op
        return call

    return decorate


def _returns_none(*args, **kwargs) -> None:
    return None

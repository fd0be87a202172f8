"""Functions that torch.compile sees as one opaque op, and that eager code calls directly."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch


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
        op = torch.library.custom_op(name, function, mutates_args=tuple(mutates_args))
        op.register_fake(fake or _returns_none)

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

"""Signatures of functions that pass their arguments on to others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps


def like(function: Callable, without: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Give the decorated function the signature of another one, less some of its parameters."""
    signature = inspect.signature(function)
    kept = [x for name, x in signature.parameters.items() if name not in without]

    def decorate(passes_on: Callable) -> Callable:
        passes_on.__signature__ = signature.replace(parameters=kept)
        return passes_on

    return decorate


def returning_lse(run: Callable) -> Callable:
    """A method run() with return_lse=True, as upstream's run_return_lse and forward_return_lse."""

    @like(run, without=("return_lse",))
    @wraps(run)
    def run_return_lse(self, *args, **kwargs):
        return self.run(*args, return_lse=True, **kwargs)

    run_return_lse.__name__ = "run_return_lse"
    run_return_lse.__qualname__ = run.__qualname__.replace("run", "run_return_lse")
    run_return_lse.__doc__ = _with_lse(inspect.getdoc(run) or "")
    return run_return_lse


def _with_lse(text: str) -> str:
    """The docstring of a run(), as that of the same with return_lse=True."""
    body = text.partition("\n")[2].replace("return_lse, ", "").replace(", with return_lse", "")
    body = re.sub(r"^return_lse : bool.*\n(?: +.*\n)*", "", body, flags=re.MULTILINE)
    return f"`run` with return_lse=True, whose other parameters it has: out and the log-sum-exp.\n{body}"

"""Signatures of functions that pass their arguments on to others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps


def like(function: Callable, without: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Give the decorated function the signature of another one, less some of its parameters."""

    def decorate(passes_on: Callable) -> Callable:
        passes_on.__signature__ = less(function, without)
        return passes_on

    return decorate


def less(function: Callable, without: tuple[str, ...]) -> inspect.Signature:
    """The signature of a function, less some of its parameters."""
    signature = inspect.signature(function)
    return signature.replace(parameters=[x for name, x in signature.parameters.items() if name not in without])


def returning_lse(run: Callable) -> Callable:
    """A method run() or forward() with return_lse=True, as upstream's run_return_lse and forward_return_lse."""
    name = run.__name__

    @like(run, without=("return_lse",))
    @wraps(run)
    def run_return_lse(self, *args, **kwargs):
        return getattr(self, name)(*args, return_lse=True, **kwargs)

    run_return_lse.__name__ = f"{name}_return_lse"
    run_return_lse.__qualname__ = f"{run.__qualname__}_return_lse"
    run_return_lse.__doc__ = _with_lse(name, inspect.getdoc(run) or "")
    return run_return_lse


def _with_lse(name: str, text: str) -> str:
    """The docstring of a run(), as that of the same with return_lse=True."""
    body = text.partition("\n")[2].replace("return_lse, ", "").replace(", with return_lse", "")
    body = re.sub(r"^return_lse : bool.*\n(?: +.*\n)*", "", body, flags=re.MULTILINE)
    return f"`{name}` with return_lse=True, whose other parameters it has: out and the log-sum-exp.\n{body}"


_SIZE = """Bytes of (float, int) workspace that plan() with these arguments would use; both 0 on the CPU.

The plan of the wrapper stays as it is. With the offsets of queries on a GPU and no bound on their rows, the size is
known at the first run() only, and float_bytes is 0.

Parameters
----------
{names}
    As in `plan`.

Returns
-------
float_bytes : int
    What `float_workspace_buffer` has to hold, so that the wrapper allocates no scratch of its own.
int_bytes : int
    Always 0: the wrapper owns its work lists.

Raises
------
ValueError
    As `plan` raises it.
"""


def sized_by(plan: Callable, *without: str) -> Callable:
    """A method workspace_size(): plan()'s arguments less some, for a plan of the wrapper that `_probe` makes."""
    signature = less(plan, without).replace(return_annotation="tuple[int, int]")
    first, *names = signature.parameters

    @wraps(plan)
    def workspace_size(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        del given[first]
        probe = self._probe()
        probe.plan(**given)
        return probe._planned().scratch_bytes, 0

    setattr(workspace_size, "__signature__", signature)
    workspace_size.__name__ = "workspace_size"
    workspace_size.__qualname__ = plan.__qualname__.replace("plan", "workspace_size")
    workspace_size.__doc__ = _SIZE.format(names=", ".join(names))
    return workspace_size

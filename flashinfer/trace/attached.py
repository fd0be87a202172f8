"""Functions with templates: their `fi_trace`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashinfer._core import env
from flashinfer.trace.template import TraceTemplate, write

# Names of definitions that were written to the environment's folder: each once in a process.
_written: set[str] = set()


def attach(function: Callable, template: TraceTemplate | Callable, place: str | None = None) -> Callable:
    """Give a function the attribute `fi_trace`.

    Parameters
    ----------
    function : callable
    template : TraceTemplate, or callable (**arguments) -> TraceTemplate or None
        The second where it depends on an argument.
    place : str, optional
        Of the function, for its definitions; module and name by default.
    """
    where = place or f"{function.__module__}.{function.__qualname__}"

    def fi_trace(save_dir: str | Path | None = None, name: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """The definition of a call with these arguments; see `flashinfer.fi_trace`."""
        chosen = template if isinstance(template, TraceTemplate) else template(**kwargs)
        if chosen is None:
            raise ValueError(f"kwargs: got {sorted(kwargs)}; allowed: arguments for which {where} has a template")
        found = chosen.definition(where, kwargs, name)
        if save_dir is not None:
            write(found, save_dir)
        elif env.trace_folder() and found["name"] not in _written:
            write(found, env.trace_folder())
            _written.add(found["name"])
        return found

    function.fi_trace = fi_trace
    function.trace_template = template
    return function

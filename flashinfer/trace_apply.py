"""Solutions in place of functions: calls that a definition describes run what its solution computes.

A definition is what `flashinfer.fi_trace` says of a call: its name has the function and the sizes of the model. Calls
of other sizes, and calls with an argument that neither the definition nor its solution has, run the function itself.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

import torch

from flashinfer._core.checks import require
from flashinfer.trace.template import Const, TraceTemplate
from flashinfer.trace.templates import TEMPLATES

__all__ = ["disable_apply", "enable_apply", "stats"]

# Arguments that change no result: a solution may be without them.
_HINTS = ("enable_pdl",)
# Whether this thread is in a solution, whose own calls run the functions themselves.
_inside: ContextVar[bool] = ContextVar("inside", default=False)


class _Api(NamedTuple):
    """A function with a template; solutions by the name of a definition; what became of calls."""

    place: str
    original: Callable
    template: TraceTemplate
    solutions: dict[str, Callable]
    counts: dict[str, int]


# {place: (the api, what stands in its place)}
_applied: dict[str, tuple[_Api, Callable]] = {}


def enable_apply(solutions: Mapping[str, Callable] | None = None) -> int:
    """Run solutions in place of functions, in every thread, until `disable_apply`. Earlier solutions are forgotten.

    A solution gets the inputs of its definition by their names there, and further arguments that it has parameters for
    by theirs. It returns the definition's outputs, one or a tuple, or None if it has written all of them where the
    function does. What the function writes in place, or to an `out`, is copied there. What it raises is raised.

    Parameters
    ----------
    solutions : mapping, optional
        The name of a definition to a callable. None, as an empty mapping, stands for none. Folders of sources are not
        read.

    Returns
    -------
    int
        How many functions have solutions.

    Raises
    ------
    ValueError
        A name that no definition has (see `flashinfer.fi_trace`), or something that cannot be called.

    Notes
    -----
    Functions are replaced in the modules of this package: a name that a program took from there before still stands for
    the function itself. A CUDA graph keeps what its capture ran.

    Examples
    --------
    >>> import torch, flashinfer
    >>> from flashinfer import trace_apply
    >>> def doubled(hidden_states, weight, eps=1e-6):
    ...     return 2 * torch.nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)
    >>> x, weight = torch.ones(1, 64).half(), torch.ones(64).half()
    >>> trace_apply.enable_apply({"rmsnorm_h64": doubled})
    1
    >>> float(flashinfer.rmsnorm(x, weight)[0, 0]), trace_apply.stats()["flashinfer.norm.rmsnorm"]["hit"]
    (2.0, 1)
    >>> trace_apply.disable_apply()
    >>> float(flashinfer.rmsnorm(x, weight)[0, 0])
    1.0
    """
    known = [(f"{module}.{name}", template) for module, names in TEMPLATES.items() for name, template in names.items()]
    chosen: dict[str, dict[str, Callable]] = {}
    for name, solution in (solutions or {}).items():
        place = next((place for place, template in known if _pattern(template).fullmatch(name)), None)
        allowed = ", ".join(_pattern(template).pattern.replace(r"\d+", "<n>") for _, template in known)
        require(place is not None, "solutions", repr(name), f"the name of a definition: {allowed}")
        require(callable(solution), f"solutions[{name!r}]", type(solution).__name__, "a callable")
        chosen.setdefault(str(place), {})[name] = solution
    disable_apply()
    for place, template in known:
        if place in chosen:
            module, name = place.rsplit(".", 1)
            original = getattr(import_module(module), name)
            api = _Api(place, original, template, chosen[place], {"hit": 0, "fallback": 0, "error": 0})
            _applied[place] = api, _replacing(api)
    _replace({id(api.original): replacing for api, replacing in _applied.values()})
    return len(_applied)


def disable_apply() -> None:
    """Run the functions themselves again; `stats` has nothing then.

    Examples
    --------
    >>> from flashinfer import trace_apply
    >>> trace_apply.disable_apply()
    >>> trace_apply.stats()
    {}
    """
    _replace({id(replacing): api.original for api, replacing in _applied.values()})
    _applied.clear()


def stats() -> dict[str, dict[str, int]]:
    """What became of calls since `enable_apply`.

    Returns
    -------
    dict
        For each function with solutions, by module and name: "hit", calls that a solution has run; "fallback", calls
        that the function has; "error", solutions that raised.

    Examples
    --------
    >>> from flashinfer import trace_apply
    >>> trace_apply.disable_apply()
    >>> trace_apply.stats()
    {}
    """
    return {place: dict(api.counts) for place, (api, _) in _applied.items()}


@functools.cache
def _pattern(template: TraceTemplate) -> re.Pattern:
    """Names of a template's definitions, as `definition_name` makes them."""
    numbered = [
        (name if axis.abbrev is None else axis.abbrev)
        for name, axis in template.axes.items()
        if isinstance(axis, Const) and axis.abbrev != ""
    ]
    prefix = template.op_type if template.name_prefix is None else template.name_prefix
    return re.compile("_".join((prefix, *(rf"{abbrev}\d+" for abbrev in numbered))))


def _replace(of: dict[int, Callable]) -> None:
    """Put functions in the place of those with these ids, in every module of this package."""
    for name, module in list(sys.modules.items()):
        if name == "flashinfer" or name.startswith("flashinfer."):
            for attribute, value in list(vars(module).items()):
                if id(value) in of:
                    setattr(module, attribute, of[id(value)])


def _replacing(api: _Api) -> Callable:
    signature = inspect.signature(api.original)

    @functools.wraps(api.original)
    def applied(*args, **kwargs):
        found = None if _inside.get() else _route(api, signature, args, kwargs)
        if found is None:
            api.counts["fallback"] += not _inside.get()
            return api.original(*args, **kwargs)
        solution, given, arguments = found
        token = _inside.set(True)
        try:
            results = _results(api, solution(**given), arguments)
        except Exception:
            api.counts["error"] += 1
            raise
        finally:
            _inside.reset(token)
        api.counts["hit"] += 1
        if signature.return_annotation in (None, "None"):
            return None
        return results[0] if len(results) == 1 else tuple(results)

    return applied


def _route(api: _Api, signature: inspect.Signature, args, kwargs) -> tuple[Callable, dict, dict] | None:
    """The solution of a call, its arguments, and the call's; None for what the function has to run."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    arguments, template = dict(bound.arguments), api.template
    solution = api.solutions.get(template.definition_name(template.axis_values(arguments)))
    if solution is None:
        return None
    given = {name: template.argument(name, arguments) for name in template.inputs}
    given = {name: value for name, value in given.items() if value is not None}
    parts = [*template.inputs.items(), *template.outputs.items()]
    covered = {name if part.param is None else part.param for name, part in parts} | {"out", *_HINTS}
    takes = inspect.signature(solution).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    for name, value in arguments.items():
        if name in covered or _is_default(value, signature.parameters[name].default):
            continue
        if name not in takes and not anything:
            return None
        given[name] = value
    return solution, given, arguments


def _is_default(value: Any, default: Any) -> bool:
    return value is default or not isinstance(value, torch.Tensor) and type(value) is type(default) and value == default


def _results(api: _Api, made: Any, arguments: dict) -> list:
    """What the function would return, if it returns something; results are where it would have written them."""
    outputs = api.template.outputs
    places = [None if part.param is None else api.template.argument(name, arguments) for name, part in outputs.items()]
    if len(outputs) == 1 and places[0] is None:
        places = [arguments.get("out")]
    made = list(made) if isinstance(made, (tuple, list)) else [made] * (len(outputs) if made is None else 1)
    fits = len(made) == len(outputs)
    require(fits, f"results of the solution for {api.place}", f"{len(made)} of them", f"{len(outputs)}")
    for index, (name, result, place) in enumerate(zip(outputs, made, places, strict=True)):
        what = f"{name} of the solution for {api.place}"
        if place is None:
            require(isinstance(result, torch.Tensor), what, type(result).__name__, "a tensor")
        elif result is None or result is place:
            made[index] = place
        else:
            require(result.shape == place.shape, what, tuple(result.shape), f"{tuple(place.shape)}")
            made[index] = place.copy_(result)
    return made

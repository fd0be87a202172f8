"""The log of calls: FLASHINFER_LOGLEVEL 1 names them, 3 adds shapes, 5 values, 10 writes them to disk.

With FLASHINFER_TRACE_DUMP=1 they write their definitions. At level 0 and without it, nothing of this is imported by
`import flashinfer`, and no function is wrapped.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from enum import EnumMeta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from flashinfer._core import call_dump, call_log, env
from flashinfer.trace.attached import attach

__all__ = ["flashinfer_api", "replay", "replay_from_dump", "replay_sequence"]

_LEVEL = env.api_level()
_WRAPPED = _LEVEL > 0 or env.traces_calls()
_dumps: call_dump.Dumps | None = None
# Folders of the package that hold no public functions.
_INNER = {"_core", "_direct", "api_logging", "cli", "collect_env", "compat", "integrations", "jit", "ops", "testing",
          "trace"}


class _Depth(threading.local):
    """Whether this thread is in a logged call already: what that calls is not logged."""

    inside = False


_depth = _Depth()


def flashinfer_api(func: Callable | None = None, *, trace=None) -> Callable:
    """Decorator: calls of a function are logged, as FLASHINFER_LOGLEVEL said when this module was imported.

    Parameters
    ----------
    func : callable, optional
        A function, or a method. None: the decorator itself is returned.
    trace : flashinfer.trace.TraceTemplate, optional
        What definitions of its calls have in common, or a callable that gives one for the arguments of a call: the
        function has `fi_trace` then (`flashinfer.fi_trace`).

    Returns
    -------
    callable
        `func` itself at level 0.

    Examples
    --------
    >>> from flashinfer.api_logging import flashinfer_api
    >>> @flashinfer_api
    ... def double(x):
    ...     return 2 * x
    >>> double(4)
    8
    """
    if func is None:
        return partial(flashinfer_api, trace=trace)
    if trace is not None:
        attach(func, trace)
    return _logged(func) if _WRAPPED else func


def _logged(function: Callable) -> Callable:
    signature = inspect.signature(function)
    is_method = next(iter(signature.parameters), "") == "self"

    @functools.wraps(function)
    def call(*args, **named):
        if _depth.inside or torch.compiler.is_compiling():
            return function(*args, **named)
        _depth.inside, call_log.choices.now = True, []
        try:
            return _call(function, signature, is_method, args, named)
        finally:
            _depth.inside, call_log.choices.now = False, None

    setattr(call, "is_logged", True)
    return call


def _call(function, signature, is_method, args, named):
    # A method that a class inherits is logged as that of the object's class.
    name = f"{type(args[0]).__name__}.{function.__name__}" if is_method and args else function.__name__
    arguments = _named(signature, args[1:] if is_method else args, named, is_method)
    if env.traces_calls() and hasattr(function, "fi_trace"):
        owner = {"self": args[0]} if is_method and args else {}
        _tried(name, lambda: function.fi_trace(**owner, **_all(signature, is_method, arguments)))
    if _LEVEL == 0:
        return function(*args, **named)
    shown = _LEVEL if _LEVEL < 3 or call_dump.wanted(name) else 1
    dump = None
    _tried(name, lambda: call_log.logger().debug("%s", call_log.before(name, arguments, shown)))
    if _LEVEL >= 10:
        place = f"{(type(args[0]) if is_method else function).__module__}:{name}"
        self_id = id(args[0]) if is_method else None
        dump = _tried(name, lambda: _dumps_now().begin(name, place, arguments, self_id))
    try:
        result = function(*args, **named)
    except BaseException as failure:
        text = f"FlashInfer API Error: {name}: {type(failure).__name__}: {failure}"
        _tried(name, lambda: call_log.logger().debug("%s", text))
        if dump is not None:
            _tried(name, partial(dump.fail, failure))
        raise
    if shown >= 3:
        chosen = call_log.choices.now or []
        _tried(name, lambda: call_log.logger().debug("%s", call_log.after(name, result, chosen, shown)))
    if dump is not None:
        _tried(name, lambda: dump.end(result))
    return result


def _tried(name: str, write: Callable):
    """What `write` returns; a log that cannot be written costs a warning, and never the call."""
    try:
        return write()
    except Exception as error:  # a full disk, a tensor that cannot be read
        env.logger.warning("a call of %s could not be logged: %s: %s", name, type(error).__name__, error)
        return None


def _named(signature: inspect.Signature, args: tuple, named: dict, is_method: bool) -> dict:
    """Arguments by the names of their parameters; those that do not fit as they are, and the call will say so."""
    parameters = list(signature.parameters.values())[is_method:]
    try:
        bound = signature.replace(parameters=parameters).bind(*args, **named).arguments
    except TypeError:
        return {f"args[{i}]": x for i, x in enumerate(args)} | named
    found = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found


def _all(signature: inspect.Signature, is_method: bool, arguments: dict) -> dict:
    """Arguments with those that were left out, at their defaults."""
    parameters = list(signature.parameters.values())[is_method:]
    return {p.name: p.default for p in parameters if p.default is not p.empty} | arguments


def _dumps_now() -> call_dump.Dumps:
    global _dumps
    if _dumps is None:
        _dumps = call_dump.Dumps()
    return _dumps


# -- which functions --------------------------------------------------------------------------------------------------


def install() -> None:
    """Log every public function, and every public method of public classes, of this package. Done once, at import."""
    if _LEVEL:
        call_log.watch_choices()
    wrapped: dict[int, Callable] = {}
    for module in _modules():
        for name, value in _public(module):
            if inspect.isclass(value):
                _log_methods(value)
            elif id(value) not in wrapped:
                wrapped[id(value)] = _logged(value)
    # A function stands under several names; all of them give the logged one.
    for name, module in list(sys.modules.items()):
        if name == "flashinfer" or name.startswith("flashinfer.") and name.split(".")[1] not in _INNER:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and id(value) in wrapped:
                    setattr(module, attribute, wrapped[id(value)])
                elif isinstance(value, partial) and id(value.func) in wrapped:
                    setattr(module, attribute, partial(wrapped[id(value.func)], *value.args, **value.keywords))


def _modules() -> Iterator[ModuleType]:
    root = sys.modules["flashinfer"]
    for found in pkgutil.walk_packages(root.__path__, "flashinfer."):
        if found.name.split(".")[1] not in _INNER and not found.name.endswith("__main__"):
            try:
                yield import_module(found.name)
            except ImportError as error:
                env.logger.warning("calls of %s are not logged: %s", found.name, error)


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public functions and classes that a module defines, or gives on by `__all__`."""
    for name, value in list(vars(module).items()):
        ours = getattr(value, "__module__", None) or ""
        if name.startswith("_") or not ours.startswith("flashinfer.") or ours.split(".")[1] in _INNER - {"_direct"}:
            continue
        if isinstance(value, FunctionType) and (ours == module.__name__ or name in getattr(module, "__all__", ())):
            yield name, value
        elif inspect.isclass(value) and (hasattr(value, "run") or hasattr(value, "plan")):
            yield name, value


def _log_methods(kind: type) -> None:
    for owner in kind.__mro__[:-1]:
        if not owner.__module__.startswith("flashinfer."):
            continue
        for name, value in list(vars(owner).items()):
            public = isinstance(value, FunctionType) and (name == "__init__" or not name.startswith("_"))
            if public and not getattr(value, "is_logged", False):
                setattr(owner, name, _logged(value))


# -- replay -----------------------------------------------------------------------------------------------------------


def replay(folder: str | Path, device: torch.device | str | None = None) -> list[dict]:
    """Run the calls of a folder of dumps again, in their order, and compare what they give with what they gave.

    Parameters
    ----------
    folder : path
        The folder that FLASHINFER_DUMP_DIR named, or that of one call.
    device : torch.device, optional
        Where tensors of a GPU go; default: the GPU, or the CPU where there is none.

    Returns
    -------
    list of dict
        Of each call "call" (its folder's name), "function", "state" and "detail". The state is "equal" (bitwise),
        "close" (as near as the dtype resolves), "different", "failed", or "skipped" where a dump is not whole.

    Raises
    ------
    FileNotFoundError
        There is no call in the folder.
    """
    folder = Path(folder)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = [folder / "metadata.jsonl"] if (folder / "metadata.jsonl").exists() else folder.glob("*/metadata.jsonl")
    calls = sorted(path.parent for path in found)
    if not calls:
        raise FileNotFoundError(f"{folder}: no dump of a call (a folder with metadata.jsonl)")
    objects: dict[tuple, object] = {}
    return [{"call": call.name, **_replayed(call, objects, device)} for call in calls]


def replay_from_dump(
    dump_dir: str | Path,
    compare_outputs: bool = False,
    device: torch.device | str = "cuda",
    run: bool = False,
    object_registry: dict[tuple, object] | None = None,
) -> dict:
    """The arguments of one dumped call, and, if asked, the call run again.

    Parameters
    ----------
    dump_dir : path
        The folder of one call, as this package writes it; upstream's dumps are not read.
    compare_outputs : bool
        Give what the call gave then; if it is run, compare.
    device : torch.device
        Where tensors of a GPU go.
    run : bool
        Run the call.
    object_registry : dict, optional
        Objects of dumped `__init__` calls by (process, object), read and added to.

    Returns
    -------
    dict
        "args", an empty list; "kwargs", the arguments by name; "metadata", what the dump says of the call. With `run`
        "execution_result". With `compare_outputs` "expected_tensors" and "expected_metadata", None where no result was
        dumped; with both "comparison_match", whether all are as near as the dtype resolves.

    Raises
    ------
    ValueError
        The folder holds no whole call of a public function of this package.
    LookupError
        The object of a method is not in `object_registry`.
    """
    record, given, expected = call_dump.read(Path(dump_dir))
    enums, device = {kind.__name__: kind for kind in _enums()}, torch.device(device)
    arguments = {key: call_dump.decoded(value, given, enums, device) for key, value in record["inputs"].items()}
    found = {"args": [], "kwargs": arguments, "metadata": record}
    if compare_outputs:
        found |= {"expected_tensors": expected, "expected_metadata": record.get("outputs")}
    if run:
        objects = {} if object_registry is None else object_registry
        key = (record.get("pid"), record.get("self_id"))
        result = found["execution_result"] = _run(_found(record["place"]), key, objects, arguments)
        if compare_outputs and expected is not None:
            found["comparison_match"] = "different" not in _states(result, given, expected).values()
    return found


def replay_sequence(root_dir: str | Path, device: torch.device | str = "cuda") -> list[dict]:
    """Run all dumped calls of a folder again, in their order, each as `replay_from_dump` does.

    Parameters
    ----------
    root_dir : path
        The folder that FLASHINFER_DUMP_DIR named.
    device : torch.device
        Where tensors of a GPU go.

    Returns
    -------
    list of dict
        Of each call the result of `replay_from_dump` with "dump_dir"; "error" and "dump_dir" where it failed.

    Raises
    ------
    FileNotFoundError
        There is no such folder.
    """
    if not Path(root_dir).is_dir():
        raise FileNotFoundError(f"{root_dir}: no folder of dumps")
    objects: dict[tuple, object] = {}
    results = []
    for folder in sorted(path.parent for path in Path(root_dir).glob("*/metadata.jsonl")):
        try:
            result = replay_from_dump(folder, True, device, True, objects)
        except Exception as error:  # what a call raises is its outcome
            result = {"error": f"{type(error).__name__}: {error}"}
        results.append(result | {"dump_dir": str(folder)})
    return results


def _states(result, given: dict, expected: dict) -> dict[str, str]:
    """How near each dumped result is to what was found: `given` holds the arguments, written or not."""
    found: dict[str, torch.Tensor] = {}
    call_dump._encoded(result, "result", found)
    found |= {f"written {key}": value for key, value in given.items()}
    return {key: _compared(found.get(key), value) for key, value in expected.items()}


def _replayed(call: Path, objects: dict, device: torch.device) -> dict:
    name = ""
    try:
        record, given, expected = call_dump.read(call)
        name = str(record.get("function_name", ""))
        function = _found(record["place"])
        enums = {kind.__name__: kind for kind in _enums()}
        arguments = {key: call_dump.decoded(value, given, enums, device) for key, value in record["inputs"].items()}
    except (call_dump.NotKept, LookupError, TypeError, ValueError, RuntimeError) as error:
        return {"function": name, "state": "skipped", "detail": str(error)}
    try:
        result = _run(function, (record.get("pid"), record.get("self_id")), objects, arguments)
    except Exception as error:  # what a call raises is its outcome
        failed_then = record.get("execution_status") == "failed"
        detail = f"{type(error).__name__}: {error}"
        return {"function": name, "state": "equal" if failed_then and detail == record.get("error") else "failed",
                "detail": detail}  # fmt: skip
    if expected is None:
        return {"function": name, "state": "ran", "detail": "no result was dumped to compare with"}
    states = _states(result, given, expected)
    worst = max(states.values(), key=("equal", "close", "different").index, default="equal")
    return {"function": name, "state": worst, "detail": ", ".join(k for k, s in states.items() if s != "equal")}


def _found(place: str) -> tuple[type | None, Callable]:
    """(class, function) of a place that a dump names, among public ones of this package."""
    module, _, name = place.partition(":")
    for each in _modules():
        for public, value in _public(each):
            if inspect.isclass(value):
                method = inspect.getattr_static(value, name.rpartition(".")[2], None)
                if name == f"{value.__name__}.{name.rpartition('.')[2]}" and isinstance(method, FunctionType):
                    return value, method
            elif public == name or value.__name__ == name:
                return None, value
    raise call_dump.NotKept(f"{place!r} is no public function of this package")


def _enums() -> Iterator[EnumMeta]:
    for module in _modules():
        yield from (value for value in vars(module).values() if isinstance(value, EnumMeta))


def _run(function: tuple[type | None, Callable], self_id: tuple, objects: dict, arguments: dict):
    owner, call = function
    if owner is None:
        return call(**arguments)
    if call.__name__ == "__init__":
        objects[self_id] = owner(**arguments)
        return None
    if self_id not in objects:
        raise LookupError("the object's __init__ is not among the dumps")
    return call(objects[self_id], **arguments)


def _compared(found: torch.Tensor | None, expected: torch.Tensor) -> str:
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return "different"
    found = found.detach().cpu().contiguous()
    if torch.equal(found.reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)):
        return "equal"
    if not expected.dtype.is_floating_point:
        return "different"
    bound = torch.finfo(expected.dtype).eps ** 0.5
    a, b = found.double(), expected.double()
    largest = float(b.nan_to_num(0, 0, 0).abs().max())
    near = torch.allclose(a, b, rtol=bound, atol=bound * largest, equal_nan=True)
    return "close" if near else "different"

"""The kinds of arguments that a public function takes, read off its signature and checked before its body runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps

import numpy as np
import torch

from flashinfer._core import literals
from flashinfer._core.checks import WrongKind, renamed
from flashinfer._core.tracing import is_traced

# {annotation: (test of a value, the kind's name in errors)}.
_NUMBERS = (int, float, np.integer, np.floating)


def _is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and x.device.type != "meta"


def _is_one_element(x) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() == 1 and _is_tensor(x)


def _is_whole(x) -> bool:
    return _is_one_element(x) and not x.is_floating_point() and x.dtype != torch.bool


def _is_device(x) -> bool:
    try:
        return isinstance(x, (torch.device, str, int)) and bool(torch.device(x))
    except RuntimeError:
        # An unknown name, or a number where there is no accelerator.
        return False


_KINDS: dict[str, tuple[Callable, str]] = {
    "torch.Tensor": (_is_tensor, "a torch.Tensor with strides and memory"),
    "None": (lambda x: x is None, "None"),
    # None for a flag is upstream's False.
    "bool": (lambda x: x is None or isinstance(x, np.bool_) or isinstance(x, int) and x in (0, 1), "True or False"),
    "int": (lambda x: isinstance(x, (int, np.integer)) or _is_whole(x), "an integer"),
    "float": (lambda x: isinstance(x, _NUMBERS) or _is_one_element(x), "a number"),
    "str": (lambda x: isinstance(x, str), "a string"),
    "torch.dtype": (lambda x: isinstance(x, torch.dtype), "a torch.dtype"),
    "torch.device": (_is_device, "a torch.device"),
    "torch.Generator": (lambda x: isinstance(x, torch.Generator), "a torch.Generator"),
    "dict": (lambda x: isinstance(x, dict), "a dict"),
    "tuple": (lambda x: isinstance(x, (tuple, list)), "a tuple"),
    "list": (lambda x: isinstance(x, (tuple, list)), "a list"),
}
_KINDS |= dict.fromkeys((name for name in vars(literals) if name[0].isupper()), _KINDS["str"])


# Functions that torch's compiler does not look into, by their numbers.
_untraced: list[Callable] = []


def _untraced_at(number: int) -> int:
    """Have torch's compiler break its graph at calls of a function. Called while it traces: it is imported by then."""
    function = _untraced[number]
    if not hasattr(function, "_torchdynamo_disable"):
        _untraced[number] = torch._dynamo.disable(function)
    return number


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler, which takes seconds.
_untraced_at._dynamo_marked_constant = True


def between_graphs(function: Callable) -> Callable:
    """Have torch's compiler call the function between two graphs, as it is: it does not trace what that does."""
    number = len(_untraced)
    _untraced.append(function)

    @wraps(function)
    def call(*args, **named):
        if torch.compiler.is_compiling():
            return _untraced[_untraced_at(number)](*args, **named)
        return function(*args, **named)

    return call


def untraced(function: Callable) -> Callable:
    """`checked`, between the graphs of torch's compiler.

    For functions whose inner parts are no ops: to trace their planning takes torch half a minute.
    """
    return checked(function, between_graphs(checked(function)))


def checked(function: Callable, traced: Callable | None = None) -> Callable:
    """Refuse arguments of another kind than the annotations of a public function say, by a WrongKind that names them.

    A tensor on the meta device or without strides is no tensor here. Nothing is recorded for gradients. `traced` is
    called in the place of the function under torch.compile.

    Example
    -------
    >>> @checked
    ... def scaled(x: torch.Tensor, scale: float = 1.0):
    ...     return x * scale
    >>> scaled([1.0])
    Traceback (most recent call last):
    flashinfer._core.checks.WrongKind: x: got a list; allowed: a torch.Tensor with strides and memory
    """

    # At the first call: an import of the library would read some three thousand annotations.
    @cache
    def checks() -> dict[str, Callable | None]:
        return {name: _check_of(p) for name, p in inspect.signature(function).parameters.items()}

    is_op, traced = traced is not None, traced or function

    @wraps(function)
    def call(*args, **named):
        if torch.compiler.is_compiling() or is_op and is_traced():
            return traced(*args, **named)
        known = checks()
        if any(isinstance(x, np.generic) for x in (*args, *named.values())):
            args = tuple(map(_plain, args))
            named = {name: _plain(x) for name, x in named.items()}
        learns = whole = False
        for (name, check), x in zip(known.items(), args, strict=False):
            if check is not None:
                whole |= check(name, x)
            learns |= _learns(x)
        for name, x in named.items():
            if (check := known.get(name)) is not None:
                whole |= check(name, x)
            learns |= _learns(x)
        if whole:
            args = tuple(_item(check, x) for check, x in zip((*known.values(), *[None] * len(args)), args))
            named = {name: _item(known.get(name), x) for name, x in named.items()}
        if not learns:
            return function(*args, **named)
        with torch.no_grad():
            return function(*args, **named)

    call.checks_kinds = True
    return call


def checked_late(function: Callable) -> Callable:
    """`checked`, for a call that is too quick for it: an argument of another kind is named where the call fails by it.

    Nothing is recorded for gradients.
    """

    @wraps(function)
    def call(*args, **named):
        try:
            if not (torch.is_grad_enabled() and (any(map(_learns, args)) or any(map(_learns, named.values())))):
                return function(*args, **named)
            with torch.no_grad():
                return function(*args, **named)
        except (AttributeError, TypeError):
            _name_wrong_kind(function, args, named)
            raise

    return call


def _name_wrong_kind(function: Callable, args, named) -> None:
    """Raise the error of the first argument of another kind than its parameter's, if there is one."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError:
        return
    for name, value in given.items():
        if (check := _check_of(signature.parameters[name])) is not None:
            check(name, value)


def _learns(x) -> bool:
    """Whether torch would record what is done with a value: a tensor, or one of a pair."""
    if isinstance(x, torch.Tensor):
        return x.requires_grad
    return isinstance(x, (tuple, list)) and any(isinstance(y, torch.Tensor) and y.requires_grad for y in x)


def named(**names: str) -> Callable:
    """Give a public function's errors its own names: `names` from those that what it shares with others says.

    Example
    -------
    >>> from flashinfer._core.checks import require
    >>> @named(out_dtype="dtype")
    ... def product(dtype):
    ...     require(False, "out_dtype", dtype, "float32")
    >>> product(3)
    Traceback (most recent call last):
    flashinfer._core.checks.WrongArgument: dtype: got 3; allowed: float32
    """

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def call(*args, **given):
            try:
                return function(*args, **given)
            except ValueError as error:
                raise renamed(error, names) from None

        return call

    return decorate


def _check_of(parameter: inspect.Parameter) -> Callable | None:
    """What raises the error for a value of another kind; None where the annotation names a kind that is not known."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.annotation is parameter.empty:
        return None
    annotation = parameter.annotation
    kinds = _union(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    if kinds is None:
        return None
    tests, words = zip(*kinds, strict=True)
    default, allowed = parameter.default, " or ".join(words) if len(words) < 3 else ", ".join(words)
    whole = "an integer" in words and set(words) <= {"an integer", "None"}

    def check(name: str, x) -> bool:
        """Whether x is an integer in a tensor on the host. One on a GPU is left as it is: nothing may wait for it."""
        if x is default:
            return False
        if not any(test(x) for test in tests):
            raise WrongKind(f"{name}: got {_shown(x)}; allowed: {allowed}")
        return whole and isinstance(x, torch.Tensor) and x.device.type == "cpu"

    check.whole = whole
    return check


def _item(check: Callable | None, x):
    """The integer of a tensor on the host, where an integer is wanted; other values as they are."""
    wanted = getattr(check, "whole", False) and isinstance(x, torch.Tensor) and x.device.type == "cpu"
    return x.item() if wanted else x


def _union(text: str) -> list[tuple[Callable, str]] | None:
    parts = [part.strip() for part in _split(text, "|")]
    # A device's name is a string that torch knows as one.
    kinds = [_kind(part) for part in parts if part != "str" or "torch.device" not in parts]
    return None if None in kinds else kinds


def _kind(text: str) -> tuple[Callable, str] | None:
    name, _, inner = text.partition("[")
    if name == "Literal":
        return _KINDS["str"]
    if not inner or name not in ("tuple", "list"):
        return _KINDS.get(text)
    parts = [part.strip() for part in _split(inner[:-1], ",")]
    elements = [_union(part) for part in parts if part != "..."]
    if None in elements:
        return None
    test, word = _KINDS[name]
    if name == "list" or parts[-1] == "...":
        return (lambda x: test(x) and all(_fits(y, elements[0]) for y in x)), f"{word} of {elements[0][0][1]}"
    count = len(elements)
    words = f"{word} of {count}: {', '.join(kinds[0][1] for kinds in elements)}"
    return (lambda x: test(x) and len(x) == count and all(map(_fits, x, elements))), words


def _fits(x, kinds: list) -> bool:
    return any(test(x) for test, _ in kinds)


def _split(text: str, mark: str) -> list[str]:
    """Parts between marks that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == mark and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _plain(x):
    """Python's number for NumPy's: bodies ask numbers for methods that only Python's have."""
    return x.item() if isinstance(x, np.generic) else x


def _shown(x) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor {tuple(x.shape)} on {x.device}, {x.layout}"
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)
    kind = type(x)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"

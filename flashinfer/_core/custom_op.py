"""Functions that torch.compile sees as one opaque op, and that eager code calls directly."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable

import torch

from flashinfer._core.arguments import between_graphs, checked
from flashinfer._core.checks import check_apart, require
from flashinfer._core.packed import SEPARATOR, joined, packed, unpacked
from flashinfer._core.tracing import is_traced

_libraries: list[torch.library.Library] = []


def custom_op(
    name: str, mutates_args: tuple[str, ...] = (), fake: Callable | None = None,
    in_place: tuple[str, ...] | None = None,
) -> Callable:  # fmt: skip
    """Register the decorated function as the torch custom op `name`; traced calls use the op, eager calls skip it.

    Eager calls refuse outputs that share memory, with themselves, one another, or in part with an input.

    The function's annotations give the op's schema (Tensor, int, float, bool, str, their Optional and list forms). Its
    first parameter may be a named tuple of these and of such tuples, which the op then takes as lists of each type.
    Inputs and outputs must not alias, as torch demands: write results into an argument named in `mutates_args` and
    return None, or return new tensors.

    Parameters
    ----------
    name : str
        "namespace::op", unique in the process.
    mutates_args : tuple of str
        Every tensor argument that the function writes.
    fake : callable, optional
        Same signature; returns tensors of the result's shape and dtype without computing. Required when the function
        returns something; one that returns None needs none.
    in_place : tuple of str, optional
        The inputs in whose place an output may be; None for all (`check_apart`).

    Raises
    ------
    TypeError
        The function returns something and `fake` is missing.
    """

    def decorate(function: Callable) -> Callable:
        returns_nothing = inspect.signature(function).return_annotation in (None, "None")
        if fake is None and not returns_nothing:
            raise TypeError(f"{name}: a function that returns tensors needs fake=")
        flat, flat_fake, arguments = _flattened(function), fake, None
        if flat is not None:
            record, flat = flat
            flat_fake = fake and _of_lists(record, fake)
            arguments = functools.partial(_arguments_of, record)
        schema = torch.library.infer_schema(flat or function, mutates_args=mutates_args)
        op = _registered(name, schema, flat or function, flat_fake or _returns_none)

        places = {each: place for place, each in enumerate(inspect.signature(function).parameters)}
        outputs = [(each, places[each]) for each in mutates_args]
        inputs = [(each, at) for each, at in places.items() if each not in mutates_args]

        @functools.wraps(function)
        def call(*args, **kwargs):
            if is_traced():
                return op(*(args if arguments is None else (*arguments(args[0]), *args[1:])), **kwargs)
            read = [(each, args[at] if at < len(args) else kwargs.get(each)) for each, at in inputs]
            if flat is not None and args:
                read += _tensors_of(args[0])
            written = [(each, args[at] if at < len(args) else kwargs.get(each)) for each, at in outputs]
            check_apart(written, read, in_place)
            return function(*args, **kwargs)

        call.op = op
        return call

    return decorate


def one_op(
    written: tuple[str, ...], given: dict[str, Callable], returned: Callable, made: Callable | None = None,
    between: bool = False,
) -> Callable:  # fmt: skip
    """`checked`; and torch.compile sees a call of the function as one op, which checks its arguments when it runs.

    Arguments may be of any kind that `packed` takes.

    Parameters
    ----------
    written : tuple of str
        Every tensor argument that the function writes, and the names of `made`.
    given : dict of callables
        What an argument becomes before the op, by the arguments by name: an output of the op's own, for one.
    returned : callable
        The function's result, of the arguments by name.
    made : callable, optional
        New tensors in the function's result, by names that no argument has; of those that `given` made, and which are
        tensors, the op's outputs are copies.
    between : bool
        Have torch's compiler call the function between two graphs, which may keep memory that it allocates; it is an op
        of other tracers, as those of fake tensors.
    """

    def decorate(function: Callable) -> Callable:
        defaults = {each: p.default for each, p in inspect.signature(function).parameters.items()}

        def run(outputs, places, tensors, floats, ints, names, words):
            its = unpacked(tensors, floats, ints, names, words)["its"]
            its |= zip(places.split(), outputs, strict=True)
            new = {each: its.pop(each) for each in list(its) if each not in defaults}
            result = function(**its)
            found = made(result) if made else {}
            for each, output in new.items():
                require(found[each].shape == output.shape, each, tuple(found[each].shape), f"{tuple(output.shape)}")
                output.copy_(found[each])

        op = _registered(f"flashinfer::{function.__name__}", _PACKED, run, _returns_none)

        outside = between_graphs(checked(function)) if between else None

        def traced(*args, **named):
            if outside and torch.compiler.is_compiling():
                return outside(*args, **named)
            its = defaults | dict(zip(defaults, args)) | named
            for each, make in given.items():
                its[each] = make(its)
            outputs = {each: its[each] for each in written if isinstance(its.get(each), torch.Tensor)}
            others = {each: value for each, value in its.items() if each not in outputs and each in defaults}
            op(list(outputs.values()), " ".join(outputs), *packed({"its": others}))
            return returned(its)

        return checked(function, traced)

    return decorate


# Outputs and their names, and the other arguments.
_PACKED = (
    "(Tensor(a!)[] outputs, str places, Tensor[] tensors, float[] floats, SymInt[] ints, str names, str words) -> ()"
)


def _registered(name: str, schema: str, function: Callable, fake: Callable):
    # Not torch.library.custom_op, which adds a backward and takes 3 ms of import each; this takes 1.
    namespace, _, short = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(short + schema)
    # Traced callers may record gradients, of parameters for one; nothing here has any.
    library.impl(short, torch.no_grad()(function), "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    # It lives as long as the function: an op leaves with its library.
    _libraries.append(library)
    return getattr(getattr(torch.ops, namespace), short).default


def _returns_none(*args, **kwargs) -> None:
    return None


# What the values of a record become, by type: lists, and parts of one text.
_LISTS = {"tensors": list[torch.Tensor | None], "words": str, "numbers": list[int], "floats": list[float]}


def _flattened(function: Callable) -> tuple[_Record, Callable] | None:
    """Where the first parameter is a named tuple: it, and the function of lists in its place."""
    hints = typing.get_type_hints(function)
    first, *others = inspect.signature(function).parameters.values()
    if not hasattr(hints[first.name], "_fields"):
        return None
    record = _record(hints[first.name])
    flat = _of_lists(record, function)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    lists = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in _LISTS.items()]
    others = [parameter.replace(annotation=hints[parameter.name]) for parameter in others]
    result = hints["return"] if hints["return"] is not types.NoneType else None
    flat.__signature__ = inspect.Signature([*lists, *others], return_annotation=result)
    return record, flat


def _of_lists(record: _Record, function: Callable) -> Callable:
    def flat(tensors, words, numbers, floats, *args, **kwargs):
        lists = {name: iter(values) for name, values in zip(_LISTS, (tensors, words.split(SEPARATOR), numbers, floats))}
        return function(_put_together(record, lists), *args, **kwargs)

    return flat


class _Record(typing.NamedTuple):
    """A named tuple's type, and each field with the list that has its value, or the _Record that it is."""

    type: type
    fields: tuple


def _record(kind: type) -> _Record:
    names = {torch.Tensor: "tensors", str: "words", int: "numbers", bool: "numbers", float: "floats"}
    fields = []
    for name, hint in typing.get_type_hints(kind).items():
        its = next((part for part in typing.get_args(hint) if part is not types.NoneType), hint)
        fields.append((name, _record(its) if hasattr(its, "_fields") else names[its]))
    return _Record(kind, tuple(fields))


def _tensors_of(value) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a named tuple, and of those in it, with their names."""
    found = []
    for name, each in zip(value._fields, value):
        if isinstance(each, torch.Tensor):
            found.append((name, each))
        elif hasattr(each, "_fields"):
            found += _tensors_of(each)
    return found


def _arguments_of(record: _Record, value) -> tuple:
    lists = {name: [] for name in _LISTS}
    _take_apart(record, value, lists)
    return lists["tensors"], joined(lists["words"]), lists["numbers"], lists["floats"]


def _take_apart(record: _Record, value, lists: dict) -> None:
    for name, its in record.fields:
        if isinstance(its, str):
            its_value = getattr(value, name)
            if isinstance(its_value, bool):
                # A list of the op that has a symbolic size takes none.
                its_value = int(its_value)
            lists[its].append((name, its_value) if its == "words" else its_value)
        else:
            _take_apart(its, getattr(value, name), lists)


def _put_together(record: _Record, lists: dict):
    return record.type(
        *(next(lists[its]) if isinstance(its, str) else _put_together(its, lists) for _, its in record.fields)
    )

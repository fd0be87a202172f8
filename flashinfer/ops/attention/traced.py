"""Attention under torch.compile: run() of a wrapper is one op, which finds its wrapper, and so the plan, when it is
called; plan() is called between two graphs. And arguments of any kind as an op takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from weakref import WeakValueDictionary

import torch

from flashinfer._core.arguments import between_graphs
from flashinfer._core.custom_op import SEPARATOR, custom_op, joined
from flashinfer.ops.attention.variants import AttentionVariant, find

_numbers = count(1)
_wrappers = WeakValueDictionary()


def number_of(wrapper) -> int:
    """A number that stands for a wrapper in a traced program, for as long as the wrapper lives."""
    number = next(_numbers)
    _wrappers[number] = wrapper
    return number


@custom_op("flashinfer::attention_run", mutates_args=("out", "lse"))
def attention_run(
    wrapper: int,
    method: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    floats: Sequence[float],
    ints: Sequence[int],
    names: str,
    words: str,
) -> None:
    """A method of a wrapper that attends, with its other arguments as `packed` has them.

    "changes" are options that the older forward() replaces first.
    """
    owner = _wrappers[wrapper]
    given = unpacked(tensors, floats, ints, names, words)
    changes = given.pop("changes", None)
    if changes:
        owner._change_plan(**changes)
    getattr(owner, method)(out=out, lse=lse, return_lse=lse is not None, **given)


@between_graphs  # Tables on the host are NumPy's, whose unsigned integers that compiler would take for tensors.
def plan_elsewhere(wrapper, *args, **given) -> None:
    """A wrapper's `_plan`, between the graphs of torch's compiler and with the wrapper's device as the current one."""
    with torch.cuda.device(wrapper.device) if wrapper.device.type == "cuda" else nullcontext():
        wrapper._plan(*args, **given)


def run(wrapper, method: str, out, lse, return_lse, shape, dtype: torch.dtype, given: dict):
    """A method of a wrapper, as a trace sees it. `shape` and `dtype` are those of its output."""
    device = wrapper.device
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    if return_lse and lse is None:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    attention_run(wrapper._number, method, out, lse, *packed(given))
    return (out, lse) if return_lse else out


def _named(given: dict, prefix: str = "") -> dict:
    """Entries of nested dicts and tuples by their names with dots between: "kv.0" is the first of a pair.

    Arguments that are None are left out; within a dict or a tuple, None is a value.
    """
    found = {}
    for name, value in given.items():
        if isinstance(value, (dict, tuple, list)):
            inner = value if isinstance(value, dict) else {str(i): x for i, x in enumerate(value)}
            found.update(_named(inner, f"{prefix}{name}."))
        elif value is not None or prefix:
            found[f"{prefix}{name}"] = value
    return found


def packed(given: dict) -> tuple[list, list, list, str, str]:
    """Arguments as an op takes them: tensors, floats, ints, the names of these in this order, and the rest as text."""
    tensors, floats, ints, words = {}, {}, {}, []
    for name, value in _named(given).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, float):
            floats[name] = value
        elif isinstance(value, int) and not isinstance(value, bool):
            ints[name] = value
        else:
            words.append((name.rpartition(".")[2], f"{name}={_text(value)}"))
    names = " ".join([*tensors, *floats, *ints])
    return list(tensors.values()), list(floats.values()), list(ints.values()), names, joined(words)


def _text(value) -> str:
    if value is None:
        return "none:"
    if isinstance(value, bool):
        return f"bool:{int(value)}"
    if isinstance(value, AttentionVariant):
        return f"variant:{_key_of(id(value))}"
    if isinstance(value, torch.dtype):
        return f"dtype:{str(value).removeprefix('torch.')}"
    return f"str:{value}"


def _key_of(address: int) -> str:
    """The key of the variant with this id(). Not every torch takes a dataclass for a constant, but an id it does."""
    return ctypes.cast(address, ctypes.py_object).value.key


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler, which takes seconds.
_key_of._dynamo_marked_constant = True


_READ = {
    "none": lambda text: None, "bool": lambda text: text == "1", "variant": find,
    "dtype": lambda text: getattr(torch, text), "str": str,
}  # fmt: skip


def unpacked(tensors, floats, ints, names: str, words: str) -> dict:
    """What `packed` was given, but for arguments that were None."""
    given = dict(zip(names.split(), (*tensors, *floats, *ints), strict=True))
    for line in words.split(SEPARATOR) if words else ():
        name, _, text = line.partition("=")
        kind, _, text = text.partition(":")
        given[name] = _READ[kind](text)
    nested: dict = {}
    for name, value in given.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return {name: _as_given(value) for name, value in nested.items()}


def _as_given(value):
    if not isinstance(value, dict):
        return value
    value = {name: _as_given(x) for name, x in value.items()}
    return tuple(value.values()) if all(map(str.isdigit, value)) else value

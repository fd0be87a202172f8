"""Attention under torch.compile: run() of a wrapper is one op, which finds its wrapper, and so the plan, when it is
called; attention of one request is another, whose memory is torch's allocator's.

What the second allocates lies in the pool of a CUDA graph (mode="reduce-overhead"), and its results alone may outlive
the call: nothing else that it makes is kept for later calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch

from flashinfer._core.custom_op import SEPARATOR, custom_op, joined
from flashinfer.ops.attention.options import default_o_dtype
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
    """A method of a wrapper that attends, with its other arguments as `_packed` has them.

    "changes" are options that the older forward() replaces first.
    """
    owner = _wrappers[wrapper]
    given = _unpacked(tensors, floats, ints, names, words)
    changes = given.pop("changes", None)
    if changes:
        owner._change_plan(**changes)
    getattr(owner, method)(out=out, lse=lse, return_lse=lse is not None, **given)


def run(wrapper, method: str, out, lse, return_lse, shape, dtype: torch.dtype, given: dict):
    """A method of a wrapper, as a trace sees it. `shape` and `dtype` are those of its output."""
    device = wrapper.device
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    if return_lse and lse is None:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    attention_run(wrapper._number, method, out, lse, *_packed(given))
    return (out, lse) if return_lse else out


class _Inside(threading.local):
    """Whether this thread is in the op."""

    op = False


inside = _Inside()


def run_single(q, k, v, kv_layout: str, backend: str, call: dict, others: dict):
    """`single.run_single` as a trace sees it; `others` are its arguments by name."""
    out, lse = call.get("out"), call.get("lse")
    call = {name: value for name, value in call.items() if name not in ("out", "lse")}
    given = dict(kv_layout=kv_layout, backend=backend, call=call, other=others)
    found = attention_single(q, k, v, *_packed(given))
    for place, result in zip((out, lse), found):
        if place is not None:
            place.copy_(result)
    result = found[0] if out is None else out
    return (result, found[1] if lse is None else lse) if call.get("return_lse") else result


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


def _packed(given: dict) -> tuple[list, list, list, str, str]:
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


def _unpacked(tensors, floats, ints, names: str, words: str) -> dict:
    """What `_packed` was given, but for arguments that were None."""
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


def _like_single(q, k, v, tensors, floats, ints, names, words):
    given = _unpacked(tensors, floats, ints, names, words)
    packed = 2 if v.dtype == torch.uint8 else 1
    dtype = default_o_dtype(q.dtype, given["other"].get("o_dtype"))
    out = torch.empty((*q.shape[:2], packed * v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return [out, lse] if given["call"].get("return_lse") else [out]


@custom_op("flashinfer::attention_single", fake=_like_single)
def attention_single(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    floats: Sequence[float],
    ints: Sequence[int],
    names: str,
    words: str,
) -> list[torch.Tensor]:
    """`single.run_single` with its arguments as an op takes them: see above."""
    from flashinfer.ops.attention import single

    given = _unpacked(tensors, floats, ints, names, words)
    before, inside.op = inside.op, True
    try:
        result = single.run_single(q, k, v, given["kv_layout"], given["backend"], given["call"], **given["other"])
    finally:
        inside.op = before
    return list(result) if isinstance(result, tuple) else [result]

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
    q: torch.Tensor,
    kv: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    floats: Sequence[float],
    ints: Sequence[int],
    names: str,
) -> None:
    """`Plan.run` of a wrapper's plan.

    `names` are those of its other arguments, of the tensors, floats and ints in this order; "params.x" is the entry x
    of `params`.
    """
    owner = _wrappers[wrapper]
    given, params = {}, {}
    for name, value in zip(names.split(), (*tensors, *floats, *ints), strict=True):
        group, _, field = name.partition(".")
        if field:
            params[field] = value
        else:
            given[group] = value
    owner._planned().run(
        q, kv[0] if len(kv) == 1 else tuple(kv), owner._views, out=out, lse=lse, return_lse=lse is not None,
        params=params or None, **given,
    )  # fmt: skip


def run(wrapper, q, kv, out, lse, return_lse, *, params=None, **others):
    """`Plan.run` of the wrapper's plan, as a trace sees it."""
    options = wrapper._planned().options
    if out is None:
        shape = q.shape[0], options.num_qo_heads, options.head_dim_vo
        out = torch.empty(shape, dtype=options.o_dtype, device=q.device)
    if return_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    given = {name: value for name, value in others.items() if value is not None}
    given.update((f"params.{name}", value) for name, value in (params or {}).items())
    kinds = [{}, {}, {}]
    for name, value in given.items():
        kinds[0 if isinstance(value, torch.Tensor) else 1 if isinstance(value, float) else 2][name] = value
    tensors, floats, ints = (list(kind.values()) for kind in kinds)
    names = " ".join(name for kind in kinds for name in kind)
    kv = [kv] if isinstance(kv, torch.Tensor) else list(kv)
    attention_run(wrapper._number, q, kv, out, lse, tensors, floats, ints, names)
    return (out, lse) if return_lse else out


class _Inside(threading.local):
    """Whether this thread is in the op."""

    op = False


inside = _Inside()


def run_single(q, k, v, kv_layout: str, backend: str, call: dict, others: dict):
    """`single.run_single` as a trace sees it; `others` are its arguments by name."""
    out, lse = call.get("out"), call.get("lse")
    given = {f"call.{name}": value for name, value in call.items() if name not in ("out", "lse", "params")}
    given |= {f"params.{name}": value for name, value in (call.get("params") or {}).items()}
    given |= {f"other.{name}": value for name, value in others.items()}
    factors = others.get("kv_cache_sf")
    if isinstance(factors, (tuple, list)):
        del given["other.kv_cache_sf"]
        given |= {f"factors.{i}": x for i, x in enumerate(factors)}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    floats = {name: value for name, value in given.items() if isinstance(value, float)}
    words = [("kv_layout", f"call.layout=str:{kv_layout}"), ("backend", f"call.backend=str:{backend}")]
    ints = {}
    for name, value in given.items():
        if name in tensors or name in floats or value is None:
            continue
        if isinstance(value, bool):
            text = f"bool:{int(value)}"
        elif isinstance(value, int):
            ints[name] = value
            continue
        elif isinstance(value, AttentionVariant):
            text = f"variant:{_key_of(id(value))}"
        elif isinstance(value, torch.dtype):
            text = f"dtype:{str(value).removeprefix('torch.')}"
        else:
            text = f"str:{value}"
        words.append((name.partition(".")[2], f"{name}={text}"))
    names = " ".join([*tensors, *floats, *ints])
    values = list(tensors.values()), list(floats.values()), list(ints.values())
    found = attention_single(q, k, v, *values, names, joined(words))
    for place, result in zip((out, lse), found):
        if place is not None:
            place.copy_(result)
    result = found[0] if out is None else out
    return (result, found[1] if lse is None else lse) if call.get("return_lse") else result


def _key_of(address: int) -> str:
    """The key of the variant with this id(). Not every torch takes a dataclass for a constant, but an id it does."""
    return ctypes.cast(address, ctypes.py_object).value.key


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler, which takes seconds.
_key_of._dynamo_marked_constant = True


def _arguments(tensors, floats, ints, names: str, words: str) -> tuple[str, str, dict, dict]:
    """(layout, backend, call, other arguments by name) of the op's arguments."""
    given = dict(zip(names.split(), (*tensors, *floats, *ints), strict=True))
    for line in words.split(SEPARATOR):
        name, _, text = line.partition("=")
        kind, _, text = text.partition(":")
        given[name] = {
            "bool": lambda text: text == "1",
            "variant": find,
            "dtype": lambda text: getattr(torch, text),
            "str": str,
        }[kind](text)
    groups: dict[str, dict] = {"call": {}, "params": {}, "other": {}, "factors": {}}
    for name, value in given.items():
        group, _, field = name.partition(".")
        groups[group][field] = value
    call, other = groups["call"], groups["other"]
    if groups["params"]:
        call["params"] = groups["params"]
    if groups["factors"]:
        other["kv_cache_sf"] = tuple(groups["factors"].values())
    return call.pop("layout"), call.pop("backend"), call, other


def _like_single(q, k, v, tensors, floats, ints, names, words):
    layout, _, call, other = _arguments(tensors, floats, ints, names, words)
    packed = 2 if v.dtype == torch.uint8 else 1
    dtype = default_o_dtype(q.dtype, other.get("o_dtype"))
    out = torch.empty((*q.shape[:2], packed * v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return [out, lse] if call.get("return_lse") else [out]


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

    layout, backend, call, other = _arguments(tensors, floats, ints, names, words)
    before, inside.op = inside.op, True
    try:
        result = single.run_single(q, k, v, layout, backend, call, **other)
    finally:
        inside.op = before
    return list(result) if isinstance(result, tuple) else [result]

"""Attention of one request under torch.compile: one op, whose memory is torch's allocator's.

What such an op allocates lies in the pool of a CUDA graph (mode="reduce-overhead"), and its results alone may outlive
the call: nothing else that it makes is kept for later calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from flashinfer._core.custom_op import custom_op
from flashinfer.ops.attention.options import default_o_dtype
from flashinfer.ops.attention.variants import AttentionVariant, find


class _Inside(threading.local):
    """Whether this thread is in the op."""

    op = False


inside = _Inside()


def run(q, k, v, kv_layout: str, backend: str, call: dict, others: dict):
    """`run_single` as a trace sees it; `others` are its arguments by name."""
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
    words = [f"call.layout=str:{kv_layout}", f"call.backend=str:{backend}"]
    ints = {}
    for name, value in given.items():
        if name in tensors or name in floats or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"{name}=bool:{int(value)}")
        elif isinstance(value, int):
            ints[name] = value
        elif isinstance(value, AttentionVariant):
            words.append(f"{name}=variant:{_key_of(value)}")
        elif isinstance(value, torch.dtype):
            words.append(f"{name}=dtype:{str(value).removeprefix('torch.')}")
        else:
            words.append(f"{name}=str:{value}")
    names = " ".join([*tensors, *floats, *ints])
    values = list(tensors.values()), list(floats.values()), list(ints.values())
    found = attention_single(q, k, v, *values, names, "\n".join(words))
    for place, result in zip((out, lse), found):
        if place is not None:
            place.copy_(result)
    result = found[0] if out is None else out
    return (result, found[1] if lse is None else lse) if call.get("return_lse") else result


def _key_of(variant: AttentionVariant) -> str:
    return variant.key


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler, which takes seconds.
_key_of._dynamo_marked_constant = True


def _arguments(tensors, floats, ints, names: str, words: str) -> tuple[str, str, dict, dict]:
    """(layout, backend, call, other arguments by name) of the op's arguments."""
    given = dict(zip(names.split(), (*tensors, *floats, *ints), strict=True))
    for line in words.split("\n"):
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
    """`run_single` with its arguments as an op takes them: see `run`."""
    from flashinfer.ops.attention.single import run_single

    layout, backend, call, other = _arguments(tensors, floats, ints, names, words)
    before, inside.op = inside.op, True
    try:
        result = run_single(q, k, v, layout, backend, call, **other)
    finally:
        inside.op = before
    return list(result) if isinstance(result, tuple) else [result]

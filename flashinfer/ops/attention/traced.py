"""Attention under torch.compile: run() of a wrapper is one op, which finds its wrapper, and so the plan, when it is
called; plan() is called between two graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from weakref import WeakValueDictionary

import torch

from flashinfer._core import packed as packing
from flashinfer._core.arguments import between_graphs
from flashinfer._core.custom_op import custom_op
from flashinfer._core.packed import packed, unpacked
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


def _key_of(address: int) -> str:
    """The key of the variant with this id(). Not every torch takes a dataclass for a constant, but an id it does."""
    return ctypes.cast(address, ctypes.py_object).value.key


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler, which takes seconds.
_key_of._dynamo_marked_constant = True


packing.others[AttentionVariant] = "variant", lambda variant: _key_of(id(variant)), find

"""run() of a wrapper under torch.compile: one op, which finds its wrapper, and so the plan, when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch

from flashinfer._core.custom_op import custom_op

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
    """`Batch.run` of a wrapper's plan.

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


def run(wrapper, q, kv, out, lse, numbers: tuple, *, params=None, **others):
    """`Batch.call` of the wrapper's plan, as a trace sees it."""
    return_lse, *scalars = numbers
    others.update(zip(("q_scale", "k_scale", "v_scale", "window_left"), scalars, strict=True))
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

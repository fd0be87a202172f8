"""Arguments that a caller should not give: a valid call with one of them made wrong has to be refused by name.

`changes` lists what to put in place of one argument; `attempt` makes the call and judges what came of it. A refusal is
a ValueError that names an argument, raised before any tensor of the caller's was written. What is not refused has to
give the result of the valid call where the change means the same (offsets in int64, rows with gaps), or that of a call
whose meaning is plain where one says the same (values rounded to float8, for a tensor in float8).
"""

from __future__ import annotations

import inspect
import math
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashinfer.testing import guard
from flashinfer.testing.fuzz import Wrong, described, names_an_argument

# What a change is expected to come to.
REFUSED, SAME, LIKE, EITHER = "refused", "same", "like", "either"
# Refused where one of the tensors that share memory is written; else nothing is asked.
SHARED = "shared"
# Seconds that a call may take: sizes of 2^40 must not be walked.
LIMIT = 20
# Bytes that it may take: a size of 2^40 may be what the caller wants, but not here.
MEMORY = 4 << 30
_INTEGERS = (torch.int32, torch.int64)
# Of them, codes of any format.
_BYTES = {torch.uint8, torch.int8}
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """`value` in place of an argument; `what` says how it differs, `expected` what it has to come to.

    For LIKE the result, if any, is that of a call with `like` in the place of `value`. `beside` are arguments that
    change with it: those that have memory in common with `value`.
    """

    what: str
    value: Any
    expected: str = EITHER
    like: Any = None
    is_made: bool = True
    beside: dict[str, Any] = field(default_factory=dict)

    def made(self) -> Change:
        """The change with its value, which some make when they are drawn."""
        if self.is_made:
            return self
        value = self.value()
        if self.expected != LIKE:
            return Change(self.what, value, self.expected)
        like = self.like(value)
        # What the usual dtype cannot hold means something else.
        same = torch.equal(like.double(), value.double())
        return Change(self.what, value, LIKE, like) if same else Change(self.what, value)


def _later(what: str, make: Callable, expected: str = EITHER, like: Callable | None = None) -> Change:
    return Change(what, make, expected, like, is_made=False)


def changes(value, required: bool) -> list[Change]:
    """What may stand in place of `value`. `required`: whether the parameter takes no None."""
    if isinstance(value, torch.Tensor):
        return list(_of_tensor(value, required))
    none = [Change("None", None, REFUSED if required else EITHER)]
    if isinstance(value, Enum):
        return [Change("a string for an enum", value.name), Change("an unknown string", "nothing", REFUSED), *none]
    if isinstance(value, bool):
        return [Change("negated", not value), Change("a string", "False", REFUSED), Change("2", 2)]
    if isinstance(value, int):
        return [*_of_integer(value), *none]
    if isinstance(value, float):
        return [*_of_float(value), *none]
    if isinstance(value, str):
        return [Change("an unknown string", "nothing", REFUSED), Change("an empty string", ""), Change("3", 3, REFUSED),
                *none]  # fmt: skip
    if isinstance(value, torch.dtype):
        return [Change(f"{dtype}", dtype) for dtype in _DTYPES if dtype != value] + [Change("3", 3, REFUSED)]
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return list(_of_sequence(value))
    if value is None:
        tensor = torch.ones(3, dtype=torch.float32, device="cpu")
        return [Change("a string", "nothing"), Change("-1", -1), Change("a tensor", tensor), Change("NaN", math.nan)]
    return []


def _of_integer(value: int) -> Iterator[Change]:
    for other in (-1, 0, value + 1, 1 << 31, 1 << 40, -(1 << 63)):
        if other != value:
            yield Change(str(other), other)
    yield Change("a float", float(value), SAME)
    yield Change("half more", value + 0.5)
    yield Change("NaN", math.nan, REFUSED)
    yield Change("a string", str(value), REFUSED)
    yield Change("NumPy's integer", np.int64(value), SAME)


def _of_float(value: float) -> Iterator[Change]:
    for other in (math.nan, math.inf, -math.inf, 0.0, -value):
        yield Change(str(other), other)
    yield Change("a string", str(value), REFUSED)
    yield Change("NumPy's float", np.float64(value), SAME)
    yield Change("a tensor of one element", torch.tensor([value], dtype=torch.float32, device="cpu"), SAME)
    yield Change("a tensor of two elements", torch.tensor([value, value], dtype=torch.float32, device="cpu"))


def _of_sequence(value) -> Iterator[Change]:
    kind = type(value)
    yield Change("one element less", kind(value[:-1]))
    yield Change("no element", kind())
    yield Change("a string", "nothing", REFUSED)
    for i, element in enumerate(value):
        for change in changes(element, True):
            expected = EITHER if change.expected in (REFUSED, LIKE) else change.expected
            yield _later(f"element {i}: {change.what}", partial(_with_element, value, i, change), expected)


def _with_element(value: tuple | list, i: int, change: Change) -> tuple | list:
    return type(value)((*value[:i], change.made().value, *value[i + 1 :]))


def _of_tensor(x: torch.Tensor, required: bool) -> Iterator[Change]:
    yield Change("None", None, REFUSED if required else EITHER)
    yield Change("a string", "nothing", REFUSED)
    yield Change("a number", 1)
    yield _later("on the meta device", lambda: x.to("meta"), REFUSED)
    for dtype in _DTYPES:
        if dtype != x.dtype:
            if {x.dtype, dtype} & _BYTES and {x.dtype.itemsize, dtype.itemsize} == {1} and dtype != torch.bool:
                yield _later(f"{dtype}", partial(x.view, dtype), SAME)
                continue
            same = {x.dtype, dtype} == set(_INTEGERS) and torch.equal(x.to(dtype), x)
            yield _later(f"{dtype}", partial(x.to, dtype), SAME if same else LIKE, lambda made: made.to(x.dtype))
    yield Change("one dimension more", x[None])
    yield Change("two dimensions more", x[None, None])
    if x.numel() <= 4096:
        yield _later("a list", x.tolist, REFUSED)
        if x.dtype.itemsize > 1 and x.dtype != torch.bfloat16 or not x.dtype.is_floating_point:
            yield Change("a NumPy array", x.detach().cpu().numpy(), REFUSED)
    if x.dtype.is_floating_point and x.dtype.itemsize > 1:
        yield _later("requires gradients", lambda: x.detach().clone().requires_grad_(), SAME)
        yield _later("a parameter", lambda: torch.nn.Parameter(x.detach().clone()), SAME)
    if x.dim() and x.numel():
        yield from _of_shape(x)
    if x.numel() and (x.dtype in _INTEGERS or x.dtype.is_floating_point and x.dtype.itemsize > 1):
        yield from _of_values(x)


def _of_shape(x: torch.Tensor) -> Iterator[Change]:
    yield Change("one dimension less", x[0])
    yield _later("a scalar", lambda: x.flatten()[0])
    yield _later("flat", x.flatten)
    few = {0, x.dim() - 1, x.dim() // 2}
    for dim in range(x.dim()):
        yield _later(f"gaps along {dim}", lambda dim=dim: _with_gaps(x, dim), SAME)
        if x.shape[dim] > 1 and 0 not in x.stride():
            one = x.narrow(dim, 0, 1)
            yield _later(f"stride 0 along {dim}", lambda one=one: one.expand(x.shape), LIKE, partial(_laid_as, x))
        if x.shape[dim] == 1:
            for step in (0, 1, 1 << 20):
                yield _later(f"stride {step} along {dim}", partial(_with_stride, x, dim, step), SAME)
        if dim + 1 < x.dim():
            swapped = partial(lambda dim: x.transpose(dim, dim + 1).contiguous().transpose(dim, dim + 1), dim)
            yield _later(f"axes {dim} and {dim + 1} swapped in memory", swapped, SAME)
    for dim in few:
        yield _later(f"one element less along {dim}", lambda dim=dim: x.narrow(dim, 0, x.shape[dim] - 1).contiguous())
        yield _later(f"empty along {dim}", lambda dim=dim: x.narrow(dim, 0, 0).contiguous())
        yield _later(f"twice as long along {dim}", lambda dim=dim: torch.cat((x, x), dim))
        yield _later(f"one element more along {dim}", lambda dim=dim: torch.cat((x, x.narrow(dim, 0, 1)), dim))
    if 0 not in x.stride():
        yield _later("one element into its storage", lambda: _moved(x), SAME)
    if x.dim() > 1:
        yield Change("transposed", x.transpose(0, -1))
        yield _later("column-major", lambda: x.transpose(0, -1).contiguous().transpose(0, -1), SAME)


def _with_gaps(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, every other element along `dim` of a larger tensor."""
    shape = (*x.shape[:dim], x.shape[dim] * 2, *x.shape[dim + 1 :])
    gaps = torch.empty(shape, dtype=x.dtype, device=x.device)[(slice(None),) * dim + (slice(None, None, 2),)]
    return gaps.copy_(x)


def _with_stride(x: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """The same tensor, whose axis of one element has another stride."""
    strides = [step if axis == dim else stride for axis, stride in enumerate(x.stride())]
    return x.as_strided(x.shape, strides)


def _laid_as(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if 0 in x.stride():
        return values.contiguous()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(values)


def _moved(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind the beginning of a storage."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    whole = torch.empty(extent + 1, dtype=x.dtype, device=x.device)
    return whole.as_strided(x.shape, x.stride(), 1).copy_(x)


def _of_values(x: torch.Tensor) -> Iterator[Change]:
    integers = x.dtype in _INTEGERS
    wide = (1 << 31, 1 << 40, -(1 << 63)) if x.dtype == torch.int64 else ()
    values = (-1, 1 << 20, 2**31 - 1, -(2**31), *wide) if integers else (math.nan, math.inf, -math.inf, 0.0, -1.0)
    for value in values:
        for place in {0, x.numel() // 2, x.numel() - 1}:
            yield _later(f"{value} at {place}", partial(_with_value, x, place, value))
        yield _later(f"all {value}", partial(torch.full_like, x, value))
    if integers and x.dim():
        yield _later("reversed", lambda: x.flip(0))
        yield _later("one more each", lambda: x + 1)
        yield _later("one more than the largest", lambda: _with_value(x, int(x.argmax()), int(x.max()) + 1))
        # A base that only 64 bits hold.
        yield _later("beyond 2^31", lambda: x.long() + (1 << 31))


def _with_value(x: torch.Tensor, place: int, value: float) -> torch.Tensor:
    changed = x.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1)[place] = value
    return changed


def of_call(arguments: dict[str, Any], signature: inspect.Signature) -> Iterator[tuple[str, Change]]:
    """Every argument with every change of it, and with the tensors of other arguments in its place."""
    for name, value in arguments.items():
        if name in signature.parameters:
            parameter = signature.parameters[name]
            annotation = inspect.formatannotation(parameter.annotation)
            takes_none = parameter.default is None or "None" in annotation
            if type(value) is int and "float" in annotation:
                value = float(value)
            for change in changes(value, not takes_none):
                yield name, change
            yield from ((name, change) for change in _of_others(name, value, arguments))


def _of_others(name: str, x, arguments: dict[str, Any]) -> Iterator[Change]:
    if isinstance(x, torch.Tensor) and x.numel():
        for other, y in arguments.items():
            alike = isinstance(y, torch.Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)
            if alike and y is not x and other != name:
                yield Change(f"the same tensor as {other}", y, LIKE, copied(y))
            several = isinstance(y, torch.Tensor) and y.numel() and max(x.numel(), y.numel()) > 1
            if several and y is not x and x.dtype == y.dtype and 0 not in (*x.stride(), *y.stride()):
                first, second = _sharing(x, y)
                yield Change(f"an element of {other}", first, SHARED, beside={other: second})


def _sharing(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors as `x` and `y`, whose first and last element are one."""
    extents = [1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in (x, y)]
    whole = torch.zeros(sum(extents) - 1, dtype=x.dtype, device=x.device)
    first = whole.as_strided(x.shape, x.stride(), extents[1] - 1).copy_(x.detach())
    return first, whole.as_strided(y.shape, y.stride()).copy_(y.detach())


def drawn(arguments: dict[str, Any], signature: inspect.Signature, draw: random.Random) -> tuple[str, Change] | None:
    """One argument, and what to put in its place; None where nothing can be changed. A draw of fair arguments first."""
    found = list(of_call(arguments, signature))
    if not found:
        return None
    wanted = draw.choice(sorted({name for name, _ in found}))
    return wanted, draw.choice([change for name, change in found if name == wanted]).made()


def copied(value):
    """The same value with tensors of its own: same strides, and same storage where tensors shared one."""
    storages: dict[int, torch.UntypedStorage] = {}

    def visit(x):
        if isinstance(x, torch.Tensor):
            if x.device.type == "meta" or x.layout is not torch.strided:
                return x
            storage = x.untyped_storage()
            made = storages.setdefault(storage.data_ptr(), storage.clone())
            alone = torch.empty(0, dtype=x.dtype, device=x.device)
            return alone.set_(made, x.storage_offset(), x.shape, x.stride()).requires_grad_(x.requires_grad)
        if type(x) in (tuple, list):
            return type(x)(visit(y) for y in x)
        if type(x) is dict:
            return {key: visit(y) for key, y in x.items()}
        return x

    return visit(value)


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [] if value.device.type == "meta" else [value]
    if isinstance(value, (tuple, list)):
        return [x for y in value for x in tensors_in(y)]
    return tensors_in(list(value.values())) if isinstance(value, dict) else []


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as it is now."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,)).clone()


@contextmanager
def _limited(seconds: int):
    """An end to a call's time and to what it may allocate."""

    def late(number, frame):
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


class _Said:
    """Text that is put together when it is needed."""

    def __init__(self, make: Callable[[], str]):
        self._make = make

    def __format__(self, spec: str) -> str:
        return self._make()


def attempt(
    function: Callable, arguments: dict, name: str, change: Change, names: set[str], shown: str, written=None
) -> Any:
    """Make the call with the change in place; its result, or None where it was refused.

    Parameters
    ----------
    function : callable
        Takes `arguments` by keyword; they are copied before.
    names : set of str
        What an error may name.
    shown : str
        What messages call the function.
    written : set of str, optional
        The arguments that the function writes; without it nothing is known of that.

    Raises
    ------
    Wrong
        Another error than a ValueError that names an argument, a refusal that comes after something was written, no
        refusal where one is due, or an argument that is written and should only be read.
    """
    given = copied(arguments | {name: change.value} | change.beside)
    call = _Said(lambda: f"{shown}({name}: {change.what}; {described(given)})")
    tensors = tensors_in(given)
    before = [_bytes(x) for x in tensors]
    try:
        with _limited(LIMIT):
            result = function(**given)
    except ValueError as error:
        if not names_an_argument(error, names):
            raise Wrong(f"{call}: an error that names no argument: {error}") from error
        if any(not torch.equal(_bytes(x), was) for x, was in zip(tensors, before, strict=True)):
            raise Wrong(f"{call}: refused when a tensor was written already: {error}") from error
        return None
    except Exception as error:
        if _is_out_of_memory(error):
            return None
        raise Wrong(f"{call}: {type(error).__name__}: {error}") from error
    finally:
        try:
            guard.check()
        except AssertionError as error:
            raise Wrong(f"{call}: {error}") from error
    if change.expected == REFUSED:
        raise Wrong(f"{call}: taken without a word")
    if written is not None:
        outputs = {x.untyped_storage().data_ptr() for each in written for x in tensors_in(given[each])}
        for x, was in zip(tensors, before, strict=True):
            if x.untyped_storage().data_ptr() not in outputs and not torch.equal(_bytes(x), was):
                raise Wrong(f"{call}: a tensor {list(x.shape)} that is only read was written")
    return given, result


def _is_out_of_memory(error: Exception) -> bool:
    """A size of 2^40 may be what the caller wants."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def differ(one, other) -> str:
    """Where two results of one call differ beyond rounding; '' where they do not.

    Codes are of one result if one in 50 or fewer differ: a value on the border of two may be rounded either way.
    """
    ones, others = tensors_in(one), tensors_in(other)
    if len(ones) != len(others):
        return f"{len(ones)} tensors, {len(others)} expected"
    for i, (x, y) in enumerate(zip(ones, others, strict=True)):
        x, y = x.detach(), y.detach()
        if x.dtype == torch.float4_e2m1fn_x2 or x.dtype != y.dtype and x.dtype.itemsize == y.dtype.itemsize == 1:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
        if x.shape != y.shape:
            return f"tensor {i}: {list(x.shape)}, {list(y.shape)} expected"
        step = max((torch.finfo(t.dtype).eps for t in (x, y) if t.dtype.is_floating_point), default=0.0)
        near = torch.isclose(x.double(), y.double(), rtol=max(step, 2e-2), atol=1e-2, equal_nan=True)
        if int((~near).sum()) > (near.numel() // 50 if x.dtype.itemsize == 1 else 0):
            return f"tensor {i}: values differ"
    return ""

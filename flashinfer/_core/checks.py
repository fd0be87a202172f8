"""Checks of arguments: they raise ValueError with the argument's name, its value and what is allowed."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar, overload

import numpy as np
import torch

from flashinfer._core.tracing import is_traced

_T = TypeVar("_T")
_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | None)


class CompileError(RuntimeError):
    """A kernel, or a function that a user gave it, does not compile; the message has file, line and reason."""


# Errors of arguments are ValueErrors; these are the built-in kind as well that upstream raises, and callers catch.
class UnsupportedConfig(ValueError, NotImplementedError):
    """No variant takes this problem; the message says why each refused."""


class WrongArgument(ValueError, AssertionError, RuntimeError):
    """A value that is refused: upstream asserts some of them, and its kernels refuse others by a RuntimeError."""


class BackendSupportedError(ValueError, RuntimeError):
    """A backend that does not serve a call, by the name that upstream has for the error."""


class WrongKind(ValueError, TypeError):
    """An argument of a kind that its parameter does not take."""


class UnknownName(ValueError, KeyError):
    """A layout or an encoding of positions by a name that none has."""

    __str__ = Exception.__str__  # KeyError's puts the message in quotes.


class NoPlan(ValueError, RuntimeError):
    """A run of what has no plan yet."""


class OutOfTurn(RuntimeError, AssertionError):
    """A call before one that it follows, or instead of one that follows it."""


_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
DTYPE_NAMES = tuple(_DTYPES)


_ERRORS = {"backend": BackendSupportedError, "kv_layout": UnknownName}


def require(condition: bool, argument: str, value, allowed: str) -> None:
    """Raise ValueError naming `argument`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise _ERRORS.get(argument, WrongArgument)(f"{argument}: got {value}; allowed: {allowed}")


def require_fit(name: str, x: torch.Tensor, fits: bool, shape: str, *dtypes: torch.dtype) -> None:
    """Refuse a tensor that does not have the `shape` that was looked for, as `fits` says, or is of none of `dtypes`."""
    if not fits:
        require(False, name, tuple(x.shape), shape)
    if x.dtype not in dtypes:
        require(False, name, x.dtype, ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))


def present(argument: str, value: _T | None, allowed: str = "a tensor") -> _T:
    """The value of an argument that has to be given; ValueError naming it for None."""
    if value is None:
        raise WrongArgument(f"{argument}: got None; allowed: {allowed}")
    return value


def check_both(argument: str, value, other: str, value_of_other) -> None:
    """Refuse one of two arguments without the other."""
    both = (value is None) == (value_of_other is None)
    require(both, argument, "None" if value is None else "a tensor", f"given if and only if {other} is")


def renamed(error: ValueError, names: dict[str, str]) -> ValueError:
    """The error of an argument that the caller has another name for: `names` from ours to the caller's."""
    text = str(error)
    argument = re.match(r"\w*", text)[0]
    return type(error)(names.get(argument, argument) + text[len(argument) :])


def require_tensor(name: str, value, optional: bool = False) -> None:
    """Raise ValueError naming the argument if `value` is no tensor with memory; None passes where it is optional."""
    if isinstance(value, torch.Tensor):
        require(value.device.type != "meta", name, "a tensor on meta", "a torch.Tensor with memory")
    elif not (optional and value is None):
        given = None if value is None else f"a {type(value).__module__}.{type(value).__name__}"
        raise WrongKind(f"{name}: got {given}; allowed: {'a torch.Tensor, or None' if optional else 'a torch.Tensor'}")


def number(name: str, value) -> Any:
    """A number, or that of a tensor of one element on any device; anything else as it is.

    Raises
    ------
    ValueError
        A tensor of more elements; one on a GPU in a captured stream, where its value cannot be waited for.
    """
    if not isinstance(value, torch.Tensor):
        return value
    require(value.numel() == 1, name, f"a tensor {tuple(value.shape)}", "a number, or a tensor of one element")
    waits = value.is_cuda and torch.cuda.is_current_stream_capturing()
    require(not waits, name, f"a tensor on {value.device} in a captured stream", "a number, or a tensor on the host")
    return value.item()


def dtype_name(dtype: torch.dtype, argument: str = "dtype") -> str:
    """Triton's name of a torch dtype, as Problems hold it; ValueError naming `argument` for one that has none."""
    name = _NAMES.get(dtype)
    if name is None:
        raise WrongArgument(f"{argument}: got {dtype}; allowed: {', '.join(str(d) for d in _NAMES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a Problem's dtype name."""
    return _DTYPES[name]


@overload
def as_dtype(
    value: str | torch.dtype, default: torch.dtype | None = None, argument: str = "dtype"
) -> torch.dtype: ...
@overload
def as_dtype(value: str | torch.dtype | None, default: torch.dtype, argument: str = "dtype") -> torch.dtype: ...
@overload
def as_dtype(
    value: str | torch.dtype | None, default: torch.dtype | None = None, argument: str = "dtype"
) -> torch.dtype | None: ...
def as_dtype(
    value: str | torch.dtype | None, default: torch.dtype | None = None, argument: str = "dtype"
) -> torch.dtype | None:
    """A dtype given as upstream allows it: a torch.dtype, its name ("float16", "torch.float16"), or None."""
    if value is None:
        return default
    if isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    require(isinstance(dtype, torch.dtype), argument, repr(value), "a torch.dtype or the name of one")
    return dtype


def wants_pdl(enable_pdl: bool | None) -> bool:
    """Whether a call's kernels may be launched dependently, where the chip has that; None leaves it to us."""
    return enable_pdl is None or bool(enable_pdl)


def same_device(**tensors: torch.Tensor | None) -> torch.device:
    """The device all the given tensors are on; ValueError naming the odd one."""
    first_name, first = None, None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first_name, first = name, tensor.device
        elif tensor.device != first:
            raise WrongArgument(f"{name}: got a tensor on {tensor.device}; allowed: {first}, where {first_name} is")
    if first is None:
        raise ValueError("no tensor was given")
    return first


class _Watched(threading.local):
    """The outputs that `check_apart` has seen in this thread's call, where a recording asks for them."""

    outputs: list[torch.Tensor] | None = None


watched = _Watched()


def check_apart(
    outputs: Iterable[tuple[str, torch.Tensor | None]], inputs: Iterable[tuple[str, torch.Tensor | None]] = (),
    in_place: tuple[str, ...] | None = None,
) -> None:  # fmt: skip
    """Refuse outputs that share memory: with themselves by strides of 0, with one another, or in part with an input.

    An output that has all elements of an input in their places is in place. It is refused too but for the inputs that
    `in_place` names; None names all, for what reads no element that another block writes.

    Example
    -------
    >>> check_apart([("out", torch.empty(1, 8).expand(4, 8))])
    Traceback (most recent call last):
    flashinfer._core.checks.WrongArgument: out: got strides (0, 1) of shape (4, 8); allowed: ...
    >>> x = torch.empty(5, 8)
    >>> check_apart([("out", x[1:])], [("input", x[:-1])])
    Traceback (most recent call last):
    flashinfer._core.checks.WrongArgument: out: got some of the memory of input; allowed: ...
    """
    if torch.compiler.is_compiling():
        # Tensors have no memory there; torch's compiler gives outputs that share some memory of their own.
        return
    written: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, x in outputs:
        if isinstance(x, torch.Tensor):
            if watched.outputs is not None:
                watched.outputs.append(x)
            if not x.is_contiguous() and torch._debug_has_internal_overlap(x) == 1:
                shown = f"strides {x.stride()} of shape {tuple(x.shape)}"
                require(False, name, shown, "an element of memory for each of the tensor")
            beside = written.setdefault(x.untyped_storage()._cdata, [])
            for first, y in beside:
                require(not overlap(x, y), name, f"the memory of {first}", "memory of its own")
            beside.append((name, x))
    for name, x in inputs:
        if isinstance(x, torch.Tensor):
            for output, y in written.get(x.untyped_storage()._cdata, ()):
                if in_place is not None and name not in in_place:
                    require(not overlap(x, y), output, f"some of the memory of {name}", "memory of its own")
                elif x is not y and not _in_place(x, y):
                    require(not overlap(x, y), output, f"some of the memory of {name}",
                            "all of it in its place, or memory of its own")  # fmt: skip


def check_spans(
    outputs: Iterable[tuple[str, torch.Tensor | None]], inputs: Iterable[tuple[str, torch.Tensor | None]],
    apart: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """`check_apart` of contiguous tensors, whose bytes are one span each, in a fraction of its time. An output may be
    in the place of an input but for those that `apart` names."""
    written: list[tuple[str, int, int]] = []
    for name, x in outputs:
        if x is not None:
            begin = x.data_ptr()
            end = begin + x.nbytes
            for other, first, last in written:
                require(end <= first or last <= begin, name, f"the memory of {other}", "memory of its own")
            written.append((name, begin, end))
    for name, x in inputs:
        if x is not None:
            begin = x.data_ptr()
            end = begin + x.nbytes
            for output, first, last in written:
                if begin < last and first < end and ((begin, end) != (first, last) or name in apart):
                    require(False, output, f"some of the memory of {name}", "memory of its own")


def _in_place(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes in the same order, as a tensor and its views of other axes have."""
    if x.data_ptr() != y.data_ptr() or x.nbytes != y.nbytes:
        return False
    if x.shape == y.shape and x.stride() == y.stride() or x.is_contiguous() and y.is_contiguous():
        return True
    return _merged(x) == _merged(y)


def _merged(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, step) in bytes of the axes, neighbours that one step walks through taken for one."""
    axes: list[tuple[int, int]] = []
    size = x.element_size()
    for n, step in (*zip(x.shape, (step * size for step in x.stride())), (size, 1)):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * step:
            axes[-1] = axes[-1][0] * n, step
        else:
            axes.append((n, step))
    return axes


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have a byte of memory in common.

    Example
    -------
    >>> x = torch.empty(4, 2, 8)
    >>> overlap(x[:, 0], x[:, 1]), overlap(x[:2], x[1:])
    (False, True)
    """
    distance = x.data_ptr() - y.data_ptr()
    return _meet(distance, x.element_size(), y.element_size(), x.shape, x.stride(), y.shape, y.stride())


# Places a search of common bytes looks at. Slices, halves, transposes and interleaved columns take under 20; only
# strides without a common measure take more.
_MOST_PLACES = 1000


@lru_cache(maxsize=1024)
def _meet(distance: int, size: int, size_y: int, shape: tuple, stride: tuple, shape_y: tuple, stride_y: tuple) -> bool:
    """Whether bytes of two tensors meet that begin `distance` apart; False after _MOST_PLACES without an answer."""
    if 0 in shape or 0 in shape_y:
        return False
    counts: dict[int, list[int]] = {}  # Of each step in bytes, the least and the most that the tensors can differ by.
    for n, step in _axes(shape, stride, size):
        counts.setdefault(step, [0, 0])[1] += n - 1
    for n, step in _axes(shape_y, stride_y, size_y):
        counts.setdefault(step, [0, 0])[0] -= n - 1
    steps = sorted((step, least, most) for step, (least, most) in counts.items())
    low, high, common = [0], [0], [0]  # What the smaller steps reach, and what divides them all.
    for step, least, most in steps:
        low.append(low[-1] + step * least)
        high.append(high[-1] + step * most)
        common.append(math.gcd(common[-1], step))
    places = 0

    def reaches(first: int, last: int, left: int) -> bool:
        """Whether the `left` smallest steps sum to something within first ... last."""
        nonlocal places
        places += 1
        first, last = max(first, low[left]), min(last, high[left])
        if first > last or places > _MOST_PLACES:
            return False
        if left == 0:
            return True
        if last // common[left] * common[left] < first:
            return False
        step, least, most = steps[left - 1]
        least = max(least, -((high[left - 1] - first) // step))
        most = min(most, (last - low[left - 1]) // step)
        return any(reaches(first - i * step, last - i * step, left - 1) for i in range(least, most + 1))

    return reaches(1 - size - distance, size_y - 1 - distance, len(steps))


def _axes(shape: tuple, stride: tuple, size: int) -> list[tuple[int, int]]:
    """Lengths and strides in bytes, smallest stride first; an axis that goes on where a smaller one ends joins it.

    Example
    -------
    >>> _axes((8, 4, 64), (1024, 64, 1), 2)
    [(256, 2), (8, 2048)]
    """
    axes: list[tuple[int, int]] = []
    for step, n in sorted((step * size, n) for n, step in zip(shape, stride, strict=True) if n > 1 and step):
        if axes and step == axes[-1][0] * axes[-1][1]:
            axes[-1] = axes[-1][0] * n, axes[-1][1]
        else:
            axes.append((n, step))
    return axes


def check_traced(fits: torch.Tensor, name: str, allowed: str) -> None:
    """A RuntimeError of what was traced, when it runs, unless all of `fits` is True."""
    torch._assert_async(fits.all(), f"{name}: allowed: {allowed}")


def check_values(name: str, table: torch.Tensor, least: int, most: int) -> None:
    """Refuse a table on the host that has a value outside of least ... most; one on a GPU is not waited for.

    Where calls are traced the refusal is a RuntimeError of what was traced.
    """
    if table.device.type != "cpu":
        return
    if is_traced():
        check_traced((table >= least) & (table <= most), name, f"{least} ... {most}")
    elif table.numel():
        low, high = (int(x) for x in table.aminmax())
        require(least <= low and high <= most, name, f"{low} ... {high}", f"{least} ... {most}")


def check_indptr(
    name: str, values: np.ndarray, most: int | None = None, what: str = "", *, sliced: bool = False
) -> None:
    """Check offsets: from 0, or from any base where they may be `sliced` of a larger batch's; not decreasing, and up to
    `most`, which is `what`.

    Raises
    ------
    ValueError
        Naming the index of a decrease, or the first or last value that is out of range.
    """
    first = values[:1].tolist()
    require(bool(first), name, "no offsets", "batch_size + 1 offsets")
    require(first[0] == 0 or sliced and first[0] > 0, name, f"{first[0]} first", "0 or more" if sliced else "0 first")
    falls = values[1:] < values[:-1]
    require(not falls.any(), name, f"a decrease at index {int(falls.argmax()) + 1 if falls.any() else 0}",
            "values that do not decrease")  # fmt: skip
    require(most is None or values[-1] <= most, name, f"{values[-1]} last", f"at most {most}, {what}")


def indptr_values(
    name: str, indptr: torch.Tensor, most: int | None = None, what: str = "", *, sliced: bool = False
) -> list[int]:
    """The offsets on the host, checked as `check_indptr` does. Waits for a device."""
    values = indptr.cpu().numpy()
    check_indptr(name, values, most, what, sliced=sliced)
    return values.tolist()


def rows_of(x: _Tensor) -> _Tensor:
    """x with a last stride of 1, as kernels read rows: itself, or a copy. None is None."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time: base and row strides are multiples of 16 bytes, rows contiguous."""
    for tensor in tensors:
        if tensor.data_ptr() % 16:
            return False
        *outer, last = tensor.stride() or (1,)
        size = tensor.element_size()
        if last != 1 or any(stride * size % 16 for stride in outer):
            return False
    return True


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x with rows that `is_aligned` takes, if their size allows it: itself, or a copy."""
    # contiguous() would return a contiguous tensor at any address, and with any stride of an axis of one element.
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)

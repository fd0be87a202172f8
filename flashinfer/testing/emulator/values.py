"""Tensors of an emulated kernel: a numpy array and Triton's type of its elements, with Triton's arithmetic.

Floats of up to 32 bits are held as float32 and rounded to their type by each operation that has it for a result. A
scalar of the run time is a tensor without dimensions; a Python number is a constant of compile time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton.language as tl
from triton.language.core import dtype as Dtype
from triton.language.core import pointer_type

from flashinfer.testing.emulator.errors import EmulationError

_STORED = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "uint8": np.uint8,
    "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64, "fp64": np.float64,
    **dict.fromkeys(("fp32", "fp16", "bf16", "fp8e4nv", "fp8e5"), np.float32),
}  # fmt: skip
# As they lie in memory.
_RAW = {
    "int1": np.uint8, "fp32": np.uint32, "fp16": np.uint16, "bf16": np.uint16, "fp8e4nv": np.uint8, "fp8e5": np.uint8,
    "fp64": np.uint64,
}  # fmt: skip
_FLOATS = frozenset(("fp8e4nv", "fp8e5", "fp16", "bf16", "fp32", "fp64"))
# Least and greatest values of integers.
_RANGES = {
    name: (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    for name, kind in _STORED.items()
    if issubclass(kind, np.integer)
}
_FP8 = {"fp8e4nv": (torch.float8_e4m3fn, 448.0), "fp8e5": (torch.float8_e5m2, 57344.0)}
_CODES = torch.from_numpy(np.arange(256, dtype=np.uint8))
_WIDENED = {name: _CODES.view(kind).to(torch.float32).numpy() for name, (kind, _) in _FP8.items()}


def stored(dtype: Dtype) -> type:
    """The numpy type that elements are held in."""
    return np.int64 if dtype.is_ptr() else _STORED[dtype.name]


def raw_type(dtype: Dtype) -> type:
    """The numpy type of the bits that elements are in memory."""
    return np.int64 if dtype.is_ptr() else _RAW.get(dtype.name, _STORED[dtype.name])


def decode(raw: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Elements from their bits."""
    name = dtype.name
    if name == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if name == "fp32":
        return np.ascontiguousarray(raw).view(np.float32)
    if name == "fp16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    if name in _FP8:
        return _WIDENED[name][raw]
    if name == "fp64":
        return np.ascontiguousarray(raw).view(np.float64)
    return raw.astype(np.bool_) if name == "int1" else raw


def encode(a: np.ndarray, dtype: Dtype) -> np.ndarray:
    """The bits of elements; floats are rounded already."""
    name = dtype.name
    if name == "bf16":
        return (np.ascontiguousarray(a).view(np.uint32) >> 16).astype(np.uint16)
    if name == "fp32":
        return np.ascontiguousarray(a, np.float32).view(np.uint32)
    if name == "fp16":
        return np.ascontiguousarray(a).astype(np.float16).view(np.uint16)
    if name in _FP8:
        return _narrowed(a, name).view(torch.uint8).numpy()
    if name == "fp64":
        return np.ascontiguousarray(a).view(np.uint64)
    return np.asarray(a, raw_type(dtype))


def _narrowed(a: np.ndarray, name: str) -> torch.Tensor:
    """cvt.rn.satfinite: nearest, ties to even, and nothing becomes infinite (PTX ISA, cvt)."""
    kind, most = _FP8[name]
    return torch.from_numpy(np.ascontiguousarray(np.clip(a, -most, most), np.float32)).to(kind)


def rounded(a: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Floats rounded to the type: nearest, ties to even."""
    name = dtype.name
    if name in ("fp32", "fp64"):
        return np.asarray(a, stored(dtype))
    a = np.asarray(a, np.float32)
    if name == "bf16":
        shape = a.shape
        bits = np.ascontiguousarray(a).view(np.uint32)
        bits = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(a), np.float32(np.nan), bits.view(np.float32).reshape(shape))
    if name == "fp16":
        return a.astype(np.float16).astype(np.float32)
    return _narrowed(a, name).to(torch.float32).numpy().reshape(a.shape)


class Type:
    """What `x.type` of a tensor has."""

    def __init__(self, x: Tensor):
        self.element_ty, self.shape = x.dtype, x.shape
        self.layout = x.layout if x.layout is not None else ANY_LAYOUT


class _AnyLayout:
    rank = 8

    def __repr__(self) -> str:
        return "a layout that the emulator does not follow"


ANY_LAYOUT = _AnyLayout()


class Tensor:
    """An array and its type. `memory` is what a pointer points into; `layout` is kept where it is known."""

    __slots__ = ("_a", "dtype", "layout", "memory")
    __array_ufunc__ = None

    def __init__(self, a, dtype: Dtype, layout=None, memory=None):
        self._a, self.dtype, self.layout, self.memory = a, dtype, layout, memory

    @property
    def a(self):
        return self._a

    @property
    def shape(self) -> list[int]:
        return list(self.a.shape)

    @property
    def type(self) -> Type:
        return Type(self)

    @property
    def T(self) -> Tensor:
        return self.permute([1, 0])

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}({self.a})"

    def __bool__(self) -> bool:
        if self.a.size != 1:
            raise EmulationError(f"a condition of shape {self.shape}: it has to be a scalar")
        return bool(self.a)

    def __int__(self) -> int:
        return int(self.a)

    __index__ = __int__

    def __getitem__(self, key) -> Tensor:
        for part in key if isinstance(key, tuple) else (key,):
            if part is not None and part != slice(None):
                raise EmulationError(f"an index of {part}: a tensor takes None and : alone")
        return Tensor(np.asarray(self.a)[key], self.dtype, None, self.memory)

    def to(self, dtype: Dtype, fp_downcast_rounding=None, bitcast: bool = False) -> Tensor:
        return cast(self, dtype, bitcast)

    def reshape(self, *shape) -> Tensor:
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(map(int, shape)) != self.a.size:
            raise EmulationError(f"reshape of {self.shape} to {list(shape)}")
        return Tensor(np.ascontiguousarray(self.a).reshape([int(n) for n in shape]), self.dtype, None, self.memory)

    view = reshape

    def permute(self, *order) -> Tensor:
        order = order[0] if len(order) == 1 else order
        return Tensor(self.a.transpose([int(n) for n in order]), self.dtype, None, self.memory)

    trans = permute

    def split(self) -> tuple[Tensor, Tensor]:
        if self.shape[-1] != 2:
            raise EmulationError(f"split of {self.shape}: the last dimension has to be 2")
        return tuple(Tensor(np.ascontiguousarray(self.a[..., i]), self.dtype, None, self.memory) for i in range(2))

    def __neg__(self):
        return Tensor(-self.a, self.dtype, self.layout)

    def __invert__(self):
        return Tensor(~self.a, self.dtype, self.layout)


class Lanes(Tensor):
    """A number of a thread that follows from its place in its warp: an array of 32, taken for a scalar."""

    __slots__ = ()

    @property
    def shape(self) -> list[int]:
        return []

    def beside(self, shape: tuple[int, ...]) -> np.ndarray:
        """As a number of each element of an accumulator taken apart as [rows, columns / 8, 4, 2]: a row's thread, by
        the layout of wgmma's fragments (PTX ISA), has columns 8 i + 2 (lane % 4) + j."""
        few = self.a[:4]
        if len(shape) != 4 or shape[2] not in (1, 4) or not (self.a.reshape(8, 4) == few).all():
            raise EmulationError(f"a thread's number beside a tensor of shape {list(shape)}: it has to be lane % 4, "
                                 "beside accumulators taken apart as [rows, columns / 8, 4, 2]")  # fmt: skip
        return few.reshape(1, 1, 4, 1)


def scalar(value, dtype: Dtype | None = None) -> Tensor:
    """A scalar of the run time."""
    if dtype is None:
        dtype = of_python(value)
    if dtype.is_floating():
        value = rounded(np.float64(value) if dtype.name == "fp64" else np.float32(value), dtype)
    return Tensor(stored(dtype)(value), dtype)


def of_python(value) -> Dtype:
    """The type that Triton gives a Python number."""
    if isinstance(value, (bool, np.bool_)):
        return tl.int1
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return tl.int32
        return tl.uint32 if 0 <= value < 1 << 32 else tl.int64 if value < 1 << 63 else tl.uint64
    if isinstance(value, float):
        return tl.float32
    raise EmulationError(f"a {type(value).__name__} in place of a number: {value!r}")


def carried(value):
    """What a loop carries: numbers become scalars of the run time, as Triton has them."""
    kind = type(value)
    if kind is int or kind is float or kind is bool:
        return scalar(value)
    return tuple(map(carried, value)) if kind is tuple else value


def cast(x, dtype: Dtype, bitcast: bool = False) -> Tensor:
    if not isinstance(x, Tensor):
        x = scalar(x)
    if x.dtype == dtype:
        return x
    kind = Lanes if isinstance(x, Lanes) else Tensor
    if x.dtype.is_ptr() or dtype.is_ptr():
        if dtype.is_ptr() or dtype == tl.int64:
            return Tensor(np.int64(x.a) if np.ndim(x.a) == 0 else x.a, dtype, x.layout, x.memory)
        raise EmulationError(f"a cast of {x.dtype} to {dtype}")
    if bitcast:
        if x.dtype.primitive_bitwidth != dtype.primitive_bitwidth:
            raise EmulationError(f"a bitcast of {x.dtype} to {dtype}")
        raw = np.ascontiguousarray(encode(x.a, x.dtype)).view(raw_type(dtype)).reshape(np.shape(x.a))
        return kind(decode(raw, dtype).reshape(np.shape(x.a)), dtype, x.layout)
    if dtype.is_floating():
        return kind(rounded(x.a.astype(np.float32) if dtype.name != "fp64" else x.a, dtype), dtype, x.layout)
    if x.dtype.is_floating() and dtype.name != "int1":
        # Towards zero.
        return kind(np.trunc(x.a).astype(np.int64).astype(stored(dtype)), dtype, x.layout)
    return kind(x.a.astype(stored(dtype)) if dtype.name != "int1" else x.a != 0, dtype, x.layout)


def common(x: Dtype, y: Dtype) -> Dtype:
    """What two tensors' types become in arithmetic (triton.language semantics: computation_type)."""
    if x == y:
        return x
    if x.is_floating() or y.is_floating():
        if not (x.is_floating() and y.is_floating()):
            return x if x.is_floating() else y
        for name in ("fp64", "fp32"):
            if name in (x.name, y.name):
                return tl.float64 if name == "fp64" else tl.float32
        narrow = {x.name, y.name} & {"fp16", "bf16"}
        if len(narrow) == 2:
            return tl.float32
        return tl.float16 if narrow == {"fp16"} or not narrow else tl.float32 if "fp16" in narrow else tl.bfloat16
    if x.primitive_bitwidth != y.primitive_bitwidth:
        return x if x.primitive_bitwidth > y.primitive_bitwidth else y
    return x if x.name.startswith("u") else y


def pair(x, y) -> tuple:
    """Both operands' arrays in their common type, that type, the result's layout, and the class of the result."""
    kind = Tensor
    if isinstance(x, Lanes) or isinstance(y, Lanes):
        x, y, kind = _beside_lanes(x, y)
    if not isinstance(x, Tensor):
        dtype = _like(x, y.dtype)
        return _as(x, dtype), y.a if y.dtype is dtype else cast(y, dtype).a, dtype, y.layout, kind
    if not isinstance(y, Tensor):
        dtype = _like(y, x.dtype)
        return x.a if x.dtype is dtype else cast(x, dtype).a, _as(y, dtype), dtype, x.layout, kind
    layout = x.layout
    if layout is None or np.ndim(x.a) < np.ndim(y.a):
        layout = y.layout
    if x.dtype is y.dtype or x.dtype == y.dtype:
        return x.a, y.a, x.dtype, layout, kind
    dtype = common(x.dtype, y.dtype)
    return cast(x, dtype).a, cast(y, dtype).a, dtype, layout, kind


def _beside_lanes(x, y) -> tuple:
    pair_shape = [np.shape(z.a) if isinstance(z, Tensor) and not isinstance(z, Lanes) else () for z in (x, y)]
    shape = max(pair_shape, key=len)
    if shape == ():
        return x, y, Lanes
    return *(Tensor(z.beside(shape), z.dtype) if isinstance(z, Lanes) else z for z in (x, y)), Tensor


def _like(value, dtype: Dtype) -> Dtype:
    """The type of an operation of a tensor and a Python number."""
    name = dtype.name
    if name in _FLOATS or isinstance(value, bool):
        return dtype
    if isinstance(value, float):
        return tl.float32
    if name == "int1":
        return of_python(value)
    # An address is an int64.
    least, most = _RANGES.get(name, _RANGES["int64"])
    return dtype if least <= value <= most else common(of_python(value), dtype)


def _as(value, dtype: Dtype):
    return rounded(np.float32(value), dtype) if dtype.name in _FLOATS else stored(dtype)(value)


def _arithmetic(function, is_float=True):
    def operation(x, y):
        if isinstance(y, InSharedMemory):
            return NotImplemented
        if isinstance(x, Tensor) and isinstance(x.dtype, pointer_type):
            return _moved(x, y, function)
        if isinstance(y, Tensor) and isinstance(y.dtype, pointer_type):
            return _moved(y, x, function)
        a, b, dtype, layout, kind = pair(x, y)
        result = function(a, b)
        if dtype.name in _FLOATS:
            if not is_float:
                raise EmulationError(f"{function.__name__} of {dtype}")
            if dtype.name not in ("fp32", "fp64"):
                result = rounded(result, dtype)
        return kind(result, dtype, layout)

    return operation


class InSharedMemory:
    """What lies in shared memory, which takes no part in arithmetic."""


def _moved(pointer: Tensor, steps, function) -> Tensor:
    """A pointer and a number of elements."""
    if isinstance(steps, Tensor):
        if steps.dtype.is_ptr() or steps.dtype.is_floating():
            raise EmulationError(f"a pointer and {steps.dtype}")
        steps = steps.a.astype(np.int64)
    size = pointer.dtype.element_ty.primitive_bitwidth // 8 or 1
    return Tensor(function(pointer.a, np.int64(size) * steps), pointer.dtype, None, pointer.memory)


def _quotient(a, b):
    """Of integers, towards zero as in C. The divisor 0, which a masked element may have, gives 0."""
    b = np.where(b == 0, b.dtype.type(1), b)
    result = a // b
    return result + ((result < 0) & (result * b != a)).astype(result.dtype) if result.dtype.kind == "i" else result


def _integers(function):
    def operation(x, y):
        a, b, dtype, layout, kind = pair(x, y)
        if dtype.is_floating():
            raise EmulationError(f"{function.__name__} of {dtype}")
        return kind(function(a, np.asarray(b)).astype(stored(dtype)), dtype, layout)

    return operation


def _remainder(a, b):
    return np.fmod(a, np.where(b == 0, b.dtype.type(1), b))


def _divide(x, y):
    a, b, dtype, layout, kind = pair(x, y)
    if not dtype.is_floating():
        dtype = tl.float32
        a, b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
    return kind(rounded(np.divide(a, b), dtype), dtype, layout)


def _comparison(function):
    def operation(x, y):
        if x is None or y is None:
            return function is np.not_equal
        a, b, _, layout, kind = pair(x, y)
        return kind(function(a, b), tl.int1, layout)

    return operation


def _install() -> None:
    plain = {
        "add": _arithmetic(np.add), "sub": _arithmetic(np.subtract), "mul": _arithmetic(np.multiply),
        "and": _arithmetic(np.bitwise_and, False), "or": _arithmetic(np.bitwise_or, False),
        "xor": _arithmetic(np.bitwise_xor, False), "lshift": _arithmetic(np.left_shift, False),
        "rshift": _arithmetic(np.right_shift, False), "floordiv": _integers(_quotient), "mod": _integers(_remainder),
        "truediv": _divide,
    }  # fmt: skip
    for name, operation in plain.items():
        setattr(Tensor, f"__{name}__", operation)
        setattr(Tensor, f"__r{name}__", lambda self, other, operation=operation: operation(other, self))
    comparisons = dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal, ne=np.not_equal)
    for name, function in comparisons.items():
        setattr(Tensor, f"__{name}__", _comparison(function))
    Tensor.__hash__ = None


_install()


def pointer(memory, address: int, element: Dtype) -> Tensor:
    """A pointer to elements of that type."""
    return Tensor(np.int64(address), pointer_type(element), None, memory)

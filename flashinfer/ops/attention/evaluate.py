"""A user's device function on whole tensors, in torch: what the CPU backend makes of the very same function.

`@triton.jit` keeps the Python function that it was given. Here that function runs as it is written, its names bound
again: what it knows as `triton.language` is a table of torch operations, functions that it calls are rebound in turn,
and its arguments are `Tile`s, which compute as Triton's tensors do: strongly typed, integers dividing towards zero. An
operation that is not in the table is refused by name. Nothing is interpreted, and an error carries the user's own line.
"""

from __future__ import annotations

import builtins
import dis
import traceback
from collections import namedtuple
from functools import lru_cache
from types import CellType, FunctionType, ModuleType

import torch

from flashinfer._core.checks import UnsupportedConfig, torch_dtype

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def evaluate(function, *args):
    """`function` of the tensors, numbers and named tuples `args`; a tensor.

    Parameters
    ----------
    function : a `@triton.jit` function
    *args
        Tensors become Tiles; what is one already, and Pointers, stay.

    Raises
    ------
    UnsupportedConfig
        Naming the line of the function that does what is not in the table, or fails.
    """
    try:
        result = _bound(function.fn)(*(Tile(a) if isinstance(a, torch.Tensor) else a for a in args))
    except Exception as error:  # whatever a user's function raises is reported with the line that raised it
        raise UnsupportedConfig(f"{_line_of(function.fn, error)}: {type(error).__name__}: {error}") from error
    if not isinstance(result, Tile):
        raise UnsupportedConfig(f"{_line_of(function.fn, None)}: got {result!r}; allowed: a tile, as logits are")
    return result.x


def vary(variant, values: tuple, logits: torch.Tensor, batch, q_pos, kv_pos, head):
    """What the functions of an AttentionVariant, with `values` for its parameters, make of tensors that broadcast.

    Returns the logits, and which of them take part; None without a mask. UnsupportedConfig as `evaluate`, and for a
    mask that is not of booleans.
    """
    if not logits.numel():
        return logits, None
    kinds = variant.params.items()
    params = namedtuple("params", variant.params)(
        *(_param(name, kind, value, logits.device) for (name, kind), value in zip(kinds, values, strict=True))
    )
    given = logits, batch, q_pos, kv_pos, head, params
    seen = None
    if variant.mask is not None:
        seen = evaluate(variant.mask, *given)
        if seen.dtype != torch.bool:
            raise UnsupportedConfig(f"mask: {variant.mask.__name__} returns {seen.dtype}; allowed: booleans")
    if variant.logits is not None:
        logits = evaluate(variant.logits, *given).float().broadcast_to(logits.shape).contiguous()
    return logits, seen


def _param(name: str, kind: str, value, device: torch.device):
    if isinstance(value, torch.Tensor):
        return Pointer(name, value)
    return Tile(torch.tensor(value, dtype=torch_dtype(kind), device=device))


def _line_of(function, error) -> str:
    """The innermost line of the user's own file that `error` passed, or else that of the function."""
    code = function.__code__
    lines = [] if error is None else traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in lines if frame.filename == code.co_filename]
    return f"{code.co_filename}:{own[-1] if own else code.co_firstlineno} ({function.__name__})"


class Tile:
    """A torch tensor that computes as a Triton tensor does."""

    __slots__ = ("x",)
    __hash__ = None

    def __init__(self, x: torch.Tensor):
        self.x = x

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        dtype = _dtype(dtype)
        return Tile(self.x.view(dtype) if bitcast else self.x.to(dtype))

    def __bool__(self):
        if self.x.dim():
            raise TypeError("a branch, or `and`, `or`, `not`, on a tile: its elements differ; use tl.where, &, |, ~")
        return bool(self.x)

    def __getitem__(self, index):
        raise TypeError("indexing: a function works on elements, whatever the shape of a tile")

    def __getattr__(self, name):
        if name in _OPERATIONS:
            return lambda *args: _OPERATIONS[name](self, *args)
        raise AttributeError(f"{name} of a tile is not evaluated on the CPU")

    def __neg__(self):
        return Tile(-self.x)

    def __invert__(self):
        return Tile(~self.x)

    def __abs__(self):
        return Tile(self.x.abs())


class Pointer:
    """A tensor parameter: base plus offsets, in elements."""

    def __init__(self, name: str, tensor: torch.Tensor, offset=None):
        self.name, self.tensor, self.offset = name, tensor, offset

    def __add__(self, other):
        if not isinstance(other, (int, Tile)):
            raise TypeError(f"params.{self.name} + {type(other).__name__}")
        return Pointer(self.name, self.tensor, other if self.offset is None else self.offset + other)

    __radd__ = __add__

    def __sub__(self, other):
        return self + -other

    def load(self, mask=None, other=0):
        flat = self.tensor.view(-1)
        index = torch.as_tensor(_raw(0 if self.offset is None else self.offset), device=flat.device).long()
        if mask is not None:
            ok = torch.as_tensor(_raw(mask), device=flat.device).bool()
            index, ok = torch.broadcast_tensors(index, ok)
            index = torch.where(ok, index, 0)
        if mask is not None and not flat.numel():
            return Tile(torch.where(ok, 0, _raw(other)).to(flat.dtype))
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= flat.numel()):
            wrong = int(index.min()) if int(index.min()) < 0 else int(index.max())
            raise IndexError(f"params.{self.name}: element {wrong} of {flat.numel()}")
        x = flat[index]
        if mask is not None:
            x = torch.where(ok, x, torch.as_tensor(_raw(other), dtype=flat.dtype, device=flat.device))
        return Tile(x)


def _raw(value):
    return value.x if isinstance(value, Tile) else value


def _dtype(dtype) -> torch.dtype:
    """A torch dtype from Triton's, whose name is what Problems hold, or from torch's own."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype)
    return torch.bool if name == "int1" else torch_dtype({"uint8": "u8"}.get(name, name.replace("int", "i")))


def _pair(a, b, divides: bool = False):
    """Both operands in the type that Triton computes in. A number takes the type of the tile beside it where it can."""
    for tile, number in ((a, b), (b, a)):
        if isinstance(tile, Tile) and not isinstance(number, Tile):
            if not isinstance(number, (bool, int, float)):
                raise TypeError(f"a tile and {type(number).__name__}")
            if tile.dtype == torch.bool and not isinstance(number, bool):
                dtype = torch.float32 if isinstance(number, float) else torch.int32
            else:
                dtype = torch.float32 if isinstance(number, float) and tile.dtype in _INTEGERS else tile.dtype
            break
    else:
        dtype = torch.promote_types(a.dtype, b.dtype)
    if divides and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    device = (a if isinstance(a, Tile) else b).x.device
    return [x.x.to(dtype) if isinstance(x, Tile) else torch.tensor(x, dtype=dtype, device=device) for x in (a, b)]


def _binary(compute, divides=False):
    def operation(a, b):
        if isinstance(b, Pointer) or isinstance(a, Pointer):
            return NotImplemented
        return Tile(compute(*_pair(a, b, divides)))

    return operation


def _whole(compute):
    def on_integers(a, b):
        if a.dtype not in _INTEGERS:
            raise TypeError("// of floats: Triton divides integers alone so")
        return compute(a, b)

    return on_integers


def _true_divide(a, b):
    return a.float() / b.float() if a.dtype in _INTEGERS else a / b


_OPERATORS = {
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "truediv": _binary(_true_divide, divides=True),
    # Towards zero, and the remainder with the sign of the dividend, as in C.
    "floordiv": _binary(_whole(lambda a, b: torch.div(a, b, rounding_mode="trunc"))),
    "mod": _binary(torch.fmod, divides=True),
    "and": _binary(torch.bitwise_and),
    "or": _binary(torch.bitwise_or),
    "xor": _binary(torch.bitwise_xor),
    "lshift": _binary(torch.bitwise_left_shift),
    "rshift": _binary(torch.bitwise_right_shift),
}
for _name, _operation in _OPERATORS.items():
    setattr(Tile, f"__{_name}__", _operation)
    setattr(Tile, f"__r{_name}__", lambda self, other, operation=_operation: operation(other, self))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tile, f"__{_name}__", _binary(getattr(torch, _name)))


def _of_floats(compute):
    def operation(x, *others):
        if not isinstance(x, Tile):
            x = Tile(torch.tensor(x, dtype=torch.float32, device="cpu"))
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a tile of {x.dtype} where Triton takes float32 or float64")
        return Tile(compute(x.x, *(torch.as_tensor(_raw(y), dtype=x.dtype, device=x.x.device) for y in others)))

    return operation


def _choose(floats, integers, numbers):
    def operation(a, b):
        if not isinstance(a, Tile) and not isinstance(b, Tile):
            return numbers(a, b)
        a, b = _pair(a, b)
        return Tile(floats(a, b) if a.dtype.is_floating_point else integers(a, b))

    return operation


# Of a number and NaN, Triton takes the number unless it is asked to propagate NaN.
_maximum = _choose(torch.fmax, torch.maximum, max)
_minimum = _choose(torch.fmin, torch.minimum, min)


def _where(condition, a, b):
    condition = _raw(condition)
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        kind = torch.float32 if isinstance(a, float) or isinstance(b, float) else torch.int32
        a = Tile(torch.tensor(a, dtype=kind, device=condition.device))
    return Tile(torch.where(condition.bool(), *_pair(a, b)))


def _load(pointer, mask=None, other=0, **hints):
    if not isinstance(pointer, Pointer):
        raise TypeError("a load from what is no tensor parameter")
    return pointer.load(mask, 0 if other is None else other)


def _nothing(*args, **kwargs):
    """Of hints to the compiler, and prints."""


_OPERATIONS = {
    "abs": abs,
    "cast": lambda x, dtype: x.to(dtype),
    "cdiv": lambda a, b: (a + (b - 1)) // b,
    "clamp": lambda x, low, high: _minimum(_maximum(x, low), high),
    "fdiv": lambda a, b: a / b,
    "div_rn": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
    "load": _load,
    "max_constancy": lambda x, values: x,
    "max_contiguous": lambda x, values: x,
    "maximum": _maximum,
    "minimum": _minimum,
    "multiple_of": lambda x, values: x,
    "static_range": range,
    "range": range,
    "where": _where,
    "isnan": lambda x: Tile(x.x.isnan()),
    "isinf": lambda x: Tile(x.x.isinf()),
    "pow": _of_floats(torch.pow),
    "fmod": _of_floats(torch.fmod),
    "zeros_like": lambda x: Tile(torch.zeros_like(x.x)),
    "sqrt_rn": _of_floats(torch.sqrt),
    **dict.fromkeys(("assume", "device_assert", "device_print", "debug_barrier", "static_print"), _nothing),
    **{
        name: _of_floats(getattr(torch, name))
        for name in (
            "ceil", "cos", "erf", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2", "round", "rsqrt", "sigmoid",
            "sin", "sqrt", "tan", "tanh", "trunc",
        )  # fmt: skip
    },
}


def _static_assert(condition, message=""):
    if not condition:
        raise TypeError(message or "static_assert")


_OPERATIONS["static_assert"] = _static_assert
_BUILTINS = {"max": _maximum, "min": _minimum, "abs": abs}


class _Language:
    """A module of Triton's, as a function of a user's sees it."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name):
        return _rebind(getattr(self._module, name), name)


@lru_cache(maxsize=1024)
def _bound(function: FunctionType) -> FunctionType:
    """The same code, with the names that it reads rebound."""
    scope = dict(_SCOPE)
    for name in _globals_of(function.__code__):
        if name in function.__globals__:
            scope[name] = _rebind(function.__globals__[name], name)
    cells = tuple(CellType(_rebind(cell.cell_contents, "")) for cell in function.__closure__ or ())
    defaults = tuple(_rebind(value, "") for value in function.__defaults__ or ())
    return FunctionType(function.__code__, scope, function.__name__, defaults, cells)


_SCOPE = {"__builtins__": vars(builtins) | _BUILTINS}


def _globals_of(code):
    """Names that code reads from its module; those of attributes are not among them."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _globals_of(constant)


def _rebind(value, name: str):
    """What a name of a device function stands for in torch."""
    kind = type(value).__name__
    if kind == "constexpr":
        return value.value
    if value is None or isinstance(value, (bool, int, float, str, tuple)) or kind == "dtype":
        return value
    if isinstance(value, ModuleType):
        return _Language(value) if value.__name__.split(".")[0] == "triton" else value
    if isinstance(value, type) and kind == "type" and value.__name__ in ("constexpr", "tensor"):
        return _constant if value.__name__ == "constexpr" else Tile
    module = getattr(getattr(value, "fn", value), "__module__", "") or ""
    if module.split(".")[0] == "triton":
        called = getattr(value, "__name__", name)
        if called not in _OPERATIONS:
            raise AttributeError(f"triton's {called} is not evaluated on the CPU; what is: {', '.join(_OPERATIONS)}")
        return _OPERATIONS[called]
    if hasattr(value, "fn"):
        return lambda *args, **kwargs: _bound(value.fn)(*args, **kwargs)
    raise TypeError(f"{name}, a {kind}, which a device function cannot read")


def _constant(value):
    return value

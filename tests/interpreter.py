"""Triton's interpreter without most of the work that comes to nothing; values are the same.

Each operation of a kernel makes a tensor, its type, the tuple of its shape, and names for all three. Here a shape, its
tuple and its types are made once, and names when they are asked for. Two operands of one type, and a number beside a
tensor of its kind, need none of the rules of promotion, and their operators are numpy's.
tests/core/test_interpreter.py holds both to Triton's own.
"""

import inspect
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """For the whole process."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    # It works out overflows of integers for an assertion that only its debug mode makes.
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once_a_launch(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtins
    interpreter.TensorHandle.__init__ = _make_handle
    TritonSemantic.binary_op_type_checking_impl = _quick_operands(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = _quick_broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.to_tensor = _quick_to_tensor(TritonSemantic.to_tensor)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _reduce_in_pairs
    core._unwrap_if_constexpr = _quick_for_one(core._unwrap_if_constexpr)
    core.tensor.__init__ = _make_tensor
    core.dtype.__eq__ = _quick_equal(core.dtype.__eq__)
    core.block_type.__init__ = _make_block_type
    core.block_type.with_element_ty = _with_element
    core.block_type.to_ir = _quick_to_ir(core.block_type.to_ir)
    _add_lazily(core.block_type, "name", lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple.__init__ = _make_tuple
    _add_lazily(core.tuple, "type", lambda self: core._type_for_tuple_values(self.values))
    core.tuple_type.__init__ = _make_tuple_type
    _add_lazily(core.tuple_type, "name", _name_of)


def _add_lazily(kind: type, name: str, make) -> None:
    """An attribute that is made when it is first read; one that was set stands before it."""
    made = cached_property(make)
    made.__set_name__(kind, name)
    setattr(kind, name, made)


def _name_of(kind) -> str:
    return "[" + ",".join(f"{field}:{its}" for field, its in zip(kind.fields, kind.types)) + "]"


def _quick_for_one(unwrap):
    """The value of a constant; what is no list or tuple of them needs no look at its bases."""

    def unwrapped(x):
        kind = x.__class__
        if kind is core.constexpr:
            return x.value
        return x if kind in (core.tensor, int, float, bool, str) else unwrap(x)

    return unwrapped


def _patched_once_a_launch(patch):
    """The language's functions are replaced at a kernel's launch, not again at each call of a device function."""
    replaced, known = set(), {}

    def once(function):
        scope = function.__globals__
        if id(scope) not in known:
            # The scope is kept, so that its number stays its own.
            known[id(scope)] = frozenset(id(m) for m in scope.values() if m is interpreter.tl or m is core), scope
        modules, _ = known[id(scope)]
        if modules in replaced:
            return interpreter._LangPatchScope()
        scope, is_kernel = patch(function), not replaced
        replaced.add(modules)
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    return once


# {module or class: [(name of a builtin, what stands for it in a kernel)]}
_BUILTINS = {}


def _patch_builtins(place, builder, scope) -> None:
    """Replace the builtins of a module or class by functions that know the interpreter; these are made once."""
    if place not in _BUILTINS:
        found = inspect.getmembers(place, core.is_builtin)
        bound = [(name, _bound(member, interpreter.interpreter_semantic)) for name, member in found]
        quick = _quick if place is core.tensor else _quick_function
        _BUILTINS[place] = [(name, quick(name, member)) for name, member in bound]
    for name, bound in _BUILTINS[place]:
        scope.set_attr(place, name, bound)


def _bound(member, semantic):
    # Triton's wrapper asks whether `_semantic` was given, and calls what it wraps.
    function = getattr(member, "__wrapped__", member)

    def bound(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return bound


# {operator: (what numpy computes, whether its operands are in turn, whether it compares)}
_OPERATORS = {
    "__add__": (np.add, False, False),
    "__radd__": (np.add, True, False),
    "__sub__": (np.subtract, False, False),
    "__rsub__": (np.subtract, True, False),
    "__mul__": (np.multiply, False, False),
    "__rmul__": (np.multiply, True, False),
    "__lt__": (np.less, False, True),
    "__le__": (np.less_equal, False, True),
    "__gt__": (np.greater, False, True),
    "__ge__": (np.greater_equal, False, True),
    "__eq__": (np.equal, False, True),
    "__ne__": (np.not_equal, False, True),
    "__and__": (np.bitwise_and, False, False),
    "__or__": (np.bitwise_or, False, False),
}


def _quick(name: str, operator):
    """An operator of tensors that computes at once where no operand has to be refused or converted.

    numpy does what Triton's own way does in steps: the wider of two signed integers, and one shape for both operands.
    """
    if name == "__getitem__":
        return _quick_axes(operator)
    if name not in _OPERATORS:
        return operator
    compute, in_turn, compares = _OPERATORS[name]
    keeps = _keeps_compared if compares else _keeps
    if "and" in name or "or" in name:
        plain, keeps = _INTEGERS | {"int1"}, _keeps_bits
    else:
        plain = _WIDE
    adds = name in ("__add__", "__radd__")

    def quick(self, other):
        dtype, number = self.dtype, other
        if other.__class__ is core.constexpr:
            number = other.value
        if dtype.__class__ is core.dtype and dtype.name in plain:
            if number.__class__ is core.tensor:
                its = number.dtype
                if its.__class__ is not core.dtype:
                    return operator(self, other)
                if its.name != dtype.name:
                    if its.name not in _SIGNED or dtype.name not in _SIGNED:
                        return operator(self, other)
                    if its.primitive_bitwidth > dtype.primitive_bitwidth:
                        dtype = its
                kind = _common(self.type, number.type)
                if kind is None:
                    return operator(self, other)
            elif keeps(dtype, number):
                number, kind = _constant(interpreter.interpreter_semantic, number, dtype), self.type
            else:
                return operator(self, other)
            left, right = (number, self) if in_turn else (self, number)
            handle = interpreter.TensorHandle(compute(left.handle.data, right.handle.data), dtype)
            return core.tensor(handle, kind.with_element_ty(core.int1 if compares else dtype))
        if adds and dtype.__class__ is core.pointer_type and number.__class__ is core.tensor:
            its = number.dtype
            if its.__class__ is core.dtype and its.name in _SIGNED:
                kind = _common(self.type, number.type)
                if kind is not None:
                    handle = interpreter.interpreter_builder.create_addptr(self.handle, number.handle)
                    return core.tensor(handle, kind.with_element_ty(dtype))
        return operator(self, other)

    return quick


def _quick_axes(operator):
    """New axes of a block, all at once."""

    def quick(self, slices):
        if slices.__class__ is tuple and self.type.is_block():
            sizes = iter(self.type.sizes.sizes)
            shape = [1 if one is None else next(sizes, 0) if one == _WHOLE else 0 for one in slices]
            if 0 not in shape and next(sizes, None) is None:
                handle = interpreter.TensorHandle(self.handle.data[slices], self.handle.dtype.scalar)
                return core.tensor(handle, core.block_type(self.dtype, shape))
        return operator(self, slices)

    return quick


_WHOLE = slice(None)


def _quick_function(name: str, function):
    """`where` of operands of one type, as numpy has it."""
    if name != "where":
        return function

    def quick(condition, x, y, **others):
        kinds = [a.dtype for a in (condition, x, y) if a.__class__ is core.tensor]
        if len(kinds) > 1 and condition.__class__ is core.tensor and kinds[-1].__class__ is core.dtype:
            kind = kinds[-1]
            if x.__class__ is not core.tensor and _keeps(kind, x):
                x = _constant(interpreter.interpreter_semantic, x, kind)
            elif y.__class__ is not core.tensor and _keeps(kind, y):
                y = _constant(interpreter.interpreter_semantic, y, kind)
            if x.__class__ is y.__class__ is core.tensor and kinds[0].name == "int1" and kinds[1].name == kind.name:
                both = _common(x.type, y.type)
                shape = both and _common(condition.type, both)
                if shape is not None:
                    data = np.where(condition.handle.data, x.handle.data, y.handle.data)
                    return core.tensor(interpreter.TensorHandle(data, kind), shape.with_element_ty(kind))
        return function(condition, x, y, **others)

    return quick


def _common(left, right):
    """The one of two types that has the shape of both together; None where neither has."""
    if not right.is_block():
        return left
    if not left.is_block() or left.sizes is right.sizes:
        return right
    if len(left.shape) != len(right.shape):
        return None
    pairs = list(zip(left.shape, right.shape))
    if all(a == b or b == 1 for a, b in pairs):
        return left
    if all(a == b or a == 1 for a, b in pairs):
        return right
    if all(a == b or 1 in (a, b) for a, b in pairs):
        return core.block_type(core.int1, [max(pair) for pair in pairs])
    return None


def _make_handle(self, data, dtype, attr=None):
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if dtype.__class__ is not core.dtype or data.itemsize > 1 and data.itemsize * 8 > dtype.primitive_bitwidth:
        self.__post_init__()


def _quick_operands(check):
    """Operands of one plain type, and numbers beside a tensor of their kind or a higher one, keep that type."""

    def operands(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        left = right = None
        if lhs.__class__ is core.tensor:
            left = lhs.dtype
            if rhs.__class__ is core.tensor:
                right = rhs.dtype
            elif arithmetic_check and _keeps(left, rhs):
                rhs, right = _constant(self, rhs, left), left
        elif rhs.__class__ is core.tensor and arithmetic_check and _keeps(rhs.dtype, lhs):
            right = rhs.dtype
            lhs, left = _constant(self, lhs, right), right
        if left.__class__ is right.__class__ is core.dtype and left.name == right.name:
            # Quotients of narrow floats are float32.
            if not div_or_mod or left.name in _WIDE:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return operands


_SIGNED = {f"int{bits}" for bits in (8, 16, 32, 64)}
_INTEGERS = _SIGNED | {f"u{name}" for name in _SIGNED}
_WIDE = _INTEGERS | {"fp32", "fp64"}


def _keeps(dtype, number) -> bool:
    """Whether a number takes the type of the tensor beside it, whatever the operation."""
    kind = number.__class__
    if dtype.__class__ is not core.dtype or dtype.name not in _WIDE:
        return False
    if dtype.name in _INTEGERS:
        return kind is int and dtype.get_int_min_value() <= number <= dtype.get_int_max_value()
    return kind is float or kind is int and -(2**63) <= number < 2**64


def _keeps_bits(dtype, number) -> bool:
    return dtype.name in _INTEGERS and _keeps(dtype, number)


def _keeps_compared(dtype, number) -> bool:
    """A number is a tensor of its own kind before it is compared: int32 or float32, if it has its range."""
    if number.__class__ is int:
        return dtype.name in ("int32", "int64", "fp32") and -(2**31) <= number < 2**31
    return dtype.name == "fp32" and number.__class__ is float and (number == 0 or 1e-37 < abs(number) < 1e38)


def _constant(semantic, number, dtype):
    # Equal keys have to be the same number of the same class.
    return _kept_constant(semantic, number, dtype.name) if number == number else semantic.scalar_constant(number, dtype)


@lru_cache(1 << 12, typed=True)
def _kept_constant(semantic, number, name):
    found = semantic.scalar_constant(number, core.dtype(name))
    found.handle.data.flags.writeable = False
    return found


def _quick_broadcast(broadcast):
    """Operands of one shape are left as they are."""

    def broadcasted(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left is right or left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcasted


def _quick_to_tensor(convert):
    def converted(self, x, check_type=True):
        return x if x.__class__ is core.tensor else convert(self, x, check_type)

    return converted


def _quick_equal(compare):
    def equal(self, other):
        if self is other:
            return True
        if self.__class__ is other.__class__ is core.dtype:
            return self.name == other.name
        return compare(self, other)

    return equal


def _quick_to_ir(make):
    """The type that stands for a block's in the interpreter, made once."""

    def made(self, builder):
        if builder is not interpreter.interpreter_builder:
            return make(self, builder)
        if self.ir is None:
            self.ir = make(self, builder)
        return self.ir

    return made


def _by_name(find):
    """The function of a Triton type, which makes a table of all types at each call, with its results kept."""
    known = {}

    def found(dtype):
        # A block has its elements' type.
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return found


def _reduce_in_pairs(operation, input):
    """A reduction with a function of the kernel's, neighbours in pairs and all rows at once.

    The interpreter calls the function for each element; as it is associative, a tree gives what it stands for.
    """
    arrays = [x.handle.data for x in input]
    rank, axis = arrays[0].ndim, operation.axis
    parts = [array.reshape(-1) if axis is None else np.moveaxis(array, axis, -1) for array in arrays]
    while parts[0].shape[-1] > 1:
        assert parts[0].shape[-1] % 2 == 0
        halves = [(part[..., first::2], x.dtype) for first in (0, 1) for part, x in zip(parts, input)]
        found = operation.combine_fn.fn(*(operation.to_tensor(*half) for half in halves))
        parts = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
    parts = [part[..., 0] for part in parts]
    if operation.keep_dims:
        parts = [np.expand_dims(part, tuple(range(rank)) if axis is None else axis) for part in parts]
    return [operation.to_tensor(part if part.ndim else part.item(), x.dtype) for part, x in zip(parts, input)]


class _Shape:
    """Sizes, as types and as tensors have them, and the blocks' types of that shape, {element's name: type}."""

    def __init__(self, sizes: tuple):
        self.sizes, self.count = sizes, core.validate_block_shape(sizes)
        self.of_types = core.tuple(sizes)
        self.of_tensors = core.tuple([core.constexpr(size) for size in sizes])
        self.numel = core.constexpr(self.count)
        self.blocks = {}


_SHAPES = {}


def _shape_of(sizes: tuple) -> _Shape:
    found = _SHAPES.get(sizes)
    if found is None:
        found = _SHAPES[sizes] = _Shape(sizes)
    return found


def _make_tensor(self, handle, type):
    shape = type.sizes if type.is_block() else _shape_of(())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape.of_tensors, shape.numel


def _make_block_type(self, element_ty, shape):
    sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.sizes, self.ir = element_ty, _shape_of(sizes), None
    self.shape, self.numel = self.sizes.of_types, self.sizes.count


def _with_element(self, scalar_ty):
    if scalar_ty.__class__ is not core.dtype:
        return core.block_type(scalar_ty, self.shape)
    found = self.sizes.blocks.get(scalar_ty.name)
    if found is None:
        found = self.sizes.blocks[scalar_ty.name] = core.block_type(scalar_ty, self.shape)
    return found


def _make_tuple(self, args, type=None):
    self.values = list(args)
    if isinstance(type, core.tuple_type):
        self.type = type
    elif type is not None:
        self.type = core.tuple_type(type)


def _make_tuple_type(self, types, fields=None):
    self.types = types
    self.fields = fields or [""] * len(types)

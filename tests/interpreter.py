"""Triton's interpreter without most of the work that comes to nothing; values are the same.

Each operation of a kernel makes a tensor, its type, the tuple of its shape, and names for all three. Here a shape and
its tuple are made once, and names when they are asked for.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def make_quick() -> None:
    """For the whole process."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    # It works out overflows of integers for an assertion that only its debug mode makes.
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _reduce_in_pairs
    core._unwrap_if_constexpr = _quick_for_one(core._unwrap_if_constexpr)
    core.tensor.__init__ = _make_tensor
    core.block_type.__init__ = _make_block_type
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
    replaced = set()

    def once(function):
        found = function.__globals__.values()
        modules = frozenset(id(m) for m in found if m is interpreter.tl or m is core)
        if modules in replaced:
            return interpreter._LangPatchScope()
        scope, is_kernel = patch(function), not replaced
        replaced.add(modules)
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    return once


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


# {sizes: (the tuple that types have, the one of constants that tensors have, how many elements)}
_SHAPES = {}


def _shape_of(sizes: tuple):
    found = _SHAPES.get(sizes)
    if found is None:
        count = core.validate_block_shape(sizes)
        found = core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(count)
        _SHAPES[sizes] = found
    return found


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = tuple(type.shape.values) if type.is_block() else ()
    _, self.shape, self.numel = _shape_of(sizes)


def _make_block_type(self, element_ty, shape):
    sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, _, count = _shape_of(sizes)
    self.numel = count.value


def _make_tuple(self, args, type=None):
    self.values = list(args)
    if isinstance(type, core.tuple_type):
        self.type = type
    elif type is not None:
        self.type = core.tuple_type(type)


def _make_tuple_type(self, types, fields=None):
    self.types = types
    self.fields = fields or [""] * len(types)

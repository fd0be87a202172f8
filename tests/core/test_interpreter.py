"""tests/interpreter.py against Triton's own rules: operands get the same types and values, and the same refusals."""

import json
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from tests.pairs import pairs

TYPES = (
    "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp8e5", "fp8e4nv", "fp16",
    "bf16", "fp32", "fp64",
)  # fmt: skip
SHAPES = ((), (1,), (4,), (2, 4), (2, 1), (8,))
# The types that operators answer at once, and one that they do not.
NAMES = ("fp32", "int32", "int64", "int1")
NUMBERS = (
    True, False, 0, 1, -1, 2, 127, 128, -128, -129, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**32 - 1, 2**32,
    2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 0.0, -0.0, 1.0, -1.5, 1e-40, 1e39, 1e300, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip


def tensor_of(name, shape):
    dtype = core.dtype(name)
    data = np.arange(max(1, int(np.prod(shape)))).reshape(shape or (1,)).astype(interpreter._get_np_dtype(dtype))
    return core.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def pointer():
    kind = core.pointer_type(tl.float32)
    return core.tensor(interpreter.TensorHandle(np.array([4096], np.uint64), kind), kind)


def a_pointer(x):
    return isinstance(x, core.tensor) and x.dtype.is_ptr()


def described(x):
    data = np.ascontiguousarray(x.handle.data)
    sizes = [int(size.value if hasattr(size, "value") else size) for size in x.shape]
    return [str(x.type), str(x.dtype), str(x.handle.dtype), sizes, x.numel.value, str(data.dtype), data.shape,
            data.tobytes().hex()]  # fmt: skip


def outcome(operation, *operands, **given):
    """What becomes of the operands, or the kind of refusal."""
    try:
        with np.errstate(all="ignore"):
            found = operation(*operands, **given)
    except Exception as error:  # the kind is compared
        return type(error).__name__
    return [described(x) for x in (found if isinstance(found, tuple) else (found,))]


def outcomes():
    """Of operands of all types, shapes and numbers: promotion, comparison of types, conversion, broadcasting."""
    semantic = interpreter.interpreter_semantic
    flags = [dict(zip(("arithmetic_check", "div_or_mod"), chosen)) for chosen in product((True, False), repeat=2)]
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, scope)
    try:
        tensors = [tensor_of(name, shape) for name in TYPES for shape in ((), (4,))]
        operands = list(product(tensors, tensors))
        operands += [pair for x, n in product([*tensors, pointer()], NUMBERS) for pair in ((x, n), (n, x))]
        operands += [(pointer(), x) for x in tensors] + [(x, pointer()) for x in tensors]
        for (a, b), chosen in product(operands, flags):
            allowed = ("allow_lhs_ptr",) * a_pointer(a) + ("allow_rhs_ptr",) * a_pointer(b)
            for pointers in ({}, *({name: True} for name in allowed)):
                yield outcome(semantic.binary_op_type_checking_impl, a, b, **pointers, **chosen)
        yield from operators(tensors)
        shaped = [tensor_of(name, shape) for name in ("fp32", "int1") for shape in SHAPES]
        for a, b in product(shaped, shaped):
            yield outcome(semantic.broadcast_impl_value, a, b)
        for x in (*NUMBERS, *tensors, core.constexpr(3), core.constexpr(2.5)):
            yield outcome(semantic.to_tensor, x)
        types = [kind for x in (*tensors, pointer()) for kind in (x.type, core.pointer_type(x.dtype))]
        yield [[bool(a == b), bool(a != b)] for a, b in product(types, types)]
        yield [str(x.type.with_element_ty(core.dtype(name))) for x in tensors for name in TYPES]
        for data, name in product((np.uint8, np.int32, np.float64), TYPES):
            try:
                interpreter.TensorHandle(np.zeros(2, data), core.dtype(name))
                yield "held"
            except ValueError as error:
                yield str(error)
    finally:
        scope.restore()


OPERATORS = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__lt__", "__le__", "__gt__", "__ge__",
    "__eq__", "__ne__", "__and__", "__or__",
)  # fmt: skip


def operators(tensors):
    """What a kernel's operators make of tensors of all types, of shapes, pointers and numbers."""
    interpreter._patch_builtin(core.tensor, interpreter.interpreter_builder, interpreter._LangPatchScope())
    shaped = [tensor_of(name, shape) for name in NAMES for shape in SHAPES]
    rows = [tensor_of(name, shape) for name in ("fp32", "int16") for shape in ((4, 1), (1, 8), (2, 1, 4), (1, 4, 1))]
    alone = [x for x in tensors if not x.type.is_block()]
    both = pairs(NAMES, SHAPES, NAMES, SHAPES)
    operands = [*product(alone, alone), *((tensor_of(*row[:2]), tensor_of(*row[2:])) for row in both)]
    operands += product(rows, rows)
    operands += [(pointer(), x) for x in (*alone, *shaped)] + [(x, pointer()) for x in alone]
    operands += list(product([*alone, pointer(), shaped[2], shaped[8]], (*NUMBERS, *map(core.constexpr, (2, 0.5, -1)))))
    for (a, b), name in product(operands, OPERATORS):
        yield outcome(getattr(core.tensor, name), a, b)
    interpreter._patch_builtin(tl, interpreter.interpreter_builder, interpreter._LangPatchScope())
    conditions = [tensor_of("int1", shape) for shape in SHAPES] + [tensor_of("int32", (4,)), True]
    chosen = [*product(shaped[4:10], shaped), *product(alone, alone), *product((*alone, *shaped[:6]), NUMBERS)]
    for place, (a, b) in enumerate(chosen):
        for condition in conditions if place % 7 == 0 else conditions[2:3]:
            yield outcome(tl.where, condition, a, b)
            yield outcome(tl.where, condition, b, a)
    every = slice(None)
    keys = (None, every, 0, (None,), (every,), (None, every), (every, None), (every, None, every), (None, every, None),
            (every, every), (every, every, None), (None, None, every), (every, slice(0, 2)), (0, every))  # fmt: skip
    for x, key in product((*shaped[:6], pointer()), keys):
        yield outcome(core.tensor.__getitem__, x, key)


def main(quick):
    if quick:
        from tests.interpreter import make_quick

        make_quick()
    # What is kept from the first time is used the second time.
    for _ in range(1 + quick):
        print(json.dumps(list(outcomes())))


def said(quick):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"from tests.core.test_interpreter import main; main({quick})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_operands_are_as_tritons_own():
    (plain,), quick = said(False), said(True)
    assert len(plain) > 10_000
    # Most are answered, and many are refused.
    refused = sum(isinstance(one, str) for one in plain)
    assert 1000 < refused < len(plain) / 2
    for found in quick:
        assert len(found) == len(plain)
        differ = [(place, a, b) for place, (a, b) in enumerate(zip(plain, found)) if a != b]
        assert not differ, differ[:3]


def test_a_constant_that_is_kept_cannot_be_written():
    _, five = interpreter.interpreter_semantic.binary_op_type_checking_impl(tensor_of("fp32", ()), 5.0)
    with pytest.raises(ValueError, match="read-only"):
        five.handle.data[0] = 6

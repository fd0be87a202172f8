"""Lanes of LLVM's vectors that nobody reads do not run over into others."""

import operator
import re
from unittest.mock import patch

import pytest

from flashinfer._core.compiler import without_flags_of_lanes

WORD = (1 << 32) - 1
_BINARY = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "add": operator.add, "mul": operator.mul}
_BINARY |= {"shl": operator.lshift, "shr": operator.rshift}
_LINE = re.compile(r"\s*([a-z][\w.]*)\s+(.+);")


# Lines as LLVM's language reference writes them.
@pytest.mark.parametrize(
    "line, left",
    [
        ("%a = shl nuw nsw <2 x i32> %x, <i32 24, i32 3>", "%a = shl <2 x i32> %x, <i32 24, i32 3>"),
        ("%a = lshr exact <4 x i16> %x, %y", "%a = lshr <4 x i16> %x, %y"),
        ("%a = or disjoint <2 x i64> %x, %y", None),
        ("%a = zext nneg <2 x i8> %x to <2 x i32>", "%a = zext <2 x i8> %x to <2 x i32>"),
        ("%a = trunc nuw <2 x i32> %x to <2 x i8>", "%a = trunc <2 x i32> %x to <2 x i8>"),
        ("%a = shl nuw nsw i32 %x, 3", None),
        ("%a = fmul nnan <2 x float> %x, %y", None),
        ("%a = getelementptr inbounds <2 x i32>, ptr %x, i64 1", None),
    ],
)
def test_flags_that_are_dropped(line, left):
    assert without_flags_of_lanes(line) == (left or line)


def ptx_of(rule):
    """PTX of a product of MXFP8 and MXFP4 for Hopper, float32 out."""
    from flashinfer._core import compiler
    from flashinfer._core.target import named
    from flashinfer.ops.gemm.grouped import Problem, config, portable

    problem = Problem("offsets", "fp8e4nv", "e2m1", "ue8m0", 32, "fp32", 128, padded=True)
    build = portable.build(problem, config.portable(problem, named("90a")))
    kept = rule or (lambda text: text)
    with (
        patch.object(compiler, "without_flags_of_lanes", kept),
        patch.object(compiler, "_describe", wraps=compiler._describe) as describe,
    ):
        compiler.compile_kernel(build, "90a")
    return describe.call_args.args[1]


def instructions(ptx):
    """[(name, operands)] of the lines that are one instruction without a predicate."""
    found = (_LINE.match(line) for line in ptx.splitlines())
    return [(each[1], [part.strip() for part in re.split(r",(?![^{]*})", each[2])]) for each in found if each]


def shifts(code, thread):
    """The amounts of a thread's arithmetic shifts of registers, where they depend on its number alone."""
    values, amounts = {}, []
    for name, operands in code:
        given = [_value(each, values, thread) for each in operands[1:]]
        if name == "shr.s32" and operands[2].startswith("%") and given[1] is not None:
            amounts.append(given[1])
        result = None if None in given else _result(name, given, operands[0])
        if result is not None:
            values.setdefault(operands[0].strip("{_, }"), result)
    return amounts


def _value(text, values, thread):
    if text == "%tid.x":
        return thread
    return int(text) if text.isdigit() else values.get(text)


def _result(name, given, to):
    operation, _, kind = name.partition(".")
    if operation in ("mov", "cvt"):
        return given[0] >> 32 if to.startswith("{_") else given[0] if not to.startswith("{") else None
    if name == "bfe.u32":
        return given[0] >> given[1] & (1 << given[2]) - 1
    if operation not in _BINARY or kind.startswith(("f", "rn")) or name == "shr.s32":
        return None
    result = _BINARY[operation](*given[:2])
    return result & (WORD if kind[-2:] == "32" and not kind.startswith("wide") else WORD << 32 | WORD)


def test_no_lane_runs_over_into_another(in_triton):
    """A factor is one byte of a word that was read, in every thread; by flags of lanes it was not by Triton 3.6."""
    code = instructions(in_triton(ptx_of, without_flags_of_lanes))
    # Four neighbours of each warp have the four bytes.
    for thread in (warp * 32 + lane for warp in range(8) for lane in range(4)):
        amounts = shifts(code, thread)
        assert amounts and set(amounts) <= {0, 8, 16, 24}, thread

"""Device functions as Python that runs: a generator each, which pauses where another warp may go on.

The source of a `@gluon.jit` or `@triton.jit` function stays as it is, but for its annotations, for calls, which pass a
pause on, and for loops, whose numbers become scalars of the run time before they begin. Names are resolved as Triton
resolves them, and what is Triton's becomes the emulator's.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache, partial
from types import CodeType, FunctionType, GeneratorType, ModuleType

import triton
from triton.language.core import constexpr
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from flashinfer.testing.emulator.errors import MARK, EmulationError
from flashinfer.testing.emulator.values import Tensor, carried, scalar


def unwrap(value):
    """A constant of compile time is its value."""
    while isinstance(value, constexpr):
        value = value.value
    return tuple(map(unwrap, value)) if type(value) is tuple else value


class Record:
    """An instance of an aggregate."""

    def __init__(self, kind: type, methods: dict):
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_methods", methods)

    def __getattr__(self, name: str):
        if name in self._methods:
            return partial(self._methods[name], self)
        raise AttributeError(f"{self._kind.__name__} has no {name}")

    def __setattr__(self, name: str, value) -> None:
        object.__setattr__(self, name, unwrap(value))

    def __repr__(self) -> str:
        return f"{self._kind.__name__}({ {n: v for n, v in vars(self).items() if n[0] != '_'} })"


def _is_static(node: ast.For) -> bool:
    return isinstance(node.iter, ast.Call) and getattr(node.iter.func, "attr", "") == "static_range"


class _Rewriter(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef):
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        body = []
        for statement in node.body:
            made = self.visit(statement)
            body += made if isinstance(made, list) else [made]
        node.body = body
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign):
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_Call(self, node: ast.Call):
        self.generic_visit(node)
        made = ast.NamedExpr(ast.Name("_made", ast.Store()), node)
        is_paused = ast.Compare(
            ast.Call(ast.Name("_type", ast.Load()), [made], []), [ast.Is()], [ast.Name("_Generator", ast.Load())]
        )
        first, other = ast.Name("_made", ast.Load()), ast.Name("_made", ast.Load())
        return ast.copy_location(ast.IfExp(is_paused, ast.YieldFrom(first), other), node)

    def visit_While(self, node: ast.While):
        names = _assigned(node.body)
        self.generic_visit(node)
        return [*_carry(names, node), node]

    def visit_For(self, node: ast.For):
        names = [] if _is_static(node) else _assigned(node.body)
        self.generic_visit(node)
        return [*_carry(names, node), node]


def _assigned(body: list[ast.stmt]) -> list[str]:
    constants = {n.target.id for s in body for n in ast.walk(s) if isinstance(n, ast.AnnAssign)}
    names = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return sorted(names - constants)


def _carry(names: list[str], node: ast.stmt) -> list[ast.stmt]:
    """name = _carried(name) for each that is bound already."""
    found = []
    for name in names:
        statement = ast.parse(f"try:\n {name} = _carried({name})\nexcept NameError:\n pass").body[0]
        for part in ast.walk(statement):
            ast.copy_location(part, node)
        found.append(statement)
    return found


def _range(*bounds):
    return map(scalar, range(*map(int, bounds)))


class Translator:
    """Device functions, each translated once.

    Parameters
    ----------
    language : object
        What stands for `gl` and `tl`; `language.of(value)` is what stands for a value of Triton's, or None.
    """

    def __init__(self, language):
        self._language = language
        self._found: dict[int, tuple] = {}

    def __call__(self, value):
        """What stands for a value of a kernel's module, or of its constants."""
        value = unwrap(value)
        known = self._found.get(id(value))
        if known is not None:
            return known[1]
        made = self._made(value)
        # The value stays alive, so that its id stays its own.
        self._found[id(value)] = value, made
        return made

    def _made(self, value):
        ours = self._language.of(value)
        if ours is not None:
            return ours
        if isinstance(value, (JITFunction, InterpretedFunction)):
            return self._function(value.fn)
        if isinstance(value, ConstexprFunction):
            return lambda *args, **kwargs: unwrap(value(*args, **kwargs))
        if isinstance(value, type) and getattr(value, "__triton_aggregate__", False):
            return self._aggregate(value)
        if type(value) is tuple:
            return tuple(map(self, value))
        if isinstance(value, FunctionType) and getattr(value, "__triton_builtin__", False):
            raise EmulationError(f"{value.__module__}.{value.__name__} is not known to the emulator")
        if isinstance(value, ModuleType) and value.__name__.startswith("triton.") and value is not triton:
            raise EmulationError(f"the module {value.__name__} is not known to the emulator")
        return value

    def _aggregate(self, kind: type):
        functions = (JITFunction, InterpretedFunction, ConstexprFunction)
        methods = {name: self(value) for name, value in vars(kind).items() if isinstance(value, functions)}

        def make(*args, **kwargs):
            made = Record(kind, methods)
            init = kind.hash_attrs[0]
            getattr(init, "fn", init)(made, *args, **kwargs)
            return made

        return make

    def _function(self, function):
        """Translated at its first call, so that functions may call themselves."""
        made = []

        def call(*args, **kwargs):
            if not made:
                made.append(self._compiled(function))
            return made[0](*args, **kwargs)

        call.__name__ = function.__name__
        return call

    def _compiled(self, function):
        code = _translated(function)
        names = dict(_type=type, _Generator=GeneratorType, _carried=carried, range=_range, float=_float)
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in _names(code):
            if name in closure:
                names[name] = self(closure[name].cell_contents)
            elif name in function.__globals__ and name not in names:
                names[name] = self(function.__globals__[name])
        exec(code, names)
        return names[function.__name__]


@lru_cache(maxsize=None)
def _translated(function: FunctionType) -> CodeType:
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    tree.body = [_Rewriter().visit(tree.body[0])]
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    return compile(tree, MARK + inspect.getsourcefile(function), "exec")


def _float(value):
    return value if isinstance(value, Tensor) else float(value)


def _names(code) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found |= _names(constant)
    return found

"""Stubs of modules whose functions return a tensor or, by a flag, a pair: each such function is overloaded there.

A stub is made of the source without running it: signatures stay as they are, bodies and docstrings do not.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

# Flags that decide between the two results of `A | tuple[...]`.
FLAGS = ("return_lse", "return_valid", "output_final_state")
_KEPT = ("property", "staticmethod", "classmethod", "setter", "dataclass")
_FOLDERS = ("_core", "ops", "cli", "testing", "compat", "integrations")
_NEEDED = "from typing import Any, Literal, overload"


def stubs(package: Path, command: str) -> dict[Path, str]:
    """The stub of every public module that needs one."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if path.relative_to(package).parts[0] in _FOLDERS or not any(flag in text for flag in FLAGS):
            continue
        tree = ast.parse(text)
        if any(_flag(node) for node in ast.walk(tree)):
            found[path.with_suffix(".pyi")] = _stub(tree, command)
    return found


def _flag(node: ast.AST) -> str:
    """The flag by which a public function returns one of two results; '' for others."""
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or not isinstance(node.returns, ast.BinOp):
        return ""
    if isinstance(node.returns.left, ast.BinOp) or not ast.unparse(node.returns.right).startswith("tuple["):
        return ""
    names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
    return next((flag for flag in FLAGS if flag in names), "")


def _stub(tree: ast.Module, command: str) -> str:
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    body = [line for node in tree.body for line in _lines(node, functions)]
    used = {n.id for line in body for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Name)}
    listed = next((line.removeprefix("__all__ = ") for line in body if line.startswith("__all__ = ")), "[]")
    used |= set(ast.literal_eval(listed))
    imports = []
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if getattr(node, "module", "") not in ("__future__", "typing"):
            names = [a for a in node.names if (a.asname or a.name.split(".")[0]) in used]
            if names:
                imports.append(ast.unparse(type(node)(**{**vars(node), "names": names})))
    title = f'"""Signatures, for type checkers; written by `{command}`, do not edit by hand."""'
    return "\n".join([title, "", _NEEDED, "", *imports, "", *body, ""])


def _lines(node: ast.stmt, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """The statements of a stub for one of a module or class, each as text."""
    if isinstance(node, ast.FunctionDef):
        if not (node.name.startswith("_") and not node.name.startswith("__")):
            yield from map(ast.unparse, _signatures(node))
    elif isinstance(node, ast.ClassDef):
        inner = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        made = copy.copy(node)
        text = [line for n in node.body for line in _lines(n, inner)]
        text += [f"{name}: Any" for name in _attributes(node, inner)]
        made.body = ast.parse("\n".join(text) or "...").body
        made.decorator_list = [d for d in node.decorator_list if _name(d) in _KEPT]
        yield ast.unparse(made)
    elif isinstance(node, ast.AnnAssign):
        yield ast.unparse(node)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Name) and value.id in functions or name == "__all__":
            yield ast.unparse(node)
        elif isinstance(value, ast.Call) and value.args and _name(value.args[0]) in functions:
            # A function with its flag set, or another one of its arguments.
            paired = copy.deepcopy(functions[_name(value.args[0])])
            if _name(value) == "sized_by":
                paired.name, paired.returns = name, ast.parse("tuple[int, int]", mode="eval").body
                yield ast.unparse(_bare(_less(paired, [ast.literal_eval(x) for x in value.args[1:]])))
            elif flag := _flag(paired):
                paired.name, paired.returns = name, paired.returns.right
                yield ast.unparse(_bare(_without(paired, flag)))
        elif not name.startswith("_"):
            yield f"{name}: Any"


def _name(node: ast.expr) -> str:
    """The last name of a decorator or a reference."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _attributes(node: ast.ClassDef, methods: dict[str, ast.FunctionDef]) -> list[str]:
    """Names that methods assign on self, but for those that the class declares."""
    assigned = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _name(n.value) == "self"
    }
    declared = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return sorted(assigned - methods.keys() - declared)


def _signatures(node: ast.FunctionDef) -> list[ast.FunctionDef]:
    """The one signature of a function, or its overloads: the flag False, True, and not known."""
    flag = _flag(node)
    if not flag:
        return [_bare(copy.deepcopy(node))]
    one, pair, either = (_bare(copy.deepcopy(node)) for _ in range(3))
    one.returns, pair.returns = node.returns.left, node.returns.right
    _parameter(one, flag).annotation = ast.parse("Literal[False]", mode="eval").body
    _keyword_only(pair, flag)
    for made in (one, pair, either):
        made.decorator_list = [ast.Name("overload"), *made.decorator_list]
    return [one, pair, either]


def _parameter(node: ast.FunctionDef, name: str) -> ast.arg:
    return next(a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg == name)


def _keyword_only(node: ast.FunctionDef, flag: str) -> None:
    """Make the flag a Literal[True] without a default: what stands behind it is given by keyword then."""
    args = node.args
    _parameter(node, flag).annotation = ast.parse("Literal[True]", mode="eval").body
    names = [a.arg for a in args.args]
    if flag in names:
        at, required = names.index(flag), len(names) - len(args.defaults)
        args.kwonlyargs = args.args[at:] + args.kwonlyargs
        args.kw_defaults = [None if i < required else args.defaults[i - required] for i in range(at, len(names))] + (
            args.kw_defaults
        )
        args.args, args.defaults = args.args[:at], args.defaults[: max(at - required, 0)]
    args.kw_defaults[[a.arg for a in args.kwonlyargs].index(flag)] = None


def _without(node: ast.FunctionDef, flag: str) -> ast.FunctionDef:
    """The function without its flag."""
    _keyword_only(node, flag)
    return _less(node, [flag])


def _less(node: ast.FunctionDef, names: list[str]) -> ast.FunctionDef:
    """The function without some of its parameters, which have defaults or are given by keyword."""
    args = node.args
    required = len(args.args) - len(args.defaults)
    args.defaults = [x for a, x in zip(args.args[required:], args.defaults) if a.arg not in names]
    args.kw_defaults = [x for a, x in zip(args.kwonlyargs, args.kw_defaults) if a.arg not in names]
    args.args, args.kwonlyargs = ([a for a in some if a.arg not in names] for some in (args.args, args.kwonlyargs))
    return node


def _bare(node: ast.FunctionDef) -> ast.FunctionDef:
    node.body = [ast.Expr(ast.Constant(...))]
    node.decorator_list = [d for d in node.decorator_list if _name(d) in _KEPT]
    return node

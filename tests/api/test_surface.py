"""The public names and signatures that callers written for FlashInfer rely on, against surface.json.

surface.json lists, for each dotted name, upstream's signature or its methods' signatures. A name holds if every listed
parameter can be given by name and, in the listed order, by position, with upstream's default where it is a literal;
parameters of ours beyond the list have defaults.
"""

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

import flashinfer

SURFACE = json.loads((Path(__file__).parent / "surface.json").read_text())
# names of this package that upstream's 0.7 does not have at its root
OWN = {
    "AttentionVariant": "flashinfer.ops.attention.variants",
    "BatchDecodeWithPagedKVCache": "flashinfer.core",
    "BatchPrefillWithRaggedKVCache": "flashinfer.core",
    "PagedKVCache": "flashinfer.core",
    "explain": "flashinfer._core.dispatch",
}


def resolve(path):
    """The object behind a dotted name: the longest importable module, then attributes."""
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError as error:
            if error.name != ".".join(parts[:i]):
                raise
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def differences(function, signature):
    """What of a call written for `signature` could fail on `function`, or mean another thing."""
    wanted = ast.parse(f"def f{signature}: ...").body[0].args
    positional = [a.arg for a in wanted.posonlyargs + wanted.args]
    defaults = dict(zip(reversed(positional), reversed(wanted.defaults)))
    defaults |= {a.arg: d for a, d in zip(wanted.kwonlyargs, wanted.kw_defaults) if d is not None}
    names = positional + [a.arg for a in wanted.kwonlyargs]
    ours = inspect.signature(function).parameters
    by_position = [n for n, p in ours.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found = [f"no parameter {n!r}" for n in names if n not in ours]
    if by_position[: len(positional)] != positional:
        found.append(f"positional order {by_position[: len(positional)]}, expected {positional}")
    for name, node in defaults.items():
        if name not in ours:
            continue
        if ours[name].default is inspect.Parameter.empty:
            found.append(f"{name!r} has no default")
        elif isinstance(node, ast.Constant) and ours[name].default != node.value:
            found.append(f"{name!r} defaults to {ours[name].default!r}, expected {node.value!r}")
    for name, p in ours.items():
        if name not in names and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            found.append(f"extra parameter {name!r} has no default")
    return found


@pytest.mark.parametrize("path", sorted(SURFACE))
def test_name(path):
    entry, target = SURFACE[path], resolve(path)
    found = differences(target, entry["signature"]) if "signature" in entry else []
    for method, signature in entry.get("methods", {}).items():
        # A class method is looked at bound.
        signature = signature.replace("(cls, ", "(").replace("(cls)", "()")
        if not hasattr(target, method):
            found.append(f"no method {method}")
        elif not isinstance(inspect.getattr_static(target, method), property):
            found += [f"{method}: {why}" for why in differences(getattr(target, method), signature)]
    found += [f"no attribute {value}" for value in entry.get("values", []) if not hasattr(target, value)]
    assert not found, f"{path}: " + "; ".join(found)


def test_root_has_exactly_the_listed_names():
    listed = {path.split(".")[1] for path in SURFACE if path.count(".") == 1}
    modules = {path.split(".")[1] for path in SURFACE if path.count(".") == 2} | {"core"}
    assert set(flashinfer.__all__) - {"__version__"} == listed | modules | OWN.keys()


@pytest.mark.parametrize("name", sorted(set(flashinfer.__all__) - {"__version__"}))
def test_root_name_is_its_modules_name(name):
    value = getattr(flashinfer, name)
    if inspect.ismodule(value):
        assert value is importlib.import_module(f"flashinfer.{name}")
    else:
        home = OWN.get(name) or SURFACE[f"flashinfer.{name}"]["module"]
        assert value is getattr(importlib.import_module(home), name)
    assert name in dir(flashinfer)


def test_unknown_root_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        flashinfer.no_such_name


def test_the_check_sees_what_it_should():
    def ours(a, b=1, *, c): ...

    assert differences(ours, "(a, b=1, *, c)") == []
    assert "no parameter 'd'" in differences(ours, "(a, b=1, d=2, *, c)")
    assert "'b' defaults to 1, expected 2" in differences(ours, "(a, b=2, *, c)")
    assert "extra parameter 'c' has no default" in differences(ours, "(a, b=1)")
    assert any("positional order" in why for why in differences(ours, "(b, a)"))

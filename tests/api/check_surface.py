#!/usr/bin/env python3
"""Compare the installed `flashinfer` package with api/surface.json.

An entry is a public object: its import paths, each of which is a check of its own, and
  signature   names in order, kinds and defaults; `=...` is a default that is no simple literal;
  methods     the same by name, without self; "class (...)" is called on the class, "property" is read;
  attributes  what engines read or set on an instance (of a function: on the function);
  values      members of an enum, constants of a class.
A path is
  ok        a call written for upstream works: every parameter has its name, place and default
            (more parameters are fine if they have defaults);
  differs   it resolves, but such a call could fail or mean something else;
  missing   it does not resolve.

    python check_surface.py                             everything
    python check_surface.py --family moe gemm --tier 1  those families, tier 1 only
    python check_surface.py --family seed               what the seed documents name
    python check_surface.py --module decode comm.mnnvl  objects of which a path passes through one of these
    python check_surface.py --json out.json             also {path: [state, why]}

Exit status: 0 if nothing selected is missing or differs, else 1.
"""
import argparse
import ast
import functools
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

SURFACE = Path(__file__).resolve().parent / "surface.json"
EMPTY = inspect.Parameter.empty


def resolve(path, kind):
    """What `import path` gives for a module, `from module import name` for anything else."""
    if kind == "module":
        return importlib.import_module(path)
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@functools.cache
def wanted(signature):
    """[(name, its default's node or None)] of the parameters before `/`, before `*` and after it."""
    args = ast.parse(f"def f{signature}: pass").body[0].args
    pos = args.posonlyargs + args.args
    pairs = [(a.arg, d) for a, d in zip(pos, [None] * (len(pos) - len(args.defaults)) + args.defaults)]
    n = len(args.posonlyargs)
    return pairs[:n], pairs[n:], [(a.arg, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]


def some(names, most=8):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def compare(fn, signature, bound=True):
    """How a call written for `signature` could fail on `fn`, whose self is dropped unless bound."""
    try:
        ours = list(inspect.signature(fn).parameters.values())[0 if bound else 1:]
    except (TypeError, ValueError):
        yield "has no signature"
        return
    named = {p.name: p for p in ours if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    order = [p.name for p in named.values() if p.kind is not p.KEYWORD_ONLY]
    unnamed, pos, keyword = wanted(signature)
    absent = [name for name, _ in pos + keyword if name not in named]
    if absent:
        hidden = any(p.kind is p.VAR_KEYWORD for p in ours)
        yield ("only through **: " if hidden else "no parameter ") + some(absent)
    for name, default in pos + keyword:
        p = named.get(name)
        if p is None:
            continue
        if p.kind is p.POSITIONAL_ONLY:
            yield f"{name} is positional-only"
        if default is None:
            continue
        value = ast.literal_eval(default)
        if p.default is EMPTY:
            yield f"{name} has no default"
        elif value is not ... and value != p.default:
            yield f"{name} is {p.default!r} by default, upstream {value!r}"
    want = order[: len(unnamed)] + [name for name, _ in pos]
    if not absent and order[: len(want)] != want:
        i = next(i for i, name in enumerate(want) if order[i: i + 1] != [name])
        yield f"at position {i} is {order[i] if i < len(order) else 'nothing'}, upstream {want[i]}"
    if len(order) < len(unnamed):
        yield f"takes {len(order)} by position, upstream {len(unnamed)}"
    known = {*want, *(name for name, _ in keyword)}
    own = [name for name, p in named.items() if p.default is EMPTY and name not in known]
    if own:
        yield f"required by us alone: {some(own)}"


def has_attribute(obj, name):
    """Whether an object, or any instance of a class, has this attribute: set in __init__ counts."""
    if hasattr(obj, name) or not inspect.isclass(obj):
        return hasattr(obj, name)
    for cls in obj.__mro__[:-1]:
        if name in getattr(cls, "__annotations__", {}):
            return True
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):  # a class without source
            continue
        set_here = (n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        if name in set_here:
            return True
    return False


def differences(obj, entry):
    """Each way in which the object falls short of its entry."""
    if entry["kind"] in ("class", "enum") and not inspect.isclass(obj):
        yield "not a class"
        return
    if entry["kind"] == "function" and not callable(obj):
        yield "not callable"
        return
    if "signature" in entry:
        yield from compare(obj, entry["signature"])
    for name, signature in entry.get("methods", {}).items():
        if signature == "property":
            if not has_attribute(obj, name):
                yield f"no property {name}"
            continue
        if not callable(getattr(obj, name, None)):
            yield f"no method {name}"
            continue
        on_class = isinstance(inspect.getattr_static(obj, name), (classmethod, staticmethod))
        if signature.startswith("class ") and not on_class:
            yield f"{name}: upstream calls it on the class"
            continue
        init = name == "__init__"
        ours = obj if init else getattr(obj, name)
        for why in compare(ours, signature.removeprefix("class "), init or on_class):
            yield f"{name}: {why}"
    for kind in ("attribute", "value"):
        for name in entry.get(kind + "s", []):
            if not has_attribute(obj, name):
                yield f"no {kind} {name}"


def check(path, entry):
    if entry["kind"] == "command":
        run = subprocess.run([sys.executable, *path.split()[1:], "--help"], capture_output=True, text=True)
        return ("missing", (run.stderr.strip() or "no such command").splitlines()[-1]) if run.returncode else ("ok", "")
    try:
        obj = resolve(path, entry["kind"])
    except Exception as e:  # whatever stops an import, the name is missing
        return "missing", f"{type(e).__name__}: {e}".splitlines()[0]
    why = "; ".join(differences(obj, entry))
    return ("differs", why) if why else ("ok", "")


def selected(entry, args):
    families = {entry["family"]} | {"seed"}.intersection(entry["used_by"])
    steps = [f".{path}." for path in entry["paths"]]
    return (
        (not args.family or families & set(args.family))
        and args.tier in (None, entry["tier"])
        and (not args.module or any(f".{m}." in s for m in args.module for s in steps))
    )


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--family", nargs="+", help="only these families")
    ap.add_argument("--tier", type=int, choices=(1, 2), help="1: now, 2: soon or when asked")
    ap.add_argument("--module", nargs="+", help="only objects of which a path passes through one of these")
    ap.add_argument("--json", type=Path, help="write {path: [state, why]} here")
    args = ap.parse_args()
    results, families = {}, defaultdict(dict)
    for entry in json.loads(SURFACE.read_text())["entries"].values():
        if selected(entry, args):
            for path in entry["paths"]:
                results[path] = families[entry["family"]][path] = check(path, entry)
    if not results:
        ap.error("nothing is selected")
    for family in sorted(families):
        count = Counter(state for state, _ in families[family].values())
        print(f"{family:14} ok {count['ok']:3}  differ {count['differs']:3}  missing {count['missing']:3}")
    for family in sorted(families):
        for path, (state, why) in sorted(families[family].items()):
            if state != "ok":
                print(f"{state:8} {path}  {why}")
    total = Counter(state for state, _ in results.values())
    print(f"surface: {total['ok']} of {len(results)} ok, {total['differs']} differ, {total['missing']} missing")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if total["ok"] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

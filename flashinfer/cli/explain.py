"""`flashinfer explain`"""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, fields, replace
from typing import get_type_hints

import click
import torch

from flashinfer._core.backends import VARIANTS_OF
from flashinfer._core.checks import DTYPE_NAMES, require
from flashinfer._core.target import GPU_ARCHS, named, target_of
from flashinfer.cli.output import json_option, near, print_json, print_table, reports_errors
from flashinfer.ops import all_ops

_TRUTH = {"1": True, "true": True, "0": False, "false": False}


def problem_of(op, settings: tuple[str, ...]):
    """The first problem of the op's catalog, with every `field=value` of `settings` put in."""
    base = next(iter(op.catalog()))
    types = get_type_hints(op.problem_type)
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        allowed = "FIELD=VALUE, the fields " + near(name, list(types))
        require(bool(equals) and name in types, "setting", repr(setting), allowed)
        values[name] = _parse(name, types[name], text)
        _check(op, name, values[name], getattr(base, name))
    return replace(base, **values)


def documented(op) -> dict[str, str]:
    """What the docstring of an op's problem says of each field."""
    text = inspect.getdoc(op.problem_type) or ""
    _, _, section = text.partition("Attributes\n----------\n")
    found, names = {}, []
    for line in section.split("\n\n")[0].splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.partition(":")[0].split(",")]
        for name in names if line.startswith(" ") else ():
            found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def values_of(op, name: str) -> list[str]:
    """The values that a field of words may have; [] where any may be: those that its text and the catalog name."""
    words = set(re.findall(r'"([^"]*)"', documented(op).get(name, "")))
    known = {getattr(problem, name) for problem in op.catalog()}
    # A text names the dtypes that matter; another one is refused by the variants, which say why.
    is_dtype = bool(words & set(DTYPE_NAMES)) or not words and bool(known & set(DTYPE_NAMES))
    return sorted(words | known | set(DTYPE_NAMES if is_dtype else ())) if words or is_dtype else []


def _check(op, name: str, value, like) -> None:
    if isinstance(value, str):
        allowed = values_of(op, name)
        listed = near(value, [word or "''" for word in allowed])
        require(not allowed or value in allowed, name, repr(value), listed)
    elif not isinstance(value, bool) and like >= 0:
        require(value >= 0, name, value, "0 or more")


def _parse(name: str, kind: type, text: str):
    if kind is bool:
        require(text.lower() in _TRUTH, name, repr(text), ", ".join(_TRUTH))
        return _TRUTH[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}: got {text!r}; allowed: {kind.__name__}") from None


@click.command("explain")
@click.argument("op", required=False)
@click.argument("settings", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--arch", type=click.Choice(["cpu", *GPU_ARCHS]), help="Architecture; default: this machine's.")
@click.option("--backend", default="auto", show_default=True, help="A backend name as the public API takes it.")
@click.option("--fields", "only_fields", is_flag=True, help="Say what the fields of OP mean, and choose nothing.")
@json_option
@reports_errors
def command(op, settings, arch, backend, only_fields, as_json):
    """Say which variant runs a problem, with which config, and why the others do not.

    OP is a name that `flashinfer explain` without arguments lists; `flashinfer explain OP --fields` documents its
    fields. Fields that are not given keep the values of the first problem that `flashinfer precompile` builds for the
    op.

    \b
    Example: flashinfer explain decode head_dim_qk=64 head_dim_vo=64 group=8 --arch 90a
    """
    ops = all_ops()
    if op is None:
        return _list(ops, as_json)
    require(op in ops, "op", repr(op), near(op, list(ops)))
    require(backend in VARIANTS_OF, "--backend", repr(backend), near(backend, list(VARIANTS_OF)))
    if only_fields:
        return _print_fields(ops[op], as_json)
    if arch is None:
        target = target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        target = named(arch)
    choice = ops[op].select(problem_of(ops[op], settings), target, backend)
    found = choice.as_dict()
    if as_json:
        return print_json(found)
    click.echo(f"{op} on {found['arch']}: {found['variant']}")
    given = {setting.partition("=")[0] for setting in settings}
    rows = [[name, value, "given" if name in given else "catalog"] for name, value in found["problem"].items()]
    print_table("Problem", ["field", "value", "from"], rows)
    if found["config"]:
        print_table("Config", ["field", "value"], [[n, v] for n, v in found["config"].items()])
    if found["refused"]:
        print_table("Refused", ["variant", "why"], [[n, why] for n, why in found["refused"].items()])


def _print_fields(op, as_json):
    example, texts, kinds = next(iter(op.catalog())), documented(op), get_type_hints(op.problem_type)
    rows = [
        {
            "field": name,
            "type": kinds[name].__name__,
            "example": getattr(example, name),
            "meaning": texts.get(name, ""),
            "values": values_of(op, name) if kinds[name] is str else [],
        }
        for name in kinds
    ]
    if as_json:
        return print_json(rows)
    columns = ["field", "type", "example", "meaning"]
    print_table(f"Fields of {op.name}", columns, [[row[c] for c in columns] for row in rows])


def _list(ops, as_json):
    listed = [
        {
            "op": name,
            "variants": [v.name for v in op.variants],
            "fields": {f.name: f.type for f in fields(op.problem_type)},
            "example": asdict(next(iter(op.catalog()))),
        }
        for name, op in sorted(ops.items())
    ]
    if as_json:
        return print_json(listed)
    rows = [[e["op"], ", ".join(e["variants"]), ", ".join(f"{n}={v}" for n, v in e["example"].items())] for e in listed]
    print_table("Ops", ["op", "variants, best first", "fields, with the values of the first catalog problem"], rows)

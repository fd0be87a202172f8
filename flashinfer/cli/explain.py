"""`flashinfer explain`"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import get_type_hints

import click
import torch

from flashinfer._core.checks import require
from flashinfer._core.target import GPU_ARCHS, named, target_of
from flashinfer.cli.output import json_option, print_json, print_table, reports_errors
from flashinfer.ops import all_ops

_TRUTH = {"1": True, "true": True, "0": False, "false": False}


def problem_of(op, settings: tuple[str, ...]):
    """The first problem of the op's catalog, with every `field=value` of `settings` put in."""
    base = next(iter(op.catalog()))
    types = get_type_hints(op.problem_type)
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        require(bool(equals) and name in types, "setting", repr(setting), "; ".join(f"{n}=..." for n in types))
        values[name] = _parse(name, types[name], text)
    return replace(base, **values)


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
@json_option
@reports_errors
def command(op, settings, arch, backend, as_json):
    """Say which variant runs a problem, with which config, and why the others do not.

    OP is a name that `flashinfer explain` without arguments lists. Fields that are not given keep the values of the
    first problem that `flashinfer precompile` builds for the op.

    \b
    Example: flashinfer explain decode head_dim_qk=64 head_dim_vo=64 group=8 --arch 90a
    """
    ops = all_ops()
    if op is None:
        return _list(ops, as_json)
    require(op in ops, "op", repr(op), ", ".join(sorted(ops)))
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

"""`flashinfer cache list | verify | clear`"""

from __future__ import annotations

from pathlib import Path

import click

from flashinfer._core import env, kernel_cache
from flashinfer._core.checks import require
from flashinfer._core.target import GPU_ARCHS
from flashinfer.cli.output import json_option, near, print_json, print_table, reports_errors
from flashinfer.ops import all_ops

_base_option = click.option(
    "--base",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder that holds .cache/flashinfer, such as `precompile --out` wrote; default: ${env.WORKSPACE_BASE.name}.",
)


@click.group("cache")
def command():
    """List, verify or clear compiled kernels."""


def kernels_of(op: str, base: Path | None) -> list[str]:
    """The kernels that an op launches, or the kernel of that name; ValueError for what is neither."""
    ops, stored = all_ops(), {entry["op"] for entry in kernel_cache.entries(base)}
    if op in ops:
        variants = [variant for variant in ops[op].variants if variant.name != "reference"]
        return sorted({launcher.name for variant in variants for launcher in variant.load().launchers})
    require(op in stored, "--op", repr(op), near(op, [*ops, *stored]))
    return [op]


@command.command("list", short_help="List entries and their faults.")
@_base_option
@json_option
@reports_errors
def list_entries(base, as_json):
    """List every entry: version, architecture, op, size, and what is wrong with it."""
    entries = kernel_cache.entries(base)
    if as_json:
        return print_json(entries)
    columns = ["version", "arch", "op", "digest", "bytes", "fault"]
    print_table("Compiled kernels", columns, [[e[c] for c in columns] for e in entries], ("bytes",))
    click.echo(f"{len(entries)} entries, {sum(e['bytes'] for e in entries)} bytes")


@command.command("verify", short_help="Check entries against their checksums.")
@_base_option
@json_option
@reports_errors
def verify(base, as_json):
    """Check every entry against its checksums; exit status 1 if one would not be believed, or there is none."""
    count, faults = len(kernel_cache.entries(base)), kernel_cache.verify(base)
    if not count and not faults:
        raise FileNotFoundError(f"{kernel_cache.root_of(base or env.workspace_base()).parent}: no entries to verify")
    if as_json:
        print_json({"entries": count, "faults": faults})
    else:
        if faults:
            print_table("Faults", ["path", "fault"], [[f["path"], f["fault"]] for f in faults])
        click.echo(f"{count} entries, {len(faults)} faults")
    if faults:
        raise SystemExit(1)


@command.command("clear")
@_base_option
@click.option("--arch", help="Only entries of this architecture, such as 90a.")
@click.option("--op", help="Only entries of this op, as `explain` lists it, or of this kernel, as `cache list` does.")
@json_option
@reports_errors
def clear(base, arch, op, as_json):
    """Remove entries of the cache. Other files in its folder stay."""
    require(arch is None or arch in GPU_ARCHS, "--arch", repr(arch), near(arch or "", list(GPU_ARCHS)))
    removed = {"files": 0, "bytes": 0}
    for kernel in [None] if op is None else kernels_of(op, base):
        for name, count in kernel_cache.clear(base, arch, kernel).items():
            removed[name] += count
    if as_json:
        return print_json(removed)
    click.echo(f"removed {removed['files']} files, {removed['bytes']} bytes")

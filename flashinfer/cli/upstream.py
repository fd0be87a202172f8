"""Upstream's commands about cubins and compiled modules, which engines and scripts call.

Kernels are Python here. What downloads, installs or lists binaries has nothing to do, says so and ends with status 0.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import click

from flashinfer._core import kernel_cache
from flashinfer.cli.output import json_option, near, print_json, print_table, reports_errors
from flashinfer.ops import all_ops

_AHEAD = "kernels are Python, compiled at first use or ahead by `flashinfer precompile`"
# command -> why it has nothing to do
NOTHING_TO_DO = {
    "download-kernels": f"nothing to download: {_AHEAD}",
    "download-cubin": f"nothing to download: {_AHEAD}",
    "install-cubin-wheel": f"nothing to install: {_AHEAD}",
    "install-jit-cache-wheel": f"nothing to install: {_AHEAD}",
    "list-cubins": "no cubins are downloaded; `flashinfer cache list` lists compiled kernels",
    "clear-cubin": "no cubins are downloaded; `flashinfer cache clear` removes compiled kernels",
}


def nothing_to_do(name: str) -> click.Command:
    """The command `name`: it takes upstream's options, names them as without effect, and does nothing."""

    @click.command(name, context_settings={"ignore_unknown_options": True})
    @click.argument("options", nargs=-1, type=click.UNPROCESSED)
    @json_option
    @reports_errors
    def command(options, as_json):
        text = NOTHING_TO_DO[name] + (f" (without effect: {' '.join(options)})" if options else "")
        if as_json:
            return print_json({"done": False, "why": text})
        click.echo(text)

    command.help = f"Upstream's command; {NOTHING_TO_DO[name]}."
    return command


@click.command("clear-cache")
@json_option
@reports_errors
def clear_cache(as_json):
    """Remove all compiled kernels, as `flashinfer cache clear` does."""
    removed = kernel_cache.clear()
    if as_json:
        return print_json(removed)
    click.echo(f"removed {removed['files']} files, {removed['bytes']} bytes")


def _modules() -> list[dict]:
    """What an op's variants need of launchers, and how many kernels of each the cache holds."""
    held: dict[str, int] = {}
    for entry in kernel_cache.entries():
        held[entry["op"]] = held.get(entry["op"], 0) + (not entry["fault"])
    rows = []
    for name, op in sorted(all_ops().items()):
        for variant in op.variants:
            launchers = [launcher.name for launcher in variant.load().launchers]
            rows.append(
                {
                    "module": name,
                    "variant": variant.name,
                    "source": variant.module,
                    "launchers": launchers,
                    "compiled": sum(held.get(launcher, 0) for launcher in launchers),
                }
            )
    return rows


@click.command("list-modules")
@click.argument("module_name", required=False)
@json_option
@reports_errors
def list_modules(module_name, as_json):
    """List the ops, their variants and the Python modules that these are in; or one op."""
    rows = _modules()
    if module_name is not None:
        known = sorted({row["module"] for row in rows})
        if module_name not in known:
            raise ValueError(f"module_name: got {module_name!r}; allowed: {near(module_name, known)}")
        rows = [row for row in rows if row["module"] == module_name]
    if as_json:
        return print_json(rows)
    columns = ["module", "variant", "source", "compiled"]
    print_table("Modules", columns, [[row[c] for c in columns] for row in rows], ("compiled",))


@click.command("module-status")
@click.option("--detailed", is_flag=True, help="Say the launchers of each variant, too.")
@click.option(
    "--filter",
    "kept",
    type=click.Choice(["all", "aot", "jit", "compiled", "not-compiled"]),
    default="all",
    show_default=True,
    help="Which to show. All are compiled at run time (jit), none is in the wheel (aot).",
)
@json_option
@reports_errors
def module_status(detailed, kept, as_json):
    """Say how many kernels of each op's variants are compiled, in the cache of this user."""
    takes = {
        "all": lambda row: True, "jit": lambda row: bool(row["launchers"]), "aot": lambda row: False,
        "compiled": lambda row: row["compiled"] > 0,
        "not-compiled": lambda row: bool(row["launchers"]) and not row["compiled"],
    }  # fmt: skip
    rows = [row for row in _modules() if takes[kept](row)]
    if as_json:
        return print_json(rows)
    columns = ["module", "variant", "compiled", *(["launchers"] if detailed else [])]
    print_table(
        "Status",
        columns,
        [[", ".join(row[c]) if c == "launchers" else row[c] for c in columns] for row in rows],
        ("compiled",),
    )
    click.echo(f"{len(rows)} variants, {sum(row['compiled'] for row in rows)} compiled kernels")


@click.command("export-compile-commands")
@click.argument("path", required=False, default="compile_commands.json", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The file; replaces PATH.")
@json_option
@reports_errors
def export_compile_commands(path, output, as_json):
    """Write the compile commands of C++ sources to PATH: an empty list, for there are none."""
    path = output or path
    path.write_text(json.dumps([]) + "\n")
    if as_json:
        return print_json({"path": str(path), "commands": 0})
    click.echo(f"wrote 0 commands to {path}: there is no C++ to compile, {_AHEAD}")


@click.command("collect-env")
@json_option
@reports_errors
def collect_env(as_json):
    """Print a report of the environment, for issues."""
    # A module of that name is public, and runs by itself.
    module = importlib.import_module("flashinfer.collect_env")
    report = module.collect_env_info()
    if as_json:
        return print_json(report)
    click.echo(module.format_report(report))

"""`flashinfer precompile`"""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from flashinfer._core import env, kernel_cache
from flashinfer._core.checks import require
from flashinfer._core.precompile import cached_jobs, catalog_jobs, precompile
from flashinfer._core.target import GPU_ARCHS
from flashinfer.cli.output import json_option, near, print_json, print_table, reports_errors
from flashinfer.ops import all_ops


@click.command("precompile")
@click.option("--arch", required=True, help=f"Architectures, separated by commas: {','.join(GPU_ARCHS)}.")
@click.option("--op", "names", multiple=True, help="Only this op, as `explain` lists it; may be given again.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder for the kernels, to be named in {env.PRECOMPILED_DIR.name}; default: the cache.",
)
@click.option(
    "--from-cache",
    "base",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Compile what the cache under this folder holds (what a run met) in place of the ops' catalogs.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Import a module whose functions kernels of --from-cache call; nothing else that an entry names is imported.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes; default: one per core.")
@json_option
@reports_errors
def command(arch, names, out, base, imports, workers, as_json):
    """Compile kernels for named architectures; needs no GPU. Exit status 1 if a kernel did not compile.

    All ops have about 600 kernels on one architecture: some 5 minutes on two cores. --op names one op of `explain`.

    \b
    Example: flashinfer precompile --arch 90a,100a --op decode --out kernels
    """
    archs = arch.split(",")
    for name in archs:
        require(name in GPU_ARCHS, "--arch", repr(name), near(name, list(GPU_ARCHS)))
    ops = all_ops()
    for name in names:
        require(name in ops, "--op", repr(name), near(name, list(ops)))
    ops = {name: op for name, op in ops.items() if not names or name in names}
    for module in imports:
        import_module(module)
    jobs = list(catalog_jobs(ops, archs) if base is None else cached_jobs(ops, archs, base))
    with _Progress(jobs) as progress:
        records = precompile(jobs, out, workers, on_record=progress.report, imports=imports)
    failed = [record for record in records if record.error]
    if as_json:
        print_json([asdict(record) for record in records])
    else:
        _print_summary(records)
        click.echo(f"Kernels: {kernel_cache.root_of(out or env.workspace_base())}")
    if failed:
        raise SystemExit(1)


class _Progress:
    """Count and remaining time on stderr: a bar in a terminal, elsewhere a line every tenth. A failure is a line."""

    def __init__(self, jobs):
        self._count = len({(job.module, job.launcher, job.arch, job.problem, job.config) for job in jobs})
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("kernels", total=self._count)
        self._done, self._began = 0, time.monotonic()

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *exception):
        self._bar.stop()

    def report(self, record) -> None:
        self._done += 1
        if record.error:
            self._console.print(Text(f"{record.launcher} sm_{record.arch} failed: {record.error}"))
        self._bar.advance(self._task)
        before, now = ((10 * done) // self._count for done in (self._done - 1, self._done))
        if not self._console.is_terminal and now > before:
            left = (time.monotonic() - self._began) / self._done * (self._count - self._done)
            left_text = f"{left / 60:.0f} minutes" if left >= 100 else f"{left:.0f} s"
            self._console.print(Text(f"{self._done} of {self._count} kernels, about {left_text} left"))


def _print_summary(records) -> None:
    rows = []
    for launcher, arch in sorted({(r.launcher, r.arch) for r in records}):
        mine = [r for r in records if (r.launcher, r.arch) == (launcher, arch)]
        good = [r for r in mine if not r.error]
        shared, registers = (max((getattr(r, name) for r in good), default="") for name in ("shared", "registers"))
        rows.append([launcher, arch, len(good), len(mine) - len(good), shared, registers])
    columns = ["kernel", "arch", "compiled", "failed", "most shared bytes", "most registers"]
    print_table("Compiled kernels", columns, rows, tuple(columns[2:]))

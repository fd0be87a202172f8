"""`flashinfer bench`"""

from __future__ import annotations

import datetime
import json
import platform
import runpy
import sys
from pathlib import Path

import click

from flashinfer.cli import checkout, figures
from flashinfer.cli.output import json_option, print_json, print_table, reports_errors
from flashinfer.version import SUPPORTED, __version__, installed


def rooms(folder: Path) -> dict[str, Path]:
    """Room path -> its benchmark module, for every bench_<room>.py under `folder`."""
    return {
        str(path.parent.relative_to(folder)): path
        for path in sorted(folder.rglob("bench_*.py"))
        if path.stem == f"bench_{path.parent.name}"
    }


def load(module: Path) -> dict:
    """The names of a benchmark module, which imports its siblings as a script does."""
    sys.path.insert(0, str(module.parent))
    try:
        return runpy.run_path(str(module))
    finally:
        sys.path.remove(str(module.parent))


def run(room: str, module: Path, device, match: str = "", peer: str | None = None) -> dict:
    """Measure the cases of one room whose names contain `match`; see `flashinfer.testing.bench`.

    A module that has `outside(names, device, peer)` measures peers in other processes with it, after its cases.
    """
    import torch

    from flashinfer.testing.bench import ceilings, measure, settle

    names = load(module)
    if peer is not None and "outside" not in names:
        raise ValueError(f"--peer: got {peer!r}; allowed: none, {room} has no peer in a process of its own")
    cases = [case for case in names["cases"](device) if match in case.name]
    if not cases:
        raise ValueError(f"--match: got {match!r}; allowed: a part of the name of a case of {room}")
    ceiling = ceilings(device)
    rows = []
    for case in cases:
        rows.append(measure(case, device))
        click.echo(f"{case.name}: {figures.took(rows[-1])}", err=True)
    versions = {"flashinfer": __version__, **{name: installed(name) for name in SUPPORTED}}
    if "outside" in names:
        answer = names["outside"]([case.name for case in cases], device, peer)
        versions.update(answer["versions"])
        for row in rows:
            row["peers"].update(answer["rows"][row["name"]])
    settle(rows, cases, ceiling)
    on_gpu = device.type == "cuda"
    return {
        "room": room,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "ceilings": ceiling,
        "cases": rows,
    }


def write(result: dict, folder: Path) -> list[Path]:
    """Write a result as JSON and, where matplotlib is installed, as a plot; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['room']}-{result['device']}".replace("/", "-").replace(" ", "-").lower()
    data = folder / f"{stem}.json"
    data.write_text(json.dumps(result, indent=1) + "\n")
    if not figures.draw(result, data.with_suffix(".png")):
        click.echo("no plot: pip install 'flashinfer-python[bench]' brings matplotlib", err=True)
        return [data]
    return [data, data.with_suffix(".png")]


@click.command("bench")
@click.argument("room", required=False)
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--match", default="", help="Only cases whose name contains this.")
@click.option(
    "--peer",
    help="Where a peer that shares our import name is installed, as in PYTHONPATH; it is measured in its own process.",
)
@click.option(
    "--benchmarks",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of benchmarks; default: the checkout's.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of results; default: results beside them."
)
@json_option
@reports_errors
def command(room, device, match, peer, benchmarks, out, as_json):
    """Measure a room's kernels against this device's ceilings and its peers, and keep the result as JSON and a plot.

    ROOM is a path such as norm or attention/decode; without it, the rooms that have a benchmark are listed.
    """
    folder = benchmarks or checkout.folder("benchmarks")
    found = rooms(folder)
    if room is None:
        if as_json:
            return print_json(sorted(found))
        return print_table("Benchmarks", ["room"], [[name] for name in found])
    if room not in found:
        raise ValueError(f"room: got {room!r}; allowed: {', '.join(found)}")
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    result = run(room, found[room], device, match, peer)
    files = write(result, out or folder / "results")
    if as_json:
        return print_json(result)
    ceiling = ", ".join(f"{name} {value:.3g}" for name, value in result["ceilings"].items())
    columns, rows = figures.table(result["cases"])
    print_table(f"{room} on {result['device']} ({ceiling}; above 1x ours is faster)", columns, rows)
    for file in files:
        click.echo(str(file))

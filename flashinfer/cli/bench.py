"""`flashinfer bench`"""

from __future__ import annotations

import datetime
import json
import platform
import runpy
import sys
from pathlib import Path

import click

from flashinfer.cli import checkout
from flashinfer.cli.output import json_option, print_json, print_table, reports_errors
from flashinfer.version import SUPPORTED, __version__, installed


def rooms(folder: Path) -> dict[str, Path]:
    """Room path -> its benchmark module, for every bench_<room>.py under `folder`."""
    return {
        str(path.parent.relative_to(folder)): path
        for path in sorted(folder.rglob("bench_*.py"))
        if path.stem == f"bench_{path.parent.name}"
    }


def run(room: str, module: Path, device, match: str = "") -> dict:
    """Measure the cases of one room whose names contain `match`; see `flashinfer.testing.bench`."""
    import torch

    from flashinfer.testing.bench import ceilings, measure

    cases = [case for case in runpy.run_path(str(module))["cases"](device) if match in case.name]
    if not cases:
        raise ValueError(f"--match: got {match!r}; allowed: a part of the name of a case of {room}")
    ceiling = ceilings(device)
    rows = []
    with click.progressbar(cases, label=room, file=sys.stderr) as progress:
        for case in progress:
            rows.append(measure(case, device, ceiling))
    on_gpu = device.type == "cuda"
    return {
        "room": room,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "versions": {"flashinfer": __version__, **{name: installed(name) for name in SUPPORTED}},
        "ceilings": ceiling,
        "cases": rows,
    }


def write(result: dict, folder: Path) -> list[Path]:
    """Write a result as JSON and, where matplotlib is installed, as a plot; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['room']}-{result['device']}".replace("/", "-").replace(" ", "-").lower()
    data = folder / f"{stem}.json"
    data.write_text(json.dumps(result, indent=1) + "\n")
    try:
        import matplotlib.figure
    except ModuleNotFoundError:
        click.echo("no plot: pip install 'flashinfer-python[bench]' brings matplotlib", err=True)
        return [data]
    picture = data.with_suffix(".png")
    _plot(result, matplotlib.figure.Figure(figsize=(9, 1.5 + 0.4 * len(result["cases"])))).savefig(picture, dpi=120)
    return [data, picture]


def _plot(result, figure):
    """Device time of every case, beside its peers; shorter is better."""
    cases = result["cases"]
    peers = sorted({name for case in cases for name in case["peers"]})
    axes = figure.subplots()
    height = 0.8 / (1 + len(peers))
    for k, name in enumerate(["flashinfer", *peers]):
        times = [case["us"] if k == 0 else case["peers"].get(name, {}).get("us", 0) for case in cases]
        bars = axes.barh([i + k * height for i in range(len(cases))], times, height, label=name)
        axes.bar_label(bars, [f"{t:.1f}" if t else "" for t in times], padding=3, fontsize="small")
    axes.set_yticks([i + height * len(peers) / 2 for i in range(len(cases))], [case["name"] for case in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    # a decade to the left of the shortest bar, so that it is seen; room for its number on the right
    times = [case["us"] for case in cases] + [peer["us"] for case in cases for peer in case["peers"].values()]
    axes.set_xlim(min(times) / 10, max(times) * 10)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("microseconds per call, logarithmic (less is better)")
    axes.set_title(f"{result['room']} on {result['device']}, {result['date']}")
    axes.legend(loc="lower right")
    figure.tight_layout()
    return figure


def _table(cases: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows: the measures that any case has, then time and ratio of each peer."""
    titles = {
        "us": "us",
        "gb_s": "GB/s",
        "tflop_s": "TFLOP/s",
        "percent": "% of ceiling",
        "host_us": "host us",
        "plan_us": "plan us",
    }
    titles = {key: title for key, title in titles.items() if any(key in case for case in cases)}
    peers = sorted({name for case in cases for name in case["peers"]})
    rows = []
    for case in cases:
        numbers = [f"{case[key]:.1f}" if key in case else "" for key in titles]
        rivals = [case["peers"].get(name) for name in peers]
        cells = [f"{r['us']:.1f} us, {r['ratio']:.2f}x" if r else "" for r in rivals]
        rows.append([case["name"], *numbers, *cells])
    return ["case", *titles.values(), *peers], rows


@click.command("bench")
@click.argument("room", required=False)
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--match", default="", help="Only cases whose name contains this.")
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
def command(room, device, match, benchmarks, out, as_json):
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
    result = run(room, found[room], device, match)
    files = write(result, out or folder / "results")
    if as_json:
        return print_json(result)
    ceiling = ", ".join(f"{name} {value:.3g}" for name, value in result["ceilings"].items())
    columns, rows = _table(result["cases"])
    print_table(
        f"{room} on {result['device']} ({ceiling}; ratio above 1: ours is faster)", columns, rows, tuple(columns[1:])
    )
    for file in files:
        click.echo(str(file))

"""`flashinfer bench`"""

from __future__ import annotations

import datetime
import gc
import json
import platform
from dataclasses import replace
from pathlib import Path

import click

from flashinfer.cli import checkout, figures, peers, plots
from flashinfer.cli.output import json_option, near, print_json, print_table, reports_errors
from flashinfer.version import SUPPORTED, __version__, installed


# Bytes that are more than a row leaves, unless its objects refer to each other.
_LEFT_BEHIND = 1 << 30


def rooms(folder: Path) -> dict[str, Path]:
    """Room path -> its benchmark module, for every bench_<room>.py under `folder`."""
    return {
        str(path.parent.relative_to(folder)): path
        for path in sorted(folder.rglob("bench_*.py"))
        if path.stem == f"bench_{path.parent.name}"
    }


class Room:
    """The benchmark of a path and those under it, as one table; a group of rows for each.

    Attributes
    ----------
    cases : list of (Path, Case)
        The rows whose names contain `match`, with the module that each comes from.
    modules : list of dict
        The names of those modules. One may have `ceilings(device)`, more ceilings, and `versions(device)`, what else a
        reader has to know of the run: of several devices, how many "ranks" there were.
    """

    def __init__(self, name: str, found: dict[str, Path], device, match: str):
        from flashinfer.testing.bench import load

        self.name, self.device = name, device
        parts = {part: module for part, module in found.items() if f"{part}/".startswith(f"{name}/")}
        if not parts:
            raise ValueError(f"room: got {name!r}; allowed: {near(name, list(found))}, or a folder of them")
        self.cases, self.modules = [], []
        for part, module in parts.items():
            names = load(module)
            inner = part.removeprefix(name).lstrip("/")
            chosen = [case for case in names["cases"](device) if match in case.name]
            for case in chosen:
                self.cases.append((module, replace(case, group=", ".join(filter(None, (inner, case.group))))))
            if chosen:
                self.modules.append(names)
        rows = [case.name for _, case in self.cases]
        if not rows:
            raise ValueError(f"--match: got {match!r}; allowed: a part of the name of a case of {name}")
        twice = {case for case in rows if rows.count(case) > 1}
        if twice:
            raise ValueError(f"room: {name!r} has rows of the same name: {', '.join(sorted(twice))}")

    def rows(self) -> peers.Rows:
        """Names and kinds by module, for a peer's process."""
        wanted: peers.Rows = {}
        for module, case in self.cases:
            wanted.setdefault(module, {})[case.name] = case.kind
        return wanted

    def measure(self, ceiling: dict) -> dict:
        """The result without peers of other processes; see `flashinfer.testing.bench`."""
        import torch

        from flashinfer.testing.bench import measure, settle

        rows = []
        for _, case in self.cases:
            rows.append(measure(case, self.device))
            click.echo(f"{case.name}: {figures.took(rows[-1])}", err=True)
            if self.device.type == "cuda" and torch.cuda.memory_allocated(self.device) > _LEFT_BEHIND:
                gc.collect()
        ceiling = ceiling | self._from_modules("ceilings")
        settle(rows, [case for _, case in self.cases], ceiling)
        versions = {"flashinfer": __version__, **{name: installed(name) for name in SUPPORTED}}
        if self.device.type == "cuda":
            versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        versions |= self._from_modules("versions")
        ranks = versions.get("ranks", 1)
        return {
            "room": self.name,
            "device": f"{ranks} x {device_name(self.device)}" if ranks > 1 else device_name(self.device),
            "date": datetime.date.today().isoformat(),
            "versions": versions,
            "ceilings": ceiling,
            "cases": rows,
        }

    def _from_modules(self, function: str) -> dict:
        found = {}
        for names in self.modules:
            if function in names:
                found |= names[function](self.device)
        return found

    def measure_peer(self, result: dict, peer: str, tune: bool, limit: float) -> None:
        """Add FlashInfer's times to `result`."""
        import torch

        from flashinfer.testing.bench import settle

        if self.device.type == "cuda":
            # the card's memory is the peer's now
            gc.collect()
            torch.cuda.empty_cache()
        version, found = peers.run(self.rows(), self.device, peer, tell_peer, tune=tune, limit=limit)
        result["versions"]["flashinfer (peer)"] = f"{version}, tuned" if tune else version
        for row, (module, case) in zip(result["cases"], self.cases):
            for way, answer in found[module][case.name].items():
                row["peers"]["flashinfer" + (f"/{way}" if way else "")] = answer
        settle(result["cases"], [case for _, case in self.cases], result["ceilings"])


def device_name(device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def tell_peer(name: str, ways: dict) -> None:
    for way, answer in ways.items():
        note = f"built in {answer['built']:g} s" if "built" in answer else figures.took(answer)
        click.echo(f"{name}, flashinfer{f'/{way}' if way else ''}: {note}", err=True)


def build(chosen: list[Room], device, peer: str) -> dict:
    """Build what the peer needs for these rooms, all in one process; room -> row -> way -> {"built"} or {"error"}."""
    wanted: peers.Rows = {}
    for room in chosen:
        for module, kinds in room.rows().items():
            wanted.setdefault(module, {}).update(kinds)
    _, found = peers.run(wanted, device, peer, tell_peer, build=True)
    return {room.name: {case.name: found[module][case.name] for module, case in room.cases} for room in chosen}


def write(result: dict, folder: Path, plot: bool = True) -> list[Path]:
    """Write a result as JSON and, where matplotlib is installed, as a plot; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['room']}-{result['device']}".replace("/", "-").replace(" ", "-").lower()
    data = folder / f"{stem}.json"
    data.write_text(json.dumps(result, indent=1) + "\n")
    if not plot:
        return [data]
    if not plots.draw(result, data.with_suffix(".svg")):
        click.echo("no plot: pip install 'flashinfer-python[bench]' brings matplotlib", err=True)
        return [data]
    return [data, data.with_suffix(".svg")]


@click.command("bench")
@click.argument("room", nargs=-1)
@click.option("--device", default=None, help="Default: cuda if there is one, else cpu.")
@click.option("--match", default="", help="Only cases whose name contains this.")
@click.option("--peer", help="Where FlashInfer is installed, as in PYTHONPATH; it is measured in its own process.")
@click.option("--build-peer", is_flag=True, help="Only let --peer build what the rooms need; measure nothing.")
@click.option("--tune-peer", is_flag=True, help="Let --peer's tuner choose, by measuring, before it is timed.")
@click.option("--peer-limit", default=120.0, show_default=True, help="Seconds that --peer may take for one row.")
@click.option(
    "--benchmarks",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of benchmarks; default: the checkout's.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of results; default: results beside them, but nothing in the checkout's without a GPU.",
)
@json_option
@reports_errors
def command(room, device, match, peer, build_peer, tune_peer, peer_limit, benchmarks, out, as_json):
    """Measure rooms' kernels against this device's ceilings and their peers; keep each result as JSON and a plot.

    ROOM is a path such as norm or attention/mla, or a folder of them such as gemm, which is one result; without any,
    the rooms that have a benchmark are listed.
    """
    folder = benchmarks or checkout.folder("benchmarks")
    found = rooms(folder)
    if not room:
        return print_json(sorted(found)) if as_json else print_table("Benchmarks", ["room"], [[name] for name in found])
    if peer is None and (build_peer or tune_peer):
        raise ValueError(f"--peer: got none; allowed with {'--build-peer' if build_peer else '--tune-peer'}: a folder")
    import torch

    from flashinfer.testing.ceilings import ceilings

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = [Room(name, found, device, match) for name in room]
    if build_peer:
        built = build(chosen, device, peer)
        return print_json(built) if as_json else None
    # Results in a checkout are of GPUs.
    place = out or (folder / "results" if benchmarks or device.type == "cuda" else None)
    if device.type != "cuda":
        kept = f"they are kept in {place}" if place else "nothing is written without --out"
        click.echo(f"No GPU: these are times of plain torch on a CPU, which say nothing of kernels; {kept}.", err=True)
    ceiling, results = ceilings(device), []
    for one in chosen:
        result = one.measure(ceiling)
        if peer is not None and place is not None:
            # what is measured is kept, whatever happens to the peer
            write(result, place, plot=False)
        if peer is not None:
            one.measure_peer(result, peer, tune_peer, peer_limit)
        results.append(result)
        show(result, [] if place is None else write(result, place), as_json)
    if as_json:
        print_json(results[0] if len(results) == 1 else results)


def show(result: dict, files: list[Path], as_json: bool) -> None:
    if as_json:
        return
    ceiling = ", ".join(f"{name} {value:.3g}" for name, value in result["ceilings"].items())
    columns, rows = figures.table(result["cases"])
    print_table(f"{result['room']} on {result['device']} ({ceiling}; above 1x ours is faster)", columns, rows)
    for file in files:
        click.echo(str(file))

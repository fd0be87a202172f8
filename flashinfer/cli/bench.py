"""`flashinfer bench`"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import click

from flashinfer.cli import checkout, figures, peers, plots
from flashinfer.cli.output import device_of, json_option, print_json, print_table, reports_errors
from flashinfer.testing.rooms import Room, rooms, write
from flashinfer.version import SUPPORTED, __version__, installed

# A row that leaves more bytes allocated has objects in reference cycles, which the collector has to free.
_LEFT_BEHIND = 1 << 30


def wanted(room: Room) -> peers.Rows:
    """Names and kinds by module, for FlashInfer's process."""
    rows: peers.Rows = {}
    for module, case in room.cases:
        rows.setdefault(module, {})[case.name] = case.kind
    return rows


def measure(room: Room, ceiling: dict) -> dict:
    """The result without peers of other processes; see `flashinfer.testing.bench`."""
    import torch

    from flashinfer.testing import bench

    rows = []
    for _, case in room.cases:
        rows.append(bench.measure(case, room.device))
        click.echo(f"{case.name}: {figures.took(rows[-1])}", err=True)
        if room.device.type == "cuda" and torch.cuda.memory_allocated(room.device) > _LEFT_BEHIND:
            gc.collect()
    versions = {"flashinfer": __version__, **{name: installed(name) for name in SUPPORTED}}
    result = room.described(rows, ceiling, versions)
    bench.settle(rows, [case for _, case in room.cases], result["ceilings"])
    return result


def measure_peer(room: Room, result: dict, peer: str, tune: bool, limit: float) -> None:
    """Add FlashInfer's times to `result`."""
    from flashinfer.testing.bench import settle

    leave_memory(room.device)
    version, found = peers.run(wanted(room), room.device, peer, tell_peer, tune=tune, limit=limit)
    result["versions"]["flashinfer (peer)"] = f"{version}, tuned" if tune else version
    for row, (module, case) in zip(result["cases"], room.cases):
        for way, answer in found[module][case.name].items():
            row["peers"]["flashinfer" + (f"/{way}" if way else "")] = answer
    settle(result["cases"], [case for _, case in room.cases], result["ceilings"])


def measure_packed(chosen: list[Room], results: list[dict], packed: Path, folder: Path, limit: float, keep) -> None:
    """Add the times of packed libraries to the results, in turn with ours; `keep(result)` after every row."""
    from flashinfer.testing.bench import settle
    from flashinfer.testing.interleaved import Beside, Library
    from flashinfer.testing.interleaved import packed as libraries_of

    device = chosen[0].device
    leave_memory(device)
    libraries = [Library(name, *place, device) for name, place in libraries_of(packed, folder).items()]
    rows = [row for room in chosen for row in room.cases if row[1].problem]
    beside = Beside(libraries, device, limit * (len(rows) + 1), limit, lambda line: click.echo(line, err=True))
    try:
        broken = beside.warm(rows)
        for room, result in zip(chosen, results):
            result["not_loaded"] = broken
            for row, (module, case) in zip(result["cases"], room.cases):
                if beside.takes(case):
                    beside.measure(module, case, row)
                    settle(result["cases"], [case for _, case in room.cases], result["ceilings"])
                    keep(result)
    finally:
        beside.end()


def leave_memory(device) -> None:
    """The card's memory is another process's now."""
    import torch

    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def tell_peer(name: str, ways: dict) -> None:
    for way, answer in ways.items():
        note = f"built in {answer['built']:g} s" if "built" in answer else figures.took(answer)
        click.echo(f"{name}, flashinfer{f'/{way}' if way else ''}: {note}", err=True)


def build(chosen: list[Room], device, peer: str) -> dict:
    """Build what the peer needs for these rooms, all in one process; room -> row -> way -> {"built"} or {"error"}."""
    rows: peers.Rows = {}
    for room in chosen:
        for module, kinds in wanted(room).items():
            rows.setdefault(module, {}).update(kinds)
    _, found = peers.run(rows, device, peer, tell_peer, build=True)
    return {room.name: {case.name: found[module][case.name] for module, case in room.cases} for room in chosen}


def keep(result: dict, folder: Path) -> list[Path]:
    """Write a result as JSON and, where matplotlib is installed, as a plot; returns the files."""
    data = write(result, folder)
    if not plots.draw(result, data.with_suffix(".svg")):
        click.echo("no plot: pip install 'flashinfer-python[bench]' brings matplotlib", err=True)
        return [data]
    return [data, data.with_suffix(".svg")]


@click.command("bench")
@click.argument("room", nargs=-1)
@click.option("--device", default=None, help="cpu, cuda or cuda:N; default: the first GPU, else cpu.")
@click.option("--match", default="", help="Only cases whose name contains this.")
@click.option("--peer", help="Where FlashInfer is installed, as in PYTHONPATH; it is measured in its own process.")
@click.option("--build-peer", is_flag=True, help="Only let --peer build what the rooms need; measure nothing.")
@click.option("--tune-peer", is_flag=True, help="Let --peer's tuner choose, by measuring, before it is timed.")
@click.option("--peers", "packed", type=click.Path(file_okay=False, exists=True, path_type=Path),
              help="Folder of packed libraries that have an adapter; each is measured in turn with ours.")
@click.option("--peer-limit", default=120.0, show_default=True, help="Seconds that a peer may take for one row.")
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
def command(room, device, match, peer, build_peer, tune_peer, packed, peer_limit, benchmarks, out, as_json):
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
    from flashinfer.testing.ceilings import ceilings

    device = device_of(device)
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
        results.append(measure(one, ceiling))
        if place is not None:
            # what is measured is kept, whatever happens to the peers
            write(results[-1], place)
        if peer is not None:
            measure_peer(one, results[-1], peer, tune_peer, peer_limit)
    if packed is not None:
        step = partial(write, folder=place) if place else lambda result: None
        measure_packed(chosen, results, packed, folder, peer_limit, step)
    for result in results:
        show(result, [] if place is None else keep(result, place), as_json)
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

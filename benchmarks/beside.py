"""Rows beside packed libraries, without the command line's packages: it needs torch, Triton and this repository.

`python benchmarks/beside.py ROOM... --peers FOLDER` measures the rows of the rooms that a library of the folder takes,
each in turn with ours, as `flashinfer bench ROOM --peers FOLDER` does beside all the rest. `--all` measures the other
rows too. A result is written after every row, so that what is cut loses nothing that was measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flashinfer.testing.bench import settle
from flashinfer.testing.ceilings import ceilings
from flashinfer.testing.interleaved import Beside, Library, packed
from flashinfer.testing.rooms import Room, rooms, write
from flashinfer.version import SUPPORTED, __version__, installed

HERE = Path(__file__).resolve().parent


def words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", nargs="+")
    parser.add_argument("--peers", type=Path, required=True, help="folder of packed libraries")
    parser.add_argument("--names", default="", help="only these of them, separated by commas")
    parser.add_argument("--all", action="store_true", help="rows that no library takes, too")
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--seconds", type=float, default=540.0, help="all that may pass")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a library for one answer")
    parser.add_argument("--benchmarks", type=Path, default=HERE)
    return parser.parse_args()


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    asked = words()
    device = torch.device(asked.device)
    names = tuple(filter(None, asked.names.split(",")))
    found = packed(asked.peers, asked.benchmarks, names)
    libraries = [Library(name, *place, device) for name, place in found.items()]
    beside = Beside(libraries, device, asked.seconds, asked.limit, tell)
    versions = {"flashinfer": __version__, **{name: installed(name) for name in SUPPORTED}}
    try:
        chosen = [Room(name, rooms(asked.benchmarks), device, asked.match) for name in asked.room]
        broken = beside.warm([row for room in chosen for row in room.cases if row[1].problem])
        ceiling = ceilings(device)
        for room in chosen:
            if not asked.all:
                room.cases = [(module, case) for module, case in room.cases if beside.takes(case)]
            name = f"{room.name} beside libraries"
            result = room.described([], ceiling, versions) | {"room": name, "not_loaded": broken}
            write(result, asked.out)
            for at, (module, case) in enumerate(room.cases):
                row = {"name": case.name, "group": case.group, "headline": case.headline, "peers": {}}
                beside.measure(module, case, row)
                result["cases"].append(row)
                settle(result["cases"], [case for _, case in room.cases[: at + 1]], result["ceilings"])
                write(result, asked.out)
            show(result)
    finally:
        beside.end()


def show(result: dict) -> None:
    """A line a row and library: ours, theirs, and how many times faster ours is."""
    print(f"{result['room']} on {result['device']}; ratio above 1: ours is faster")
    for name, why in result["not_loaded"].items():
        print(f"  {name}: {why}")
    for row in result["cases"]:
        reached = f", {row['percent']:.0f} % of {row['bound']}" if "bound" in row else ""
        print(f"  {row['name']}: {took(row)}{reached}")
        for name, peer in row["peers"].items():
            ratio = f"{peer['ratio']:.2f} x  " if "ratio" in peer else ""
            print(f"    {name:40s} {ratio}{took(peer)}" + (f", {peer['driven']}" if "driven" in peer else ""))


def took(row: dict) -> str:
    if "us" not in row:
        return row.get("error", "no time")
    return f"{row['us']:.1f} us" + (f" ({row['p10']:.1f} to {row['p90']:.1f})" if "p10" in row else "")


if __name__ == "__main__":
    main()

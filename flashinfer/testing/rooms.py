"""The benchmarks of a checkout, by room, and the format of their results. It needs neither click nor rich."""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import replace
from pathlib import Path

import torch

from flashinfer.testing.bench import load


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

    def __init__(self, name: str, found: dict[str, Path], device: torch.device, match: str):
        self.name, self.device = name, device
        parts = {part: module for part, module in found.items() if f"{part}/".startswith(f"{name}/")}
        if not parts:
            raise ValueError(f"room: got {name!r}; allowed: {', '.join(sorted(found))}, or a folder of them")
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

    def described(self, rows: list[dict], ceiling: dict[str, float], versions: dict) -> dict:
        """The result of those rows: `versions` and what torch, the card and the modules add to them, and ceilings."""
        if self.device.type == "cuda":
            versions = versions | {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        versions = versions | self._from_modules("versions")
        ranks = versions.get("ranks", 1)
        card = device_name(self.device)
        return {
            "room": self.name,
            "device": f"{ranks} x {card}" if ranks > 1 else card,
            "date": datetime.date.today().isoformat(),
            "versions": versions,
            "ceilings": ceiling | self._from_modules("ceilings"),
            "cases": rows,
        }

    def _from_modules(self, function: str) -> dict:
        found = {}
        for names in self.modules:
            if function in names:
                found |= names[function](self.device)
        return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def write(result: dict, folder: Path) -> Path:
    """Write a result as JSON; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['room']}-{result['device']}".replace("/", "-").replace(" ", "-").lower()
    file = folder / f"{stem}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(file)
    return file

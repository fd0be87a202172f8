"""Shows the results of benchmarks: as tables, and as the figures of docs/performance.md.

`python -m flashinfer.cli.figures [--check]` writes the figures of docs/performance.md, which stand between two markers,
from the headline rows of every JSON file under benchmarks/results, and draws docs/plots: a panel for each file and one
chart of all ratios.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import click

from flashinfer.cli import checkout, plots
from flashinfer.cli.plots import time

BEGIN = "<!-- figures: written by `python -m flashinfer.cli.figures` -->"
END = "<!-- end of figures -->"
PAGE, PLOTS = Path("docs", "performance.md"), Path("docs", "plots")
# Below this ratio a row is listed as slower. The same kernel differs by 2 % from one run to the next.
LIMIT = 0.98
SLOWER = "Every measured row that another library does faster, those without a place in the tables below included."


def families(rows: list[dict]) -> list[str]:
    """Names of the libraries among the peers: what stands before the slash."""
    return sorted({name.split("/")[0] for row in rows for name in row["peers"]})


def best(row: dict, family: str) -> tuple[str, dict]:
    """The fastest way through a library, or one that failed, or ("", {})."""
    ways = [(name, peer) for name, peer in row["peers"].items() if name.split("/")[0] == family]
    name, peer = min(ways, key=lambda way: way[1].get("us", float("inf")), default=("", {}))
    return name.partition("/")[2], peer


def took(row: dict) -> str:
    """The time of a row, or why it has none."""
    return time(row["us"]) if "us" in row else row["error"].split("\n")[0][:120]


def speed(row: dict) -> str:
    """In the unit of the nearer ceiling."""
    if row.get("bound") == "copy":
        return f"{row['gb_s'] / 1e3:.3g} TB/s"
    if row.get("bound") == "link":
        return f"{row['link_gb_s']:.3g} GB/s"
    if "bound" not in row:
        return ""
    rate = row["tflop_s"]
    return f"{rate:.0f} TFLOP/s" if rate >= 1000 else f"{rate:.3g} TFLOP/s"


def _percent(row: dict) -> str:
    return f"{row['percent']:.1f} %" if "percent" in row else ""


def _reached(row: dict) -> str:
    names = []
    for target in row["targets"]:
        reached = target["reached"]
        in_us = target["text"].startswith("<=")
        number = "no figure" if reached is None else time(reached) if in_us else f"{reached:.3g}"
        names.append(f"{number}, {'met' if target['met'] else 'missed'}")
    return "; ".join(names)


def _rival(row: dict, family: str) -> str:
    way, peer = best(row, family)
    if "us" not in peer:
        return peer.get("error", "").split("\n")[0][:40]
    ratio = f"{peer['ratio']:.2f}x, " if "ratio" in peer else ""
    return f"{ratio}{time(peer['us'])}" + (f" ({way})" if way else "")


def table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows; columns that no row fills are left out. A ratio above 1: ours is faster."""
    rivals = families(rows)
    columns = ["case", "time", "speed", "of ceiling", "host us", "plan us", "target", "reached", *rivals]
    lines = []
    for row in rows:
        host = [f"{row[key]:.1f}" if key in row else "" for key in ("host_us", "plan_us")]
        wanted = "; ".join(target["text"] for target in row["targets"])
        cells = [row["name"], took(row), speed(row), _percent(row), *host, wanted, _reached(row)]
        lines.append(cells + [_rival(row, family) for family in rivals])
    kept = [i for i, _ in enumerate(columns) if any(line[i] for line in lines)]
    return [columns[i] for i in kept], [[line[i] for i in kept] for line in lines]


def results_of(folder: Path) -> list[tuple[str, dict]]:
    """(file's stem, result) of every result under `folder`."""
    return [(file.stem, json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]


def latest(results: Iterable[dict]) -> list[dict]:
    """The results without libraries beside a row that a newer result of the same card has."""
    results, seen, kept = list(results), set(), {}
    for at in sorted(range(len(results)), key=lambda at: results[at]["date"], reverse=True):
        result, measured, cases = results[at], set(), []
        for row in result["cases"]:
            beside = {name: (result["device"], row["name"], plots.library(name)) for name in row["peers"]}
            cases.append(row | {"peers": {name: row["peers"][name] for name, key in beside.items() if key not in seen}})
            measured |= set(beside.values())
        seen |= measured
        kept[at] = result | {"cases": cases}
    return [kept[at] for at in range(len(results))]


def headlines(result: dict) -> list[dict]:
    return [row for row in result["cases"] if row["headline"]]


def quoted(folder: Path) -> str:
    """Markdown of what is slower than another library, and of the headlines of every result under `folder`."""
    results = results_of(folder)
    parts = [_slower(latest(result for _, result in results))]
    parts += [_quoted(stem, result) for stem, result in results if headlines(result)]
    return "\n\n".join(part for part in parts if part)


def _slower(results: Iterable[dict]) -> str:
    """Markdown of every row that another library does in less than `LIMIT` of the time, the worst first; or ""."""
    found = []
    for result in results:
        # A row in one shot and in two is one call, which takes the faster.
        best_of: dict[str, tuple[float, str, dict]] = {}
        for row in result["cases"]:
            name, peer = plots.fastest(row, {library for library in families([row]) if library not in plots.NO_PEERS})
            call = row["name"].replace("one shot, ", "").replace("two shots, ", "")
            if peer and peer["ratio"] > best_of.get(call, (0,))[0]:
                best_of[call] = peer["ratio"], name, row
        found += [(ratio, name, row, result) for ratio, name, row in best_of.values() if ratio < LIMIT]
    if not found:
        return ""
    lines = ["| row | card | time | the fastest other library | its time | ratio |", "| --- " * 6 + "|"]
    for ratio, name, row, result in sorted(found, key=lambda item: item[0]):
        card, others = plots.short(result["device"]), time(row["peers"][name]["us"])
        library, _, way = name.partition("/")
        named = library + (f" ({way})" if way else "")
        lines.append(f"| {row['name']} | {card} | {time(row['us'])} | {named} | {others} | {ratio:.2f}x |")
    text = f"{SLOWER}\nRows within {100 - LIMIT * 100:.0f} % of the other library are left out."
    return "\n".join(["## What is slower than a peer", "", text, "", *lines])


def _quoted(stem: str, result: dict) -> str:
    rows = headlines(result)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    ceiling = result["ceilings"]
    more = f", FP8 {ceiling['fp8_tflop_s']:.0f} TFLOP/s" if "fp8_tflop_s" in ceiling else ""
    more += f", link {ceiling['link_gb_s']:.0f} GB/s" if "link_gb_s" in ceiling else ""
    rivals = families(rows)
    lines = [["", "time", "speed", "of ceiling", *(f"against {family}" for family in rivals)]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        cells = [row["name"], time(row["us"]) if "us" in row else "refused", speed(row), _percent(row)]
        for family in rivals:
            way, peer = best(row, family)
            cells.append((f"{peer['ratio']:.2f}x" + (f" ({way})" if way else "")) if "ratio" in peer else "")
        lines.append(cells)
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"## {result['room'].capitalize()}, {result['device']}\n\n"
        f"{result['date']}; {versions}. Ceilings in the run: copy {ceiling['copy_gb_s'] / 1e3:.2f} TB/s, bf16 matmul "
        f"{ceiling['bf16_tflop_s']:.0f} TFLOP/s{more}.\n\n{text}\n\n![{result['room']}](plots/{stem}.svg)"
    )


def generated(root: Path) -> str:
    """docs/performance.md with its figures as benchmarks/results has them."""
    before, rest = (root / PAGE).read_text().split(BEGIN)
    after = rest.split(END)[1]
    body = quoted(root / "benchmarks" / "results")
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 if docs/performance.md is out of date.")
def main(check):
    results = checkout.folder("benchmarks") / "results"
    root = results.parent.parent
    text = generated(root)
    if check:
        stale = (root / PAGE).read_text() != text
        click.echo(f"{PAGE} is stale" if stale else f"{PAGE} is up to date")
        raise SystemExit(stale)
    (root / PAGE).write_text(text)
    shown = [(stem, result) for stem, result in results_of(results) if headlines(result)]
    drawn = [plots.draw(result, root / PLOTS / f"{stem}.svg") for stem, result in shown]
    drawn.append(plots.draw_ratios(latest(result for _, result in shown), root / PLOTS / "ratios.svg"))
    if not all(drawn):
        raise SystemExit("no plot: pip install 'flashinfer-python[bench]' brings matplotlib")
    click.echo(f"wrote {PAGE} and {len(drawn)} plots")


if __name__ == "__main__":
    main()

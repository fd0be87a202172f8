"""Shows the results of benchmarks: as a table, as a plot, and as the figures that README.md quotes.

`python -m flashinfer.cli.figures [--check]` draws the plot of every JSON file under benchmarks/results again and writes
README.md's figures, which stand between two markers, from the rows that are marked as headlines.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from flashinfer.cli import checkout

BEGIN = "<!-- figures: written by `python -m flashinfer.cli.figures` -->"
END = "<!-- end of figures -->"
_OURS = "this package"


def families(rows: list[dict]) -> list[str]:
    """Names of the libraries among the peers: what stands before the slash."""
    return sorted({name.split("/")[0] for row in rows for name in row["peers"]})


def best(row: dict, family: str) -> tuple[str, dict]:
    """The fastest way through a library, or one that failed, or ("", {})."""
    ways = [(name, peer) for name, peer in row["peers"].items() if name.split("/")[0] == family]
    name, peer = min(ways, key=lambda way: way[1].get("us", float("inf")), default=("", {}))
    return name.partition("/")[2], peer


def time(us: float) -> str:
    """Microseconds for a reader: 4.53 us, 372 us, 1.25 ms, 3.1 s."""
    for limit, size, unit in ((1e3, 1, "us"), (1e5, 1e3, "ms")):
        if us < limit:
            return f"{us / size:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def took(row: dict) -> str:
    """The time of a row, or why it has none."""
    return time(row["us"]) if "us" in row else row["error"].split("\n")[0][:120]


def speed(row: dict) -> str:
    """In the unit of the nearer ceiling."""
    if row.get("bound") == "copy":
        return f"{row['gb_s'] / 1e3:.3g} TB/s"
    if row.get("bound") == "link":
        return f"{row['link_gb_s']:.3g} GB/s"
    return f"{row['tflop_s']:.3g} TFLOP/s" if "bound" in row else ""


def _percent(row: dict) -> str:
    return f"{row['percent']:.1f} %" if "percent" in row else ""


def _reached(row: dict) -> str:
    told = []
    for target in row["targets"]:
        reached = target["reached"]
        in_us = target["text"].startswith("<=")
        number = "no figure" if reached is None else time(reached) if in_us else f"{reached:.3g}"
        told.append(f"{number}, {'met' if target['met'] else 'missed'}")
    return "; ".join(told)


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


def plot(result: dict, figure):
    """A panel for each group: percent of the nearer ceiling where its rows have one, else time; ours above peers."""
    from matplotlib.patches import Patch

    groups: dict[str, list[dict]] = {}
    for row in result["cases"]:
        groups.setdefault(row["group"], []).append(row)
    figure.set_size_inches(10, sum(0.5 + _height(rows) for rows in groups.values()) + 0.6)
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=[_height(rows) for rows in groups.values()])
    colours = {name: f"C{k}" for k, name in enumerate([_OURS, *families(result["cases"])])}
    for axes, (group, rows) in zip(panels[:, 0], groups.items()):
        _panel(axes, rows, colours)
        axes.set_title(group, loc="left", fontsize="medium")
    inch = 1 / figure.get_figheight()
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize="small")
    figure.suptitle(f"{result['room']} on {result['device']}, {result['date']}", x=0.02, ha="left", va="top",
                    y=1 - 0.1 * inch)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.1 * inch))
    return figure


def _height(rows):
    return 0.3 + len(rows) * (0.08 + 0.075 * (1 + len(families(rows))))


def _panel(axes, rows, colours):
    shares = all("percent" in row or "us" not in row for row in rows)
    names = [_OURS, *families(rows)]
    height = 0.84 / len(names)
    for k, name in enumerate(names):
        values = [_bar(row, name, shares) for row in rows]
        bars = axes.barh([i + k * height for i in range(len(rows))], values, height, color=colours[name])
        written = [(f"{v:.0f}" if shares else time(v)) if v else "" for v in values]
        axes.bar_label(bars, written, padding=2, fontsize=5)
    axes.set_yticks([i + height * (len(names) - 1) / 2 for i in range(len(rows))], [row["name"] for row in rows])
    axes.tick_params(axis="y", labelsize="small")
    axes.set_ylim(len(rows) - 0.1, -0.3)
    if shares:
        axes.axvline(100, color="grey", linewidth=0.8)
        label = "percent of the nearest ceiling: copy bandwidth, matrix product or link (more is better)"
    else:
        axes.set_xscale("log")
        axes.margins(x=0.1)
        label = "microseconds, logarithmic (less is better)"
    axes.set_xlabel(label, fontsize="small")


def _bar(row: dict, name: str, shares: bool) -> float:
    """Length of a bar; 0 where there is no time, or no ceiling of ours to set a peer's time against."""
    us = row.get("us") if name == _OURS else best(row, name)[1].get("us")
    if us is None or not shares:
        return us or 0
    return row["percent"] * row["us"] / us if "percent" in row else 0


def draw(result: dict, file: Path) -> bool:
    """Write the plot; False where matplotlib is not installed."""
    try:
        import matplotlib.figure
    except ModuleNotFoundError:
        return False
    plot(result, matplotlib.figure.Figure()).savefig(file, dpi=120)
    return True


def quoted(folder: Path) -> str:
    """Markdown of the headlines of every result under `folder`."""
    parts = []
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        rows = [row for row in result["cases"] if row["headline"]]
        if rows:
            parts.append(_quoted(result, rows, f"{folder.parent.name}/{folder.name}/{file.stem}"))
    return "\n\n".join(parts)


def _quoted(result: dict, rows: list[dict], stem: str) -> str:
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
        f"{result['room'].capitalize()} on {result['device']}, {result['date']}; {versions}. Ceilings in the run: copy "
        f"{ceiling['copy_gb_s'] / 1e3:.2f} TB/s, bf16 matmul {ceiling['bf16_tflop_s']:.0f} TFLOP/s{more}. Above 1x "
        f"this package is faster. All rows, with each peer's time: [{stem}.json]({stem}.json).\n\n{text}\n\n"
        f"![{result['room']}]({stem}.png)"
    )


def generated(root: Path) -> str:
    """README.md with its figures as benchmarks/results has them."""
    before, rest = (root / "README.md").read_text().split(BEGIN)
    after = rest.split(END)[1]
    body = quoted(root / "benchmarks" / "results")
    return f"{before}{BEGIN}\n{body}\n{END}{after}" if body else f"{before}{BEGIN}\n{END}{after}"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 if README.md is out of date.")
def main(check):
    results = checkout.folder("benchmarks") / "results"
    readme = results.parent.parent / "README.md"
    text = generated(readme.parent)
    stale = readme.read_text() != text
    if check:
        click.echo("stale README.md" if stale else "README.md is up to date")
        raise SystemExit(stale)
    readme.write_text(text)
    for file in sorted(results.glob("*.json")):
        if not draw(json.loads(file.read_text()), file.with_suffix(".png")):
            raise SystemExit("no plot: pip install 'flashinfer-python[bench]' brings matplotlib")
        click.echo(f"wrote {file.with_suffix('.png').name}")


if __name__ == "__main__":
    main()

"""Plots of benchmark results, as SVG that reads at 900 pixels: a panel for a room, and one chart of all ratios."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

OURS = "this package"
# One colour for one library, in every plot.
COLOURS = {
    OURS: "#1b5fa8",
    "flashinfer": "#e07b00",
    "cudnn": "#5b9e3a",
    "flash": "#8e5bb5",
    "torch": "#c0392b",
    "nccl": "#7a5230",
    "nccl and torch": "#a8866a",
    "torch bf16": "#d98880",
    "triton-kernels": "#17a589",
    "fla": "#c2185b",
    "flashkda": "#5c6bc0",
}
_OTHER = "#7f8c8d"
# What is no other library's kernel for the row: a ceiling, or Python that launches one product after another.
NO_PEERS = ("copy of its bytes", "torch loop, bf16")
# Of rows that are all above this percentage of a ceiling the percentage is shown, of others the time.
_NEAR = 25
_INCHES = 9


def library(name: str) -> str:
    """The library of a peer: what stands before the slash."""
    return name.split("/")[0]


def fastest(row: dict, names=None) -> tuple[str, dict]:
    """The fastest peer with a time, of the libraries `names` or of all; ("", {}) where none has one."""
    timed = [(name, peer) for name, peer in row["peers"].items() if "us" in peer and "ratio" in peer]
    timed = [(name, peer) for name, peer in timed if names is None or library(name) in names]
    return min(timed, key=lambda item: item[1]["us"], default=("", {}))


def draw(result: dict, file: Path) -> bool:
    """Write the panel of a result: its headline rows, or all where none is one. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    rows = [row for row in result["cases"] if row["headline"]] or result["cases"]
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    heights = [0.55 + sum(_height(row) for row in group) for group in groups.values()]
    figure = Figure(figsize=(_INCHES, sum(heights) + 0.9), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    shown = {OURS}
    for axes, (group, group_rows) in zip(panels, groups.items(), strict=True):
        shown |= _panel(axes, group, group_rows)
    _legend(figure, shown)
    figure.suptitle(f"{result['room']} on {result['device']}, {result['date']}", fontsize=11)
    return _save(figure, file)


def draw_ratios(results: list[dict], file: Path) -> bool:
    """Write the chart of every headline row's speed against the fastest other library. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    points = []
    for result in results:
        for row in (row for row in result["cases"] if row["headline"]):
            libraries = {library(name) for name in row["peers"]} - set(NO_PEERS)
            name, peer = fastest(row, libraries)
            if peer:
                points.append((_named(result, row), peer["ratio"], library(name)))
    figure = Figure(figsize=(_INCHES, 0.21 * len(points) + 1.3), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1)
    for place, (_, ratio, name) in enumerate(points):
        colour = COLOURS.get(name, _OTHER)
        axes.plot([1, ratio], [place, place], color=colour, linewidth=1.2)
        axes.plot(ratio, place, "o", color=colour, markersize=5)
        side = 1 if ratio >= 1 else -1
        axes.annotate(f"{ratio:.2f}", (ratio, place), (6 * side, 0), textcoords="offset points", fontsize=7.5,
                      va="center", ha="left" if side > 0 else "right")  # fmt: skip
    axes.set_yticks(range(len(points)), [label for label, _, _ in points], fontsize=7.5)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xscale("log")
    low, high = (f(ratio for _, ratio, _ in points) for f in (min, max))
    axes.set_xlim(min(low * 0.65, 0.5), max(high * 1.3, 2))
    marks = [mark for mark in (0.2, 0.5, 1, 2, 5, 10) if axes.get_xlim()[0] <= mark <= axes.get_xlim()[1]]
    axes.set_xticks(marks, [f"{mark:g} x" for mark in marks], fontsize=8)
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("speed against the fastest other library in the same run", fontsize=8)
    _legend(figure, {name for _, _, name in points}, "fastest other library:")
    return _save(figure, file)


def _named(result: dict, row: dict) -> str:
    device = result["device"].replace("NVIDIA ", "").replace(" 80GB HBM3", "")
    return row["name"] + (f" ({device})" if result["room"] == "comm" else "")


def _libraries(row: dict) -> list[str]:
    return [OURS, *sorted({library(name) for name, peer in row["peers"].items() if "us" in peer})]


def _height(row: dict) -> float:
    return 0.14 * len(_libraries(row)) + 0.1


def _panel(axes, group: str, rows: list[dict]) -> set[str]:
    """Bars of a group's rows; returns the libraries shown."""
    near = all(row.get("percent", 0) >= _NEAR for row in rows)
    at, places, shown, longest = 0.0, [], set(), 0.0
    for row in rows:
        names = _libraries(row)
        for name in names:
            us = row.get("us") if name == OURS else fastest(row, {name})[1].get("us")
            if us is None or "us" not in row:
                continue
            value = row["percent"] * row["us"] / us if near else us
            axes.barh(at, value, 0.13, color=COLOURS.get(name, _OTHER))
            axes.annotate(f"{value:.0f} %" if near else _time(us), (value, at), (3, 0), textcoords="offset points",
                          fontsize=7, va="center")  # fmt: skip
            longest = max(longest, value)
            shown.add(name)
            at += 0.14
        places.append(at - 0.07 * len(names) - 0.07)
        at += 0.1
    axes.set_yticks(places, ["\n".join(wrap(row["name"], 42)) for row in rows], fontsize=8)
    axes.set_ylim(at, -0.15)
    axes.set_title(group, loc="left", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    if near:
        axes.axvline(100, color="grey", linewidth=0.8)
        axes.set_xlim(0, max(longest, 100) * 1.12)
        ceilings = {"copy": "copy bandwidth", "matmul": "matrix product", "link": "link"}
        bounds = sorted({ceilings[row["bound"]] for row in rows})
        axes.set_xlabel(f"percent of the card's {' or '.join(bounds)}; more is better", fontsize=8)
    else:
        axes.set_xscale("log")
        axes.set_xlim(right=max(longest, 1e-3) * 8)
        axes.set_xlabel("microseconds, logarithmic; less is better", fontsize=8)
    return shown


def _time(us: float) -> str:
    for limit, size, unit in ((1e3, 1, "us"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / size:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def _legend(figure, names: set[str], title: str = "") -> None:
    from matplotlib.patches import Patch

    order = [*(name for name in COLOURS if name in names), *sorted(names - COLOURS.keys())]
    handles = [Patch(color=COLOURS.get(name, _OTHER), label=name) for name in order]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), fontsize=8, title=title,
                  title_fontsize=8)  # fmt: skip


def _save(figure, file: Path) -> bool:
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    # The same bytes for the same figures: no date, and ids from a fixed salt.
    same = {"metadata": {"Date": None}} if file.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "flashinfer", "svg.fonttype": "none"}):
        figure.savefig(file, format=file.suffix[1:], dpi=100, **same)
    return True

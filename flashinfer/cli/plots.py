"""Plots of benchmark results, as SVG that reads at 900 pixels: panels for a room, and one chart of all ratios."""

from __future__ import annotations

from math import floor, log10
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
    "fa3": "#d4a017",
    "vllm-ssm": "#00838f",
    "vllm-moe": "#4dd0e1",
    "flashmla": "#9e9d24",
    "deepgemm": "#37474f",
    "naive": "#b0bec5",
}
_OTHER = "#7f8c8d"
# What is no other library's kernel for the row: a ceiling, or Python that launches one product after another.
NO_PEERS = ("copy of its bytes", "torch loop, bf16")
# Of rows that are all above this percentage of a ceiling the percentage is shown, of others the time.
_NEAR = 25
_INCHES = 9
_SMALL = 8.5
_BAR = 0.17


def library(name: str) -> str:
    """The library of a peer: what stands before the slash."""
    return name.split("/")[0]


def fastest(row: dict, names=None) -> tuple[str, dict]:
    """The fastest peer with a time, of the libraries `names` or of all; ("", {}) where none has one."""
    timed = [(name, peer) for name, peer in row["peers"].items() if "us" in peer and "ratio" in peer]
    timed = [(name, peer) for name, peer in timed if names is None or library(name) in names]
    return min(timed, key=lambda item: item[1]["us"], default=("", {}))


def short(device: str) -> str:
    """A card's name without its maker: H100 for NVIDIA H100 80GB HBM3."""
    return device.replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def draw(result: dict, file: Path) -> bool:
    """Write the panels of a result: its headline rows, or all where none is one. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    rows = [row for row in result["cases"] if row["headline"]] or result["cases"]
    groups: dict[tuple[str, bool], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["group"], row.get("percent", 0) >= _NEAR), []).append(row)
    heights = [0.6 + sum(_height(row) for row in group) for group in groups.values()]
    figure = Figure(figsize=(_INCHES, sum(heights) + 1.2), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    shown = {OURS}
    for axes, ((group, near), group_rows) in zip(panels, groups.items(), strict=True):
        shown |= _panel(axes, group_rows, near)
        axes.set_title(group if near else f"{group}, latency", loc="left", fontsize=10)
    _legend(figure, shown)
    figure.suptitle(f"{result['room']} on {result['device']}, {result['date']}\n{_ceilings(result)}", fontsize=10)
    return _save(figure, file)


def _ceilings(result: dict) -> str:
    """What 100 % stands for."""
    ceilings = result["ceilings"]
    known = [f"copy {ceilings['copy_gb_s'] / 1e3:.2f} TB/s", f"bf16 product {ceilings['bf16_tflop_s']:.0f} TFLOP/s"]
    known += [f"FP8 product {ceilings['fp8_tflop_s']:.0f} TFLOP/s"] if "fp8_tflop_s" in ceilings else []
    known += [f"link {ceilings['link_gb_s']:.0f} GB/s"] if "link_gb_s" in ceilings else []
    return "100 % is the ceiling in the same run: " + ", ".join(known)


def draw_ratios(results: list[dict], file: Path) -> bool:
    """Write the chart of every headline row's speed against the fastest other library. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    # (label, ratio, library) of a row; (label, None, "") of the room and card above its rows.
    lines: list[tuple[str, float | None, str]] = []
    for result in results:
        points = []
        for row in (row for row in result["cases"] if row["headline"]):
            name, peer = fastest(row, {library(name) for name in row["peers"]} - set(NO_PEERS))
            if peer:
                points.append((row["name"], peer["ratio"], library(name)))
        lines += [(f"{result['room']}, {short(result['device'])}", None, ""), *points] if points else []
    figure = Figure(figsize=(_INCHES, 0.21 * len(lines) + 1.3), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1)
    drawn = [(place, *line) for place, line in enumerate(lines) if line[1] is not None]
    for place, _, ratio, name in drawn:
        colour = COLOURS.get(name, _OTHER)
        axes.plot([1, ratio], [place, place], color=colour, linewidth=1.6)
        axes.plot(ratio, place, "o", color=colour, markersize=5)
        side = 1 if ratio >= 1 else -1
        axes.annotate(f"{ratio:.2f}", (ratio, place), (6 * side, 0), textcoords="offset points", fontsize=_SMALL,
                      va="center", ha="left" if side > 0 else "right")  # fmt: skip
    axes.set_yticks(range(len(lines)), [label for label, _, _ in lines], fontsize=_SMALL)
    for tick, (_, ratio, _) in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("bold" if ratio is None else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xscale("log")
    low, high = (f(ratio for _, _, ratio, _ in drawn) for f in (min, max))
    axes.set_xlim(min(low * 0.65, 0.5), max(high * 1.5, 2))
    marks = [mark for mark in (0.2, 0.5, 1, 2, 5, 10) if axes.get_xlim()[0] <= mark <= axes.get_xlim()[1]]
    axes.set_xticks(marks, [f"{mark:g} x" for mark in marks], fontsize=_SMALL)
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("speed / that of the fastest other library; above 1 ours is faster", fontsize=_SMALL)
    _legend(figure, {name for *_, name in drawn}, "fastest other library:")
    return _save(figure, file)


def _libraries(row: dict) -> list[str]:
    return [OURS, *sorted({library(name) for name, peer in row["peers"].items() if "us" in peer})]


def _height(row: dict) -> float:
    return _BAR * len(_libraries(row)) + 0.12


def _panel(axes, rows: list[dict], near: bool) -> set[str]:
    """Bars of rows, in percent of their ceilings or in microseconds; returns the libraries shown."""
    at, places, shown, values = 0.0, [], set(), []
    for row in rows:
        names = _libraries(row)
        for name in names:
            us = row.get("us") if name == OURS else fastest(row, {name})[1].get("us")
            if us is None or "us" not in row:
                continue
            value = row["percent"] * row["us"] / us if near else us
            text = f"{value:.0f} %" if near else time(us)
            text += f" of {_bound(row)}" if near and name == OURS else ""
            axes.barh(at, value, _BAR - 0.01, color=COLOURS.get(name, _OTHER))
            axes.annotate(text, (value, at), (3, 0), textcoords="offset points", fontsize=_SMALL, va="center",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3})  # fmt: skip
            values.append(value)
            shown.add(name)
            at += _BAR
        places.append(at - _BAR * (len(names) + 1) / 2)
        at += 0.12
    axes.set_yticks(places, ["\n".join(wrap(row["name"], 42)) for row in rows], fontsize=_SMALL)
    axes.set_ylim(at - 0.05, -0.15)
    if near:
        axes.axvline(100, color="grey", linewidth=0.8, zorder=0)
        axes.set_xlim(0, max(*values, 100) * 1.35)
        axes.set_xlabel("percent of the ceiling; more is better", fontsize=_SMALL)
    elif values:
        # A logarithmic axis has no zero: it begins at a power of ten, so that the shortest bar has a length, too.
        axes.set_xscale("log")
        first, last = floor(log10(min(values) / 2)), log10(max(values) * 8)
        axes.set_xlim(10.0**first, 10.0**last)
        marks = [10.0**power for power in range(first, floor(last) + 1)]
        axes.set_xticks(marks, [time(mark) for mark in marks])
        axes.set_xlabel("time, logarithmic; less is better", fontsize=_SMALL)
    axes.tick_params(axis="x", labelsize=_SMALL)
    return shown


def _bound(row: dict) -> str:
    """The nearer ceiling of a row."""
    product = "FP8 product" if row.get("operands") == "fp8" else "bf16 product"
    return {"copy": "copy", "link": "link", "matmul": product}[row["bound"]]


def time(us: float) -> str:
    """Microseconds for a reader: 4.53 us, 372 us, 1.25 ms, 3.1 s."""
    for limit, size, unit in ((1e3, 1, "us"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / size:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def _legend(figure, names: set[str], title: str = "") -> None:
    from matplotlib.patches import Patch

    order = [*(name for name in COLOURS if name in names), *sorted(names - COLOURS.keys())]
    handles = [Patch(color=COLOURS.get(name, _OTHER), label=name) for name in order]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), fontsize=_SMALL, title=title,
                  title_fontsize=_SMALL)  # fmt: skip


def _save(figure, file: Path) -> bool:
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    # The same bytes for the same figures: no date, and ids from a fixed salt.
    same = {"metadata": {"Date": None}} if file.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "flashinfer", "svg.fonttype": "none"}):
        figure.savefig(file, format=file.suffix[1:], dpi=100, **same)
    return True

"""What the demo shows: the texts as they come, then the figures."""

from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import flashinfer

from .engine import Engine, Request


def serve_in_view(console: Console, engine: Engine, requests: list[Request], tokenizer) -> None:
    """Serve under a progress bar for each request, with the end of its text, and one for all; then print the texts."""

    def text_of(request):
        return " ".join(tokenizer.decode(request.output, skip_special_tokens=True).split())

    end = TextColumn("{task.fields[end]}", markup=False)
    columns = TextColumn("{task.description:>3}"), BarColumn(16), MofNCompleteColumn(), end
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bars = [progress.add_task(str(i), total=r.max_new_tokens, end="") for i, r in enumerate(requests)]
        whole = progress.add_task("all", total=sum(request.max_new_tokens for request in requests), end="")

        def after_step():
            for bar, request in zip(bars, requests):
                progress.update(bar, completed=len(request.output), end=text_of(request)[-(console.width - 40) :])
            progress.update(whole, completed=sum(len(request.output) for request in requests))
            progress.refresh()

        def in_lines():
            nonlocal shown
            made, most = (sum(lengths) for lengths in zip(*((len(r.output), r.max_new_tokens) for r in requests)))
            if made * 8 // most > shown:
                shown = made * 8 // most
                console.print(f"{made} of {most} tokens")

        # In a pipe, a line at each eighth.
        shown = 0
        engine.serve(requests, after_step if console.is_terminal else in_lines)
    for number, request in enumerate(requests):
        prompt = f"{number} ({len(request.prompt)} prompt tokens, {request.shared} of them shared): "
        console.print(Text.assemble((prompt, "bold"), text_of(request)))


def engine_figures(engine: Engine) -> dict[str, dict]:
    """Speed, pages and variants. Steps with any prompt token in them count as prefill, the others as decode."""
    phases = {"prefill + decode": [], "decode": [], "all": engine.steps}
    for step in engine.steps:
        phases["prefill + decode" if step.prompt_tokens else "decode"].append(step)
    figures: dict[str, dict] = {}
    for name, steps in phases.items():
        row: dict[str, float] = {"steps": len(steps), "seconds": sum(step.seconds for step in steps)}
        row["prompt tokens"] = sum(step.prompt_tokens for step in steps)
        row["new tokens"] = sum(step.new_tokens for step in steps)
        for kind in ("prompt tokens", "new tokens"):
            row[f"{kind}/s"] = row[kind] / max(row["seconds"], 1e-9)
        figures[name] = row
    pages = {
        "tokens in a page": engine.cache.page_size,
        "in the cache": engine.cache.max_num_pages,
        "used, at most": max(step.used_pages for step in engine.steps),
        "shared by two requests or more, at most": max(step.shared_pages for step in engine.steps),
        "needed without sharing": sum(engine.cache.pages_needed(r.sequence.length) for r in engine.finished),
        "prompt tokens": sum(len(request.prompt) for request in engine.finished),
        "prompt tokens found in shared pages": sum(request.shared for request in engine.finished),
    }
    ran = Counter((choice.op, choice.variant.name, choice.target.arch) for choice in flashinfer.explain())
    variants = {f"{op}: {name}": {"arch": arch, "problems": n} for (op, name, arch), n in sorted(ran.items())}
    return {"engine": figures, "KV pages": pages, "variants that ran, from explain()": variants}


def show(console: Console, title: str, rows: dict) -> None:
    """A table with one row for each key, whose value is a figure or a dict of figures."""
    rows = {name: row if isinstance(row, dict) else {"": row} for name, row in rows.items()}
    table = Table("", title=title, title_justify="left", title_style="bold")
    for name in next(iter(rows.values())):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def status(console: Console, text: str):
    """A spinner beside the text; in a pipe the text alone, so that a reader knows what takes the time."""
    if not console.is_terminal:
        console.print(text)
    return console.status(text)


def summary(figures: dict) -> str:
    """What a run has shown, in one sentence."""
    text = f"In short: {figures['engine']['all']['new tokens/s']:.0f} tokens/s"
    speeds = figures.get("against Hugging Face", {})
    others = [f"{row['tokens/s']:.0f} ({name})" for name, row in speeds.items() if name.startswith("generate")]
    if others:
        text += f", and {' and '.join(others)} of Hugging Face"
    rows = figures.get("greedy tokens that agree", {}).values()
    if rows:
        text += f"; of {min(row['of'] for row in rows)} greedy tokens {min(row['agree'] for row in rows)} agree"
    return text + "."

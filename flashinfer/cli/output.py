"""How commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import difflib
import functools
import json
import sys

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 240

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def reports_errors(function):
    """Of a command: an error ends it with its message and no traceback.

    The status is 2 for a value that is not allowed (ValueError), as click's own is, and 1 for what went wrong (OSError,
    RuntimeError). With --json the message is printed as {"error": ...}.
    """

    @functools.wraps(function)
    def run(*args, as_json, **kwargs):
        try:
            return function(*args, as_json=as_json, **kwargs)
        except (ValueError, OSError, RuntimeError) as error:
            if as_json:
                print_json({"error": str(error)})
            else:
                click.echo(f"Error: {error}", err=True)
            raise SystemExit(2 if isinstance(error, ValueError) else 1) from error

    return run


def near(given: str, allowed: list[str]) -> str:
    """The names that are allowed, after the ones that `given` may have been meant for."""
    guesses = [guess for guess in difflib.get_close_matches(given, allowed, n=3) if guess != given]
    listed = ", ".join(sorted(allowed))
    return f"(did you mean {' or '.join(guesses)}?) {listed}" if guesses else listed


def device_of(name: str | None):
    """The torch device of an option --device; without one, the first GPU, or else the CPU."""
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    allowed = ["cpu", *(["cuda"] if gpus else []), *gpus]
    if name is not None and name not in allowed:
        why = "" if gpus else "; torch finds no GPU, `flashinfer doctor` says why"
        raise ValueError(f"--device: got {name!r}; allowed: {', '.join(allowed)}{why}")
    return torch.device(name or ("cuda" if gpus else "cpu"))


def print_json(document) -> None:
    click.echo(json.dumps(document, indent=1))


def print_table(title: str, columns: list[str], rows: list[list], numbers: tuple[str, ...] = ()) -> None:
    """A table on stdout; columns named in `numbers` are aligned to the right. Cells are any values; None is empty."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    # what is written to a file or a pipe has no width to be folded to
    Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE).print(table)

"""`flashinfer demo`"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from flashinfer.cli import checkout
from flashinfer.cli.output import json_option, print_json, reports_errors

_STDERR = 2  # the file descriptor


@click.command("demo", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
@reports_errors
def command(arguments, as_json):
    """Serve a real model with this package, and compare with Hugging Face's `generate`.

    Needs a source checkout and the `demo` extra; `make demo` sets up both. ARGUMENTS go to examples/serve
    (`flashinfer demo -- --help` lists them). With --json the figures are printed, and the texts go to stderr.
    """
    root = checkout.folder("examples").parent
    run = [sys.executable, "-m", "examples.serve", *arguments]
    if not as_json:
        raise SystemExit(subprocess.run(run, cwd=root, check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        status = subprocess.run([*run, "--json", str(figures)], cwd=root, stdout=_STDERR, check=False).returncode
        print_json(json.loads(figures.read_text()) if figures.exists() else {"error": f"exit status {status}"})
    raise SystemExit(status)

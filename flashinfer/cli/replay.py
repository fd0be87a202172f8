"""`flashinfer replay`"""

from pathlib import Path

import click

from flashinfer.api_logging import replay
from flashinfer.cli.output import device_of, json_option, print_json, print_table, reports_errors


@click.command("replay")
@click.option(
    "--dir",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder of dumps, as FLASHINFER_DUMP_DIR named it, or that of one call.",
)
@click.option("--device", help="Where a GPU's tensors go: cpu, cuda or cuda:N; default: the first GPU, else cpu.")
@json_option
@reports_errors
def command(folder, device, as_json):
    """Run calls again that FLASHINFER_LOGLEVEL=10 wrote down; exit status 1 if one fails or gives another result.

    Nothing in a dump is executed or unpickled: it holds names of this package's public functions, plain values and
    tensors.
    """
    found = replay(folder, device_of(device))
    if as_json:
        print_json(found)
    else:
        columns = ["call", "function", "state", "detail"]
        print_table("Replayed calls", columns, [[row[c] for c in columns] for row in found])
    if any(row["state"] in ("failed", "different") for row in found) or all(r["state"] == "skipped" for r in found):
        raise SystemExit(1)

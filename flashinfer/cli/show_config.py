"""`flashinfer show-config`"""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path

import click

import flashinfer
from flashinfer._core import env, kernel_cache
from flashinfer.cli.output import json_option, print_json, print_table, reports_errors
from flashinfer.version import SUPPORTED, installed, supported_range


def collect() -> dict:
    """Versions, devices, environment variables and the cache, as plain data."""
    return {
        "flashinfer": flashinfer.__version__,
        "path": str(Path(flashinfer.__file__).parent),
        "python": platform.python_version(),
        "packages": {name: {"found": installed(name), "supported": supported_range(name)} for name in SUPPORTED},
        "devices": devices(),
        "environment": env.table(),
        "cache": str(kernel_cache.root_of(env.workspace_base())),
    }


def devices() -> list[dict]:
    """Name and target of every CUDA device, or of the CPU where there is none."""
    import torch

    from flashinfer._core.target import target_of

    if not torch.cuda.is_available():
        return [
            {
                "device": "cpu",
                "name": platform.processor() or platform.machine(),
                **asdict(target_of(torch.device("cpu"))),
            }
        ]
    return [
        {"device": f"cuda:{i}", "name": torch.cuda.get_device_name(i), **asdict(target_of(torch.device("cuda", i)))}
        for i in range(torch.cuda.device_count())
    ]


@click.command("show-config")
@json_option
@reports_errors
def command(as_json):
    """Print versions, devices, environment variables and the cache folder."""
    found = collect()
    if as_json:
        return print_json(found)
    rows = [["flashinfer", found["flashinfer"], found["path"]], ["python", found["python"], ""]]
    rows += [
        [name, p["found"] or "not installed", f"supported: {p['supported']}"] for name, p in found["packages"].items()
    ]
    print_table("Versions", ["package", "version", ""], rows)
    columns = ["device", "name", "arch", "sms", "smem", "l2"]
    print_table("Devices", columns, [[d[c] for c in columns] for d in found["devices"]], ("sms", "smem", "l2"))
    columns = ["name", "value", "default", "meaning"]
    print_table("Environment", columns, [[v[c] for c in columns] for v in found["environment"]])
    click.echo(f"Cache: {found['cache']}")

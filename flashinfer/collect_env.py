"""A report of the environment for issues: `python -m flashinfer.collect_env`, or `flashinfer collect-env`.

Only the standard library is imported at the top, and each section is collected on its own: a section that fails
reports its error, and the others are unaffected.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

__all__ = ["collect_env_info", "format_report", "main"]

# Distributions that are named, by the beginnings of their names.
_PACKAGES = (
    "cuda", "flashinfer", "numpy", "nvidia", "pytorch", "sglang", "sgl", "torch", "transformers", "triton", "vllm",
)  # fmt: skip
_VARIABLES = ("CUDA", "FLASHINFER", "NCCL", "SGLANG", "TORCH", "TRITON", "VLLM", "LD_LIBRARY_PATH", "PTXAS")
# Parts of names whose values are not printed.
_SECRET = ("KEY", "PASSWORD", "SECRET", "TOKEN")
_SECONDS = 30


def collect_env_info() -> dict[str, dict[str, str]]:
    """Sections of the report, each with its values.

    Returns
    -------
    dict of str to dict
        Plain data. A section that cannot be had holds "error".

    Examples
    --------
    >>> from flashinfer.collect_env import collect_env_info
    >>> collect_env_info()["FlashInfer"]["version"].split("+")[0] in ("0.7.2", "0.7.2.post1")
    True
    """
    sections: tuple[tuple[str, Callable[[], dict]], ...] = (
        ("FlashInfer", _package),
        ("Platform", _platform),
        ("PyTorch", _torch),
        ("GPU", _gpus),
        ("Packages", _packages),
        ("Environment", _variables),
        ("GPU topology", _topology),
    )
    report = {}
    for title, section in sections:
        try:
            report[title] = section()
        except Exception as error:  # what is broken is what the report is for
            report[title] = {"error": f"{type(error).__name__}: {error}"}
    return report


def format_report(report: dict[str, dict[str, str]]) -> str:
    """The text of a report.

    Parameters
    ----------
    report : dict
        As `collect_env_info` gives it. Empty sections are left out.

    Returns
    -------
    str

    Examples
    --------
    >>> from flashinfer.collect_env import format_report
    >>> print(format_report({"GPU": {"name": "none"}}))
    FlashInfer environment report
    <BLANKLINE>
    GPU
    ---
    name  none
    """
    lines = ["FlashInfer environment report"]
    for title, values in report.items():
        if values:
            width = max(map(len, values))
            lines += ["", title, "-" * len(title)]
            lines += [f"{name:<{width}}  {value}" for name, value in values.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the report; as JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer.collect_env", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    report = collect_env_info()
    print(json.dumps(report, indent=1) if parser.parse_args().json else format_report(report))


def _package() -> dict:
    from flashinfer._core import cache_folders, env, kernel_cache

    cache = kernel_cache.root_of(env.workspace_base())
    count = sum(not entry["fault"] for entry in kernel_cache.entries())
    return {
        "version": cache_folders.__version__,
        "path": os.path.dirname(os.path.abspath(__file__)),
        "cache": str(cache),
        "compiled kernels": str(count),
    }


def _platform() -> dict:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "nvcc": shutil.which("nvcc") or "none (not needed)",
        "ptxas": shutil.which("ptxas") or "none (Triton brings its own)",
    }


def _torch() -> dict:
    import torch

    return {
        "version": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cuda available": str(torch.cuda.is_available()),
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else "not asked",
    }


def _gpus() -> dict:
    query = "name,compute_cap,memory.total,driver_version"
    found = {}
    for i, line in enumerate(_asked("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines()):
        found[f"gpu {i}"] = line.strip()
    return found or {"gpu": "none found"}


def _topology() -> dict:
    text = _asked("nvidia-smi", "topo", "-m")
    return {"links": "\n" + text} if text else {}


def _asked(*command: str) -> str:
    """What a tool prints; '' where it is not there, or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _packages() -> dict:
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower().startswith(_PACKAGES):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _variables() -> dict:
    named = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    hidden = {name: "(set)" for name in named if any(part in name for part in _SECRET)}
    return dict(sorted((named | hidden).items()))


if __name__ == "__main__":
    main()

"""`flashinfer doctor`"""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import platform
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

import flashinfer
from flashinfer._core import env, kernel_cache
from flashinfer.cli.output import json_option, print_json, print_table, reports_errors
from flashinfer.version import SUPPORTED, installed, is_supported, supported_range

DISTRIBUTION = "flashinfer-python"
# What upstream installs beside its own flashinfer-python; this package reads neither.
UPSTREAM_COMPANIONS = ("flashinfer-cubin", "flashinfer-jit-cache")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `state` is "ok", "warning" (works, worth knowing) or "error" (broken)."""

    subject: str
    state: str
    detail: str


def examine() -> list[Finding]:
    """Every check of this installation, in order."""
    return [finding for check in CHECKS for finding in check()]


def check_python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 10) and sys.platform == "linux"
    detail = f"{platform.python_version()} on {sys.platform}; supported: Python 3.10 and newer on Linux"
    yield Finding("python", "ok" if good else "error", detail)


def check_packages() -> Iterator[Finding]:
    for name in SUPPORTED:
        version = installed(name)
        state = "ok" if is_supported(name, version) else "error"
        yield Finding(name, state, f"{version or 'not installed'}; supported: {supported_range(name)}")


def _known_of(arch: str) -> str:
    """Whether this package's kernels have run on an architecture, or are compiled for it in tests and no more."""
    from flashinfer._core.target import GPU_ARCHS, RUN_ARCHS

    if arch in RUN_ARCHS:
        return "the tests run kernels on this architecture"
    others = ", ".join(name for name in GPU_ARCHS if name not in RUN_ARCHS)
    if arch in GPU_ARCHS:
        return "the tests compile kernels for this architecture; they were not run on it"
    return f"not tested; run: {', '.join(RUN_ARCHS)}; compiled: {others}"


def check_chips() -> Iterator[Finding]:
    """Every architecture, whether or not it is here: what is known of it."""
    from flashinfer._core.target import GPU_ARCHS

    for arch in GPU_ARCHS:
        yield Finding(f"sm_{arch}", "ok", _known_of(arch))


def check_devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        why = "this torch is built for the CPU" if torch.version.cuda is None else "torch finds no CUDA device"
        yield Finding("gpu", "ok", f"none ({why}); every op runs by its reference on the CPU")
        return
    from flashinfer._core.target import RUN_ARCHS, target_of

    for i in range(torch.cuda.device_count()):
        arch = target_of(torch.device("cuda", i)).arch
        tested = arch in RUN_ARCHS
        detail = f"{torch.cuda.get_device_name(i)}, sm_{arch}: {_known_of(arch)}"
        yield Finding(f"cuda:{i}", "ok" if tested else "warning", detail)
    try:
        yield Finding("cuda-bindings", "ok", metadata.version("cuda-bindings"))
    except metadata.PackageNotFoundError:
        yield Finding(
            "cuda-bindings", "error", "not installed, and kernels are launched through it: pip install cuda-bindings"
        )


def check_environment() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith("FLASHINFER_") and name not in {v.name for v in env.VARIABLES}:
            yield Finding(name, "warning", "is set, and this package does not read it")
    for switch in (v for v in env.VARIABLES if v.default == "0"):
        try:
            switch.is_on()
        except ValueError as error:
            yield Finding(switch.name, "error", str(error))


def check_cache() -> Iterator[Finding]:
    faults = []
    handler = logging.Handler()
    handler.emit = lambda record: faults.append(record.getMessage())
    env.logger.addHandler(handler)
    try:
        root = kernel_cache.writable_root()
    finally:
        env.logger.removeHandler(handler)
    for fault in faults:
        yield Finding("cache", "warning", fault)
    if root is None and not faults:
        yield Finding("cache", "warning", "there is no folder for compiled kernels, so they are not kept")
    elif not faults:
        broken = kernel_cache.verify()
        entries = len(kernel_cache.entries())
        yield Finding("cache", "ok", f"{root}: writable, {entries} entries")
        for entry in broken:
            yield Finding("cache", "warning", f"{entry['path']} is not used: {entry['fault']}")


def check_identity() -> Iterator[Finding]:
    """Whether the files that run are this package's, and whether the original FlashInfer is installed as well."""
    folder = Path(flashinfer.__file__).resolve().parent
    owners = [d for d in metadata.distributions() if _owns_package(d)]
    ours = [d for d in owners if d.version == flashinfer.__version__]
    for distribution in owners:
        if distribution not in ours:
            where = Path(str(distribution.locate_file("flashinfer"))).resolve()
            relation = "over" if where == folder else "beside"
            yield Finding(
                "identity",
                "error",
                f"{distribution.metadata['Name']} {distribution.version} is installed {relation} this package, "
                f"at {where}: pip uninstall {DISTRIBUTION}, then install the one you want",
            )
    for distribution in ours:
        for name in _changed_files(distribution):
            yield Finding(
                "identity", "error", f"{name} is not the file that {DISTRIBUTION} {distribution.version} installed"
            )
    for name in UPSTREAM_COMPANIONS:
        for distribution in metadata.distributions(name=name):
            yield Finding(
                "identity", "warning", f"{name} {distribution.version} is installed; this package does not use it"
            )
    yield Finding(
        "identity", "ok", f"flashinfer {flashinfer.__version__} from {folder}" + ("" if ours else " (not installed)")
    )


def _owns_package(distribution: metadata.Distribution) -> bool:
    """Whether a distribution brings the import package `flashinfer`; an editable install lists no file of it."""
    if (distribution.metadata["Name"] or "").lower().replace("_", "-") == DISTRIBUTION:
        return True
    return "\nflashinfer/__init__.py," in "\n" + (distribution.read_text("RECORD") or "")


def _changed_files(distribution: metadata.Distribution) -> Iterator[str]:
    """Python files of the package whose content is not what the distribution's RECORD states, or that are gone."""
    # distribution.files leaves out what is gone, from Python 3.12 on.
    for name, digest, _ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        algorithm, _, value = digest.partition("=")
        if not name.startswith("flashinfer/") or not name.endswith(".py") or not value:
            continue
        path = Path(str(distribution.locate_file(name)))
        if not path.is_file():
            yield name
            continue
        found = hashlib.new(algorithm, path.read_bytes()).digest()
        if urlsafe_b64encode(found).rstrip(b"=").decode() != value:
            yield name


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_devices,
    check_chips,
    check_environment,
    check_cache,
    check_identity,
)


@click.command("doctor")
@json_option
@reports_errors
def command(as_json):
    """Check the installation; exit status 1 if something is broken.

    Looks at Python, torch, Triton and cuda-bindings against the supported versions, the GPUs, the environment
    variables, the kernel cache, and whether the original FlashInfer is installed over this package or beside it.
    """
    findings = examine()
    broken = any(f.state == "error" for f in findings)
    if as_json:
        print_json({"ok": not broken, "findings": [asdict(f) for f in findings]})
    else:
        print_table("Doctor", ["subject", "state", "detail"], [[f.subject, f.state, f.detail] for f in findings])
    if broken:
        raise SystemExit(1)

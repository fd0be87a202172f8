"""Writes docs/support.md of a source checkout from the code: `python -m flashinfer.cli.support [--check]`."""

from __future__ import annotations

from pathlib import Path

import click

import flashinfer
from flashinfer._core import env
from flashinfer._core.backends import VARIANTS_OF
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.dispatch import Op
from flashinfer._core.target import GPU_ARCHS, named
from flashinfer.cli.stubs import stubs
from flashinfer.ops import all_ops
from flashinfer.version import SUPPORTED, supported_range

COMMAND = "python -m flashinfer.cli.support"

_OPS = """\
Which variant runs the problems that `flashinfer precompile` builds, by architecture. Where a count follows, the variant
takes that many of them, and the rest are refused with an error that says why."""


def ops_table() -> str:
    """For every op: the variants that take its catalog on each architecture, and the dtypes in the catalog."""
    rows = [
        [f"`{name}`", *(_on(op, arch) for arch in ("cpu", *GPU_ARCHS)), ", ".join(_dtypes(op))]
        for name, op in sorted(all_ops().items())
    ]
    return _markdown(["op", "CPU", *(f"sm_{arch}" for arch in GPU_ARCHS), "dtypes"], rows)


def _on(op: Op, arch: str) -> str:
    """The variants that run the catalog's problems on an architecture, and how many problems none takes."""
    chosen: dict[str, int] = {}
    refused = 0
    for problem in op.catalog():
        try:
            name = op.select(problem, named(arch)).variant.name
            chosen[name] = chosen.get(name, 0) + 1
        except UnsupportedConfig:
            refused += 1
    total = refused + sum(chosen.values())
    if len(chosen) == 1 and not refused:
        return next(iter(chosen))
    return ", ".join(f"{name} {n} of {total}" for name, n in chosen.items()) or "none"


def _dtypes(op: Op) -> list[str]:
    names = [field for field in op.problem_type.__dataclass_fields__ if field.endswith("dtype")]
    return sorted({getattr(problem, field) for problem in op.catalog() for field in names} - {""})


def support_page() -> str:
    """The text of docs/support.md."""
    versions = [["Python", ">=3.10"], *([name, supported_range(name)] for name in SUPPORTED), ["system", "Linux"]]
    names = [
        [f"`flashinfer.{module}`", ", ".join(f"`{name}`" for name in names)]
        for module, names in flashinfer._ROOT_NAMES.items()
        if names
    ]
    backends = [
        [f"`{name}`", "the best that takes the problem" if variants is None else ", ".join(variants)]
        for name, variants in VARIANTS_OF.items()
    ]
    variables = [[f"`{v.name}`", f"`{v.default}`" if v.default else "", v.meaning] for v in env.VARIABLES]
    return "\n".join(
        [
            "# Support",
            "",
            f"Written from the code by `{COMMAND}`; do not edit by hand.",
            "",
            "## Versions",
            "",
            _markdown(["", "supported"], versions),
            "",
            "## Ops",
            "",
            _OPS,
            "",
            ops_table(),
            "",
            "## Public names",
            "",
            _markdown(["module", "names, also at the root"], names),
            "",
            "## Backend names",
            "",
            "What the `backend` argument of a public function or wrapper admits.",
            "",
            _markdown(["backend", "variants"], backends),
            "",
            "## Environment variables",
            "",
            _markdown(["name", "default", "meaning"], variables),
            "",
        ]
    )


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def stub() -> str:
    """The text of flashinfer/__init__.pyi: what editors and type checkers cannot see in names that are lazy."""
    lines = [f'"""The root\'s names, for type checkers; written by `{COMMAND}`, do not edit by hand."""', ""]
    lines += [f"from . import {module} as {module}" for module in sorted(flashinfer._ROOT_NAMES)]
    for name, module in sorted(flashinfer._MODULE_OF.items(), key=lambda pair: (pair[1], pair[0])):
        lines.append(f"from .{module} import {name} as {name}")
    return "\n".join([*lines, "", "__version__: str", f"__all__ = {sorted(flashinfer.__all__)!r}", ""])


def generated(root: Path) -> dict[Path, str]:
    """Every generated file of a checkout, with the text that it should hold."""
    package = root / "flashinfer"
    return {root / "docs" / "support.md": support_page(), package / "__init__.pyi": stub(), **stubs(package, COMMAND)}


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit status 1 if a file is out of date.")
def main(check):
    root = Path(flashinfer.__file__).resolve().parent.parent
    stale = [path for path, text in generated(root).items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(generated(root)[path])
        click.echo(f"{'stale' if check else 'wrote'} {path.relative_to(root)}")
    if check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

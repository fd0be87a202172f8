"""Builds and tries sdist and wheel for `make wheel`: each public version that engines pin, each in a clean venv.

The sdist is built with FLASHINFER_PUBLIC_VERSION, the wheel from the sdist without it. The venv sees .venv's packages
behind its own, so that torch is not installed again, and has this package from the wheel alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "dist"
VERSIONS = ("0.7.2.post1", "0.7.2")

BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
TRY = """
import sys
from importlib import metadata
import torch
import flashinfer, flashinfer_cubin
assert flashinfer.__file__.startswith(sys.prefix), flashinfer.__file__
version = flashinfer.__version__
assert version.startswith(sys.argv[1] + "+py."), version
assert version == metadata.version("flashinfer-python") == flashinfer_cubin.__version__
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    assert "flashinfer" in {point.name for point in metadata.entry_points(group=group)}, group
x, weight = torch.randn(3, 64), torch.randn(64)
torch.testing.assert_close(flashinfer.rmsnorm(x, weight), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
print(version, "imports and runs")
"""


def run(*command, **options):
    subprocess.run([str(word) for word in command], check=True, **options)


def build(version: str) -> tuple[Path, Path]:
    """The sdist and the wheel of one public version, in build/dist."""
    with tempfile.TemporaryDirectory() as folder:
        # The build leaves metadata beside its sources, which Python would take for that of an installed version.
        others = shutil.ignore_patterns(".*", "build", "*-info")
        sources = shutil.copytree(ROOT, Path(folder) / "sources", ignore=others)
        public = {"FLASHINFER_PUBLIC_VERSION": version}
        run(sys.executable, "-c", BUILD, OUT, cwd=sources, env=os.environ | public, stdout=subprocess.DEVNULL)
    (sdist,) = OUT.glob(f"flashinfer_python-{version}+py.*.tar.gz")
    pip = sys.executable, "-m", "pip", "--disable-pip-version-check"
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", OUT, sdist)
    (wheel,) = OUT.glob(f"flashinfer_python-{version}+py.*-py3-none-any.whl")
    return sdist, wheel


def check_complete(wheel: Path) -> None:
    """Every file of the package is in the wheel."""
    files = {path for path in (ROOT / "flashinfer").rglob("*") if path.suffix in (".py", ".pyi", ".typed")}
    here = {str(path.relative_to(ROOT)) for path in files}
    with zipfile.ZipFile(wheel) as archive:
        missing = here - set(archive.namelist())
    if missing:
        raise SystemExit(f"{wheel.name}: missing {', '.join(sorted(missing))}")


def try_in_clean_venv(wheel: Path, version: str) -> None:
    """Install the wheel and nothing else; import it, run its command and an op on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        run(sys.executable, "-m", "venv", "--without-pip", venv)
        python = venv / "bin" / "python"
        pip = sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
        (packages,) = venv.glob("lib/python*/site-packages")
        others = [path for path in map(Path, sys.path) if path.name == "site-packages"]
        (packages / "others.pth").write_text("\n".join(map(str, others)) + "\n")
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run(python, "-c", TRY, version, cwd=folder, env=clean)
        run(venv / "bin" / "flashinfer", "--help", cwd=folder, env=clean, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for version in VERSIONS:
        sdist, wheel = build(version)
        check_complete(wheel)
        try_in_clean_venv(wheel, version)
        print(*(path.relative_to(ROOT) for path in (sdist, wheel)), sep="\n")

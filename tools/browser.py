"""Brings a headless Chromium for `make docs`: unpacked into .venv/chromium from the npm package @sparticuz/chromium.

The package holds one compressed program and the libraries that a bare machine lacks. It is fetched once, in the version
below. Needs npm.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import brotli

PACKAGE = "@sparticuz/chromium@147.0.0"
HOME = Path(__file__).resolve().parents[1] / ".venv" / "chromium"
PROGRAM, LIBRARIES = HOME / "chromium", HOME / "lib"


def fetch():
    """Unpack the program and its libraries; nothing where they are there."""
    if PROGRAM.exists():
        return
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", folder, PACKAGE], check=True, cwd=folder)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            for name in ("chromium.br", "al2023.tar.br"):
                data = brotli.decompress(packed.extractfile(f"package/bin/{name}").read())
                (Path(folder) / name.removesuffix(".br")).write_bytes(data)
        with tarfile.open(Path(folder) / "al2023.tar") as libraries:
            libraries.extractall(HOME, filter="data")
        program = Path(folder) / "chromium"
        program.chmod(0o755)
        program.rename(PROGRAM)


if __name__ == "__main__":
    try:
        fetch()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"no browser: {error}; npm brings {PACKAGE}")

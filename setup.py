"""The version of a build, which pyproject.toml leaves to this file.

FLASHINFER_PUBLIC_VERSION sets its public part, for engines that ask for another one (docs/engines.md).
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = (Path(__file__).parent / "flashinfer" / "version.py").read_text()
DEFAULT = re.search(r'PUBLIC = "(.+)"', SOURCE)[1]
LOCAL = re.search(r'f"\{PUBLIC\}(\+.+)"', SOURCE)[1]
ALLOWED = ("0.7.2", "0.7.2.post1")
PUBLIC = os.environ.get("FLASHINFER_PUBLIC_VERSION") or DEFAULT
if PUBLIC not in ALLOWED:
    raise SystemExit(f"FLASHINFER_PUBLIC_VERSION: got {PUBLIC!r}; allowed: {', '.join(ALLOWED)}")


class Build(build_py):
    """Writes the public part into the package that is built, where it is not the source's own."""

    def run(self):
        super().run()
        if PUBLIC != DEFAULT and not self.editable_mode:
            (Path(self.build_lib) / "flashinfer" / "_core" / "public_version.py").write_text(f'PUBLIC = "{PUBLIC}"\n')


setup(version=PUBLIC + LOCAL, cmdclass={"build_py": Build})

"""The version of a build, which pyproject.toml leaves to this file.

FLASHINFER_PUBLIC_VERSION sets its public part, for engines that ask for another one (docs/engines.md). An sdist keeps
the one that it was built with.
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SOURCE = (Path(__file__).parent / "flashinfer" / "version.py").read_text()
DEFAULT = re.search(r'PUBLIC = "(.+)"', SOURCE)[1]
LOCAL = re.search(r'f"\{PUBLIC\}(\+.+)"', SOURCE)[1]
ALLOWED = ("0.7.2", "0.7.2.post1")
WRITTEN = "flashinfer/_core/public_version.py"
IN_SDIST = Path(__file__).parent / WRITTEN
OF_SDIST = re.findall(r'"(.+)"', IN_SDIST.read_text()) if IN_SDIST.exists() else []
PUBLIC = os.environ.get("FLASHINFER_PUBLIC_VERSION") or (OF_SDIST or [DEFAULT])[0]
if PUBLIC not in ALLOWED:
    raise SystemExit(f"FLASHINFER_PUBLIC_VERSION: got {PUBLIC!r}; allowed: {', '.join(ALLOWED)}")


def write_version(folder):
    """Write the public part into the package that is built, where it is not the source's own."""
    if PUBLIC != DEFAULT:
        (Path(folder) / WRITTEN).write_text(f'PUBLIC = "{PUBLIC}"\n')


class Build(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            write_version(self.build_lib)


class Sdist(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_version(base_dir)


setup(version=PUBLIC + LOCAL, cmdclass={"build_py": Build, "sdist": Sdist})

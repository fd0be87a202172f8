"""What is measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import flashinfer


def python(script: Path, *words: str, **environment: str):
    """Run a script with the `flashinfer` of this process; the JSON document that it prints last."""
    package = Path(flashinfer.__file__).resolve().parents[1]
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(f"{script.name} ended with status {done.returncode}; what it says stands above")
    return json.loads(done.stdout.splitlines()[-1])

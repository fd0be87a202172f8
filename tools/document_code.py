"""Writes the Python code of README.md and docs/ to build/documents/, where `make types` checks it."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "documents"

if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)):
            (OUT / f"{document.stem.replace('-', '_')}_{i}.py").write_text(code)

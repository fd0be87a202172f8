"""What no file of the repository may hold."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".cfg", ""}
SKIPPED = {".git", ".venv", "build", "dist", ".pytest_cache", ".hypothesis", "__pycache__"}
# put together so that this file does not hold them
FORBIDDEN = {
    "machine path": r"(?<![\w.<$}~-])/(?:" + "work|root|tmp|opt|home" + r")/\w",
    "promise": r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b",
    "silenced check": "|".join(["type:" + " ignore", "pragma:" + " no cover", "# no" + "qa"]),
}


def files():
    """Every text file that is tracked or could be committed; where there is no git, every text file."""
    paths = list(ROOT.rglob("*"))
    if (ROOT / ".git").exists() and shutil.which("git"):
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / line for line in listed.splitlines()]
    return sorted(p for p in paths if p.is_file() and p.suffix in TEXT and not SKIPPED & set(p.relative_to(ROOT).parts))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_holds_nothing_forbidden(path):
    text = path.read_text()
    for what, pattern in FORBIDDEN.items():
        found = re.search(pattern, text)
        assert found is None, f"{what}: {found[0]!r} in line {text[: found.start()].count(chr(10)) + 1}"


def swallowed(text):
    """Line numbers of handlers of every exception whose body does nothing."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            nothing = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
            if broad and nothing:
                yield node.lineno


@pytest.mark.parametrize("path", [p for p in files() if p.suffix == ".py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_swallows_no_exception(path):
    assert list(swallowed(path.read_text())) == []


def test_the_patterns_find_what_they_should():
    assert re.search(FORBIDDEN["machine path"], "see /wo" + "rk/main")
    assert not re.search(FORBIDDEN["machine path"], "$HOME/wo" + "rk/main")
    assert re.search(FORBIDDEN["promise"], "# TO" + "DO later")
    assert list(swallowed("try:\n    f()\nexcept Exception:\n    pass\n")) == [3]

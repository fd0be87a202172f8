"""What no file of the repository may hold."""

import ast
import io
import re
import shutil
import subprocess
import tokenize
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


# -- words ------------------------------------------------------------------------------------------------------------

# Words of an old dialect, as whole words of a name (told, is_told, ToldAgain) and of prose. CONTRIBUTING's glossary and
# the field have others: published, read, slot, retry, opaque, split, work item, K slice, spill, number format.
OLD_NAMES = {"told", "anew", "twin", "twins", "tale", "board", "boards", "piece", "pieces", "form", "forms"}
OLD_WORDS = re.compile(
    "|".join(
        r"\b" + words + r"\b"
        for words in (
            "told", "anew", "twins?", "tales?", "somebody", "puts? aside", "younger than the run",
            "pieces? of (?:K|keys|work)",
        )
    ),
    re.IGNORECASE,
)  # fmt: skip


def old_words(text, is_code):
    """(line, word) of what the old dialect has in names, comments and strings of code, or in prose."""
    if not is_code:
        yield from ((text[: found.start()].count("\n") + 1, found[0]) for found in OLD_WORDS.finditer(text))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", token.string)}
            if parts & OLD_NAMES:
                yield token.start[0], token.string
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from ((token.start[0], found[0]) for found in OLD_WORDS.finditer(token.string))


def worded():
    """Code and pages, the two files that list the words apart."""
    here = ("tests/meta/test_text.py", "CHANGELOG.md")
    return [p for p in files() if p.suffix in (".py", ".md") and str(p.relative_to(ROOT)) not in here]


@pytest.mark.parametrize("path", worded(), ids=lambda p: str(p.relative_to(ROOT)))
def test_words_are_the_fields(path):
    assert not OLD_NAMES & set(re.findall("[a-z]+", str(path.relative_to(ROOT)).lower()))
    assert list(old_words(path.read_text(), path.suffix == ".py")) == []


def test_old_words_are_found_where_they_are_meant():
    assert [word for _, word in old_words("# he was told\nis_told = ReForm\n", True)]
    assert list(old_words("form = 1\n", True))
    assert not list(old_words("# a form of words, a piece of cake\n", True))
    assert not list(old_words("keyboard = platform = information = 1\n", True))
    assert list(old_words("pieces of K", False)) and not list(old_words("a piece of cake", False))

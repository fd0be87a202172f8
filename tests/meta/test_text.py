"""What no file of the repository may hold."""

import ast
import io
import re
import shutil
import subprocess
import tokenize
from pathlib import Path

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


def forbidden(text):
    """(line, what, the words) of what no file may hold."""
    for what, pattern in FORBIDDEN.items():
        for found in re.finditer(pattern, text):
            yield text[: found.start()].count("\n") + 1, what, found[0]


def faults(paths, faults_of):
    """What `faults_of` finds in the text of each of some 900 files, behind its name."""
    return [(str(path.relative_to(ROOT)), fault) for path in paths for fault in faults_of(path.read_text())]


def test_nothing_forbidden_is_held():
    assert not faults(files(), forbidden)


def swallowed(text):
    """Line numbers of handlers of every exception whose body does nothing."""
    if not re.search(r"\bexcept\b\s*(?::|.*Exception)", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            nothing = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
            if broad and nothing:
                yield node.lineno


def test_no_exception_is_swallowed():
    assert not faults([p for p in files() if p.suffix == ".py"], swallowed)


def test_the_patterns_find_what_they_should():
    assert re.search(FORBIDDEN["machine path"], "see /wo" + "rk/main")
    assert not re.search(FORBIDDEN["machine path"], "$HOME/wo" + "rk/main")
    assert re.search(FORBIDDEN["promise"], "# TO" + "DO later")
    assert list(swallowed("try:\n    f()\nexcept Exception:\n    pass\n")) == [3]


# -- words ------------------------------------------------------------------------------------------------------------

# Words of an old dialect, as whole words of a name (told, is_told, ToldAgain) and of prose. CONTRIBUTING's glossary and
# the field have others: published, read, slot, retry, opaque, split, work item, K slice, spill, number format.
OLD_NAMES = {"told", "anew", "twin", "twins", "tale", "board", "boards", "piece", "pieces", "form", "forms"}
OLD_PARTS = re.compile(
    "|".join(rf"(?<![A-Za-z]){name}(?![a-z])|{name.title()}(?![a-z])|{name.upper()}" for name in sorted(OLD_NAMES))
)
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
    # Reading tokens takes a minute for all files. Most have none of the letters of a word that could be one.
    if not (OLD_WORDS.search(text) or OLD_PARTS.search(text)):
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


def test_words_are_the_fields():
    names = [str(path.relative_to(ROOT)) for path in worded()]
    assert not [name for name in names if OLD_NAMES & set(re.findall("[a-z]+", name.lower()))]
    for suffix in (".py", ".md"):
        paths = [path for path in worded() if path.suffix == suffix]
        assert not faults(paths, lambda text, is_code=suffix == ".py": old_words(text, is_code))


def test_old_words_are_found_where_they_are_meant():
    assert [word for _, word in old_words("# he was told\nis_told = ReForm\n", True)]
    for name in ("form", "a_form", "Form", "ReForm", "FORM", "A_FORM", "form2", "XForms", "aBoard"):
        assert list(old_words(f"{name} = 1\n", True)), name
    assert not list(old_words("# a form of words, a piece of cake\n", True))
    assert not list(old_words("keyboard = platform = information = 1\n", True))
    assert list(old_words("pieces of K", False)) and not list(old_words("a piece of cake", False))

"""Every path, name, parameter, command and option that a document mentions exists, and its examples run."""

import ast
import functools
import importlib
import inspect
import linecache
import re
import shlex
from pathlib import Path

import click
import pytest

from flashinfer._core import env
from flashinfer.cli import main, support

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# variables of the test suite, not of the package
OWN_VARIABLES = {"FLASHINFER_TEST_GPU"}
# made by a command, or folders of a checkout's user
MADE = {".venv/bin/python", ".cache/flashinfer"}

# modules that are not this repository's
OTHERS = {"pytest", "venv", "pip", "sglang", "minisgl"}

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def spans(text):
    """Contents of inline code, fences left out."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def shell_lines(text):
    """Words of the commands of shell fences and of inline code, comments cut off."""
    lines = [line for language, body in FENCE.findall(text) if language == "sh" for line in body.splitlines()]
    for line in lines + [s for s in spans(text) if " " in s]:
        yield shlex.split(re.sub(r"\s#.*", "", line))


@functools.cache
def resolve(path):
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def faults_of_paths(text, folder):
    for span in spans(text):
        is_path = re.fullmatch(r"[\w.-][\w./-]*/[\w./-]*", span) and span not in MADE
        if is_path and not any((base / span).exists() for base in (ROOT, folder)):
            yield f"path {span}"
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target and not (folder / target).exists():
            yield f"link {target}"


def faults_of_names(text):
    for span in spans(text):
        name = re.match(r"flashinfer(?:\.\w+)+", span)
        if name:
            try:
                found = resolve(name[0])
            except (ModuleNotFoundError, AttributeError):
                yield f"name {name[0]}"
                continue
            yield from faults_of_call(span, found)


def faults_of_call(text, function):
    """Keywords of a call written in `text` that the function does not take."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return
    if isinstance(tree, ast.Call):
        taken = inspect.signature(function).parameters
        yield from (f"{ast.unparse(tree.func)} has no {k.arg}" for k in tree.keywords if k.arg and k.arg not in taken)


def faults_of_variables(text):
    known = {v.name for v in env.VARIABLES} | OWN_VARIABLES
    yield from (f"variable {name}" for name in set(re.findall(r"\bFLASHINFER_\w+", text)) - known)


def faults_of_command(words):
    """What of `flashinfer ...`, `python -m ...`, `make ...` or `pytest PATH` does not exist."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        variables = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"make {w}" for w in words[1:] if w.partition("=")[0] not in targets + variables)
    elif words[0].endswith("python") and words[1:2] == ["-m"] and words[2].split(".")[0] not in OTHERS:
        if importlib.util.find_spec(words[2]) is None:
            yield f"python -m {words[2]}"
    elif "pytest" in words:
        yield from (f"pytest {w}" for w in words if w.startswith("tests") and not (ROOT / w).exists())
    elif words[0] == "flashinfer" and len(words) > 1:
        yield from faults_of_flashinfer(words[1:])


def faults_of_flashinfer(words):
    command, context = main, click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        command = command.get_command(context, name)
        if command is None:
            yield f"flashinfer {name}"
            return
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    yield from (f"option {w} of {command.name}" for w in words if w.startswith("--") and w != "--" and w not in known)


@every_document
def test_mentions_only_what_exists(document):
    text = document.read_text()
    faults = [*faults_of_paths(text, document.parent), *faults_of_names(text), *faults_of_variables(text)]
    for words in shell_lines(text):
        faults += faults_of_command(words)
    assert not faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see `flashinfer/nowhere.py`", "path flashinfer/nowhere.py"),
        ("[map](nowhere.md)", "link nowhere.md"),
        ("`flashinfer.no_such_name`", "name flashinfer.no_such_name"),
        ("`flashinfer.rmsnorm(x, w, epsilon=1)`", "flashinfer.rmsnorm has no epsilon"),
        ("`FLASHINFER_NO_SUCH`", "variable FLASHINFER_NO_SUCH"),
        ("`flashinfer nothing`", "flashinfer nothing"),
        ("`flashinfer explain --nothing`", "option --nothing of explain"),
        ("```sh\nmake nothing  # comment\n```\n", "make nothing"),
        ("`python -m flashinfer.nothing`", "python -m flashinfer.nothing"),
        ("`flashinfer explain rmsnorm --arch 90a`", None),
        ("`flashinfer/topk.py` and `flashinfer.rmsnorm(x, w, eps=1)`", None),
    ],
)
def test_the_check_sees_what_it_should(text, fault):
    found = [*faults_of_paths(text, ROOT), *faults_of_names(text), *faults_of_variables(text)]
    for words in shell_lines(text):
        found += faults_of_command(words)
    assert found == ([fault] if fault else [])


def examples():
    for document in DOCUMENTS:
        for i, (language, body) in enumerate(FENCE.findall(document.read_text())):
            if language == "python":
                yield pytest.param(body, id=f"{document.relative_to(ROOT)}-{i}")


def run_example(code, device):
    code = code.replace('"cuda"', f'"{device.type}"')
    # Triton reads the source of the functions that it compiles.
    name = f"<example {hash(code)}>"
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    exec(compile(code, name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("code", list(examples()))
def test_examples_run(code, device):
    run_example(code, device)


@pytest.mark.gpu
@pytest.mark.parametrize("code", list(examples()))
def test_examples_run_on_a_gpu(code, device):
    run_example(code, device)


def test_readme_starts_with_what_it_is_and_that_it_is_independent():
    text = (ROOT / "README.md").read_text()
    assert len(text) <= 6000
    start = text[:1200]
    commands = start.index("make demo"), start.index("make test")
    assert start.index("people who build inference engines") < start.index("independent implementation") < min(commands)


def test_support_tables_are_up_to_date():
    stale = [str(path.relative_to(ROOT)) for path, text in support.generated(ROOT).items() if path.read_text() != text]
    assert stale == [], "run python -m flashinfer.cli.support"

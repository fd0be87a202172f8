"""Engines load models under another default device and dtype: nothing in the package may take those for its own."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

from flashinfer.ops import _ROOMS
from flashinfer.testing.compare import assert_bitwise
from tests import rooms
from tests.meta.test_laws import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "flashinfer"
# factory -> what it has to be given; a dtype where the default one is a floating type's
FACTORIES = dict.fromkeys(
    "empty empty_strided zeros ones full rand randn linspace logspace eye tensor scalar_tensor hann_window".split(),
    ("device", "dtype"),
) | dict.fromkeys("arange range randint randperm as_tensor asarray tril_indices triu_indices".split(), ("device",))


def faults_of_defaults(text):
    """(line, factory, what it is not given) of every call of a factory of torch that takes a default."""
    for node in ast.walk(parsed(text)):
        function = node.func if isinstance(node, ast.Call) else None
        if not isinstance(function, ast.Attribute):
            continue
        if not isinstance(function.value, ast.Name) or function.value.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        if function.attr in FACTORIES and None not in given:
            for name in FACTORIES[function.attr]:
                if name not in given:
                    yield node.lineno, function.attr, name


def test_every_allocation_names_device_and_dtype():
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {path: list(faults_of_defaults(text)) for path, text in texts.items()}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("torch.empty(3)", [(1, "empty", "device"), (1, "empty", "dtype")]),
        ("torch.zeros(3, dtype=d)", [(1, "zeros", "device")]),
        ("torch.full((3,), 0.5, device=d)", [(1, "full", "dtype")]),
        ("torch.arange(3)", [(1, "arange", "device")]),
        ("torch.tensor([1], device=d, dtype=e) + torch.arange(3, device=d)", []),
        ("torch.empty(3, **options)", []),
        ("x.new_empty(3) + numpy.empty(3) + torch.empty_like(x)", []),
    ],
)
def test_the_law_is_read_as_it_is_written(line, fault):
    assert list(faults_of_defaults(line)) == fault


@contextlib.contextmanager
def default_device(name):
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(before if before != torch.device("cpu") else None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "set_default_device": lambda: default_device("meta"),
    "with torch.device": lambda: torch.device("meta"),
    "set_default_dtype": lambda: default_dtype(torch.bfloat16),
}


def test_every_room_has_a_call():
    assert set(_ROOMS) - set(rooms.CALLS) == rooms.RANKS


@pytest.mark.parametrize(
    "variant",
    ["reference", pytest.param("portable", marks=pytest.mark.matrix), pytest.param("auto", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("room", rooms.CALLS)
def test_defaults_change_no_result(room, variant, device):
    torch.manual_seed(1)
    call = rooms.CALLS[room](device)
    with contextlib.nullcontext() if variant == "auto" else rooms.by(variant):
        expected = call()
        for name, context in CONTEXTS.items():
            with context():
                results = call()
            for number, (result, same) in enumerate(zip(results, expected, strict=True)):
                assert_bitwise(result, same, f"{name}: result {number}")

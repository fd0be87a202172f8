"""Arguments of another kind than a signature says are refused by name; every public function checks them."""

import inspect
import json
import time
import timeit
from typing import get_args

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer._core.arguments import checked
from flashinfer._core.backends import VARIANTS_OF
from flashinfer._core.literals import Backend
from tests.api.check_surface import SURFACE, resolve


@checked
def function(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor = 1.0,
    count: int = 1,
    flag: bool = False,
    name: str = "",
    dtype: torch.dtype | str | None = None,
    pair: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    several: list[torch.Tensor] | None = None,
    other: "Unknown" = None,
    place: torch.device | str | None = None,
    **more,
):
    return x.requires_grad and torch.is_grad_enabled()


X = torch.ones(2)
GOOD = [
    dict(), dict(out=X), dict(scale=2), dict(scale=X[:1]), dict(scale=np.float32(1)), dict(count=np.int64(3)),
    dict(count=torch.tensor(3)), dict(flag=None), dict(flag=1), dict(flag=np.bool_(True)), dict(dtype=torch.float16),
    dict(dtype="float16"), dict(pair=X), dict(pair=(X, X)), dict(pair=[X, X]), dict(several=[X]), dict(several=()),
    dict(other=object()), dict(anything=object()), dict(out=torch.nn.Parameter(X)),
    dict(place="cpu"), dict(place=torch.device("cpu")),
]  # fmt: skip
BAD = [
    dict(out=[1.0]), dict(out=np.ones(2)), dict(out=1), dict(out=X.to("meta")), dict(out=X.to_sparse()),
    dict(scale="1.0"), dict(scale=None), dict(count=1.0), dict(count=1.5), dict(count="1"), dict(count=X),
    dict(flag="False"), dict(flag=2), dict(flag=1.0), dict(flag=torch.tensor(True)), dict(name=None), dict(name=b""),
    dict(dtype=5), dict(pair=(X,)), dict(pair=(X, None)), dict(pair=(X, X, X)), dict(several=X), dict(several=[None]),
    dict(place="nowhere"), dict(place=""), dict(place=1.0),
]  # fmt: skip


@pytest.mark.parametrize("given", GOOD)
def test_taken(given):
    function(X, **given)


@pytest.mark.parametrize("given", BAD)
def test_refused(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"^{name}: got .*; allowed: "):
        function(X, **given)
    in_order = [given.get(p, inspect.signature(function).parameters[p].default) for p in list_of_names()]
    with pytest.raises(ValueError, match=f"^{name}: got .*; allowed: "):
        function(X, *in_order)


def list_of_names():
    return [name for name in inspect.signature(function).parameters if name not in ("x", "more")]


def test_what_is_missing_is_pythons_own_error():
    with pytest.raises(TypeError, match="'x'"):
        function()


def test_nothing_is_recorded_for_gradients():
    weight = torch.nn.Parameter(torch.ones(8))
    assert function(weight) is False
    assert not flashinfer.rmsnorm(torch.ones(2, 8), weight).requires_grad


def test_every_public_function_of_tensors_checks_their_kinds():
    """The collectives apart, whose arguments are groups and workspaces."""
    unchecked = set()
    for entry in json.loads(SURFACE.read_text())["entries"].values():
        path = entry["paths"][0]
        if entry["kind"] != "function":
            continue
        try:
            found = resolve(path, entry["kind"])
        except (ImportError, AttributeError):
            continue
        home = getattr(found, "__module__", None) or ""
        if not inspect.isfunction(found) or home.split(".")[1:2] in (["comm"], ["autotuner"], ["testing"], ["utils"]):
            continue
        takes = any("Tensor" in str(p.annotation) for p in inspect.signature(found).parameters.values())
        if takes and not path.rpartition(".")[2].startswith("supports_") and not _checks(found):
            unchecked.add(path)
    assert not unchecked


def _checks(function):
    while function is not None:
        if getattr(function, "checks_kinds", False):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def test_it_costs_little():
    """Of a call with ten arguments, beside what it takes to look at ten tensors: machines and their load differ.

    On an idle machine 12 times that with Python 3.11 and 19 with 3.10, whose calls cost more.
    """
    given = dict(out=X, scale=1.0, count=1, flag=True, name="a", dtype=torch.float16, pair=(X, X), several=[X])

    def seconds(f):
        return min(timeit.repeat(f, timer=time.process_time, number=100, repeat=20)) / 100

    looks = seconds(lambda: [isinstance(x, torch.Tensor) and x.numel() == 1 for x in (X,) * 10])
    plain = seconds(lambda: inspect.unwrap(function)(X, **given))
    assert seconds(lambda: function(X, **given)) - plain < 25 * looks


def test_numpys_numbers_become_pythons():
    @checked
    def kinds(count: int, scale: float = 1.0):
        return type(count), type(scale)

    assert kinds(np.int64(3), scale=np.float32(2)) == (int, float)


def test_words_are_strings_and_their_types_say_what_is_allowed():
    """Types of words are for editors: a rule that reads one says what it allows, and it allows what its type says."""

    @checked
    def words(kv_layout: "KvLayout" = "NHD", backend: "Literal['own'] | Backend | None" = None):
        return kv_layout, backend

    assert words("other", "any") == ("other", "any")
    with pytest.raises(ValueError, match="^kv_layout: got 3; allowed: a string"):
        words(3)
    with pytest.raises(ValueError, match="^backend: got 3; allowed: a string"):
        words(backend=3)
    assert set(get_args(Backend)) == set(VARIANTS_OF)

"""Stubs say what a flag decides, and nothing that the source does not."""

import ast
import inspect
from pathlib import Path

import pytest

import flashinfer
from flashinfer.cli.stubs import stubs

PACKAGE = Path(flashinfer.__file__).parent
SOURCE = '''
from functools import partial
import os
import torch
SIZE = 3

@checked
def attend(q: torch.Tensor, flag: int = 1, return_lse: bool = False, base: str = "2") -> T | tuple[T, T]:
    """Text."""
    return q

def other(x: torch.Tensor) -> T: ...
def _hidden(): ...
attend_return_lse = partial(attend, return_lse=True)

class Wrapper(Base):
    def __init__(self):
        self.size = 3
    @property
    def kind(self) -> str: ...
    def run(self, q, *, return_lse: bool = False) -> T | tuple[T, T]: ...
    begin = run
    def plan(self, q, wait: bool = True, n: int = 1, *, far: int = 0) -> None: ...
    workspace_size = sized_by(plan, "wait", "far")
'''
STUB = '''
from typing import Any, Literal, overload
import torch
SIZE: Any
@overload
def attend(q: torch.Tensor, flag: int = 1, return_lse: Literal[False] = False, base: str = "2") -> T: ...
@overload
def attend(q: torch.Tensor, flag: int = 1, *, return_lse: Literal[True], base: str = "2") -> tuple[T, T]: ...
@overload
def attend(q: torch.Tensor, flag: int = 1, return_lse: bool = False, base: str = "2") -> T | tuple[T, T]: ...
def other(x: torch.Tensor) -> T: ...
def attend_return_lse(q: torch.Tensor, flag: int = 1, *, base: str = "2") -> tuple[T, T]: ...
class Wrapper(Base):
    def __init__(self): ...
    @property
    def kind(self) -> str: ...
    @overload
    def run(self, q, *, return_lse: Literal[False] = False) -> T: ...
    @overload
    def run(self, q, *, return_lse: Literal[True]) -> tuple[T, T]: ...
    @overload
    def run(self, q, *, return_lse: bool = False) -> T | tuple[T, T]: ...
    begin = run
    def plan(self, q, wait: bool = True, n: int = 1, *, far: int = 0) -> None: ...
    def workspace_size(self, q, n: int = 1) -> tuple[int, int]: ...
    size: Any
'''


def test_what_a_flag_decides_is_overloaded(tmp_path):
    (tmp_path / "attend.py").write_text(SOURCE)
    (tmp_path / "plain.py").write_text("def f(return_lse: bool) -> tuple[T, T | None]: ...\n")
    ((path, text),) = stubs(tmp_path, "this").items()
    assert path == tmp_path / "attend.pyi"
    tree = ast.parse(text)
    assert "`this`" in ast.get_docstring(tree)
    assert [*map(ast.unparse, tree.body[1:])] == [*map(ast.unparse, ast.parse(STUB).body)]


@pytest.mark.parametrize(
    ("module", "name"),
    [("prefill", "single_prefill_with_kv_cache"), ("cudnn", "cudnn_batch_decode_with_kv_cache"),
     ("mla", "trtllm_batch_decode_with_kv_cache_mla"), ("sampling", "sampling_from_probs")],
)  # fmt: skip
def test_a_stub_has_the_parameters_of_its_function(module, name):
    function = inspect.unwrap(getattr(getattr(flashinfer, module), name))
    tree = ast.parse(open(inspect.getsourcefile(function) + "i").read())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert [[d.id for d in node.decorator_list] for node in found] == [["overload"]] * 3
    for node in found:
        names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        assert names == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("stub", sorted(PACKAGE.rglob("*.pyi")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_stub_has_the_names_that_it_lists(stub):
    """As type checkers read it: they take a listed name from nowhere else."""
    listed, had = [], set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            had |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            had.add(node.name)
        else:
            had |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    assert set(listed) <= had

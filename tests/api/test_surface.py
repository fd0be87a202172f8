"""The public names and signatures that callers written for FlashInfer rely on, against surface.json.

`python tests/api/check_surface.py` prints the same by family and tier.
"""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flashinfer
from tests.api.check_surface import SURFACE, check, compare

ENTRIES = json.loads(SURFACE.read_text())["entries"].values()
ENTRY_OF = {path: entry for entry in ENTRIES for path in entry["paths"]}
# Paths that are not served yet, or differ. They stand here so that each of the others is held.
OPEN = set(json.loads((Path(__file__).parent / "open.json").read_text()))
# names of this package that upstream's 0.7 does not have at its root
OWN = {
    "AttentionVariant": "flashinfer.ops.attention.variants",
    "BatchDecodeWithPagedKVCache": "flashinfer.core",
    "BatchPrefillWithRaggedKVCache": "flashinfer.core",
    "PagedKVCache": "flashinfer.core",
    "explain": "flashinfer._core.dispatch",
}
ROOT_NAMES = sorted(set(flashinfer.__all__) - {"__version__"})


def test_paths():
    states = {path: check(path, ENTRY_OF[path]) for path in sorted(ENTRY_OF.keys() - OPEN)}
    assert not {path: state for path, state in states.items() if state[0] != "ok"}


def test_what_is_open_is_a_path():
    assert OPEN <= ENTRY_OF.keys()


def test_root_lists_each_name_that_upstream_has_there():
    served = {path for path in ENTRY_OF.keys() - OPEN if path.count(".") == 1 and ENTRY_OF[path]["kind"] != "command"}
    assert {path.split(".")[1] for path in served} <= set(flashinfer.__all__)


@pytest.mark.parametrize("name", ROOT_NAMES)
def test_root_name_is_its_modules_name(name):
    value = getattr(flashinfer, name)
    if inspect.ismodule(value):
        assert value is importlib.import_module(f"flashinfer.{name}")
    elif name in OWN:
        assert value is getattr(importlib.import_module(OWN[name]), name)
    else:
        homes = [p.rsplit(".", 1) for p in ENTRY_OF[f"flashinfer.{name}"]["paths"] if p not in OPEN]
        assert all(getattr(importlib.import_module(home), leaf) is value for home, leaf in homes)
    assert name in dir(flashinfer)


def test_unknown_root_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        flashinfer.no_such_name


def test_the_check_sees_what_it_should():
    def ours(a, b=1, *, c): ...

    assert list(compare(ours, "(a, b=1, *, c)")) == []
    assert any("no parameter d" in why for why in compare(ours, "(a, b=1, d=2, *, c)"))
    assert any("b is 1 by default, upstream 2" in why for why in compare(ours, "(a, b=2, *, c)"))
    assert any("required by us alone: c" in why for why in compare(ours, "(a, b=1)"))
    assert any("at position 0" in why for why in compare(ours, "(b, a)"))


def test_modules_that_upstream_imports_are_attributes():
    """In a process of its own: imports elsewhere would set them."""
    paths = ("comm.trtllm_mnnvl_ar", "fused_moe.core", "fused_moe.fused_routing_dsv3", "gemm.gemm_base",
             "gemm.routergemm")  # fmt: skip
    names = [f"flashinfer.{path}" for path in paths]
    code = f"import flashinfer\nfor module in {', '.join(names)}: print(module.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.split() == names, found.stderr


def test_modules_of_upstream_that_functions_are_imported_from():
    from flashinfer import fused_moe, gemm
    from flashinfer.fused_moe import core
    from flashinfer.gemm import gemm_base, routergemm

    for name in gemm.__all__:
        assert getattr(gemm_base, name) is getattr(routergemm, name) is getattr(gemm, name)
    for name in ("trtllm_fp8_per_channel_scale_routed_moe", "trtllm_mxint4_block_scale_routed_moe"):
        assert getattr(core, name) is getattr(fused_moe, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gemm_base.nothing

"""Upstream's names of the cache's folders, and of emptying it."""

import pytest
import torch

from flashinfer import jit
from flashinfer._core import kernel_cache, target
from flashinfer.version import __version__
from tests.core.test_kernel_cache import KEY, store


@pytest.fixture
def hopper(monkeypatch):
    for module in (jit.env, jit.core):
        monkeypatch.setattr(module, "target_of", lambda device: target.named("90a"))


def test_folders_follow_the_variable(monkeypatch, tmp_path, hopper):
    for base in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
        cache = base / ".cache" / "flashinfer"
        assert jit.env.FLASHINFER_BASE_DIR == base and jit.env.FLASHINFER_CACHE_DIR == cache
        assert jit.env.FLASHINFER_WORKSPACE_DIR == cache / __version__ / "90a"
        assert jit.env.FLASHINFER_JIT_DIR == cache / __version__ / "90a" / "cached_ops"
    with pytest.raises(AttributeError, match="FLASHINFER_CSRC_DIR"):
        jit.env.FLASHINFER_CSRC_DIR


def test_the_kernels_of_a_device_are_removed(base, hopper):
    of_hopper, of_ampere = store().path, store({**KEY, "arch": "80"}).path
    assert of_hopper.is_relative_to(jit.env.FLASHINFER_JIT_DIR)
    assert kernel_cache.lookup(KEY) is not None
    jit.clear_cache_dir()
    assert kernel_cache.lookup(KEY) is None and kernel_cache.lookup({**KEY, "arch": "80"}) is not None
    assert of_ampere.exists() and jit.core.clear_cache_dir is jit.clear_cache_dir


def test_without_a_gpu_the_cache_of_a_cpu_is_empty(base):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    store()
    jit.clear_cache_dir()
    assert kernel_cache.lookup(KEY) is not None

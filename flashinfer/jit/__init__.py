"""Upstream's compiler of CUDA C++, as far as engines ask for it: there is none here (docs/engines.md)."""

from flashinfer.jit import core, env
from flashinfer.jit.core import clear_cache_dir

__all__ = ["clear_cache_dir", "core", "env"]

"""Upstream's compiler of CUDA C++, as far as engines ask for it: there is none here (docs/engines.md)."""

from flashinfer.jit import core, env

__all__ = ["core", "env"]

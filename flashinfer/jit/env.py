"""Folders, each a `pathlib.Path`, as callers import them from upstream's `flashinfer.jit.env`.

`FLASHINFER_BASE_DIR` is what the environment variable FLASHINFER_WORKSPACE_BASE names, `FLASHINFER_CACHE_DIR` its
`.cache/flashinfer`. `FLASHINFER_WORKSPACE_DIR` is the part of the cache for this version and the current device,
`<version>/<arch>`, and `FLASHINFER_JIT_DIR` the kernels in it.
"""

from importlib.util import find_spec

import torch

from flashinfer._core import env, kernel_cache
from flashinfer._core.target import target_of

__all__ = [
    "FLASHINFER_BASE_DIR",
    "FLASHINFER_CACHE_DIR",
    "FLASHINFER_JIT_DIR",
    "FLASHINFER_WORKSPACE_DIR",
    "has_flashinfer_cubin",
    "has_flashinfer_jit_cache",
]


def has_flashinfer_jit_cache() -> bool:
    """Whether upstream's package of compiled modules is installed. Nothing here reads it."""
    return find_spec("flashinfer_jit_cache") is not None


def has_flashinfer_cubin() -> bool:
    """Whether a package `flashinfer_cubin` is installed, as engines ask; the one beside this package is empty."""
    return find_spec("flashinfer_cubin") is not None


def __getattr__(name: str):
    # Asked for, not made at import: to know the device makes a context on it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = env.workspace_base()
    version = kernel_cache.root_of(base)
    if name == "FLASHINFER_BASE_DIR":
        return base
    if name == "FLASHINFER_CACHE_DIR":
        return version.parent
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workspace = version / target_of(device).arch
    return workspace if name == "FLASHINFER_WORKSPACE_DIR" else workspace / "cached_ops"

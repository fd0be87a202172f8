"""What engines import from upstream's `flashinfer.jit.env`.

`FLASHINFER_WORKSPACE_DIR` is the folder of kernels for the current device: `.cache/flashinfer/<version>/<arch>` in the
folder that the environment variable FLASHINFER_WORKSPACE_BASE names, a `pathlib.Path`.
"""

from importlib.util import find_spec

import torch

from flashinfer._core import env, kernel_cache
from flashinfer._core.target import target_of

__all__ = ["FLASHINFER_WORKSPACE_DIR", "has_flashinfer_cubin", "has_flashinfer_jit_cache"]


def has_flashinfer_jit_cache() -> bool:
    """Whether upstream's package of compiled modules is installed. Nothing here reads it."""
    return find_spec("flashinfer_jit_cache") is not None


def has_flashinfer_cubin() -> bool:
    """Whether a package `flashinfer_cubin` is installed, as engines ask; the one beside this package is empty."""
    return find_spec("flashinfer_cubin") is not None


def __getattr__(name: str):
    # Asked for, not made at import: to know the device makes a context on it.
    if name != "FLASHINFER_WORKSPACE_DIR":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return kernel_cache.root_of(env.workspace_base()) / target_of(device).arch

"""What engines import from upstream's `flashinfer.jit.core`."""

from __future__ import annotations

import torch

from flashinfer._core import kernel_cache
from flashinfer._core.env import logger
from flashinfer._core.target import target_of

__all__ = ["check_cuda_arch", "clear_cache_dir", "logger"]

# The oldest architecture that kernels are compiled and checked for (flashinfer/_core/target.py).
_OLDEST = 80


def check_cuda_arch() -> None:
    """Whether there are kernels for the current GPU.

    Raises
    ------
    RuntimeError
        There is no GPU, or one of compute capability below 8.0.
    """
    found = target_of(torch.device("cuda")).capability if torch.cuda.is_available() else 0
    if found < _OLDEST:
        got = f"compute capability {found / 10}" if found else "no CUDA device"
        raise RuntimeError(f"device: got {got}; allowed: compute capability {_OLDEST / 10} or above")


def clear_cache_dir() -> None:
    """Remove the compiled kernels of the current device from the cache, as ``flashinfer cache clear`` does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel_cache.clear(arch=target_of(device).arch)

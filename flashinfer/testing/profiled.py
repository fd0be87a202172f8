"""Times of named kernels by torch's profiler, and what a cold measurement needs to know: bytes and caches."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
import torch.distributed as dist

from flashinfer._core.checks import require

# Bytes written between two calls: more than any cache holds, and a pause for the card.
_FLUSH = 8_000_000_000
# How many times the L2 cache has to be passed through until nothing of a buffer is left in it.
_PASSES = 5


def count_bytes(*tensors) -> int:
    """Bytes of the elements of tensors, and of those in tuples and lists; None has none.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.testing.utils import count_bytes
    >>> count_bytes(torch.ones(3), [None, torch.ones(2).half()])
    16
    """
    parts = (count_bytes(*x) if isinstance(x, (tuple, list)) else x.numel() * x.element_size()
             for x in tensors if x is not None)  # fmt: skip
    return sum(parts)


def get_l2_cache_size(device: torch.device | int | None = None) -> int:
    """Bytes of the L2 cache of a CUDA device, the current one by default."""
    device = torch.cuda.current_device() if device is None else device
    return torch.cuda.get_device_properties(device).L2_cache_size


def calculate_rotation_count(
    tensors: list[torch.Tensor], device: torch.device | int | None = None, min_rotations: int = 2
) -> int:
    """Copies of a call's tensors to be taken in turn, so that none of a copy is in the L2 cache when it is used again.

    Parameters
    ----------
    tensors : list of torch.Tensor
        What a call reads and writes.
    device : torch.device or int, optional
        The current one by default.
    min_rotations : int
        The least, where one is not enough.

    Returns
    -------
    int
        1 if the tensors have five times the bytes of the cache, or none.
    """
    most, each = _PASSES * get_l2_cache_size(device), count_bytes(*tensors)
    if each == 0 or each >= most:
        return 1
    return max(min_rotations, math.ceil(most / each) + 1)


def aggregate_gpu_time_across_ranks(x: float | list[float], op: Callable) -> float | list[float]:
    """A time, or each of a list, as one of all ranks of torch.distributed; without them, as it is.

    Parameters
    ----------
    x : float or list of float
        This rank's.
    op : callable
        Makes one of a sequence of times, such as `max`.

    Returns
    -------
    float or list of float
        The same on each rank.

    Examples
    --------
    >>> from flashinfer.testing.utils import aggregate_gpu_time_across_ranks
    >>> aggregate_gpu_time_across_ranks([1.0, 2.0], max)
    [1.0, 2.0]
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return [op(times) for times in zip(*found, strict=True)] if isinstance(x, list) else op(found)


@contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Inside it, what the process and its libraries print goes nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            for stream, _ in kept:
                os.dup2(nowhere.fileno(), stream)
            yield
    finally:
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)


@contextmanager
def empty_suppress() -> Iterator[None]:
    """`suppress_stdout_stderr` without an effect."""
    yield


def bench_kineto(
    fn: Callable,
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
) -> float | tuple[float, ...]:
    """Mean time of kernels while a function runs, by torch's profiler.

    Parameters
    ----------
    fn : callable
        Called without arguments; three times and more, once before it is timed.
    kernel_names : str or tuple of str
        Parts of the names of kernels.
    num_tests : int
        Calls that are timed.
    suppress_kineto_output : bool
        Print nothing meanwhile.
    trace_path : str, optional
        A file for the profiler's trace.
    flush_l2 : bool
        Write 8 GB before each call, so that nothing is in a cache.
    with_multiple_kernels : bool
        Whether several kernels may have the same part of a name.

    Returns
    -------
    float or tuple of float
        Seconds of one run of a kernel; a tuple for a tuple of names.

    Raises
    ------
    ValueError
        No kernel has such a name, or several have and `with_multiple_kernels` is False.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    fn()
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
    )
    with (suppress_stdout_stderr if suppress_kineto_output else empty_suppress)(), profile:
        for _ in range(2):
            for _ in range(num_tests):
                if flush_l2:
                    torch.empty(_FLUSH // 4, dtype=torch.int32, device="cuda").zero_()
                fn()
            torch.cuda.synchronize()
            profile.step()
    if trace_path is not None:
        profile.export_chrome_trace(trace_path)
    found = [event for event in profile.key_averages() if event.device_time_total > 0]
    times = tuple(_mean_seconds(name, found, with_multiple_kernels) for name in names)
    return times[0] if isinstance(kernel_names, str) else times


def _mean_seconds(name: str, events, several: bool) -> float:
    """Of runs of the kernels whose names have that part. Events have microseconds."""
    those = [event for event in events if name in event.key]
    seen = ", ".join(event.key for event in those or events)
    require(len(those) == 1 or several and bool(those), "kernel_names", repr(name), f"part of one name of: {seen}")
    return sum(event.device_time_total for event in those) / sum(event.count for event in those) / 1e6

"""Measuring candidates, and telling whether two of them compute the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer._core.checks import require
from flashinfer._core.target import target_of

_MODES = ("auto", "cuda_graph", "eager")
# What torch.cuda._sleep counts in, about: a wait is a little longer or shorter, which does not matter.
_CYCLES_PER_MICROSECOND = 1500


@dataclass(frozen=True)
class MeasurementPolicy:
    """How candidates are timed.

    Attributes
    ----------
    execution_mode : str
        "cuda_graph" and "auto" count device time: replays of a CUDA graph, or calls queued behind a wait. "eager"
        counts what a call costs from the host.
    cold_l2 : bool, optional
        Whether L2 is flushed before each call; None is False.

    Raises
    ------
    ValueError
        Another mode.
    """

    execution_mode: str = "auto"
    cold_l2: bool | None = None

    def __post_init__(self):
        allowed = ", ".join(map(repr, _MODES))
        require(self.execution_mode in _MODES, "execution_mode", repr(self.execution_mode), allowed)


@dataclass(frozen=True)
class Timing:
    """warmup, repeat : calls. delay : of the stream before them, microseconds. replays : of a graph, or None.

    eager : what the host spends counts. cold : L2 is flushed before each call.
    """

    warmup: int
    repeat: int
    delay: int
    replays: int | None = None
    eager: bool = False
    cold: bool = False


def milliseconds(call: Callable, timing: Timing, device: torch.device) -> float:
    """Of one call."""
    for _ in range(timing.warmup):
        call()
    if device.type != "cuda":
        return _by_clock(call, timing.repeat)
    with torch.cuda.device(device):
        repeat = timing.repeat
        if timing.replays is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call, repeat = graph.replay, timing.replays
        torch.cuda.synchronize(device)
        if timing.eager and not timing.cold:
            return _by_clock(call, repeat, device)
        return _by_events(call, repeat, timing, device)


def _by_clock(call, repeat, device=None) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    if device is not None:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / repeat


def _by_events(call, repeat, timing, device) -> float:
    # Larger than L2, so that zeroing it leaves nothing else there.
    flush = torch.empty(2 * target_of(device).l2 if timing.cold else 0, dtype=torch.int8, device=device)
    if not timing.eager:
        torch.cuda._sleep(timing.delay * _CYCLES_PER_MICROSECOND)
    pairs = []
    for _ in range(repeat):
        if timing.cold:
            flush.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize(device)
    if timing.cold:
        return sum(start.elapsed_time(end) for start, end in pairs) / repeat
    return pairs[0][0].elapsed_time(pairs[-1][1]) / repeat


def copied(result) -> list[torch.Tensor]:
    """Copies of the tensors in what a runner returned."""
    if isinstance(result, torch.Tensor):
        return [result.clone()]
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in copied(part)]
    return []


def why_different(result: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Why two results are not the same computation; '' where they are.

    Candidates round in other orders: the difference's norm may be as large as that of the result times the square root
    of the dtype's epsilon, half of its digits.
    """
    if len(result) != len(expected):
        return f"{len(result)} tensors, not {len(expected)}"
    for a, b in zip(result, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a {a.dtype} tensor {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return "other integers"
            continue
        finite = b.isfinite() if b.element_size() > 1 else torch.ones_like(b, dtype=torch.bool)
        a, b, eps = a.float(), b.float(), torch.finfo(b.dtype).eps
        if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
            return "NaN or infinities at other places"
        difference, size = (a - b)[finite].norm(), b[finite].norm()
        if difference > eps**0.5 * size:
            return f"another result: their difference has {float(difference / size):.2g} of its norm"
    return ""

"""Measuring candidates, and telling whether two of them compute the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
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

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.MeasurementPolicy(execution_mode="cuda_graph").execution_mode
    'cuda_graph'
    """

    execution_mode: str = "auto"
    cold_l2: bool | None = None

    def __post_init__(self):
        allowed = ", ".join(map(repr, _MODES))
        require(self.execution_mode in _MODES, "execution_mode", repr(self.execution_mode), allowed)
        require(self.cold_l2 in (None, True, False), "cold_l2", repr(self.cold_l2), "None, True, False")

    @property
    def use_cuda_graph(self) -> bool | None:
        """Whether candidates are captured; None leaves it to `autotune(cuda_graph_profile_replays=...)`."""
        return None if self.execution_mode == "auto" else self.execution_mode == "cuda_graph"

    @property
    def timer(self) -> str:
        """What times them: "events" behind a wait of the stream, or "events_no_delay", where host time counts."""
        return "events_no_delay" if self.execution_mode == "eager" else "events"

    def manifest_fields(self) -> dict[str, str]:
        """What of the policy tells kept choices apart, by name; what is left to its default is not in it.

        Returns
        -------
        dict of str to str
        """
        fields = {}
        if self.execution_mode != "auto":
            fields["measure_execution_mode"] = self.execution_mode
        if self.cold_l2 is not None:
            fields["measure_cold_l2"] = str(bool(self.cold_l2))
        return fields


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
            # What the first replay does once is not timed.
            graph.replay()
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
        if why := _why_values_differ(a, b):
            return why
    return ""


# Elements that are compared at a time, as float64.
_PART = 1 << 22


def _why_values_differ(a: torch.Tensor, b: torch.Tensor) -> str:
    largest = 0.0
    for x, y in _parts(a, b):
        finite = y.isfinite()
        if not torch.equal(x.isfinite(), finite) or not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
            return "NaN or infinities at other places, or of another sign"
        largest = max(largest, _largest(x[finite], y[finite]))
    difference = size = 0.0
    for x, y in _parts(a, b):
        finite = y.isfinite()
        # Scaled, for what float64 came with may overflow when it is squared.
        x, y = x[finite] / (largest or 1), y[finite] / (largest or 1)
        difference += float((x - y).square().sum())
        size += float(y.square().sum())
    if difference > torch.finfo(b.dtype).eps * size:
        share = (difference / size) ** 0.5 if size else math.inf
        return f"another result: their difference has {share:.2g} of its norm"
    return ""


def _parts(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for x, y in zip(a.flatten().split(_PART), b.flatten().split(_PART), strict=True):
        yield x.double(), y.double()


def _largest(*tensors: torch.Tensor) -> float:
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)

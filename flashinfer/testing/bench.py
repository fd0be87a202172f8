"""How a benchmark measures: cold L2, medians, and CUDA graphs for small kernels.

A benchmark module (`benchmarks/<room path>/bench_<room>.py`) holds `cases(device)`, which yields `Case`s;
`flashinfer bench <room>` measures each with `measure` and sets it against the card's ceilings
(`flashinfer.testing.ceilings`), its peers and its targets with `settle`.

This file imports torch alone: FlashInfer's process (benchmarks/peer.py), where the name `flashinfer` is not ours,
loads it by its path.
"""

from __future__ import annotations

import math
import re
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

_LAUNCH_CYCLES = 600_000  # about 0.3 ms, longer than any Python launch
_ESTIMATE_ITERS, _REPEAT_MS = 5, 50
# Longer calls hide their launches, up to a millisecond of them, and ten in a graph only take longer to measure.
_GRAPH_BELOW_MS = 2.0


@dataclass(frozen=True)
class Work:
    """What one case, or a peer of it, runs.

    Attributes
    ----------
    run : callable
        The operation, called as `run(*inputs)`.
    inputs : tuple
        Its arguments. Tensors among them are copied and rotated, so that each call finds the L2 cache cold.
    bytes : int
        Bytes that any implementation has to move to and from device memory; 0 where bandwidth says nothing.
    flops : int
        Floating-point operations of the definition; 0 where they say nothing.
    operands : str
        "bf16" or "fp8": the products whose ceiling is that of `flops`.
    link : int
        Bytes that a rank has to send to other GPUs; 0 where nothing is sent.
    peers : dict of str to callable or Work
        Other implementations: called with the same inputs, or with their own. "library/variant" names one of several
        ways through a library; the fastest is its.
    plan : callable, optional
        The host-side preparation, timed apart.
    check : callable, optional
        Called once with the result of `run(*inputs)` before it is timed; raises AssertionError if it is wrong.
    clock : callable, optional
        `clock(run, inputs, device)` gives the row's microseconds; default `time_us`.
    given : dict
        The operands by name, for adapters of other libraries.
    """

    run: Callable
    inputs: tuple = ()
    bytes: int = 0
    flops: int = 0
    operands: str = "bf16"
    link: int = 0
    peers: dict[str, Callable | Work] = field(default_factory=dict)
    plan: Callable | None = None
    check: Callable | None = None
    clock: Callable | None = None
    given: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What a row should reach.

    Attributes
    ----------
    of : str
        "copy", "matmul" or "link": that ceiling. "peers", or the name of a library: the fastest of them. The name of
        another row: that row. "TFLOP/s", "TB/s" and "us": none, the value stands for itself.
    value : float
        The speed, as a multiple of what `of` names or in its unit; for "us", the time.
    """

    of: str
    value: float

    def __str__(self):
        if self.of == "us":
            return f"<= {self.value / 1e6:g} s" if self.value >= 1e5 else f"<= {self.value:g} us"
        return f">= {self.value:g} {self.of}" if self.of.endswith("/s") else f">= {self.value:.2f} x {self.of}"


@dataclass(frozen=True)
class Case:
    """One line of a benchmark: a name and how to make its work on a device.

    `group` names the part of the table that it belongs to; a `headline` is quoted in the README. FlashInfer's process
    measures what `make` gives, or `ways(device)`: a `Work` for each way through FlashInfer, by name. Rows of a module
    that have one `kind`, `builds` or the first word of `name`, need the same operators of FlashInfer: one builds them.
    `problem` is what adapters (benchmarks/peers) know the row by; its operands are in `Work.given`.
    """

    name: str
    make: Callable[[torch.device], Work]
    group: str = ""
    targets: tuple[Target, ...] = ()
    headline: bool = False
    ways: Callable[[torch.device], dict[str, Work]] | None = None
    builds: str = ""
    problem: str = ""

    @property
    def kind(self) -> str:
        return self.builds or self.name.split()[0]


def load(module: Path) -> dict:
    """The names of a benchmark module, which imports what stands in its folder, and in the one above, by its name."""
    folders = [str(folder) for folder in module.parents[:2]]
    sys.path[:0] = folders
    try:
        return runpy.run_path(str(module))
    finally:
        del sys.path[: len(folders)]


def bench_gpu_time(
    fn,
    dry_run_iters=None,
    repeat_iters=None,
    dry_run_time_ms=25,
    repeat_time_ms=100,
    l2_flush=None,
    l2_flush_size_mb=None,
    l2_flush_device=None,
    sleep_after_run=False,
    enable_cupti=False,
    use_cuda_graph=False,
    num_iters_within_graph=10,
    input_args=(),
    input_kwargs=None,
    cold_l2_cache=True,
    aggregate_op=max,
) -> list[float]:
    """Time a function on the current CUDA device.

    Parameters
    ----------
    fn : callable
        Called as `fn(*input_args, **input_kwargs)` on the current stream.
    dry_run_iters, repeat_iters : int, optional
        Calls before and during measurement; by default as many as fill `dry_run_time_ms` and `repeat_time_ms`. With
        `use_cuda_graph`, replays of the graph.
    dry_run_time_ms, repeat_time_ms : float
        Milliseconds to fill.
    l2_flush, l2_flush_size_mb, l2_flush_device : optional
        Older names: `l2_flush` overrides `cold_l2_cache`; the flush writes `l2_flush_size_mb` MiB (twice the L2 by
        default) on `l2_flush_device`.
    sleep_after_run : bool
        Sleep as long as each timed call took, so that a hot card does not throttle.
    enable_cupti : bool
        This package does not use CUPTI: a warning says so, and events or a graph time the call.
    use_cuda_graph : bool
        Capture `num_iters_within_graph` calls and time replays: for kernels shorter than their launch.
    num_iters_within_graph : int
        Calls in the graph.
    input_args, input_kwargs : tuple, dict
        Arguments of `fn`.
    cold_l2_cache : bool
        Evict the inputs from L2 before each timed call: by a flush outside the timed span and, in a graph, by rotating
        over copies of the tensors in `input_args` and `input_kwargs`. A graph without tensor arguments holds one call,
        so that each is behind a flush. What `fn` reads beside its arguments is not copied.
    aggregate_op : callable
        Reduces the times of one iteration over the ranks of an initialised `torch.distributed` group.

    Returns
    -------
    list of float
        Milliseconds of one call, an entry for each measured call or replay.

    Raises
    ------
    ValueError
        There is no CUDA device, or a count is not positive.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench_gpu_time: needs a CUDA device, and torch finds none")
    for name, count in (
        ("dry_run_iters", dry_run_iters),
        ("repeat_iters", repeat_iters),
        ("num_iters_within_graph", num_iters_within_graph),
    ):
        if count is not None and count < (0 if name == "dry_run_iters" else 1):
            raise ValueError(f"{name}: got {count}; allowed: a positive number")
    if enable_cupti:
        warnings.warn("bench_gpu_time: CUPTI is not used here; events or a CUDA graph time the call", stacklevel=2)
    cold = cold_l2_cache if l2_flush is None else l2_flush
    arguments = (tuple(input_args), dict(input_kwargs or {}))
    flush = _Flush(l2_flush_size_mb, l2_flush_device) if cold else None
    if use_cuda_graph:
        timed = _GraphTimer(fn, arguments, flush, num_iters_within_graph)
    else:
        timed = _EventTimer(fn, arguments, flush)
    estimate = _agreed(median(timed() for _ in range(_ESTIMATE_ITERS)), aggregate_op) * timed.calls
    if dry_run_iters is None:
        dry_run_iters = max(1, math.ceil(dry_run_time_ms / max(estimate, 1e-3)))
    if repeat_iters is None:
        repeat_iters = max(1, math.ceil(repeat_time_ms / max(estimate, 1e-3)))
    for _ in range(dry_run_iters):
        timed()
    times = []
    for _ in range(repeat_iters):
        times.append(timed())
        if sleep_after_run:
            time.sleep(times[-1] * timed.calls / 1e3)
    return [_agreed(t, aggregate_op) for t in times]


def host_time_us(fn: Callable, repeat: int = 200) -> float:
    """Median microseconds that the host spends in `fn()`, work on the device not awaited."""
    for _ in range(10):
        fn()
    times = []
    for i in range(repeat):
        if i % 20 == 0:
            _synchronize()
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    _synchronize()
    return median(times) * 1e6


def time_us(fn: Callable, inputs: tuple, device: torch.device, graph: bool | None = None) -> float:
    """Median microseconds of `fn(*inputs)` on `device` with a cold L2; on a CPU, of wall time.

    `graph` says whether a CUDA graph times it; by default one does where a call is shorter than `_GRAPH_BELOW_MS`, and
    events do elsewhere.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            if graph is None:
                graph = bench_gpu_time(fn, input_args=inputs, dry_run_iters=0, repeat_iters=1)[0] < _GRAPH_BELOW_MS
            times = bench_gpu_time(
                fn, input_args=inputs, use_cuda_graph=graph, dry_run_time_ms=10, repeat_time_ms=_REPEAT_MS
            )
        return median(times) * 1e3
    fn(*inputs)
    times, until = [], time.perf_counter() + _REPEAT_MS / 1e3
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        fn(*inputs)
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def host_clock(fn: Callable, inputs: tuple, device: torch.device) -> float:
    """A `Work.clock`: what the host spends in the call without arguments that `fn(*inputs)` prepares and returns."""
    return host_time_us(fn(*inputs))


def reported(fn: Callable, inputs: tuple, device: torch.device) -> float:
    """A `Work.clock`: what the call returns, for what can be timed only in a process of its own."""
    return fn(*inputs)


def checked_time(work: Work, device: torch.device) -> dict:
    """Check and time one work: {"us": ...}, or {"error": ...} where it refuses, fails or gives a wrong result.

    The check stands before the clock, so that nothing wrong has a time. An error is a result of a benchmark: it is
    shown in its row, and the other rows are still measured.
    """
    try:
        if work.check is not None:
            work.check(work.run(*work.inputs))
        return {"us": (work.clock or time_us)(work.run, work.inputs, device)}
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> dict:
    """An exception as the result of a row; of paths in it the file's name."""
    message = re.sub(r"(?<!\w)/(?:[^\s/'\":]+/)+", "", str(error).strip())
    return {"error": f"{type(error).__name__}: {message[:300]}"}


def measure(case: Case, device: torch.device) -> dict:
    """Measure one case and the peers that it brings.

    Returns
    -------
    dict
        `name`, `group`, `us` (of one call) or `error`, `host_us` (host time of one call) where `us` is device time,
        `plan_us` where there is a plan, `gb_s`, `link_gb_s` and `tflop_s` where bytes, link or flops are given, and
        `peers`: name to {`us`} or {`error`}.
    """
    row = {"name": case.name, "group": case.group, "headline": case.headline, "peers": {}}
    try:
        work = case.make(device)
        row |= checked_time(work, device)
        if "us" in row and work.clock is None:
            # as many calls as take 20 ms of the device, within reason: each has to be waited for
            repeat = max(20, min(200, int(2e4 / row["us"])))
            row["host_us"] = host_time_us(lambda: work.run(*work.inputs), repeat)
        if "us" in row and work.plan is not None:
            row["plan_us"] = host_time_us(work.plan)
    except Exception as error:
        row.pop("us", None)
        return row | failed(error)
    if "us" in row:
        row |= speeds(work, row["us"])
    for name, peer in work.peers.items():
        row["peers"][name] = checked_time(peer if isinstance(peer, Work) else Work(peer, work.inputs), device)
    return row


def speeds(work: Work, us: float) -> dict:
    """What a row of that time says of its bytes and operations."""
    amounts = {"gb_s": work.bytes / 1e3, "link_gb_s": work.link / 1e3, "tflop_s": work.flops / 1e6}
    return {key: amount / us for key, amount in amounts.items() if amount} | {"operands": work.operands}


# what bounds a row -> its key in the row and in the ceilings
_BOUNDS = {
    "copy": ("gb_s", "copy_gb_s"),
    "matmul": ("tflop_s", "{operands}_tflop_s"),
    "link": ("link_gb_s", "link_gb_s"),
}


def settle(rows: list[dict], cases: list[Case], ceiling: dict[str, float]) -> None:
    """Set measured rows against ceilings, peers and targets, in place.

    Adds `percent` and `bound` ("copy", "matmul" or "link", the nearest ceiling), `ratio` to every peer that has a time
    (above 1 where ours is faster; of its own rounds where it has them), and `targets`: each's `text`, `reached`, `met`.
    """
    times = {row["name"]: row["us"] for row in rows if "us" in row}
    for row, case in zip(rows, cases):
        share = {
            bound: row[reached] / ceiling[limit]
            for bound, (reached, template) in _BOUNDS.items()
            if reached in row and (limit := template.format(operands=row.get("operands", "bf16"))) in ceiling
        }
        if share:
            row["bound"] = max(share, key=share.get)
            row["percent"] = 100 * share[row["bound"]]
        for peer in row["peers"].values():
            if "us" in peer and "us" in row:
                peer["ratio"] = peer["us"] / peer.get("ours", row)["us"]
        row["targets"] = [_against(target, row, share, times) for target in case.targets]


def _against(target: Target, row: dict, share: dict[str, float], times: dict[str, float]) -> dict:
    """The target in words, what the row reached of it (None where a side has no time), and whether that is enough."""
    rivals = [
        peer["us"] for name, peer in row["peers"].items() if "us" in peer and target.of in ("peers", name.split("/")[0])
    ]
    reached = None
    if "us" in row:
        if target.of == "us":
            reached = row["us"]
        elif target.of.endswith("/s"):
            reached = row["tflop_s"] if target.of == "TFLOP/s" else row["gb_s"] / 1e3
        elif target.of in share:
            reached = share[target.of]
        elif rivals:
            reached = min(rivals) / row["us"]
        elif target.of in times:
            reached = times[target.of] / row["us"]
    met = reached is not None and (reached <= target.value if target.of == "us" else reached >= target.value)
    return {"text": str(target), "reached": reached, "met": met}


class _Flush:
    """Evicts what the L2 cache holds by writing a buffer larger than it."""

    def __init__(self, size_mb: int | None, device: str | None):
        device = torch.device(device or "cuda")
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size
        size = size_mb << 20 if size_mb else 2 * self.l2
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


class _EventTimer:
    """One call between two events, after a flush."""

    calls = 1

    def __init__(self, fn, arguments, flush):
        self.run = lambda: fn(*arguments[0], **arguments[1])
        self.flush = flush
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        _before_span(self.flush)
        self.start.record()
        self.run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)


class _GraphTimer:
    """Replays of a graph of several calls on rotating inputs; the time of one call."""

    def __init__(self, fn, arguments, flush, calls):
        sets = list(_rotation(arguments, flush.l2, calls)) if flush else [arguments]
        # Without a second set of inputs, a second call would find L2 warm: each replay is then one call.
        self.calls = 1 if flush and len(sets) == 1 else calls
        self.flush = flush
        self.fn, self.sets = fn, sets  # What the graph has addresses of.
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for args, kwargs in sets:
                fn(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for i in range(self.calls):
                args, kwargs = sets[i % len(sets)]
                fn(*args, **kwargs)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        _before_span(self.flush)
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / self.calls


def _before_span(flush: _Flush | None) -> None:
    """Evict L2, and keep the device busy until the call is queued: else the span would hold the host's launch too."""
    if flush:
        flush()
    torch.cuda._sleep(_LAUNCH_CYCLES)


def _rotation(arguments, l2: int, calls: int) -> Iterator[tuple]:
    """The arguments and copies of them: one set a call, or as many as L2 cannot hold; none where no tensor is."""
    yield arguments
    size = sum(x.untyped_storage().nbytes() for x in _tensors(arguments))
    if size == 0:
        return
    for _ in range(min(calls, 1 + math.ceil(2 * l2 / size)) - 1):
        yield _copied(arguments)


def _tensors(tree) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.is_cuda:
            yield tree
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from _tensors(x)
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _tensors(x)


def _copied(tree):
    """The same nest of containers, with CUDA tensors copied and strides kept."""
    if isinstance(tree, torch.Tensor):
        if not tree.is_cuda:
            return tree
        storage = tree.untyped_storage().clone()
        return torch.empty(0, dtype=tree.dtype, device=tree.device).set_(
            storage, tree.storage_offset(), tree.shape, tree.stride()
        )
    if isinstance(tree, dict):
        return {k: _copied(x) for k, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(x) for x in tree)
    return tree


def _agreed(value: float, aggregate_op: Callable) -> float:
    """The value aggregated over the ranks of torch.distributed, so that all ranks run the same number of calls."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return value
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return aggregate_op(values)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""What contexts of `autotune` say, one inside the other, and how long a candidate is measured by that."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashinfer._core.checks import require
from flashinfer.autotuner.measure import MeasurementPolicy, Timing
from flashinfer.autotuner.profiles import Buckets, TuningConfig


@dataclass(frozen=True)
class Mode:
    """In which buckets sizes are, which operations are not measured, and how many replays of a graph are timed.

    tunes : whether to measure; None is of a thread without a context.
    """

    buckets: Buckets = field(default_factory=Buckets)
    skipped: frozenset[str] = frozenset()
    replays: int | None = None
    tunes: bool | None = None

    def inside(
        self,
        tunes: bool,
        tuning_buckets: Iterable[int] | None = None,
        round_up: bool | None = None,
        skip_ops: str | Iterable[str] | None = None,
        replays: int | None = None,
    ) -> Mode:
        """The mode of a context in this one: it has what is None from here, and skips what is skipped here, too."""
        sizes = None if tuning_buckets is None else tuple(sorted(set(map(int, tuning_buckets))))
        fits = sizes is None or (len(sizes) > 0 and sizes[0] > 0)
        require(fits, "tuning_buckets", sizes, "one or more sizes above 0")
        require(replays is None or replays >= 1, "cuda_graph_profile_replays", replays, "1 or more")
        skipped = {skip_ops} if isinstance(skip_ops, str) else set(skip_ops or ())
        require(all(isinstance(name, str) for name in skipped), "skip_ops", skip_ops, "names of operations")
        buckets = Buckets(
            self.buckets.sizes if sizes is None else sizes,
            self.buckets.round_up if round_up is None else bool(round_up),
        )
        return Mode(buckets, self.skipped | skipped, self.replays if replays is None else replays, tunes)


class Modes(threading.local):
    """The modes of the contexts that a thread is in, the innermost last."""

    def __init__(self):
        self.stack = [Mode()]


class InModes:
    """What is in the modes of its threads' contexts."""

    def __init__(self):
        self._modes, self._tuning, self._tunes_elsewhere = Modes(), 0, False
        self._counting = threading.Lock()

    @property
    def mode(self) -> Mode:
        """What the contexts of this thread say."""
        return self._modes.stack[-1]

    @property
    def is_tuning_mode(self) -> bool:
        """Whether this thread measures."""
        tunes = self.mode.tunes
        return self._tunes_elsewhere if tunes is None else tunes

    @is_tuning_mode.setter
    def is_tuning_mode(self, tunes: bool) -> None:
        self._tunes_elsewhere = bool(tunes)

    def _count_tuning(self, change: int) -> None:
        """Contexts that ask for measuring, one more or one less."""
        with self._counting:
            self._tuning += change
            self._tunes_elsewhere = self._tuning > 0


def timing_of(config: TuningConfig, policy: MeasurementPolicy, replays: int | None, tuner) -> Timing:
    """How a config's candidates are timed: the policy and a context's replays go before what the config asks for."""
    repeat = tuner.repeat if config.profiling_repeat is None else config.profiling_repeat
    require(repeat >= 1, "profiling_repeat", repeat, "1 or more")
    in_graph = config.use_cuda_graph if policy.use_cuda_graph is None else policy.use_cuda_graph
    if replays is None and in_graph:
        replays = repeat * (config.cuda_graph_profile_replays if config.use_cuda_graph else 1)
    return Timing(
        tuner.warmup,
        repeat,
        tuner.stream_delay_micro_secs,
        replays=replays,
        eager=policy.execution_mode == "eager",
        cold=config.use_cold_l2_cache if policy.cold_l2 is None else bool(policy.cold_l2),
    )

"""The tuner: keeps which runner and tactic is fastest for which shapes, and measures where `autotune()` says so."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flashinfer._core.checks import require
from flashinfer._core.env import logger
from flashinfer.autotuner import measure, store
from flashinfer.autotuner.candidates import is_in_profile_measurement, measuring, results_of, why_unprepared
from flashinfer.autotuner.kept import Kept
from flashinfer.autotuner.modes import InModes, timing_of
from flashinfer.autotuner.profiles import (
    OptimizationProfile,
    TuningConfig,
    as_profile,
    inputs_for,
    profile_of,
    profiles_to_tune,
    shapes_of,
)
from flashinfer.autotuner.ranks import agreed, get_autotune_process_group, set_autotune_process_group
from flashinfer.autotuner.statistics import AutoTunerStatistics

__all__ = [
    "AutoTuner",
    "autotune",
    "get_autotune_process_group",
    "is_in_profile_measurement",
    "set_autotune_process_group",
]

# Engines compare the environments of kept choices by these names (docs/engines.md).
_collect_metadata, _classify_metadata_mismatches = store.environment, store.mismatches


class AutoTuner(Kept, InModes):
    """Choices by measurement. `AutoTuner.get()` is the process's one; its methods may be called from any thread.

    Parameters
    ----------
    warmup, repeat : int
        Calls of a candidate before, and while it is timed.
    stream_delay_micro_secs : int
        How long a stream waits before them, so that the host is ahead.

    Attributes
    ----------
    is_tuning_mode : bool
        Whether this thread measures: its innermost context of `autotune()` says so, or, in a thread without one, that
        of another thread. Set, it is what holds where no context says anything.
    stats : AutoTunerStatistics
        What was tuned, and what failed.

    Examples
    --------
    >>> from flashinfer.autotuner import AutoTuner
    >>> AutoTuner.get() is AutoTuner.get(), AutoTuner.get().is_tuning_mode
    (True, False)
    """

    _instance: AutoTuner | None = None

    def __init__(self, warmup: int = 3, repeat: int = 10, stream_delay_micro_secs: int = 5000):
        require(warmup >= 0, "warmup", warmup, "0 or more")
        require(repeat >= 1, "repeat", repeat, "1 or more")
        self.warmup, self.repeat, self.stream_delay_micro_secs = warmup, repeat, stream_delay_micro_secs
        super().__init__()
        self.policy = measure.MeasurementPolicy()
        self.clear_cache()
        self.reset_statistics()

    @classmethod
    def get(cls) -> AutoTuner:
        """The process's tuner, made at the first call.

        Returns
        -------
        AutoTuner
        """
        with cls._lock:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    def get_effective_map_to_tuning_buckets(self, tuning_config: TuningConfig, spec_idx: int = 0) -> Callable:
        """The mapping of sizes to buckets that now holds for one of the config's dynamic dimensions.

        Parameters
        ----------
        tuning_config : TuningConfig
        spec_idx : int
            Which of its dynamic_tensor_specs.

        Returns
        -------
        callable (int) -> int
            From a size to the size tuned for.

        Raises
        ------
        IndexError
            The config has no such spec.
        """
        return self.mode.buckets.mapping(tuning_config.dynamic_tensor_specs[spec_idx])

    def search_cache(
        self,
        custom_op: str,
        runners: Sequence,
        input_shapes: Sequence,
        tuning_config: TuningConfig,
        inputs: Sequence | None = None,
        *,
        require_profiling_policy: bool = False,
    ) -> tuple[bool, int, object, OptimizationProfile | None]:
        """Look a choice up.

        Parameters
        ----------
        custom_op, runners, tuning_config
            As in `choose_one`.
        input_shapes : sequence of tuple of int
            The shape of each input.
        inputs : sequence, optional
            The inputs; without them `get_cache_key_extras` of a runner is not asked.
        require_profiling_policy : bool
            Look only among choices that were measured in this process.

        Returns
        -------
        found : bool
        runner : int
            Its index; 0 if there is no choice.
        tactic
            -1 if there is none.
        profile : OptimizationProfile or None
            The shapes that the choice is kept under.

        Raises
        ------
        ValueError
            input_idx and dim_idx of a spec differ in length.
        """
        with self._lock:
            shapes = profile_of(input_shapes, tuning_config, self.mode.buckets)
            found = self._find(custom_op, runners, shapes, inputs, tuning_config, require_profiling_policy)
            if found is None:
                return False, 0, -1, None
            return True, *found, as_profile(shapes, tuning_config, self.mode.buckets)

    def choose_one(
        self, custom_op: str, runners: Sequence, tuning_config: TuningConfig, inputs: Sequence, **kwargs
    ) -> tuple[object, object]:
        """The runner and tactic to use.

        A choice that is kept is given back. Where there is none, inside `autotune()`, every tactic of every runner is
        measured, for the inputs' buckets and for all others of the config; what fails, or computes another result
        than the first runner's tactic -1, is left out. Nothing is measured while a CUDA graph is captured.

        Parameters
        ----------
        custom_op : str
            The operation's name.
        runners : sequence of TunableRunner
            Implementations; the first one's tactic -1 is the fallback.
        tuning_config : TuningConfig
            Which dimensions vary.
        inputs : sequence
            Given to the runners; tensors, numbers and None.
        **kwargs
            Given to the runners, too.

        Returns
        -------
        runner : TunableRunner
        tactic
            For its `forward`.

        Raises
        ------
        ValueError
            There is no runner.
        RuntimeError
            Ranks of the process group have other candidates.
        """
        require(len(runners) > 0, "runners", "none", "one or more")
        fallback = runners[0], -1
        with self._lock:
            if custom_op in self.mode.skipped:
                return fallback
            shapes = shapes_of(inputs)
            profile = profile_of(shapes, tuning_config, self.mode.buckets)
            found = self._find(custom_op, runners, profile, inputs, tuning_config)
            if found is None and self.is_tuning_mode and not _capturing():
                each_profile = list(profiles_to_tune(shapes, tuning_config, self.mode.buckets))
                self.stats.tuned_op_total_configs[custom_op] = len(each_profile)
                for each in each_profile:
                    made = inputs_for(each, inputs, tuning_config)
                    if self._find(custom_op, runners, each, made, tuning_config) is None:
                        self._tune(custom_op, runners, each, made, tuning_config, kwargs)
                found = self._find(custom_op, runners, profile, inputs, tuning_config)
            self.hits += found is not None
            self.misses += found is None
            if found is None:
                self.stats._missed(custom_op, profile)
            return fallback if found is None else (runners[found[0]], found[1])

    def rank_tactics(
        self, custom_op: str, runners: Sequence, tuning_config: TuningConfig, inputs: Sequence, k: int = 1, **kwargs
    ) -> list:
        """The best tactics of one runner, best first.

        Parameters
        ----------
        custom_op, tuning_config, inputs, **kwargs
            As in `choose_one`.
        runners : sequence of TunableRunner
            One.
        k : int
            How many at most. Outside of tuning, and for 1, it is the tactic that `choose_one` gives.

        Returns
        -------
        list
            Tactics; [-1] where there is no choice, or no tactic runs. The first is kept as `choose_one` keeps it.

        Raises
        ------
        ValueError
            k below 1, or not one runner.
        """
        require(k >= 1, "k", k, "1 or more")
        require(len(runners) == 1, "runners", f"{len(runners)} of them", "one")
        if k == 1 or not self.is_tuning_mode or custom_op in self.mode.skipped or _capturing():
            return [self.choose_one(custom_op, runners, tuning_config, inputs, **kwargs)[1]]
        with self._lock:
            profile = profile_of(shapes_of(inputs), tuning_config, self.mode.buckets)
            made = inputs_for(profile, inputs, tuning_config)
            key = self._key(custom_op, runners, profile, made)
            if key not in self._ranked:
                self._tune(custom_op, runners, profile, made, tuning_config, kwargs)
            return self._ranked[key][:k]

    def profile_tactic(
        self,
        runner,
        inputs: Sequence,
        tactic,
        tuning_config: TuningConfig,
        input_batches: Sequence[Sequence],
        **kwargs,
    ) -> float:
        """Milliseconds of a call of one tactic, a mean over inputs that the caller made.

        Parameters
        ----------
        runner : TunableRunner
        inputs : sequence
            Their first tensor says the device.
        tactic
            One of the runner's.
        tuning_config : TuningConfig
            How it is timed.
        input_batches : sequence of sequence
            Inputs of successive calls, as `prepare_tactic_profile` gives them; `inputs` alone if there are none.
        **kwargs
            Given to the runner.

        Returns
        -------
        float
            Milliseconds of one call.

        Raises
        ------
        Exception
            Whatever the runner raises.
        """
        with self._lock:
            return self._profile_single_kernel(runner, inputs, tactic, tuning_config, input_batches, **kwargs)

    def _profile_single_kernel(
        self, runner, inputs, tactic, tuning_config, input_tensor_batches=None, **kwargs
    ) -> float:
        batches = [list(batch) for batch in input_tensor_batches or ()] or [list(inputs)]

        def call() -> None:
            for batch in batches:
                runner(batch, tactic=tactic, **kwargs)

        timing = timing_of(tuning_config, self.policy, self.mode.replays, self)
        with measuring():
            return measure.milliseconds(call, timing, _device_of(inputs)) / len(batches)

    def prepare_tactic_profile(self, inputs: Sequence, tuning_config: TuningConfig) -> tuple[TuningConfig, list]:
        """Make the inputs that `profile_tactic` is given for one tactic after the other.

        Parameters
        ----------
        inputs : sequence
            Of a call: tensors, numbers and None.
        tuning_config : TuningConfig

        Returns
        -------
        tuning_config : TuningConfig
            With the buckets that now hold.
        input_batches : list of list
            Inputs of successive calls: those given, once. Where L2 has to be cold it is flushed before each call.
        """
        return self.mode.buckets.applied(tuning_config), [list(inputs)]

    def reset_statistics(self) -> None:
        """Count from 0 again: `hits` and `misses` of choose_one, `failures` of candidates, and `stats`."""
        self.hits = self.misses = self.failures = 0
        self.stats = AutoTunerStatistics()

    def _key(self, custom_op, runners, profile, inputs) -> str:
        extras = [(type(r).__name__, *(() if inputs is None else _extras(r, inputs))) for r in runners]
        dtypes = None if inputs is None else tuple(str(x.dtype) for x in inputs if isinstance(x, torch.Tensor))
        return str((custom_op, tuple(extras), profile, dtypes))

    def _find(self, custom_op, runners, profile, inputs, config, measured_only=False):
        """(index of the runner, tactic), or None."""
        key = self._key(custom_op, runners, profile, inputs)
        found = self.profiling_cache.get(key)
        measured = found is not None
        if not measured and not measured_only:
            found = self._loaded.get(key) or (self.folder.find(key) if self.folder is not None else None)
        if found is None:
            return None
        for index, runner in enumerate(runners):
            if type(runner).__name__ == found[0]:
                check = getattr(runner, "validate_tactic", None)
                valid = check is None or inputs is None or found[1] == -1 or check(inputs, found[1])
                valid = valid and (measured or self._offers(key, runner, profile, inputs, found[1], config))
                return (index, found[1]) if valid else None
        return None

    def _offers(self, key: str, runner, profile, inputs, tactic, config) -> bool:
        """Whether a runner has the tactic that a file names: files are not believed in that."""
        if tactic == -1:
            return True
        if key not in self._offered and inputs is not None:
            full = as_profile(profile, config, self.mode.buckets)
            tactics = [store.as_tactic(each) for each in runner.get_valid_tactics(list(inputs), full)]
            self._offered[key] = tactic in tactics
            if tactic not in tactics:
                name = type(runner).__name__
                logger.warning("a kept choice is not used: %s has no tactic %r for %s", name, tactic, profile)
        return self._offered.get(key, False)

    def _tune(self, custom_op, runners, profile, inputs, config, kwargs) -> None:
        key = self._key(custom_op, runners, profile, inputs)
        if config.inputs_pre_hook is not None:
            inputs = list(config.inputs_pre_hook(list(inputs)))
        full = as_profile(profile, config, self.mode.buckets)
        candidates, times = [(0, -1)], []
        unprepared = {}
        for index, runner in enumerate(runners):
            tactics = list(map(store.as_tactic, runner.get_valid_tactics(list(inputs), full)))
            candidates += [(index, t) for t in tactics if (index, t) != (0, -1)]
            unprepared[index] = why_unprepared(runner, inputs, tactics, full, kwargs)
        expected = results_of(runners[0], -1, inputs, kwargs)
        for index, tactic in candidates:
            took = self._time(runners[index], tactic, inputs, config, kwargs, expected, unprepared[index])
            if isinstance(took, str):
                self._left_out(custom_op, runners[index], tactic, key, took)
            times.append(math.inf if isinstance(took, str) else float(took))
        times = agreed(times)
        best = min(range(len(times)), key=times.__getitem__)
        index, tactic = candidates[best]
        name = type(runners[index]).__name__
        self.profiling_cache[key] = (name, tactic)
        self.stats._succeeded(custom_op)
        order = sorted((i for i in range(len(times)) if times[i] < math.inf), key=times.__getitem__)
        self._ranked[key] = [candidates[i][1] for i in order] or [-1]
        self._dirty = True
        if self.folder is not None:
            self.folder.keep(key, name, tactic)
        took = times[best]
        logger.info("tuned %s %s: %s, tactic %s, %.4g ms, of %d", custom_op, profile, name, tactic, took, len(times))

    def _time(self, runner, tactic, inputs, config, kwargs, expected, why) -> float | str:
        """Milliseconds of a candidate, or why it is none: `why`, if that is known."""
        inputs = list(inputs)
        try:
            if not why and expected is not None:
                why = measure.why_different(measure.copied(runner(inputs, tactic=tactic, **kwargs)), expected)
            return why or self._profile_single_kernel(runner, inputs, tactic, config, **kwargs)
        except Exception as error:  # a candidate that cannot run is no candidate
            return f"{type(error).__name__}: {error}"

    def _left_out(self, custom_op, runner, tactic, key, why) -> None:
        self.failures += 1
        self.stats._failed(custom_op, type(runner).__name__, tactic, key)
        logger.warning("%s: tactic %s of %s is left out: %s", custom_op, tactic, type(runner).__name__, why)


def _extras(runner, inputs) -> tuple:
    return tuple(getattr(runner, "get_cache_key_extras", lambda inputs: ())(list(inputs)))


def _device_of(inputs) -> torch.device:
    return next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def tuning(tune: bool, **changes) -> Iterator[AutoTuner]:
    """The process's tuner in a mode: that of this thread with `changes`, the arguments of `Mode.inside`.

    Threads without a context measure as long as one of another thread asks for that.
    """
    tuner = AutoTuner.get()
    stack = tuner._modes.stack
    stack.append(tuner.mode.inside(tune, **changes))
    try:
        tuner._count_tuning(int(tune))
        yield tuner
    finally:
        tuner._count_tuning(-int(tune))
        stack.pop()


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool | None = None,
    skip_ops: str | Iterable[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
) -> Iterator[None]:
    """Inside, operations that choose by `AutoTuner.choose_one` measure what has no choice yet.

    The functions of this library take their tiles from numbers beside their kernels and measure nothing: what is tuned
    is what callers bring to the tuner. A context in another one has from that what it does not say itself, skips what
    that skips, too, and measures if that one does.

    Parameters
    ----------
    tune_mode : bool
        Whether to measure; False only uses choices that are kept, in a context that measures, too.
    cache : str, optional
        A JSON file, which is read on entry and, if anything was tuned, written on exit.
    tuning_buckets : iterable of int, optional
        Sizes to tune for, in place of each operation's own.
    round_up : bool, optional
        Whether the next larger of the buckets stands for a size in between. Else the next smaller does, of
        `tuning_buckets`, or what each operation says of its own.
    skip_ops : str or iterable of str, optional
        Names of operations that are given their fallback.
    cuda_graph_profile_replays : int, optional
        Time so many replays of a CUDA graph of each candidate.

    Yields
    ------
    None
        A context manager.

    Raises
    ------
    ValueError
        A size, or number of replays, below 1.

    Examples
    --------
    >>> import flashinfer
    >>> with flashinfer.autotune(True):
    ...     pass  # calls in here measure the variants that may run them
    """
    changes = dict(tuning_buckets=tuning_buckets, round_up=round_up, skip_ops=skip_ops)
    with tuning(bool(tune_mode), **changes, replays=cuda_graph_profile_replays) as tuner:
        if cache is not None and os.path.exists(cache):
            tuner.load_configs(cache)
        try:
            yield
        finally:
            if cache is not None and tune_mode and tuner._dirty:
                tuner.save_configs(cache)

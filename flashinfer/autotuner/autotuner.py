"""The tuner: keeps which runner and tactic is fastest for which shapes, and measures where `autotune()` says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flashinfer._core.checks import require
from flashinfer._core.env import logger
from flashinfer.autotuner import measure, store
from flashinfer.autotuner.kept import Kept
from flashinfer.autotuner.profiles import Buckets, TuningConfig, inputs_for, profile_of, profiles_to_tune, shapes_of
from flashinfer.autotuner.ranks import agreed, get_autotune_process_group, set_autotune_process_group

__all__ = ["AutoTuner", "autotune", "get_autotune_process_group", "set_autotune_process_group"]

# Engines compare the environments of kept choices by these names (docs/engines.md).
_collect_metadata, _classify_metadata_mismatches = store.environment, store.mismatches


@dataclass(frozen=True)
class Mode:
    """What `autotune()` asked for: whether to measure, in which buckets, which operations not, by how many replays."""

    tune: bool = False
    buckets: Buckets = field(default_factory=Buckets)
    skipped: frozenset[str] = frozenset()
    replays: int | None = None


class AutoTuner(Kept):
    """Choices by measurement. `AutoTuner.get()` is the process's one; its methods may be called from any thread.

    Parameters
    ----------
    warmup, repeat : int
        Calls of a candidate before, and while it is timed.
    stream_delay_micro_secs : int
        How long a stream waits before them, so that the host is ahead.

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
        self.mode = Mode()
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

    @property
    def is_tuning_mode(self) -> bool:
        """Whether `autotune()` is on and measures."""
        return self.mode.tune

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
    ) -> tuple[bool, int, object, tuple]:
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
        profile : tuple
            The shapes that a choice is kept under.

        Raises
        ------
        ValueError
            input_idx and dim_idx of a spec differ in length.
        """
        with self._lock:
            profile = profile_of(input_shapes, tuning_config, self.mode.buckets)
            found = self._find(custom_op, runners, profile, inputs, measured_only=require_profiling_policy)
            return (True, *found, profile) if found else (False, 0, -1, profile)

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
            found = self._find(custom_op, runners, profile, inputs)
            if found is None and self.mode.tune and not _capturing():
                for each in profiles_to_tune(shapes, tuning_config, self.mode.buckets):
                    made = inputs_for(each, inputs, tuning_config)
                    if self._find(custom_op, runners, each, made) is None:
                        self._tune(custom_op, runners, each, made, kwargs)
                found = self._find(custom_op, runners, profile, inputs)
            self.hits += found is not None
            self.misses += found is None
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
        if k == 1 or not self.mode.tune or custom_op in self.mode.skipped or _capturing():
            return [self.choose_one(custom_op, runners, tuning_config, inputs, **kwargs)[1]]
        with self._lock:
            profile = profile_of(shapes_of(inputs), tuning_config, self.mode.buckets)
            made = inputs_for(profile, inputs, tuning_config)
            key = self._key(custom_op, runners, profile, made)
            if key not in self._ranked:
                self._tune(custom_op, runners, profile, made, kwargs)
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
            Not used: the inputs are made already.
        input_batches : sequence of sequence
            Inputs of successive calls, so that none finds its own in L2; `inputs` alone if there are none.
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
        batches = [list(batch) for batch in input_batches] or [list(inputs)]

        def call() -> None:
            for batch in batches:
                runner(batch, tactic=tactic, **kwargs)

        with self._lock:
            return measure.milliseconds(call, self._timing(), _device_of(inputs)) / len(batches)

    def prepare_tactic_profile(self, inputs: Sequence, tuning_config: TuningConfig) -> tuple[TuningConfig, list]:
        """Make the inputs of every profile that a config tunes for.

        Parameters
        ----------
        inputs : sequence
            Of a call: tensors, numbers and None.
        tuning_config : TuningConfig

        Returns
        -------
        tuning_config : TuningConfig
            The one given.
        profiles : list of list
            Inputs: first of the profile of `inputs`, then of every other. An input of the right shape is not copied.

        Raises
        ------
        ValueError
            input_idx and dim_idx of a spec differ in length.
        """
        profiles = profiles_to_tune(shapes_of(inputs), tuning_config, self.mode.buckets)
        return tuning_config, [inputs_for(profile, inputs, tuning_config) for profile in profiles]

    def reset_statistics(self) -> None:
        """Count from 0 again: `hits` and `misses` of choose_one, `failures` of candidates."""
        self.hits = self.misses = self.failures = 0

    def _key(self, custom_op, runners, profile, inputs) -> str:
        extras = [(type(r).__name__, *(() if inputs is None else _extras(r, inputs))) for r in runners]
        dtypes = None if inputs is None else tuple(str(x.dtype) for x in inputs if isinstance(x, torch.Tensor))
        return str((custom_op, tuple(extras), profile, dtypes))

    def _find(self, custom_op, runners, profile, inputs, measured_only=False):
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
                valid = valid and (measured or self._offers(key, runner, profile, inputs, found[1]))
                return (index, found[1]) if valid else None
        return None

    def _offers(self, key: str, runner, profile, inputs, tactic) -> bool:
        """Whether a runner has the tactic that a file names: files are not believed in that."""
        if tactic == -1:
            return True
        if key not in self._offered and inputs is not None:
            tactics = [store.as_tactic(each) for each in runner.get_valid_tactics(list(inputs), profile)]
            self._offered[key] = tactic in tactics
            if tactic not in tactics:
                name = type(runner).__name__
                logger.warning("a kept choice is not used: %s has no tactic %r for %s", name, tactic, profile)
        return self._offered.get(key, False)

    def _tune(self, custom_op, runners, profile, inputs, kwargs) -> None:
        device = _device_of(inputs)
        candidates = [(0, -1)]
        for index, runner in enumerate(runners):
            tactics = runner.get_valid_tactics(list(inputs), profile)
            candidates += [(index, t) for t in map(store.as_tactic, tactics) if (index, t) != (0, -1)]
        expected = measure.copied(runners[0](list(inputs), tactic=-1, **kwargs))
        times = [self._time(custom_op, runners[i], t, inputs, kwargs, expected, device) for i, t in candidates]
        times = agreed(list(map(float, times)))
        best = min(range(len(times)), key=times.__getitem__)
        index, tactic = candidates[best]
        name, key = type(runners[index]).__name__, self._key(custom_op, runners, profile, inputs)
        self.profiling_cache[key] = (name, tactic)
        order = sorted((i for i in range(len(times)) if times[i] < math.inf), key=times.__getitem__)
        self._ranked[key] = [candidates[i][1] for i in order] or [-1]
        self._dirty = True
        if self.folder is not None:
            self.folder.keep(key, name, tactic)
        took = times[best]
        logger.info("tuned %s %s: %s, tactic %s, %.4g ms, of %d", custom_op, profile, name, tactic, took, len(times))

    def _time(self, custom_op, runner, tactic, inputs, kwargs, expected, device) -> float:
        inputs = list(inputs)
        try:
            runner(inputs, tactic=tactic, do_preparation=True, **kwargs)
            why = measure.why_different(measure.copied(runner(inputs, tactic=tactic, **kwargs)), expected)
            if not why:
                return measure.milliseconds(lambda: runner(inputs, tactic=tactic, **kwargs), self._timing(), device)
        except Exception as error:  # a candidate that cannot run is no candidate; the fallback ran before
            why = f"{type(error).__name__}: {error}"
        self.failures += 1
        logger.warning("%s: tactic %s of %s is left out: %s", custom_op, tactic, type(runner).__name__, why)
        return math.inf

    def _timing(self) -> measure.Timing:
        replays, mode = self.mode.replays, self.policy.execution_mode
        return measure.Timing(
            self.warmup,
            self.repeat,
            self.stream_delay_micro_secs,
            replays=replays if replays is not None else self.repeat if mode == "cuda_graph" else None,
            eager=mode == "eager",
            cold=bool(self.policy.cold_l2),
        )


def _extras(runner, inputs) -> tuple:
    return tuple(getattr(runner, "get_cache_key_extras", lambda inputs: ())(list(inputs)))


def _device_of(inputs) -> torch.device:
    return next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def tuning(mode: Mode) -> Iterator[AutoTuner]:
    """The process's tuner in a mode, and in the one before afterwards."""
    tuner = AutoTuner.get()
    before, tuner.mode = tuner.mode, mode
    try:
        yield tuner
    finally:
        tuner.mode = before


def mode_of(tune, tuning_buckets, round_up, skip_ops, replays=None) -> Mode:
    """The mode that the arguments of `autotune` stand for."""
    sizes = None if tuning_buckets is None else tuple(sorted(map(int, tuning_buckets)))
    require(sizes is None or (len(sizes) > 0 and sizes[0] > 0), "tuning_buckets", sizes, "one or more sizes above 0")
    require(replays is None or replays >= 1, "cuda_graph_profile_replays", replays, "1 or more")
    return Mode(bool(tune), Buckets(sizes, round_up), frozenset(skip_ops or ()), replays)


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool | None = None,
    skip_ops: Iterable[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
) -> Iterator[None]:
    """Inside, operations that choose by `AutoTuner.choose_one` measure what has no choice yet.

    The functions of this library take their tiles from numbers beside their kernels and measure nothing: what is tuned
    is what callers bring to the tuner.

    Parameters
    ----------
    tune_mode : bool
        Whether to measure; False only uses choices that are kept.
    cache : str, optional
        A JSON file, which is read on entry and, if anything was tuned, written on exit.
    tuning_buckets : iterable of int, optional
        Sizes to tune for, in place of each operation's own.
    round_up : bool, optional
        Whether the next larger size stands for one in between; False, the next smaller, which is the default for
        `tuning_buckets`. None leaves each operation's own mapping where there are none.
    skip_ops : iterable of str, optional
        Operations that are given their fallback.
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
    mode = mode_of(tune_mode, tuning_buckets, round_up, skip_ops, cuda_graph_profile_replays)
    with tuning(mode) as tuner:
        if cache is not None:
            tuner.load_configs(cache)
        try:
            yield
        finally:
            if cache is not None and tune_mode and tuner._dirty:
                tuner.save_configs(cache)

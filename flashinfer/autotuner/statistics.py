"""What a tuner counts, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AutoTunerStatistics:
    """Counts since `AutoTuner.reset_statistics`; `print` shows them.

    Attributes
    ----------
    cache_misses : int
        Calls that were given the fallback, for there was no choice.
    cache_miss_config_collection : dict of str to set of tuple
        The shapes of these, by operation.
    failed_profiling_count : dict of str to set of str
        Keys of what was tuned while a candidate failed, by operation.
    tuned_op_total_configs : dict of str to int
        Profiles of the last tuning of each operation.
    tuned_op_successful_configs : dict of str to int
        Profiles for which there is a choice since, by operation.
    failed_tactics : dict of str to set
        Tactics that failed, by "operation::runner".

    Examples
    --------
    >>> from flashinfer.autotuner import AutoTunerStatistics
    >>> print(AutoTunerStatistics(cache_misses=2))
    Cache misses: 2
    """

    cache_misses: int = 0
    cache_miss_config_collection: dict[str, set[tuple]] = field(default_factory=dict)
    failed_profiling_count: dict[str, set[str]] = field(default_factory=dict)
    tuned_op_total_configs: dict[str, int] = field(default_factory=dict)
    tuned_op_successful_configs: dict[str, int] = field(default_factory=dict)
    failed_tactics: dict[str, set] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"Cache misses: {self.cache_misses}"]
        for op, shapes in sorted(self.cache_miss_config_collection.items()):
            lines += [f"  {op}: {each}" for each in sorted(shapes)]
        for op, total in sorted(self.tuned_op_total_configs.items()):
            done, failed = self.tuned_op_successful_configs.get(op, 0), len(self.failed_profiling_count.get(op, ()))
            lines.append(f"Tuned {op}: {done} of {total} profiles; candidates failed in {failed}")
        return "\n".join(lines)

    def _missed(self, op: str, shapes: tuple) -> None:
        """Count a call without a choice."""
        self.cache_misses += 1
        self.cache_miss_config_collection.setdefault(op, set()).add(shapes)

    def _succeeded(self, op: str) -> None:
        """Count a choice."""
        self.tuned_op_successful_configs[op] = self.tuned_op_successful_configs.get(op, 0) + 1

    def _failed(self, op: str, runner: str, tactic, key: str) -> None:
        """Count a candidate that failed."""
        self.failed_profiling_count.setdefault(op, set()).add(key)
        self.failed_tactics.setdefault(f"{op}::{runner}", set()).add(tactic)

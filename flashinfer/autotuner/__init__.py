"""Choosing among implementations by measuring them: runners with tactics, for shapes in buckets."""

from flashinfer.autotuner.autotuner import (
    AutoTuner,
    _collect_metadata,
    autotune,
)
from flashinfer.autotuner.measure import MeasurementPolicy
from flashinfer.autotuner.profiles import ConstraintSpec, DynamicTensorSpec, TunableRunner, TuningConfig
from flashinfer.autotuner.ranks import get_autotune_process_group, set_autotune_process_group

__all__ = [
    "AutoTuner",
    "ConstraintSpec",
    "DynamicTensorSpec",
    "MeasurementPolicy",
    "TunableRunner",
    "TuningConfig",
    "autotune",
    "get_autotune_process_group",
    "set_autotune_process_group",
]

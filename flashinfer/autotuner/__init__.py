"""Choosing among implementations by measuring them: runners with tactics, for shapes in buckets."""

from flashinfer.autotuner.autotuner import (
    AutoTuner,
    _collect_metadata,
    autotune,
    is_in_profile_measurement,
)
from flashinfer.autotuner.initializers import (
    autotuner_initializer_empty,
    autotuner_initializer_ones,
    autotuner_initializer_rand,
    autotuner_initializer_rand_scaled,
    autotuner_initializer_randn,
    autotuner_initializer_zeros,
)
from flashinfer.autotuner.measure import MeasurementPolicy
from flashinfer.autotuner.profiles import (
    ConstraintSpec,
    Dim,
    DynamicDim,
    DynamicTensorSpec,
    OptimizationProfile,
    StaticDim,
    TunableRunner,
    TuningConfig,
    make_bucket_mapper,
    round_to_nearest_bucket,
)
from flashinfer.autotuner.ranks import get_autotune_process_group, set_autotune_process_group
from flashinfer.autotuner.statistics import AutoTunerStatistics

__all__ = [
    "AutoTuner",
    "AutoTunerStatistics",
    "ConstraintSpec",
    "Dim",
    "DynamicDim",
    "DynamicTensorSpec",
    "MeasurementPolicy",
    "OptimizationProfile",
    "StaticDim",
    "TunableRunner",
    "TuningConfig",
    "autotune",
    "autotuner_initializer_empty",
    "autotuner_initializer_ones",
    "autotuner_initializer_rand",
    "autotuner_initializer_rand_scaled",
    "autotuner_initializer_randn",
    "autotuner_initializer_zeros",
    "get_autotune_process_group",
    "is_in_profile_measurement",
    "make_bucket_mapper",
    "round_to_nearest_bucket",
    "set_autotune_process_group",
]

"""Mixtures of experts by the names of upstream's kernels in CuTe DSL; they run on every chip and on the CPU."""

from flashinfer.fused_moe.cute_dsl.fused_moe import CuteDslMoEWrapper, cute_dsl_fused_moe, cute_dsl_fused_moe_nvfp4

__all__ = ["CuteDslMoEWrapper", "cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4"]

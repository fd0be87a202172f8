"""Mixtures of experts by the names of upstream's kernels in CuTe DSL; they run on every chip and on the CPU."""

from flashinfer.fused_moe.cute_dsl.bf16 import CuteDslBf16MoEWrapper, cute_dsl_fused_moe_bf16
from flashinfer.fused_moe.cute_dsl.fused_moe import CuteDslMoEWrapper, cute_dsl_fused_moe, cute_dsl_fused_moe_nvfp4
from flashinfer.fused_moe.cute_dsl.mxfp8_mxfp4 import CuteDslMxfp8Mxfp4MoEWrapper, cute_dsl_fused_moe_mxfp8_mxfp4

__all__ = [
    "CuteDslBf16MoEWrapper",
    "CuteDslMoEWrapper",
    "CuteDslMxfp8Mxfp4MoEWrapper",
    "cute_dsl_fused_moe",
    "cute_dsl_fused_moe_bf16",
    "cute_dsl_fused_moe_mxfp8_mxfp4",
    "cute_dsl_fused_moe_nvfp4",
]

"""The path by which callers of upstream reach the names of `flashinfer.fused_moe`."""

from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout

__all__ = ["ActivationType", "Fp8QuantizationType", "RoutingMethodType", "WeightLayout"]

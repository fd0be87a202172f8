"""Mixtures of experts: routing, and the experts' products with all that stands between them in one call."""

from flashinfer.fused_moe.routing import fused_topk_deepseek
from flashinfer.tllm_enums import ActivationType, Fp8QuantizationType, RoutingMethodType, WeightLayout

__all__ = [
    "ActivationType",
    "Fp8QuantizationType",
    "RoutingMethodType",
    "WeightLayout",
    "fused_topk_deepseek",
]

"""Linear layers, and those whose weights are given once."""

from flashinfer.gemm.prepared import (
    PreparedFp4Linear,
    PrimsTsGemmConfig,
    prepare_fp4_linear,
    prepare_fp4_linear_swiglu,
    prepare_fp4_qkv_qknorm_rope,
)
from flashinfer.gemm.projections import (
    fp4_linear,
    fp4_linear_swiglu,
    fp4_qkv_qknorm_rope,
    fp8_linear,
    fp8_linear_swiglu,
    fp8_qkv_qknorm_rope,
)

__all__ = [
    "PreparedFp4Linear",
    "PrimsTsGemmConfig",
    "fp4_linear",
    "fp4_linear_swiglu",
    "fp4_qkv_qknorm_rope",
    "fp8_linear",
    "fp8_linear_swiglu",
    "fp8_qkv_qknorm_rope",
    "prepare_fp4_linear",
    "prepare_fp4_linear_swiglu",
    "prepare_fp4_qkv_qknorm_rope",
]

"""Linear layers by the path at which callers of upstream find them; `flashinfer.gemm` is their home."""

from flashinfer.prims_ts.gemm import (
    fp4_linear,
    fp4_linear_swiglu,
    fp4_qkv_qknorm_rope,
    fp8_linear,
    fp8_linear_swiglu,
    fp8_qkv_qknorm_rope,
)

__all__ = [
    "fp4_linear",
    "fp4_linear_swiglu",
    "fp4_qkv_qknorm_rope",
    "fp8_linear",
    "fp8_linear_swiglu",
    "fp8_qkv_qknorm_rope",
]

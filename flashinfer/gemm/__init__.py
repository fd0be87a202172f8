"""Matrix products: dense, with scaled and block-scaled operands, and in groups."""

from .blockscaled import bmm_mxfp8, mm_bf16_fp4, mm_fp4, mm_mxfp8, prepare_bf16_fp4_weights
from .groupwise import fp8_blockscale_gemm_sm90, gemm_fp8_nt_blockscaled, gemm_fp8_nt_groupwise

__all__ = [
    "bmm_mxfp8",
    "fp8_blockscale_gemm_sm90",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_mxfp8",
    "prepare_bf16_fp4_weights",
]

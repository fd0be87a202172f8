"""Matrix products: dense, with scaled and block-scaled operands, and in groups."""

from .blockscaled import bmm_mxfp8, mm_bf16_fp4, mm_fp4, mm_mxfp8, prepare_bf16_fp4_weights
from .dense import (
    bmm_bf16,
    bmm_fp8,
    mm_bf16,
    mm_fp8,
    mm_M1_16_K7168_N128,
    mm_M1_16_K7168_N256,
    tgv_gemm_sm100,
    tinygemm_bf16,
)
from .grouped import (
    SegmentGEMMWrapper,
    batch_deepgemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
    group_gemm_mxfp4_nt_groupwise,
    group_gemm_mxfp8_mxfp4_nt_groupwise,
    group_gemm_nvfp4_nt_groupwise,
)
from .groupwise import fp8_blockscale_gemm_sm90, gemm_fp8_nt_blockscaled, gemm_fp8_nt_groupwise

__all__ = [
    "SegmentGEMMWrapper",
    "batch_deepgemm_fp8_nt_groupwise",
    "bmm_bf16",
    "bmm_fp8",
    "bmm_mxfp8",
    "fp8_blockscale_gemm_sm90",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
    "mm_bf16",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_fp8",
    "mm_mxfp8",
    "prepare_bf16_fp4_weights",
    "tgv_gemm_sm100",
    "tinygemm_bf16",
]

"""Matrix products: dense, with scaled and block-scaled operands, and in groups."""

from . import gemm_base as gemm_base, routergemm as routergemm
from .alpha_beta import gemm_alpha_beta
from .blockscaled import bmm_mxfp8, mm_bf16_fp4, mm_fp4, mm_mxfp8, prepare_bf16_fp4_weights
from .dense import (
    bmm_bf16,
    bmm_fp8,
    mm_bf16,
    mm_fp8,
    tinygemm_bf16,
)
from .grouped import (
    batch_deepgemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
    group_gemm_mxfp4_nt_groupwise,
    group_gemm_mxfp8_mxfp4_nt_groupwise,
    group_gemm_nvfp4_nt_groupwise,
)
from .groupwise import fp8_blockscale_gemm_sm90, gemm_fp8_nt_blockscaled, gemm_fp8_nt_groupwise
from .masked import grouped_gemm_nt_masked
from .projections import (
    fp4_linear,
    fp4_linear_swiglu,
    fp4_qkv_qknorm_rope,
    fp8_linear,
    fp8_linear_swiglu,
    fp8_qkv_qknorm_rope,
)
from .ragged import (
    group_gemm_fp8_nt_groupwise_contiguous,
    masked_bmm,
    masked_scaled_bmm,
    ragged_block_scaled_bmm,
    ragged_bmm,
    ragged_scaled_bmm,
)
from .router import (
    mm_M1_16,
    mm_M1_16_K6144_N256,
    mm_M1_16_K7168_N128,
    mm_M1_16_K7168_N256,
    mm_M1_16_K7168_N256_bf16,
    mm_M1_16_K7168_N384,
    mm_M1_16_K7168_N384_bf16,
    mm_M1_16_K7168_N896,
    mm_M1_16_K7168_N896_bf16,
)
from .segment import SegmentGEMMWrapper
from .svdquant import mm_nvfp4_svdquant, nvfp4_quantize_smooth, svdquant_linear
from .tgv import tgv_gemm_sm100
from flashinfer.trace.templates import describe

__all__ = [
    "SegmentGEMMWrapper",
    "batch_deepgemm_fp8_nt_groupwise",
    "bmm_bf16",
    "bmm_fp8",
    "bmm_mxfp8",
    "fp4_linear",
    "fp4_linear_swiglu",
    "fp4_qkv_qknorm_rope",
    "fp8_blockscale_gemm_sm90",
    "fp8_linear",
    "fp8_linear_swiglu",
    "fp8_qkv_qknorm_rope",
    "gemm_alpha_beta",
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "group_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise_contiguous",
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "grouped_gemm_nt_masked",
    "masked_bmm",
    "masked_scaled_bmm",
    "mm_M1_16",
    "mm_M1_16_K6144_N256",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_bf16",
    "mm_M1_16_K7168_N384",
    "mm_M1_16_K7168_N384_bf16",
    "mm_M1_16_K7168_N896",
    "mm_M1_16_K7168_N896_bf16",
    "mm_bf16",
    "mm_bf16_fp4",
    "mm_fp4",
    "mm_fp8",
    "mm_mxfp8",
    "mm_nvfp4_svdquant",
    "nvfp4_quantize_smooth",
    "prepare_bf16_fp4_weights",
    "ragged_block_scaled_bmm",
    "ragged_bmm",
    "ragged_scaled_bmm",
    "svdquant_linear",
    "tgv_gemm_sm100",
    "tinygemm_bf16",
]

describe(__name__, globals())

"""The path by which callers of upstream reach the small operations of DeepSeek-V3's layers."""

from flashinfer.concat_ops import concat_mla_k
from flashinfer.fused_moe.routing import fused_topk_deepseek
from flashinfer.gemm import mm_M1_16_K7168_N128, mm_M1_16_K7168_N256

__all__ = ["concat_mla_k", "fused_topk_deepseek", "mm_M1_16_K7168_N128", "mm_M1_16_K7168_N256"]

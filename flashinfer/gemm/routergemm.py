"""The path by which callers of upstream reach products of few rows."""

from flashinfer.gemm.dense import tinygemm_bf16
from flashinfer.gemm.router import (
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

__all__ = [
    "mm_M1_16",
    "mm_M1_16_K6144_N256",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
    "mm_M1_16_K7168_N256_bf16",
    "mm_M1_16_K7168_N384",
    "mm_M1_16_K7168_N384_bf16",
    "mm_M1_16_K7168_N896",
    "mm_M1_16_K7168_N896_bf16",
    "tinygemm_bf16",
]

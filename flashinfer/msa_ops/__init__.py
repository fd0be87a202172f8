"""Sparse attention over blocks of 128 keys that queries choose (MiniMax-M3, 2026): scores, selection, attention."""

from flashinfer.msa_ops.attend import msa_sparse_attention, msa_sparse_decode_attention
from flashinfer.msa_ops.score import msa_proxy_score, msa_proxy_score_fp4
from flashinfer.msa_ops.select import msa_topk_select

__all__ = [
    "msa_proxy_score",
    "msa_proxy_score_fp4",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "msa_topk_select",
]

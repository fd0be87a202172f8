"""Block scores on any architecture: the launch of `block_scores_kernel`."""

from __future__ import annotations

import torch
import triton

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import target_of
from flashinfer.ops.attention._device.block_scores import block_scores_kernel
from flashinfer.ops.attention.block_scores import BLOCK

# Programs that a multiprocessor runs at once, about: the blocks of a query are shared out until the chip is full. Not
# measured.
_PROGRAMS_PER_SM = 4


def build(p, c) -> Build:
    element = {"bf16": "*bf16:16", "fp16": "*fp16:16", "fp8e4nv": "*u8:16"}
    unit = lambda dtype: "i64:16" if dtype == "fp8e4nv" else "i64:8"
    types = dict(
        q=element[p.q_dtype], k=element[p.kv_dtype], seen="*i32", base="*i32", tables="*i32", scores="*fp32",
        blocks="i32", q_stride_t=unit(p.q_dtype), q_stride_h=unit(p.q_dtype), k_stride_page=unit(p.kv_dtype),
        k_stride_h=unit(p.kv_dtype), k_stride_n=unit(p.kv_dtype), tables_stride="i64", scores_stride_h="i64",
        scores_stride_b="i64", scores_stride_t="i64",
    )  # fmt: skip
    constants = dict(
        HEADS=p.num_heads, KV_HEADS=p.num_kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(p.num_heads // p.num_kv_heads)), D=p.head_dim,
        D_PAD=triton.next_power_of_2(p.head_dim), Q_DTYPE=p.q_dtype, KV_DTYPE=p.kv_dtype, PAGED=p.paged,
        REDUCE=p.reduce, NATIVE_FP8=c.native_fp8, WIDE=c.wide if p.q_dtype == "bf16" else "fp16", BLOCK=BLOCK,
    )  # fmt: skip
    return Build(block_scores_kernel, types, constants, num_warps=c.num_warps, num_stages=c.num_stages)


launch = Launcher("block_scores", build)
LAUNCHERS = (launch,)


def run(p, c, q, k, seen, base, tables, scores) -> None:
    """Parameters as of the reference's `run`."""
    tokens, blocks = q.shape[0], scores.shape[1]
    if not tokens or not blocks:
        return
    shares = min(blocks, triton.cdiv(target_of(q.device).sms * _PROGRAMS_PER_SM, tokens))
    page, head, row, _ = k.stride() if p.paged else (0, k.stride(1), k.stride(0), 1)
    bits = lambda t: t.view(torch.uint8) if t.element_size() == 1 else t
    launch(
        p, c, (tokens, shares, 1), bits(q), bits(k), seen, base, seen if tables is None else tables, scores, blocks,
        *q.stride()[:2], page, head, row, 0 if tables is None else tables.stride(0), *scores.stride(),
    )  # fmt: skip

"""The attention problems that `precompile` builds and CI compiles: what served models ask for, and the edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashinfer.ops.attention.problem import REQUESTS, Problem
from flashinfer.ops.formats import KV_FORMATS

_BASE = Problem("paged", "bf16", "bf16", "bf16", 128, 128, 4, page_size=16)
# (head_dim_qk, head_dim_vo, GQA group)
_COMMON = ((128, 128, 4), (128, 128, 8), (64, 64, 8), (256, 256, 4))
_ODD = ((72, 72, 1), (512, 512, 16))


def _sized(p: Problem, dims: tuple[int, int, int]) -> Problem:
    return replace(p, head_dim_qk=dims[0], head_dim_vo=dims[1], group=dims[2])


def decode_problems() -> Iterator[Problem]:
    """One query token per request: tiles of 16 rows; of 32 or 64 for a wide group or several tokens."""
    base = replace(_BASE, rows=16)
    for dims in _COMMON:
        yield _sized(base, dims)
    # Calls without a plan.
    for requests in REQUESTS:
        for dims in _COMMON:
            yield replace(_sized(base, dims), requests=requests)
        yield replace(base, kv_dtype="fp8e4nv", requests=requests)
    yield replace(base, mask="causal", rows=32, window=True, sinks=True, lse=True, requests=REQUESTS[-1])
    for dims in _ODD:
        yield replace(_sized(base, dims), lse=True)
    yield replace(base, kv_dtype="fp8e4nv")
    yield replace(base, kv_dtype="fp8e5", head_scales=True, rows=32)
    yield replace(base, kv_dtype="fp8e4nv", o_dtype="fp8e4nv")
    for kv_dtype in KV_FORMATS:
        yield replace(base, kv_dtype=kv_dtype)
    yield replace(_sized(base, (256, 256, 4)), kv_dtype="int4_group_64")
    yield replace(base, kv_dtype="int8_per_token_head", rows=64, window=True, soft_cap=True)
    yield replace(base, mask="causal", rows=32)
    yield replace(base, page_size=5, aligned=False, window=True)
    yield replace(base, q_dtype="fp32", kv_dtype="fp32", o_dtype="fp32", pos_encoding="ROPE_LLAMA")
    yield replace(base, mask="causal", rows=64)
    # Few KV heads on a card.
    yield replace(base, group=8, many_splits=True)
    yield replace(base, group=8, many_splits=True, kv_dtype="fp8e4nv")
    yield replace(base, group=8, many_splits=True, mask="causal", rows=64)
    # Heads whose columns warps share.
    wide = _sized(base, (256, 256, 8))
    yield replace(wide, kv_dtype="fp8e4nv", page_size=1, window=True, soft_cap=True, sinks=True)
    yield replace(wide, kv_dtype="fp8e5", page_size=24, head_scales=True, mask="causal", rows=32)
    yield replace(wide, mask="causal", rows=64, window=True)
    yield replace(_sized(base, (192, 192, 8)), q_dtype="fp16", kv_dtype="fp16", o_dtype="fp16", mask="custom")
    yield replace(_sized(base, (192, 128, 1)), source="ragged", page_size=0, pos_encoding="ALIBI", lse=True)


def prefill_problems() -> Iterator[Problem]:
    """Many query tokens per request: tiles of 128 rows."""
    base = replace(_BASE, mask="causal", rows=128)
    for dims in _COMMON:
        yield _sized(base, dims)
    yield replace(base, source="ragged", page_size=0, split=False)
    yield replace(base, source="ragged", page_size=0, head_dim_qk=192, lse=True, group=1)
    yield _sized(base, (96, 96, 1))
    yield replace(_sized(base, (192, 192, 4)), head_scales=True)
    # Heads narrower than their tiles: a rest of 16, 32 and 64 columns, full and in part, with boxes and gathered.
    half = dict(q_dtype="fp16", kv_dtype="fp16", o_dtype="fp16")
    yield _sized(base, (80, 80, 1))
    yield replace(_sized(base, (104, 104, 4)), source="ragged", page_size=0, split=False)
    yield replace(_sized(base, (144, 144, 1)), source="ragged", page_size=0, mask="full", lse=True)
    yield replace(_sized(base, (160, 160, 4)), window=True, soft_cap=True, sinks=True)
    yield replace(_sized(base, (88, 88, 1)), head_scales=True, **half)
    yield replace(_sized(base, (80, 80, 8)), page_size=1)
    yield replace(_sized(base, (112, 112, 1)), page_size=24, **half)
    yield replace(_sized(base, (80, 80, 1)), page_size=24, window=True)
    for dims in _ODD:
        yield _sized(base, dims)
    yield replace(base, kv_dtype="fp8e4nv", lse=True)
    yield replace(base, kv_dtype="fp8e5", page_size=1, mask="full")
    yield replace(base, kv_dtype="fp8e4nv", page_size=24, window=True, soft_cap=True)
    yield replace(_sized(base, (64, 64, 8)), q_dtype="fp16", kv_dtype="fp8e4nv", o_dtype="fp16", source="ragged",
                  page_size=0)  # fmt: skip
    for kv_dtype in KV_FORMATS:
        yield replace(base, kv_dtype=kv_dtype, page_size=24)
    yield replace(_sized(base, (64, 64, 8)), q_dtype="fp16", kv_dtype="int4_per_token_head", o_dtype="fp16")
    yield replace(base, page_size=1)
    yield replace(base, q_dtype="fp16", kv_dtype="fp16", o_dtype="fp16", page_size=1)
    yield replace(base, q_dtype="fp8e4nv", kv_dtype="fp8e4nv", head_scales=True)
    yield replace(_sized(base, (64, 64, 2)), q_dtype="fp8e4nv", kv_dtype="fp8e4nv", window=True, source="ragged",
                  page_size=0)  # fmt: skip
    yield replace(base, q_dtype="fp32", kv_dtype="fp32", o_dtype="fp32", head_dim_qk=256, head_dim_vo=256, window=True)
    yield replace(base, mask="full", window=True, page_size=5, aligned=False)
    yield replace(base, window=True, soft_cap=True, head_dim_qk=256, head_dim_vo=256)
    yield replace(base, mask="custom", lse=True)
    yield replace(base, pos_encoding="ROPE_LLAMA")
    yield replace(base, pos_encoding="ALIBI", soft_cap=True)
    yield replace(base, sinks=True, window=True, head_dim_qk=64, head_dim_vo=64, group=8)

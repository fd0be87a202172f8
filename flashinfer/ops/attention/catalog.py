"""The attention problems that `precompile` builds and CI compiles: what served models ask for, and the edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashinfer.ops.attention.problem import Problem

# (head_dim_qk, head_dim_vo, GQA group) of common models, then the odd sizes of contract 3.
_COMMON = ((128, 128, 4), (128, 128, 8), (64, 64, 8), (256, 256, 4))
_ODD = ((72, 72, 1), (80, 80, 5), (96, 96, 7), (112, 112, 1), (192, 192, 1), (192, 128, 1), (512, 512, 16), (16, 16, 1))


def problems(rows: tuple[int, ...]) -> Iterator[Problem]:
    """Problems of tiles of `rows` query rows: common models in full, then one of each edge and each option."""
    base = Problem("paged", "bf16", "bf16", "bf16", 128, 128, 4, page_size=16, mask="causal")
    for n in rows:
        for qk, vo, group in _COMMON:
            common = replace(base, head_dim_qk=qk, head_dim_vo=vo, group=group, rows=n)
            yield common
            yield replace(common, source="ragged", page_size=0, split=False)
        yield replace(base, rows=n, kv_dtype="fp8e4nv")
        yield replace(base, rows=n, q_dtype="fp16", kv_dtype="fp16", o_dtype="fp16", lse=True, page_size=1)
    top = replace(base, rows=rows[-1])
    for qk, vo, group in _ODD:
        yield replace(top, head_dim_qk=qk, head_dim_vo=vo, group=group)
    yield replace(top, mask="full", window=True, page_size=5, aligned=False)
    yield replace(top, window=True, soft_cap=True, head_dim_qk=256, head_dim_vo=256)
    yield replace(top, mask="custom", lse=True)
    yield replace(top, pos_encoding="ROPE_LLAMA")
    yield replace(top, pos_encoding="ALIBI", soft_cap=True)
    yield replace(top, sinks=True, window=True, head_dim_qk=64, head_dim_vo=64, group=8)
    yield replace(top, head_scales=True, kv_dtype="fp8e5", lse=True)
    yield replace(top, q_dtype="fp8e4nv", kv_dtype="fp8e4nv", head_scales=True)
    yield replace(top, q_dtype="fp32", kv_dtype="fp32", o_dtype="fp32", head_dim_qk=256, head_dim_vo=256, window=True)

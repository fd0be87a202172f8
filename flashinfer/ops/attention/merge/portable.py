"""Attention states merged in Triton: v = sum of 2^(s_i - s) v_i with s = log2 of the sum of 2^s_i.

Grid: rows / ROWS; a row is a head of a token. merge_pair_kernel merges two states, merge_stack_kernel STATES at a time.
Warps: all share the rows, COLUMNS of them at a time. Shared memory: reductions over states.
Inputs: v_a, v_b [tokens, heads, head_dim] and s_a, s_b float32 [tokens, heads], mask [tokens] or none; or v [tokens,
states, heads, head_dim] and s float32 [tokens, states, heads]; or, with indptr [tokens + 1], [states, heads, head_dim]
and [states, heads]. Any strides.
Outputs: out [tokens, heads, head_dim], lse float32 [tokens, heads].
Method: Ye et al., FlashInfer, 2025, https://arxiv.org/abs/2501.01005, section 2.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher

from . import PairProblem, StackProblem
from .config import unit as unit_of


@triton.jit
def _offset(token, head, stride_token, stride_head, UNIT: tl.constexpr):
    # Strides come in units of UNIT elements, so that the compiler sees rows start at multiples of 16 bytes.
    return (token * stride_token + head * stride_head) * UNIT


@triton.jit
def merge_pair_kernel(
    v_a,
    s_a,
    v_b,
    s_b,
    mask,
    out,
    lse,
    rows,
    heads,
    v_a_token,
    v_a_head,
    v_a_dim,
    s_a_token,
    s_a_head,
    v_b_token,
    v_b_head,
    v_b_dim,
    s_b_token,
    s_b_head,
    mask_token,
    out_token,
    out_head,
    out_dim,
    lse_token,
    lse_head,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    if MASKED:
        valid = valid & (tl.load(mask + token * mask_token, mask=valid, other=0) != 0)
    a = tl.load(s_a + token * s_a_token + head * s_a_head, mask=valid, other=0.0)
    b = tl.load(s_b + token * s_b_token + head * s_b_head, mask=valid, other=0.0)
    empty_a = a == float("-inf")
    empty_b = b == float("-inf")
    top = tl.where(empty_a & empty_b, 0.0, tl.maximum(a, b))
    weight_a = tl.exp2(a - top)
    weight_b = tl.exp2(b - top)
    total = weight_a + weight_b
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    scale = tl.div_rn(1.0, total)
    weight_a *= scale
    weight_b *= scale

    start_a = v_a + _offset(token, head, v_a_token, v_a_head, UNIT)[:, None]
    start_b = v_b + _offset(token, head, v_b_token, v_b_head, UNIT)[:, None]
    start_out = out + _offset(token, head, out_token, out_head, UNIT)[:, None]
    for first in tl.static_range(0, HEAD_DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = valid[:, None] & (column < HEAD_DIM)
        # Aligned rows are contiguous: a stride of 1 that the compiler knows lets it use wide accesses.
        x = tl.load(start_a + (column if UNIT > 1 else column * v_a_dim), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(start_b + (column if UNIT > 1 else column * v_b_dim), mask=inside, other=0.0).to(tl.float32)
        x = tl.where(empty_a[:, None], 0.0, x)
        y = tl.where(empty_b[:, None], 0.0, y)
        merged = x * weight_a[:, None] + y * weight_b[:, None]
        at = start_out + (column if UNIT > 1 else column * out_dim)
        tl.store(at, merged.to(out.dtype.element_ty), mask=inside)
    # lse may be s_a, which every warp that shares a row has to have read.
    tl.debug_barrier()
    merged_lse = tl.where(none, float("-inf"), top + tl.log2(total))
    tl.store(lse + token * lse_token + head * lse_head, merged_lse, mask=valid)


@triton.jit
def merge_stack_kernel(
    v,
    s,
    indptr,
    out,
    lse,
    states,
    rows,
    heads,
    v_token,
    v_state,
    v_head,
    v_dim,
    s_token,
    s_state,
    s_head,
    out_token,
    out_head,
    out_dim,
    lse_token,
    lse_head,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    start_v = v + _offset(token, head, v_token, v_head, UNIT)
    start_s = s + token * s_token + head * s_head
    own = states
    if RAGGED:
        begin = tl.load(indptr + token, mask=valid, other=0)
        own = (tl.load(indptr + token + 1, mask=valid, other=0) - begin)[:, None]
        states = tl.max(tl.max(own, 1), 0)
        start_v += begin.to(tl.int64) * v_state * UNIT
        start_s += begin.to(tl.int64) * s_state
    start_out = out + _offset(token, head, out_token, out_head, UNIT)[:, None]
    for first in tl.static_range(0, HEAD_DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        merged = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_state in range(0, states, STATES):
            state = (first_state + tl.arange(0, STATES)).to(tl.int64)[None, :]
            present = valid[:, None] & (state < own)
            score = tl.load(start_s[:, None] + state * s_state, mask=present, other=float("-inf"))
            at = (start_v[:, None] + state * v_state * UNIT)[:, :, None]
            at += (column if UNIT > 1 else column * v_dim)[None, None, :]
            inside = present[:, :, None] & (column < HEAD_DIM)[None, None, :]
            x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            x = tl.where((score == float("-inf"))[:, :, None], 0.0, x)

            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            decay = tl.exp2(top - base)
            weight = tl.exp2(score - base[:, None])
            total = total * decay + tl.sum(weight, 1)
            merged = merged * decay[:, None] + tl.sum(x * weight[:, :, None], 1)
            top = higher
        total = tl.where(total == 0.0, 1.0, total)
        scale = tl.div_rn(1.0, total)
        inside_out = valid[:, None] & (column < HEAD_DIM)[None, :]
        at_out = start_out + (column if UNIT > 1 else column * out_dim)[None, :]
        tl.store(at_out, (merged * scale[:, None]).to(out.dtype.element_ty), mask=inside_out)
        if first + COLUMNS >= HEAD_DIM:
            # No key in any state leaves top = -inf and total = 1; else total is at least 1.
            tl.store(lse + token * lse_token + head * lse_head, top + tl.log2(total), mask=valid)


def _types(kernel, problem, **others) -> dict:
    """v and out by the problem, s and lse float32, strides i64, `others` as given; in the kernel's order."""
    v = f"*{problem.dtype}:16" if problem.aligned else f"*{problem.dtype}"
    kinds = dict.fromkeys(("v", "v_a", "v_b", "out"), v) | dict.fromkeys(("s", "s_a", "s_b", "lse"), "*fp32") | others
    strides = ("_token", "_state", "_head", "_dim")
    runtime = [name for name in kernel.arg_names if name in kinds or name.endswith(strides)]
    return {name: kinds.get(name, "i64") for name in runtime}


def build_pair(problem, config) -> Build:
    types = _types(merge_pair_kernel, problem, mask="*u8", rows="i32", heads="i32")
    constants = dict(
        HEAD_DIM=problem.head_dim,
        UNIT=unit_of(problem),
        MASKED=problem.masked,
        ROWS=config.rows,
        COLUMNS=config.columns,
    )
    return Build(merge_pair_kernel, types, constants, num_warps=config.num_warps)


def build_stack(problem, config) -> Build:
    types = _types(merge_stack_kernel, problem, indptr="*i32", states="i32", rows="i32", heads="i32")
    constants = dict(
        HEAD_DIM=problem.head_dim,
        UNIT=unit_of(problem),
        RAGGED=problem.ragged,
        ROWS=config.rows,
        STATES=config.states,
        COLUMNS=config.columns,
    )
    # Without a limit ptxas aims at more blocks a multiprocessor, and spills an address for it (sm_86, Triton 3.9).
    return Build(merge_stack_kernel, types, constants, num_warps=config.num_warps, maxnreg=128)


launch_pair = Launcher("merge_pair", build_pair)
launch_stack = Launcher("merge_stack", build_stack)


def _strides(x, unit: int) -> tuple[int, ...]:
    """Strides of [..., head_dim], the outer ones in units of `unit` elements."""
    *outer, last = x.stride()
    return (*(stride // unit for stride in outer), last)


def _run_pair(problem, config, v_a, s_a, v_b, s_b, mask, out, lse) -> None:
    tokens, heads, _ = v_a.shape
    rows, unit = tokens * heads, unit_of(problem)
    mask_stride = 0
    if mask is not None:
        mask, mask_stride = mask.view(torch.uint8), mask.stride(0)
    launch_pair(
        problem, config, (-(-rows // config.rows), 1, 1),
        v_a, s_a, v_b, s_b, mask, out, lse, rows, heads,
        *_strides(v_a, unit), *s_a.stride(), *_strides(v_b, unit), *s_b.stride(), mask_stride, *_strides(out, unit),
        *lse.stride(),
    )  # fmt: skip


def _run_stack(problem, config, v, s, out, lse, indptr=None) -> None:
    if problem.ragged:
        # Every token starts at the first state, and goes on to its own.
        v, s = (x[None].expand(len(out), *x.shape) for x in (v, s))
    tokens, states, heads, _ = v.shape
    rows, unit = tokens * heads, unit_of(problem)
    launch_stack(
        problem, config, (-(-rows // config.rows), 1, 1),
        v, s, indptr, out, lse, states, rows, heads,
        *_strides(v, unit), *s.stride(), *_strides(out, unit), *lse.stride(),
    )  # fmt: skip


IMPLEMENTATION = Implementation(
    {PairProblem: _run_pair, StackProblem: _run_stack}, {PairProblem: launch_pair, StackProblem: launch_stack}
)

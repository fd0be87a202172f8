"""RoPE in Triton: queries and keys in one launch, cosines and sines computed once for several heads.

Grid: (blocks of HEADS heads, tiles of TOKENS tokens over two axes). Warps: one a program. Shared memory: none but what
changes of layout take. Angles are exact fractions of turns (`flashinfer/ops/rope/frequencies.py`).
Inputs: q, k [tokens, heads, HEAD_DIM], any strides. Outputs: q_out, k_out, as large.
Method: Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import pointer, unit
from flashinfer.ops.rope.frequencies import turns
from flashinfer.ops.rope.rotation import cached_rotation, computed_rotation, load_head, place, rotate_head


@triton.jit
def rope_kernel(
    q, k, q_out, k_out, positions, offsets, source, q_strides, k_strides, q_out_strides, k_out_strides, source_row,
    tokens, batch, q_heads, k_heads, max_position,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVE: tl.constexpr, RAGGED: tl.constexpr,
    CACHED: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Blocks of heads, first those of queries, then those of keys; programs that follow each other have the same tokens.
    q_blocks = tl.cdiv(q_heads, HEADS)
    block = tl.program_id(0)
    first = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * TOKENS
    # What waits for positions waits longest: they are read first, and the heads while they come. Loads stay before
    # a barrier; ptxas would put them behind what does not wait for them.
    at = first + tl.arange(0, TOKENS)
    begin(PDL)
    if RAGGED:
        request = tl.minimum(request_of(positions, batch, at), batch - 1)
        position = tl.load(offsets + request) + at - tl.load(positions + request)
    else:
        position = tl.load(positions + at, at < tokens, other=0)
    tl.debug_barrier()
    # A row is a head of a token. The heads of a token are in one thread, which has their cosines and sines once.
    row = tl.arange(0, HEADS * TOKENS)
    token = (first + row % TOKENS).to(tl.int64)
    is_q = block < q_blocks
    head = tl.where(is_q, block, block - q_blocks) * HEADS + row // TOKENS
    there = (token < tokens) & (head < tl.where(is_q, q_heads, k_heads))
    x_column = tl.where(is_q, q_strides.column, k_strides.column)
    x = tl.where(is_q, q, k)
    x_token, x_head = tl.where(is_q, q_strides.token, k_strides.token), tl.where(is_q, q_strides.head, k_strides.head)
    x += place(token, head, x_token, x_head, UNIT)
    a, b = load_head(x, x_column, there, ROTARY_DIM, INTERLEAVE, UNIT, HALF)
    tl.debug_barrier()
    if CACHED:
        cos, sin = cached_rotation(source, source_row, position, max_position, ROTARY_DIM, UNIT, HALF)
    else:
        cos, sin = computed_rotation(source, position, ROTARY_DIM, HALF)
    cos, sin = for_heads(cos, HEADS), for_heads(sin, HEADS)
    out = tl.where(is_q, q_out, k_out)
    out_token = tl.where(is_q, q_out_strides.token, k_out_strides.token)
    out_head = tl.where(is_q, q_out_strides.head, k_out_strides.head)
    out += place(token, head, out_token, out_head, UNIT)
    out_column = tl.where(is_q, q_out_strides.column, k_out_strides.column)
    rotate_head(
        a, b, x, out, x_column, out_column, there, cos, sin, 1.0,
        HEAD_DIM, ROTARY_DIM, INTERLEAVE, UNIT, HALF, REST, "", 0,
    )  # fmt: skip


@triton.jit
def for_heads(x, HEADS: tl.constexpr):
    """x [TOKENS, n] for HEADS heads of each token, [HEADS * TOKENS, n]."""
    wide = tl.broadcast_to(x[None, :, :], [HEADS, x.shape[0], x.shape[1]])
    return tl.reshape(wide, [HEADS * x.shape[0], x.shape[1]])


def build(problem, config):
    head = pointer(problem.dtype, problem.aligned)
    types = {"q": head, "k": head, "q_out": head, "k_out": head}
    types |= {"positions": f"*{problem.position_dtype}", "offsets": "*i32"}
    types["source"] = pointer("fp32", problem.aligned) if problem.cached else "*i64"
    operands = "q", "k", "q_out", "k_out"
    types |= {f"{x}_strides.{axis}": "i64" for x in operands for axis in ("token", "head", "column")}
    types |= {"source_row": "i64"} | dict.fromkeys(("tokens", "batch", "q_heads", "k_heads", "max_position"), "i32")
    # What is not rotated is copied, unless it is in place already.
    rest = 0 if problem.inplace else problem.head_dim - problem.rotary_dim
    constants = {
        "HEAD_DIM": problem.head_dim,
        "ROTARY_DIM": problem.rotary_dim,
        "INTERLEAVE": problem.interleave,
        "RAGGED": problem.ragged,
        "CACHED": problem.cached,
        "UNIT": unit(problem.dtype, problem.aligned),
        "TOKENS": config.tokens,
        "HEADS": config.heads,
        "HALF": triton.next_power_of_2(problem.rotary_dim // 2),
        "REST": triton.next_power_of_2(rest) if rest else 0,
        "PDL": config.pdl,
    }
    return Build(rope_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("rope", build)

# Programs along y that a grid may have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_LONGEST_AXIS = 65535


def run(problem, config, q, k, q_out, k_out, positions, offsets, source):
    """Rotate q into q_out and k into k_out; all are [tokens, heads, head_dim].

    positions : [tokens]; or, where offsets [batch] is given, the indptr [batch + 1] of a ragged batch whose request i
    begins at position offsets[i].
    source : cosines and sines [positions, rotary_dim], or Frequencies.
    """
    tokens, q_heads = q.shape[:2]
    k_heads = k.shape[1]
    if not isinstance(source, torch.Tensor):
        source = turns(source, q.device)
    strides = q.stride() + k.stride() + q_out.stride() + k_out.stride() + (source.stride(0),)
    batch = 0 if offsets is None else len(offsets)
    blocks = triton.cdiv(q_heads, config.heads) + triton.cdiv(k_heads, config.heads)
    # Three axes, for a division that finds a program's tile would stand before all loads.
    tiles = triton.cdiv(tokens, config.tokens)
    more = triton.cdiv(tiles, _LONGEST_AXIS)
    grid = (blocks, triton.cdiv(tiles, more) if more else 0, more)
    tensors = q, k, q_out, k_out, positions, offsets, source
    launch(problem, config, grid, *tensors, *strides, tokens, batch, q_heads, k_heads, len(source))


IMPLEMENTATION = Implementation(run, (launch,))

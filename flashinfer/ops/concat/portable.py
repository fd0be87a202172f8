"""The concatenation in Triton: what is shared by heads is read once per token and head, from L1 but for the first.

Grid: tokens * heads / ROWS. Warps: all share the rows. Shared memory: none.
Inputs: of concat_kernel k_nope [tokens, heads, nope_dim] and k_rope [tokens, 1, rope_dim]; of pack_kernel kv [tokens,
heads, nope_dim + value_dim] and k_rope.
Outputs: of concat_kernel k [tokens, heads, nope_dim + rope_dim]; of pack_kernel key as k, and value [tokens, heads,
value_dim], e4m3 bytes.
Method: the keys of MLA before projections are absorbed (DeepSeek-V2, 2024).
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops.concat import Pack, Problem


@triton.jit
def concat_kernel(
    k,
    k_nope,
    k_rope,
    k_token,
    k_head,
    k_column,
    nope_token,
    nope_head,
    nope_column,
    rope_token,
    rope_column,
    rows,
    heads,
    nope_dim,
    rope_dim,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    nope_dim, rope_dim = multiple(nope_dim, UNIT), multiple(rope_dim, UNIT)
    begin(PDL)
    column, rope_at = tl.arange(0, NOPE_BLOCK)[None, :], tl.arange(0, ROPE_BLOCK)[None, :]

    at = row_offset(row, heads, nope_token, nope_head, UNIT)[:, None] + column_offset(column, nope_column, UNIT)
    nope = tl.load(k_nope + at, inside & (column < nope_dim))
    at = row_offset(row, heads, rope_token, 0, UNIT)[:, None] + column_offset(rope_at, rope_column, UNIT)
    rope = tl.load(k_rope + at, inside & (rope_at < rope_dim))
    k += row_offset(row, heads, k_token, k_head, UNIT)[:, None]
    tl.store(k + column_offset(column, k_column, UNIT), nope, inside & (column < nope_dim))
    tl.store(k + column_offset(nope_dim + rope_at, k_column, UNIT), rope, inside & (rope_at < rope_dim))


@triton.jit
def pack_kernel(
    kv, k_rope, key, value, kv_token, kv_head, rope_token, key_token, key_head, value_token, value_head, rows, heads,
    nope_dim, rope_dim, value_dim,
    UNIT: tl.constexpr, ROWS: tl.constexpr, NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    nope_dim, rope_dim, value_dim = multiple(nope_dim, UNIT), multiple(rope_dim, UNIT), multiple(value_dim, UNIT)
    begin(PDL)
    column, rope_at = tl.arange(0, NOPE_BLOCK)[None, :], tl.arange(0, ROPE_BLOCK)[None, :]
    value_at = tl.arange(0, VALUE_BLOCK)[None, :]
    kv += row_offset(row, heads, kv_token, kv_head, UNIT)[:, None]
    nope = tl.load(kv + column, inside & (column < nope_dim), other=0).to(tl.float32)
    own = tl.load(kv + nope_dim + value_at, inside & (value_at < value_dim), other=0).to(tl.float32)
    k_rope += row_offset(row, heads, rope_token, 0, UNIT)[:, None]
    rope = tl.load(k_rope + rope_at, inside & (rope_at < rope_dim), other=0).to(tl.float32)
    key += row_offset(row, heads, key_token, key_head, UNIT)[:, None]
    value += row_offset(row, heads, value_token, value_head, UNIT)[:, None]
    tl.store(key + column, to_fp8(nope, "fp8e4nv", CAPABILITY), inside & (column < nope_dim))
    tl.store(key + nope_dim + rope_at, to_fp8(rope, "fp8e4nv", CAPABILITY), inside & (rope_at < rope_dim))
    tl.store(value + value_at, to_fp8(own, "fp8e4nv", CAPABILITY), inside & (value_at < value_dim))


def build(problem, config):
    rows = pointer(problem.dtype, problem.aligned)
    types = {"k": rows, "k_nope": rows, "k_rope": rows}
    types |= {f"{x}_{axis}": "i64" for x in ("k", "nope") for axis in ("token", "head", "column")}
    types |= {"rope_token": "i64", "rope_column": "i64"}
    types |= dict.fromkeys(("rows", "heads", "nope_dim", "rope_dim"), "i32")
    constants = {
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "NOPE_BLOCK": problem.nope_block,
        "ROPE_BLOCK": problem.rope_block,
        "PDL": config.pdl,
    }
    return Build(concat_kernel, types, constants, num_warps=config.num_warps)


def build_pack(problem, config):
    rows, codes = pointer(problem.dtype, problem.aligned), "*u8:16" if problem.aligned else "*u8"
    types = {"kv": rows, "k_rope": rows, "key": codes, "value": codes, "kv_token": "i64", "kv_head": "i64"}
    types |= {"rope_token": "i64"} | {f"{x}_{axis}": "i64" for x in ("key", "value") for axis in ("token", "head")}
    types |= dict.fromkeys(("rows", "heads", "nope_dim", "rope_dim", "value_dim"), "i32")
    constants = {
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "NOPE_BLOCK": problem.nope_block,
        "ROPE_BLOCK": problem.rope_block,
        "VALUE_BLOCK": problem.value_block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(pack_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("concat_mla_k", build)
launch_pack = Launcher("pack_mla_kv_fp8", build_pack)


def _pack(problem, config, kv, k_rope, key, value):
    """kv [tokens, heads, .] and k_rope [tokens, rope] to key [tokens, heads, nope + rope] and value, bytes of e4m3."""
    tokens, heads, _ = kv.shape
    strides = *kv.stride()[:2], k_rope.stride(0), *key.stride()[:2], *value.stride()[:2]
    sizes = tokens * heads, heads, key.shape[2] - k_rope.shape[1], k_rope.shape[1], value.shape[2]
    grid = (triton.cdiv(tokens * heads, config.rows), 1, 1)
    launch_pack(problem, config, grid, kv, k_rope, key, value, *strides, *sizes)


def _concat(problem, config, k, k_nope, k_rope):
    """k [tokens, heads, nope + rope] from k_nope [tokens, heads, nope] and k_rope [tokens, 1, rope]."""
    if problem.dtype == "u8":
        k, k_nope, k_rope = (x.view(torch.uint8) for x in (k, k_nope, k_rope))
    tokens, heads, nope_dim = k_nope.shape
    strides = *k.stride(), *k_nope.stride(), k_rope.stride(0), k_rope.stride(2)
    sizes = tokens * heads, heads, nope_dim, k_rope.shape[2]
    launch(problem, config, (triton.cdiv(tokens * heads, config.rows), 1, 1), k, k_nope, k_rope, *strides, *sizes)


IMPLEMENTATION = Implementation({Problem: _concat, Pack: _pack}, {Problem: launch, Pack: launch_pack})

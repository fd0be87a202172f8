"""The concatenation in Triton: what is shared by heads is read once per token and head, from L1 but for the first."""

import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit


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


launch = Launcher("concat_mla_k", build)
LAUNCHERS = (launch,)


def run(problem, config, k, k_nope, k_rope):
    """k [tokens, heads, nope + rope] from k_nope [tokens, heads, nope] and k_rope [tokens, 1, rope]."""
    if problem.dtype == "u8":
        k, k_nope, k_rope = (x.view(torch.uint8) for x in (k, k_nope, k_rope))
    tokens, heads, nope_dim = k_nope.shape
    strides = *k.stride(), *k_nope.stride(), k_rope.stride(0), k_rope.stride(2)
    sizes = tokens * heads, heads, nope_dim, k_rope.shape[2]
    launch(problem, config, (triton.cdiv(tokens * heads, config.rows), 1, 1), k, k_nope, k_rope, *strides, *sizes)

"""The paged KV cache's operations in Triton."""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import to_fp8
from flashinfer.ops._device.pages import slot_of
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.ragged import request_of
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops._device.scales import quantize_nvfp4
from flashinfer.ops.page import Append, Positions, SeqLens

# Bytes of stack a thread may use: one value of unaligned bfloat16 rows is laid aside on sm_100a and sm_103a by Triton
# 3.9, with 72 registers taken of 255.
STACK_BUDGET = 8


@triton.jit
def append_kernel(
    key,
    value,
    batch_indices,
    positions,
    k_cache,
    v_cache,
    kv_indices,
    kv_indptr,
    key_token,
    key_head,
    key_column,
    value_token,
    value_head,
    value_column,
    k_page,
    k_slot,
    k_head,
    k_column,
    v_page,
    v_slot,
    v_head,
    v_column,
    rows,
    heads,
    key_dim,
    value_dim,
    batch,
    entries,
    num_pages,
    page_size,
    k_scale,
    v_scale,
    k_factors,
    v_factors,
    k_factors_page,
    k_factors_slot,
    k_factors_head,
    k_factors_column,
    v_factors_page,
    v_factors_slot,
    v_factors_head,
    v_factors_column,
    KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    begin(PDL)
    # The new rows are asked for before the page table, whose three loads wait for one another.
    k = load_rows(key, row, inside, heads, key_token, key_head, key_column, key_dim, UNIT, KEY_BLOCK)
    v = load_rows(value, row, inside, heads, value_token, value_head, value_column, value_dim, UNIT, VALUE_BLOCK)
    # Loads stay before a barrier; ptxas would put these behind the page table's.
    tl.debug_barrier()

    token = row // heads
    head = (row % heads).to(tl.int64)
    page, slot, kept = slot_of(
        batch_indices, positions, kv_indices, kv_indptr, token, inside, batch, entries, num_pages, page_size
    )

    at = page * multiple(k_page, UNIT) + slot * multiple(k_slot, UNIT) + head * multiple(k_head, UNIT)
    if KEY_FORM == "":
        store_rows(k_cache, at, kept, k_column, key_dim, k, UNIT, KEY_BLOCK)
    else:
        to = page * k_factors_page + slot * k_factors_slot + head * k_factors_head if KEY_FORM == "nvfp4" else at
        store_codes(
            k_cache, k_factors, at, to, kept, k_column, k_factors_column, key_dim, k, k_scale,
            KEY_FORM, UNIT, KEY_BLOCK, CAPABILITY,
        )  # fmt: skip
    at = page * multiple(v_page, UNIT) + slot * multiple(v_slot, UNIT) + head * multiple(v_head, UNIT)
    if VALUE_FORM == "":
        store_rows(v_cache, at, kept, v_column, value_dim, v, UNIT, VALUE_BLOCK)
    else:
        to = page * v_factors_page + slot * v_factors_slot + head * v_factors_head if VALUE_FORM == "nvfp4" else at
        store_codes(
            v_cache, v_factors, at, to, kept, v_column, v_factors_column, value_dim, v, v_scale,
            VALUE_FORM, UNIT, VALUE_BLOCK, CAPABILITY,
        )  # fmt: skip


@triton.jit
def load_rows(x, row, inside, heads, token_stride, head_stride, column_stride, dim, UNIT, BLOCK: tl.constexpr):
    """A tile of [ROWS, BLOCK] of x, [tokens, heads, dim]; its rows are heads of tokens."""
    column = tl.arange(0, BLOCK)
    at = row_offset(row, heads, token_stride, head_stride, UNIT)
    mask = inside[:, None] & (column < multiple(dim, UNIT))[None, :]
    return tl.load(x + at[:, None] + column_offset(column, column_stride, UNIT)[None, :], mask)


@triton.jit
def store_rows(x, at, kept, column_stride, dim, tile, UNIT, BLOCK: tl.constexpr):
    """Write a tile's rows at the given offsets of x."""
    column = tl.arange(0, BLOCK)
    mask = kept[:, None] & (column < multiple(dim, UNIT))[None, :]
    tl.store(x + at[:, None] + column_offset(column, column_stride, UNIT)[None, :], tile, mask)


@triton.jit
def store_codes(
    codes,
    factors,
    at,
    to,
    kept,
    codes_column,
    factors_column,
    dim,
    tile,
    scale,
    FORM: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    """Quantise a tile's rows and write codes at the offsets `at`, factors at `to`; a value is code * factor * scale."""
    column = tl.arange(0, BLOCK)
    dim = multiple(dim, UNIT)
    y = tl.where((column < dim)[None, :], tile.to(tl.float32), 0)
    one = tl.full([], 1.0, tl.float32)
    inverse = tl.div_rn(one, one * scale)
    if FORM == "nvfp4":
        found, factor = quantize_nvfp4(y, inverse, CAPABILITY)
        store_rows(codes, at, kept, codes_column, dim // 2, found, UNIT // 2 if UNIT > 1 else 1, BLOCK // 2)
        store_rows(factors, to, kept, factors_column, dim // 16, factor, 1, BLOCK // 16)
    else:
        store_rows(codes, at, kept, codes_column, dim, to_fp8(y * inverse, FORM, CAPABILITY), UNIT, BLOCK)


@triton.jit
def positions_kernel(
    append_indptr, seq_lens, batch_indices, positions, tokens, batch, ROWS: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin(PDL)
    request = request_of(append_indptr, batch, token)
    inside = (token >= tl.load(append_indptr)) & (token < tokens) & (request < batch)
    length = tl.load(seq_lens + request, inside, other=0)
    end = tl.load(append_indptr + request + 1, inside, other=0)
    tl.store(batch_indices + token, tl.where(inside, request, -1), token < tokens)
    tl.store(positions + token, tl.where(inside, token + length - end, 0), token < tokens)


@triton.jit
def seq_lens_kernel(
    kv_indptr, kv_last_page_len, out, page_size, batch, ROWS: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = request < batch
    begin(PDL)
    pages = tl.load(kv_indptr + request + 1, inside, other=0) - tl.load(kv_indptr + request, inside, other=0)
    last = tl.load(kv_last_page_len + request, inside, other=0)
    tl.store(out + request, tl.where(pages > 0, (pages - 1) * page_size + last, 0), inside)


def build(problem, config):
    return _BUILD[type(problem)](problem, config)


def _build_append(problem, config):
    row = pointer(problem.dtype, problem.aligned)
    codes = pointer("u8", problem.aligned) if problem.key_form else row
    index = "*i32"
    types = {"key": row, "value": row, "batch_indices": index, "positions": index}
    types |= {"k_cache": codes, "v_cache": codes, "kv_indices": index, "kv_indptr": index}
    types |= {f"{x}_{axis}": "i64" for x in ("key", "value") for axis in ("token", "head", "column")}
    types |= {f"{x}_{axis}": "i64" for x in ("k", "v") for axis in ("page", "slot", "head", "column")}
    scalars = ("rows", "heads", "key_dim", "value_dim", "batch", "entries", "num_pages", "page_size")
    types |= dict.fromkeys(scalars, "i32")
    strides = [f"{x}_factors_{axis}" for x in ("k", "v") for axis in ("page", "slot", "head", "column")]
    quantised = {"k_scale": "fp32", "v_scale": "fp32", "k_factors": "*u8", "v_factors": "*u8"}
    quantised |= dict.fromkeys(strides, "i64")
    types |= quantised if problem.key_form else {}
    # What only quantising has is no parameter where rows are copied.
    constants = {name: None for name in quantised if name not in types} | {
        "KEY_FORM": problem.key_form,
        "VALUE_FORM": problem.value_form,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "KEY_BLOCK": problem.key_block,
        "VALUE_BLOCK": problem.value_block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(append_kernel, types, constants, num_warps=config.num_warps)


def _build_positions(problem, config):
    types = dict.fromkeys(("append_indptr", "seq_lens", "batch_indices", "positions"), "*i32")
    types |= {"tokens": "i32", "batch": "i32"}
    return Build(positions_kernel, types, {"ROWS": config.rows, "PDL": config.pdl}, num_warps=config.num_warps)


def _build_seq_lens(problem, config):
    types = dict.fromkeys(("kv_indptr", "kv_last_page_len", "out"), f"*{problem.dtype}")
    types |= {"page_size": "i32", "batch": "i32"}
    return Build(seq_lens_kernel, types, {"ROWS": config.rows, "PDL": config.pdl}, num_warps=config.num_warps)


_BUILD = {Append: _build_append, Positions: _build_positions, SeqLens: _build_seq_lens}
launch = Launcher("page", build)


def run(problem, config, *args):
    _RUN[type(problem)](problem, config, *args)


def append(
    problem, config, key, value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr, quantised=None
):
    """Token t goes to slot positions[t] of request batch_indices[t]; one outside the request's pages goes nowhere.

    quantised : Quantised, where the problem has forms; caches are bytes then.
    """
    if problem.dtype == "u8":
        key, value, k_cache, v_cache = (x.view(torch.uint8) for x in (key, value, k_cache, v_cache))
    heads = key.shape[1]
    rows = key.shape[0] * heads
    num_pages, page_size = k_cache.shape[:2]
    strides = key.stride() + value.stride() + k_cache.stride() + v_cache.stride()
    tables = len(kv_indptr) - 1, len(kv_indices), num_pages, page_size
    tensors = key, value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr
    grid = (triton.cdiv(rows, config.rows), 1, 1)
    more = ()
    if quantised is not None:
        factors = quantised.k_factors, quantised.v_factors
        more = *quantised, *(n for x in factors for n in ((0, 0, 0, 0) if x is None else x.stride()))
    launch(problem, config, grid, *tensors, *strides, rows, heads, key.shape[2], value.shape[2], *tables, *more)


def positions(problem, config, append_indptr, seq_lens, batch_indices, positions):
    """A request's new tokens are its last ones; tokens past the last request are padding."""
    grid = (triton.cdiv(len(positions), config.rows), 1, 1)
    tensors = append_indptr, seq_lens, batch_indices, positions
    launch(problem, config, grid, *tensors, len(positions), len(seq_lens))


def seq_lens(problem, config, kv_indptr, kv_last_page_len, out, page_size):
    """All pages of a request are full but the last."""
    grid = (triton.cdiv(len(out), config.rows), 1, 1)
    launch(problem, config, grid, kv_indptr, kv_last_page_len, out, page_size, len(out))


_RUN = {Append: append, Positions: positions, SeqLens: seq_lens}

IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

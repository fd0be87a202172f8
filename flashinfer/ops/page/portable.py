"""Rows appended to a paged KV cache in Triton: keys and values of new tokens to their slots, as they are or quantised.

Grid: (tokens * heads / ROWS). A row is one head of one token; a program has ROWS of them, keys and values.
Warps: all share the rows. Shared memory: none.

Inputs: key, value       [tokens, heads, dim], any strides
    table                of `slot_of`, or with SLOTS of `mapped_slot_of`
Outputs: k_cache, v_cache [pages, page_size, heads, dim], any strides; bytes where a format has codes
    k_factors, v_factors [pages, page_size, heads, blocks], bytes or float32, where a format has factors
Method: Kwon et al., PagedAttention, 2023, https://arxiv.org/abs/2309.06180.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pages import append_rows, mapped_slot_of, slot_of
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.rows import column_offset, multiple, pointer, row_offset, unit
from flashinfer.ops.formats import KV_FORMATS
from flashinfer.ops.page import PageTable

# Bytes of stack that a thread may use: Triton 3.9 spills one value of unaligned bfloat16 rows on sm_100a and sm_103a,
# with 72 registers taken of 255.
STACK_BUDGET = 8


@triton.jit
def append_kernel(
    key, value, k_cache, v_cache, k_factors, v_factors, table, key_strides, value_strides, k_strides, v_strides,
    k_factor_strides, v_factor_strides, rows, heads, key_dim, value_dim, k_scale, v_scale,
    KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, CAPABILITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    begin(PDL)
    # The new rows are read before the page table, whose three loads wait for one another.
    k = load_rows(key, row, inside, heads, key_strides, key_dim, UNIT, KEY_BLOCK)
    v = load_rows(value, row, inside, heads, value_strides, value_dim, UNIT, VALUE_BLOCK)
    # Loads stay before a barrier; ptxas would put these behind the page table's.
    tl.debug_barrier()
    token = row // heads
    head = (row % heads).to(tl.int64)
    if SLOTS:
        page, slot, kept = mapped_slot_of(table, token, inside)
    else:
        page, slot, kept = slot_of(table, token, inside)
    if SCALE == "tensor":
        k_scale, v_scale = tl.load(k_scale), tl.load(v_scale)
    append_rows(
        k_cache, k_factors, page, slot, head, kept, k_strides, k_factor_strides, key_dim, k, k_scale,
        KEY_FORMAT, WIDTH, UNIT, KEY_BLOCK, CAPABILITY,
    )  # fmt: skip
    append_rows(
        v_cache, v_factors, page, slot, head, kept, v_strides, v_factor_strides, value_dim, v, v_scale,
        VALUE_FORMAT, WIDTH, UNIT, VALUE_BLOCK, CAPABILITY,
    )  # fmt: skip


@triton.jit
def load_rows(x, row, inside, heads, strides, dim, UNIT, BLOCK: tl.constexpr):
    """A tile of [ROWS, BLOCK] of x, [tokens, heads, dim]; its rows are heads of tokens."""
    column = tl.arange(0, BLOCK)
    at = row_offset(row, heads, strides.token, strides.head, UNIT)
    mask = inside[:, None] & (column < multiple(dim, UNIT))[None, :]
    return tl.load(x + at[:, None] + column_offset(column, strides.column, UNIT)[None, :], mask)


def build(problem, config):
    row = pointer(problem.dtype, problem.aligned)
    codes = pointer("u8", problem.aligned) if problem.key_format else row
    types = {"key": row, "value": row, "k_cache": codes, "v_cache": codes}
    factors = [x for x, name in (("k", problem.key_format), ("v", problem.value_format)) if name in KV_FORMATS]
    # With float32 factors, both have them.
    known = KV_FORMATS.get(problem.key_format)
    wide = known is not None and known.factor == "fp32"
    # What only quantising has is no parameter where rows are copied.
    types |= {f"{x}_factors": ("*fp32" if wide else "*u8") if x in factors else None for x in "kv"}
    if problem.slots:
        types |= {"table.slots": f"*{problem.slots}"}
        types |= dict.fromkeys(("table.num_pages", "table.page_size"), "i32")
    else:
        types |= dict.fromkeys((f"table.{name}" for name in PageTable._fields), "*i32")
        types |= dict.fromkeys((f"table.{name}" for name in ("batch", "entries", "num_pages", "page_size")), "i32")
    types |= {f"{x}_strides.{axis}": "i64" for x in ("key", "value") for axis in ("token", "head", "column")}
    caches = ["k", "v", *(f"{x}_factor" for x in factors)]
    types |= {f"{x}_strides.{axis}": "i64" for x in caches for axis in ("page", "slot", "head", "column")}
    types |= dict.fromkeys(("rows", "heads", "key_dim", "value_dim"), "i32")
    types |= {f"{x}_factor_strides": None for x in "kv" if x not in factors}
    scale = "*fp32" if problem.scale == "tensor" else "fp32"
    types |= dict.fromkeys(("k_scale", "v_scale"), scale if problem.key_format else None)
    constants = {
        "KEY_FORMAT": known.element if wide else problem.key_format,
        "VALUE_FORMAT": known.element if wide else problem.value_format,
        "WIDTH": known.width if wide else 1,
        "SLOTS": problem.slots != "",
        "SCALE": problem.scale,
        "UNIT": unit(problem.dtype, problem.aligned),
        "ROWS": config.rows,
        "KEY_BLOCK": problem.key_block,
        "VALUE_BLOCK": problem.value_block,
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(append_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("page", build)


def run(problem, config, rows, caches, table, quantised=None):
    """Write rows (key, value) to the slots of caches (k, v); a token outside its request's pages goes nowhere.

    table : PageTable, or slots [tokens] where the problem has them. quantised : Quantised, where it has formats; caches
    are bytes then.
    """
    if problem.dtype == "u8":
        rows, caches = ([x.view(torch.uint8) for x in two] for two in (rows, caches))
    key, value = rows
    num_pages, page_size = caches[0].shape[:2]
    tokens, heads = (len(table) if problem.slots else key.shape[0]), key.shape[1]
    if problem.slots:
        where = table, num_pages, page_size
    else:
        where = *table, len(table.kv_indptr) - 1, len(table.kv_indices), num_pages, page_size
    factors = [] if quantised is None else [x for x in (quantised.k_factors, quantised.v_factors) if x is not None]
    scales = () if quantised is None else (quantised.k_scale, quantised.v_scale)
    strides = [n for x in (*rows, *caches, *factors) for n in x.stride()]
    sizes = tokens * heads, heads, key.shape[2], value.shape[2]
    grid = (triton.cdiv(tokens * heads, config.rows), 1, 1)
    launch(problem, config, grid, *rows, *caches, *factors, *where, *strides, *sizes, *scales)


IMPLEMENTATION = Implementation(run, (launch,), stack_budget=STACK_BUDGET)

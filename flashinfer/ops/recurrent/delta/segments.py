"""The states before each segment of long sequences, in Triton, for a scan in parallel along the sequence.

A segment of whole chunks transforms a state [V, K] by an affine map, S -> S M + N. `map_kernel` computes the maps of
all segments in parallel: M is the transformed identity matrix with values of zero, N the transformed zero state.
`chain_kernel` applies them in order, with one product for each segment. docs/rooms/recurrent.md derives it.

Grid: map_kernel (blocks of rows of M, then of N, heads, segments); chain_kernel (blocks of values, heads, sequences).
Warps: all share a program's tile. Shared memory: operands of the products, two chunks of them on Hopper.
Inputs: k [rows, tokens, heads, K], v, the workspace of workspace.py, states [slots, heads, V, K]. Outputs: maps
[segments, heads, K + V, K] and the states before segments [segments, heads, V, K] in float32, and final states of
sequences of whole segments.
Method: Martin and Cundy, Parallelizing Linear Recurrent Neural Nets Over Sequence Length, 2018 (composition of affine
maps).
"""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.products import operand
from flashinfer.ops.recurrent._device.sequences import place_of, span_of
from flashinfer.ops.recurrent._device.states import load_state, store_state
from flashinfer.ops.recurrent.delta.scan import load_factors
from flashinfer.ops.recurrent.delta.workspace import INPUT, STATE, common
from flashinfer.ops.recurrent.launching import place_types, pointers, size_types

# Values of a chain_kernel program: few, so that 8 heads of 128 values give 64 programs.
CHAIN_ROWS = 16


@triton.jit
def map_kernel(
    k,
    v,
    offsets,
    solved,
    factors,
    maps,
    k_by,
    v_by,
    of,
    PRECISION: tl.constexpr,
    STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    place = tl.program_id(2)
    head = tl.program_id(1)
    blocks = tl.cdiv(of.key_dim, ROWS)
    is_identity = tl.program_id(0) < blocks
    row = (tl.program_id(0) - tl.where(is_identity, 0, blocks)) * ROWS + tl.arange(0, ROWS)
    rows = tl.where(is_identity, of.key_dim, of.value_dim)
    in_rows = row < rows
    column = tl.arange(0, KEYS)
    in_columns = column < of.key_dim
    i = tl.arange(0, TOKENS)
    block = i[:, None] * TOKENS + i[None, :]
    n, segment = place_of(place, offsets, of, of.segment)
    origin, first, length = span_of(offsets, n, of)
    chunks = first.to(tl.int32) // STRIDE + n
    start = segment * of.segment
    if (start >= 0) & (start + of.segment <= length):
        s = tl.where(is_identity & (column[:, None] == row[None, :]), 1.0, 0.0)
        at_k = k + origin * k_by.row + first * k_by.token + head // of.k_group * k_by.head
        at_v = v + origin * v_by.row + first * v_by.token + head // of.v_group * v_by.head
        for chunk in range(start // STRIDE, (start + of.segment) // STRIDE):
            token = chunk * STRIDE + i.to(tl.int64)
            tile = (chunks + chunk).to(tl.int64) * of.heads + head
            a = tl.load(solved + tile * (TOKENS * TOKENS) + block)
            given = (in_rows & (not is_identity))[None, :] & (i >= 0)[:, None]
            values = tl.load(at_v + token[:, None] * v_by.token + row[None, :], given, other=0).to(tl.float32)
            keys = tl.load(at_k + token[:, None] * k_by.token + column[None, :], in_columns[None, :], other=0)
            keys = keys.to(OPERAND)
            k_factor, _, last_factor, decay = load_factors(factors + tile * (4 * TOKENS), TOKENS)
            values -= tl.dot(keys, operand(s, OPERAND, PRECISION), input_precision=PRECISION) * k_factor[:, None]
            change = tl.dot(a, operand(values, OPERAND, PRECISION), input_precision=PRECISION) * last_factor[:, None]
            change = operand(change, OPERAND, PRECISION)
            s = tl.dot(tl.trans(keys), change, s * decay, input_precision=PRECISION)
        write_at = (place.to(tl.int64) * of.heads + head) * ((of.key_dim + of.value_dim) * of.key_dim)
        write_at += (tl.where(is_identity, 0, of.key_dim) + row)[None, :] * of.key_dim + column[:, None]
        tl.store(maps + write_at, s, in_columns[:, None] & in_rows[None, :])


@triton.jit
def chain_kernel(
    offsets,
    read,
    source,
    state,
    maps,
    starts,
    source_by,
    state_by,
    of,
    SOURCE: tl.constexpr,
    STATE: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    n = tl.program_id(2)
    head = tl.program_id(1)
    value = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    part = tl.arange(0, BLOCK)
    in_values = (value < of.value_dim)[:, None]
    inside = in_values & (column < of.key_dim)[None, :]
    origin, first, length = span_of(offsets, n, of)
    slot = n.to(tl.int64)
    if read is not None:
        slot = tl.load(read + n).to(tl.int64)
    if slot > of.null:
        s = tl.zeros([ROWS, KEYS], tl.float32)
        if source is not None:
            read_at = slot * source_by.slot + head * source_by.head
            read_at += value[:, None].to(tl.int64) * source_by.row + column[None, :].to(tl.int64) * source_by.column
            s = load_state(source + read_at, inside, SOURCE, CAPABILITY)
        place = first.to(tl.int32) // of.segment + n
        here = (place.to(tl.int64) * of.heads + head) * of.key_dim
        square = value[:, None] * of.key_dim + column[None, :]
        for _segment in range(length // of.segment):
            tl.store(starts + here * of.value_dim + square, s, inside)
            # The product reads columns of the state in a loop. Registers cannot be indexed, so they are loaded again.
            tl.debug_barrier()
            m = maps + here * (of.key_dim + of.value_dim)
            s = tl.load(m + of.key_dim * of.key_dim + square, inside, other=0)
            for begin in range(0, of.key_dim, BLOCK):
                row = begin + part
                in_rows = row < of.key_dim
                at = starts + here * of.value_dim + value[:, None] * of.key_dim + row[None, :]
                left = tl.load(at, in_values & in_rows[None, :], other=0)
                wide = in_rows[:, None] & (column < of.key_dim)[None, :]
                right = tl.load(m + row[:, None] * of.key_dim + column[None, :], wide, other=0)
                s = tl.dot(left, right, s, input_precision="tf32x3")
            here += of.heads * of.key_dim
        if (length % of.segment > 0) | (length == 0):
            tl.store(starts + here * of.value_dim + square, s, inside)
        elif state is not None:
            write_at = slot * state_by.slot + head * state_by.head
            write_at += value[:, None].to(tl.int64) * state_by.row + column[None, :].to(tl.int64) * state_by.column
            store_state(state + write_at, s, inside, STATE, CAPABILITY)


def _build_map(problem, config):
    kinds = {"k": problem.dtype, "v": problem.dtype, "offsets": problem.index}
    kinds |= {"solved": config.operand, "factors": "fp32", "maps": "fp32"}
    rows = {"k", "v"} if problem.aligned else set()
    types = pointers(kinds, rows | {"solved", "factors", "maps"})
    types |= place_types(dict.fromkeys(("k_by", "v_by"), INPUT), {f"{name}_by": kinds[name] for name in rows})
    sizes = ("sequences", "tokens", "heads", "key_dim", "value_dim", "segment", "k_group", "v_group")
    types |= size_types(sizes, key_dim=problem.key_dim, value_dim=problem.value_dim)
    constants = common(problem, config) | {"ROWS": config.rows}
    del constants["CHANNELS"]
    return Build(map_kernel, types, constants, num_warps=config.scan_warps, num_stages=config.stages)


def _build_chain(problem, config):
    kinds = {"offsets": problem.index, "read": problem.index if problem.read else ""}
    kinds |= {"source": problem.source_dtype, "state": problem.state_dtype, "maps": "fp32", "starts": "fp32"}
    types = pointers(kinds, {"maps", "starts"})
    types |= place_types(dict.fromkeys(("source_by", "state_by"), STATE), {})
    sizes = ("tokens", "heads", "key_dim", "value_dim", "segment", "null")
    types |= size_types(sizes, key_dim=problem.key_dim, value_dim=problem.value_dim)
    constants = {"SOURCE": problem.source_dtype, "STATE": problem.state_dtype, "ROWS": CHAIN_ROWS, "BLOCK": 32}
    constants |= {"KEYS": common(problem, config)["KEYS"], "CAPABILITY": config.capability}
    return Build(chain_kernel, types, constants, num_warps=8, num_stages=2)


launch_map = Launcher("delta_map", _build_map)
launch_chain = Launcher("delta_chain", _build_chain)

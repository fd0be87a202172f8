"""The scan over chunks of 64 tokens, in Triton: outputs and states; docs/rooms/recurrent.md derives them.

Grid: (blocks of values, heads, sequences or segments), with one more for packed tokens outside of all sequences. A
program processes one head of one sequence, or of one segment, with ROWS values of the state, [K, ROWS] float32, in
registers: five products a chunk.
Warps: all share a program's tile. Shared memory: operands of the products, two chunks of them on Hopper.
Inputs: q, k [rows, tokens, heads, K], v, the workspace of workspace.py, states [slots, heads, V, K], and those before
segments. Outputs: like v, final states, checkpoints (marks): states at multiples of some tokens.
Method: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024; Kimi Team, Kimi Linear, 2025.
"""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.products import operand
from flashinfer.ops.recurrent._device.sequences import place_of, span_of
from flashinfer.ops.recurrent._device.states import load_state, store_state
from flashinfer.ops.recurrent.delta.workspace import INPUT, STATE, common, workspace
from flashinfer.ops.recurrent.launching import place_types, pointers, size_types


@triton.jit
def scan_kernel(
    tokens, pool, marks, chunks, starts, out, q_by, k_by, v_by, w_by, out_by, source_by, state_by, marks_by, of,
    CHANNELS: tl.constexpr, PRECISION: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, OPERAND: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(2)
    segment = 0
    if starts is not None:
        n, segment = place_of(n, tokens.offsets, of, of.segment)
        # The last program is for tokens outside of all sequences.
        n = tl.where(tl.program_id(2) < of.segments, n, of.sequences)
    head = tl.program_id(1)
    value = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    i = tl.arange(0, TOKENS)
    in_values = value < of.value_dim
    in_columns = column < of.key_dim
    # The state is [K, V] in registers, and [V, K] in memory.
    inside = in_columns[:, None] & in_values[None, :]
    sequence = tl.minimum(n, of.sequences - 1)
    at_out = out + head * out_by.head
    origin, first, length = span_of(tokens.offsets, sequence, of)
    if tokens.offsets is None:
        place = sequence * of.chunks
    else:
        place = first.to(tl.int32) // STRIDE + sequence
        if n == of.sequences:
            # The extra program: tokens outside of all sequences have output 0.
            begin = tl.load(tokens.offsets).to(tl.int32)
            zero_rows(at_out, out_by, 0, begin, value, in_values, TOKENS)
            zero_rows(at_out, out_by, (first + length).to(tl.int32), of.tokens, value, in_values, TOKENS)
            length = 0
    at_out += origin * out_by.row + first * out_by.token
    slot = n.to(tl.int64)
    if pool.read is not None:
        slot = tl.load(pool.read + sequence).to(tl.int64)
    live = (n < of.sequences) & (slot > of.null)
    start = 0
    stop = length
    if starts is not None:
        # Places before the first sequence, and behind the last segment of a sequence, are empty.
        start = tl.maximum(segment * of.segment, 0)
        stop = tl.where(segment < 0, 0, tl.minimum(length, start + of.segment))
        live &= (segment == 0) | (start < stop)

    if live:
        s = tl.zeros([KEYS, ROWS], tl.float32)
        if starts is not None:
            at_start = starts + (tl.program_id(2).to(tl.int64) * of.heads + head) * (of.value_dim * of.key_dim)
            at_start += value[None, :] * of.key_dim + column[:, None]
            s = tl.load(at_start, inside, other=0)
        elif pool.source is not None:
            read_at = slot * source_by.slot + head * source_by.head
            read_at += value[None, :].to(tl.int64) * source_by.row + column[:, None].to(tl.int64) * source_by.column
            s = load_state(pool.source + read_at, inside, pool.SOURCE, CAPABILITY)
        mark = tl.full([], 0, tl.int64)
        if marks.states is not None:
            mark = tl.load(marks.starts + sequence).to(tl.int64)
            at_marks = marks.states + head * marks_by.head
            at_marks += value[None, :].to(tl.int64) * marks_by.row + column[:, None].to(tl.int64) * marks_by.column
            mark += start // of.every
            if marks.FIRST:
                if (length > 0) & (segment == 0):
                    store_mark(at_marks, marks_by, marks.slots, mark, s, inside, marks.KIND, CAPABILITY)
                mark += 1
        at_k = tokens.k + origin * k_by.row + first * k_by.token + head // of.k_group * k_by.head
        at_q = tokens.q + origin * q_by.row + first * q_by.token + head // of.q_group * q_by.head
        at_v = tokens.v + origin * v_by.row + first * v_by.token + head // of.v_group * v_by.head
        for chunk in range(start // STRIDE, tl.cdiv(stop, STRIDE)):
            begin = chunk * STRIDE
            token = begin + i.to(tl.int64)
            inside_chunk = i < tl.minimum(length - begin, STRIDE)
            tile = (place + chunk).to(tl.int64) * of.heads + head
            block = i[:, None] * TOKENS + i[None, :]
            a = tl.load(chunks.solved + tile * (TOKENS * TOKENS) + block)
            p = tl.load(chunks.scores + tile * (TOKENS * TOKENS) + block)
            v_mask = inside_chunk[:, None] & in_values[None, :]
            values = tl.load(at_v + token[:, None] * v_by.token + value[None, :], v_mask, other=0).to(tl.float32)
            if tokens.w is not None:
                at_w = tokens.w + origin * w_by.row + (first + token)[:, None] * w_by.token + head * w_by.head
                values *= tl.load(at_w + value[None, :], v_mask, other=0).to(tl.float32)
            narrow = operand(s, OPERAND, PRECISION)
            if CHANNELS:
                rows = tile * (TOKENS * KEYS) + i[:, None] * KEYS + column[None, :]
                keys = tl.load(chunks.rows_k + rows)
                queries = tl.load(chunks.rows_q + rows)
                lasts = tl.load(chunks.rows_last + rows)
                decay = tl.load(chunks.factors + tile * KEYS + column)
                values -= tl.dot(keys, narrow, input_precision=PRECISION)
                o = tl.dot(queries, narrow, input_precision=PRECISION)
                change = tl.dot(a, operand(values, OPERAND, PRECISION), input_precision=PRECISION)
                change = operand(change, OPERAND, PRECISION)
                o = tl.dot(p, change, o, input_precision=PRECISION)
                s = tl.dot(tl.trans(lasts), change, s * decay[:, None], input_precision=PRECISION)
            else:
                wide = inside_chunk[:, None] & in_columns[None, :]
                keys = tl.load(at_k + token[:, None] * k_by.token + column[None, :], wide, other=0)
                queries = tl.load(at_q + token[:, None] * q_by.token + column[None, :], wide, other=0)
                keys = keys.to(OPERAND)
                k_factor, q_factor, last_factor, decay = load_factors(chunks.factors + tile * (4 * TOKENS), TOKENS)
                values -= tl.dot(keys, narrow, input_precision=PRECISION) * k_factor[:, None]
                o = tl.dot(queries.to(OPERAND), narrow, input_precision=PRECISION) * q_factor[:, None]
                change = tl.dot(a, operand(values, OPERAND, PRECISION), input_precision=PRECISION)
                o = tl.dot(p, operand(change, OPERAND, PRECISION), o, input_precision=PRECISION)
                change *= last_factor[:, None]
                change = operand(change, OPERAND, PRECISION)
                s = tl.dot(tl.trans(keys), change, s * decay, input_precision=PRECISION)
            tl.store(at_out + token[:, None] * out_by.token + value[None, :], o.to(out.dtype.element_ty), v_mask)
            if marks.states is not None:
                done = begin + STRIDE
                if (done % of.every == 0) & (done < length + (not marks.FIRST)):
                    store_mark(at_marks, marks_by, marks.slots, mark, s, inside, marks.KIND, CAPABILITY)
                    mark += 1
        if pool.state is not None:
            writes = inside
            if starts is not None:
                # The state after a whole segment is written by chain_kernel, so that it has the same bits as the state
                # before the next segment.
                writes &= (stop == length) & (stop < start + of.segment)
            write_at = slot * state_by.slot + head * state_by.head
            write_at += value[None, :].to(tl.int64) * state_by.row + column[:, None].to(tl.int64) * state_by.column
            store_state(pool.state + write_at, s, writes, pool.STATE, CAPABILITY)
    else:
        zero_rows(at_out, out_by, start, stop, value, in_values, TOKENS)


@triton.jit
def load_factors(at, TOKENS: tl.constexpr):
    """The factors of a chunk with one decay a head, by token: k_factor, q_factor and last_factor (decays from the
    chunk's start for keys and queries, to its end for keys); and the decay of the whole chunk."""
    i = tl.arange(0, TOKENS)
    return tl.load(at + i), tl.load(at + TOKENS + i), tl.load(at + 2 * TOKENS + i), tl.load(at + 3 * TOKENS)


@triton.jit
def store_mark(at_marks, marks_by, mark_slots, mark, s, inside, MARKS: tl.constexpr, CAPABILITY: tl.constexpr):
    place = mark
    if mark_slots is not None:
        place = tl.load(mark_slots + mark).to(tl.int64)
    store_state(at_marks + place * marks_by.slot, s, inside & (place >= 0), MARKS, CAPABILITY)


@triton.jit
def zero_rows(at, by, first, end, value, in_values, TOKENS: tl.constexpr):
    for begin in range(first, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        inside = (token < end)[:, None] & in_values[None, :]
        zeros = tl.zeros([TOKENS, value.shape[0]], at.dtype.element_ty)
        tl.store(at + token[:, None].to(tl.int64) * by.token + value[None, :], zeros, inside)


def _build_scan(problem, config):
    constants, narrow = common(problem, config), config.operand
    mark, table = problem.marks_dtype, problem.index
    kinds = {"tokens.q": problem.dtype, "tokens.k": problem.dtype, "tokens.v": problem.dtype}
    kinds |= {"tokens.w": problem.write_dtype, "tokens.offsets": table if problem.packed else ""}
    kinds |= {"pool.read": table if problem.read else "", "pool.source": problem.source_dtype}
    kinds |= {"pool.state": problem.state_dtype, "marks.states": mark, "marks.starts": table if mark else ""}
    kinds |= {"marks.slots": table if problem.mark_slots else ""}
    between = {f"chunks.{name}": kind for name, kind in workspace(problem, narrow).items()}
    kinds |= between | {"starts": "fp32" if problem.segments else "", "out": problem.out_dtype}
    rows = {"q_by": "tokens.q", "k_by": "tokens.k", "v_by": "tokens.v", "out_by": "out"} if problem.aligned else {}
    types = pointers(kinds, {*rows.values(), "starts", *between})
    places = dict.fromkeys(("q_by", "k_by", "v_by", "w_by", "out_by"), INPUT)
    places |= dict.fromkeys(("source_by", "state_by", "marks_by"), STATE)
    types |= place_types(places, {place: kinds[name] for place, name in rows.items()})
    sizes = ("sequences", "tokens", "chunks", "heads", "key_dim", "value_dim", "null", "every", "segments", "segment")
    sizes += ("q_group", "k_group", "v_group")
    types |= size_types(sizes, key_dim=problem.key_dim, value_dim=problem.value_dim)
    constants |= {"pool.SOURCE": problem.source_dtype, "pool.STATE": problem.state_dtype}
    constants |= {"marks.KIND": mark, "marks.FIRST": problem.first_mark}
    constants |= {"ROWS": config.rows, "CAPABILITY": config.capability}
    return Build(scan_kernel, types, constants, num_warps=config.scan_warps, num_stages=config.stages)


launch_scan = Launcher("delta_scan", _build_scan)

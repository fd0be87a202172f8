"""The gated delta rule token by token, in Triton: decode, and verification of draft tokens in a chain.

Grid: `states_grid`, with one more sequence for packed tokens outside of all sequences. A program has ROWS values of one
head's state, [ROWS, K] float32, in registers, and processes the sequence's tokens in order. The state is read once and
written once; this traffic bounds the kernel.
Warps: all share a program's state. Shared memory: sums.
Inputs: q, k [rows, tokens, heads, K], v, gate, beta, states [slots, heads, V, K], tables of slots. Outputs: like v,
states, and `Kept`.
Method: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024.
"""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer._core.target import target_of
from flashinfer.ops._device.pdl import begin
from flashinfer.ops.recurrent._device.gates import log_decay, sigmoid, unit_length
from flashinfer.ops.recurrent._device.sequences import (
    head_of, program_of, slot_of, states_grid, tokens_of, zero_tokens,
)  # fmt: skip
from flashinfer.ops.recurrent._device.states import load_state, store_state, tile_offsets
from flashinfer.ops.recurrent.delta.config import with_many
from flashinfer.ops.recurrent.delta.keep import keep_token
from flashinfer.ops.recurrent.launching import arguments, place_types, pointers, size_types, strides, table_strides


@triton.jit
def _load_token(
    tokens, there, origin, token, head, row, column, in_rows, in_columns, q_by, k_by, v_by, gate_by, beta_by, shares,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Key, query, value, gate and beta of a token as stored, if it is `there`; 0 for a gate and 1 for a beta that are
    not given."""
    in_rows &= there
    in_columns &= there
    at = origin * k_by.row + token * k_by.token + head_of(head, shares.k) * k_by.head
    key = tl.load(tokens.k + at + column, in_columns, other=0)
    at = origin * q_by.row + token * q_by.token + head_of(head, shares.q) * q_by.head
    query = tl.load(tokens.q + at + column, in_columns, other=0)
    at = origin * v_by.row + token * v_by.token + head_of(head, shares.v) * v_by.head
    value = tl.load(tokens.v + at + row, in_rows, other=0)
    gate = 0.0
    if tokens.gate is not None:
        at = origin * gate_by.row + token * gate_by.token + head_of(head, shares.gate) * gate_by.head
        if CHANNELS:
            gate = tl.load(tokens.gate + at + column, in_columns, other=0)
        else:
            gate = tl.load(tokens.gate + at, there, other=0)
    beta = 1.0
    if tokens.beta is not None:
        at = origin * beta_by.row + token * beta_by.token + head_of(head, shares.beta) * beta_by.head
        beta = tl.load(tokens.beta + at, there, other=0)
    return key, query, value, gate, beta


@triton.jit
def step_kernel(
    tokens, gates, pool, out, slots, offsets, kept, norm,
    q_by, k_by, v_by, gate_by, beta_by, out_by, source_by, state_by, each_by, read_by, rows_by, norm_by, kept_by,
    of, shares, numbers,
    NORMALIZE: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPABILITY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n, head, block = program_of(pool.BLOCKS)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    in_rows = row < of.value_dim
    in_columns = column < of.key_dim
    inside = in_rows[:, None] & in_columns[None, :]
    kh = head_of(head, shares.k)

    sequence, origin, first, length = tokens_of(offsets, n, out, out_by, head, row, 1, in_rows, of)
    if SINGLE:
        length = 1
    is_sequence = n < of.sequences

    slot = slot_of(slots.read, slots.accepted, sequence, read_by, of)
    live = is_sequence & (slot > of.null)

    # All loads precede a barrier and a branch, which ptxas moves neither them nor their uses across. So none waits for
    # another, but for a slot.
    raw_key, raw_query, raw_value, raw_gate, raw_beta = _load_token(
        tokens, length > 0, origin, first, head, row, column, in_rows, in_columns, q_by, k_by, v_by, gate_by, beta_by,
        shares, gates.CHANNELS,
    )  # fmt: skip
    raw_rate = 0.0
    if gates.a_log is not None:
        raw_rate = tl.load(gates.a_log + head_of(head, shares.rate))
    raw_shift = 0.0
    if gates.bias is not None:
        bias_head = head_of(head, shares.bias)
        if gates.CHANNELS:
            raw_shift = tl.load(gates.bias + bias_head * of.key_dim + column, in_columns, other=0)
        else:
            raw_shift = tl.load(gates.bias + bias_head)
    s = tl.zeros([ROWS, KEYS], tl.float32)
    if pool.source is not None:
        read_at = slot * source_by.slot + head * source_by.head
        read_at += tile_offsets(block, row, column, source_by.row, source_by.column, pool.LAYOUT, pool.DENSE)
        s = load_state(pool.source + read_at, inside & live, pool.SOURCE, CAPABILITY)
    tl.debug_barrier()
    if live:
        rate = 0.0
        if gates.a_log is not None:
            rate = tl.exp(raw_rate)
        shift = 0.0
        if gates.bias is not None:
            shift = raw_shift.to(tl.float32)
        write_slot = slot
        if pool.FINAL:
            if slots.write is not None:
                write_slot = tl.load(slots.write + n).to(tl.int64)
        write_at = write_slot * state_by.slot + head * state_by.head
        write_at += tile_offsets(block, row, column, state_by.row, state_by.column, pool.LAYOUT, pool.DENSE)
        stored = length
        if slots.stop is not None:
            stored = tl.load(slots.stop + n).to(tl.int32)
        for t in range(length):
            token = first + t
            if not SINGLE:
                # Behind the last token it is that one again.
                next_key, next_query, next_value, next_gate, next_beta = _load_token(
                    tokens, t >= 0, origin, first + tl.minimum(t + 1, length - 1), head, row, column, in_rows,
                    in_columns, q_by, k_by, v_by, gate_by, beta_by, shares, gates.CHANNELS,
                )  # fmt: skip
            key = raw_key.to(tl.float32)
            query = raw_query.to(tl.float32)
            if NORMALIZE:
                key = unit_length(key)
                query = unit_length(query)
            log = 0.0
            if tokens.gate is not None:
                if gates.KIND == "linear":
                    decay = raw_gate.to(tl.float32)
                    if kept.KIND == "replay":
                        log = tl.log(decay)
                else:
                    log = log_decay(raw_gate.to(tl.float32) + shift, rate, numbers, gates.KIND)
                    decay = tl.exp(log)
                if gates.CHANNELS:
                    s *= decay[None, :]
                else:
                    s *= decay
            rate_of_change = 1.0
            if tokens.beta is not None:
                rate_of_change = raw_beta.to(tl.float32)
                if gates.BETA == "logit":
                    rate_of_change = sigmoid(rate_of_change)
            correction = rate_of_change * (raw_value.to(tl.float32) - tl.sum(s * key[None, :], 1))
            s += correction[:, None] * key[None, :]
            o = tl.sum(s * query[None, :], 1) * numbers.scale
            if norm.gate is not None:
                o *= tl.rsqrt(tl.sum(o * o, 0) / of.value_dim + numbers.eps)
                o *= tl.load(norm.weight + row, in_rows, other=0).to(tl.float32)
                at = origin * norm_by.row + token * norm_by.token + head * norm_by.head
                o *= sigmoid(tl.load(norm.gate + at + row, in_rows, other=0).to(tl.float32))
            at = origin * out_by.row + token * out_by.token + head * out_by.head
            tl.store(out + at + row, o.to(out.dtype.element_ty), in_rows)
            if pool.EACH == "buffer":
                at = n.to(tl.int64) * each_by.row + t * each_by.token + head * each_by.head
                at += row[:, None].to(tl.int64) * of.key_dim + column[None, :]
                store_state(pool.each + at, s, inside & (t < stored), pool.STATE, CAPABILITY)
            if pool.EACH == "pool":
                to = tl.load(slots.rows + n.to(tl.int64) * rows_by.sequence + t * rows_by.column).to(tl.int64)
                at = to * state_by.slot + head * state_by.head
                at += tile_offsets(block, row, column, state_by.row, state_by.column, pool.LAYOUT, pool.DENSE)
                store_state(pool.state + at, s, inside & (to > of.null) & (t < stored), pool.STATE, CAPABILITY)
            if pool.FINAL and slots.stop is not None:
                store_state(
                    pool.state + write_at, s, inside & (write_slot > of.null) & (t + 1 == stored), pool.STATE,
                    CAPABILITY,
                )  # fmt: skip
            if kept.KIND != "":
                keep_token(
                    kept, kept_by, slot, t, head, kh, block, row, column, in_rows, in_columns, raw_value, raw_key,
                    raw_gate, log, rate_of_change, correction, of,
                )  # fmt: skip
            if not SINGLE:
                raw_key, raw_query, raw_value = next_key, next_query, next_value
                if tokens.gate is not None:
                    raw_gate = next_gate
                if tokens.beta is not None:
                    raw_beta = next_beta
        if pool.FINAL and slots.stop is None:
            store_state(pool.state + write_at, s, inside & (write_slot > of.null), pool.STATE, CAPABILITY)
    elif is_sequence:
        zero_tokens(out, out_by, origin, first.to(tl.int32), first.to(tl.int32) + length, head, row, 1, in_rows)


_PLACES = {
    "q_by": ("row", "token", "head"),
    "k_by": ("row", "token", "head"),
    "v_by": ("row", "token", "head"),
    "gate_by": ("row", "token", "head"),
    "beta_by": ("row", "token", "head"),
    "out_by": ("row", "token", "head"),
    "source_by": ("slot", "head", "row", "column"),
    "state_by": ("slot", "head", "row", "column"),
    "each_by": ("row", "token", "head"),
    "read_by": ("sequence", "column"),
    "rows_by": ("sequence", "column"),
    "norm_by": ("row", "token", "head"),
    "kept_by": ("v", "k", "gate", "beta"),
}
# Tensors whose rows are aligned with Problem.aligned, by their strides.
_ROWS = {"q_by": "tokens.q", "k_by": "tokens.k", "v_by": "tokens.v", "out_by": "out", "norm_by": "norm.gate"}
_ROWS |= {"source_by": "pool.source", "state_by": "pool.state", "each_by": "pool.each"}
_SIZES = ("sequences", "tokens", "key_dim", "value_dim", "columns", "kept", "null", "k_group")
# Of a head in the heads of these: one over the heads that share one.
_SHARES = ("q", "k", "v", "gate", "beta", "rate", "bias")


def input_kinds(problem) -> dict[str, str]:
    """Dtypes of a token's inputs and of the gates' parameters, by the names of kernels."""
    return {
        "tokens.q": problem.dtype,
        "tokens.k": problem.dtype,
        "tokens.v": problem.dtype,
        "tokens.gate": problem.gate_dtype,
        "tokens.beta": problem.beta_dtype,
        "gates.a_log": "fp32" if problem.gate in ("softplus", "bounded") else "",
        "gates.bias": problem.bias_dtype,
    }


def kept_kinds(problem) -> dict[str, str]:
    """Dtypes of what is kept of each token for a commit."""
    replay = "fp32" if problem.keep == "replay" else ""
    v = "fp32" if problem.keep == "corrections" else problem.kept_dtype if problem.keep else ""
    return {"kept.v": v, "kept.k": problem.kept_dtype if problem.keep else "", "kept.gate": replay, "kept.beta": replay}


def shares(tokens, gates) -> list[int]:
    """Heads of the state for each head of q, k, v, gate, beta, a_log and bias; 1 for what is not there."""
    of_tokens = [1 if x is None else tokens.heads // x.shape[2] for x in tokens[:5]]
    return of_tokens + [1 if x is None else tokens.heads // x.shape[0] for x in (gates.a_log, gates.bias)]


def _build(problem, config):
    kinds = input_kinds(problem) | {
        "pool.source": problem.source_dtype,
        "pool.state": problem.state_dtype if problem.final or problem.each == "pool" else "",
        "pool.each": problem.state_dtype if problem.each == "buffer" else "",
        "out": problem.out_dtype,
        "slots.read": problem.index if problem.read else "",
        "slots.write": problem.index if problem.write else "",
        "slots.stop": problem.index if problem.stop else "",
        "slots.rows": problem.index if problem.each == "pool" else "",
        "slots.accepted": problem.index if problem.accepted else "",
        "offsets": problem.index if problem.packed else "",
        **kept_kinds(problem),
        "norm.gate": problem.dtype if problem.norm else "",
        "norm.weight": "fp32" if problem.norm else "",
    }
    rows = (_ROWS | ({"gate_by": "tokens.gate"} if problem.channels else {})) if problem.aligned else {}
    types = pointers(kinds, rows.values())
    units = {place: kinds[name] for place, name in rows.items() if kinds[name]}
    types |= place_types(_PLACES, units, _UNITS_OF[problem.layout])
    types |= size_types(_SIZES, key_dim=problem.key_dim, value_dim=problem.value_dim)
    types |= {f"shares.{name}": "fp32" for name in _SHARES}
    types |= {f"numbers.{name}": "fp32" for name in ("scale", "eps", "lower", "sharp", "threshold")}
    constants = {
        "gates.KIND": problem.gate,
        "gates.CHANNELS": problem.channels,
        "gates.BETA": problem.beta,
        "NORMALIZE": problem.normalize,
        "pool.LAYOUT": problem.layout,
        "pool.DENSE": problem.dense,
        "pool.BLOCKS": triton.cdiv(problem.value_dim, config.rows),
        "SINGLE": problem.single,
        "pool.EACH": problem.each,
        "pool.FINAL": problem.final,
        "kept.KIND": problem.keep,
        "pool.SOURCE": problem.source_dtype,
        "pool.STATE": problem.state_dtype,
        "ROWS": config.rows,
        "KEYS": power_of_two(problem.key_dim, 16),
        "CAPABILITY": config.capability,
        "PDL": config.pdl,
    }
    return Build(step_kernel, types, constants, num_warps=config.num_warps)


_UNITS_OF = {
    "k": dict.fromkeys(("source_by", "state_by"), ("slot", "head", "row")),
    "v": dict.fromkeys(("source_by", "state_by"), ("slot", "head", "column")),
    "": dict.fromkeys(("source_by", "state_by"), ()),
}


launch_step = Launcher("delta_step", _build)


# Programs a multiprocessor from which a program has 16 rows in place of 8. H100, 32 heads of 128 x 128, 16 rows and 8:
# 256 requests 390 and 403 us in float32, 203 and 206 in bfloat16; 64 requests the same, their verification with states
# kept 260 and 270; 1 request 4.6 and 3.7.
_MANY = 128


def step(problem, config, tokens, gates, pool, out, scale, kept=None, norm=None):
    """Every sequence's tokens one after another from its state; see operands.py for what is read and written."""
    n, heads, (values, keys) = tokens.sequences, tokens.heads, (tokens.v.shape[3], tokens.k.shape[3])
    group = shares(tokens, gates)
    columns = 1 if pool.read is None or pool.read.dim() == 1 else pool.read.shape[1]
    sizes = (n, tokens.k.shape[1], keys, values, columns, 0 if kept is None else kept.v.shape[2], pool.null, group[1])
    state = pool.state if problem.final or problem.each == "pool" else None
    given = [*tokens[:5], gates.a_log, gates.bias, pool.source, state, pool.each, out, pool.read, pool.write, pool.stop]
    given += [pool.rows, pool.accepted, tokens.offsets, *(kept or ()), *(norm[:2] if norm else ())]
    places = [strides(x, (0, 1, 2)) for x in (*tokens[:5], out)]
    places += [strides(x, (0, 1, 2, 3)) for x in (pool.source, pool.state)]
    places += [strides(pool.each, (0, 1, 2))]
    places += [table_strides(x) for x in (pool.read, pool.rows)]
    places += [strides(None if norm is None else norm.gate, (0, 1, 2))]
    places += [tuple(0 if x is None else x.stride(0) for x in (kept or (None,) * 4))]
    numbers = scale, 0.0 if norm is None else norm.eps, gates.lower, gates.sharp, gates.threshold
    many = with_many(problem, config)
    if many is not None and n * heads * triton.cdiv(values, config.rows) > _MANY * target_of(out.device).sms:
        config = many
    grid = states_grid(n + problem.packed, heads, triton.cdiv(values, config.rows))
    launch_step(problem, config, grid, *arguments(given, places), *sizes, *(1 / g for g in group), *numbers)

"""The gated delta rule token by token in Triton: a program holds some rows of a state in registers."""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.gates import log_decay, sigmoid, unit_length
from flashinfer.ops.recurrent._device.sequences import slot_of, span_of, zero_tokens
from flashinfer.ops.recurrent._device.states import load_state, state_offsets, store_state
from flashinfer.ops.recurrent.delta import Commit, Step
from flashinfer.ops.recurrent.delta.config import power_of_two
from flashinfer.ops.recurrent.delta.keep import keep_token
from flashinfer.ops.recurrent.delta.tree import launch_tree, tree
from flashinfer.ops.recurrent.launching import place_types, pointers, raw, strides, table_strides


@triton.jit
def step_kernel(
    q,
    k,
    v,
    gate,
    beta,
    a_log,
    bias,
    source,
    state,
    each,
    out,
    read,
    write,
    stop,
    rows,
    accepted,
    offsets,
    kept_v,
    kept_k,
    kept_gate,
    kept_beta,
    norm_gate,
    norm_weight,
    q_by,
    k_by,
    v_by,
    gate_by,
    beta_by,
    out_by,
    source_by,
    state_by,
    each_by,
    read_by,
    rows_by,
    norm_by,
    kept_by,
    of,
    numbers,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BETA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    SINGLE: tl.constexpr,
    EACH: tl.constexpr,
    FINAL: tl.constexpr,
    KEEP: tl.constexpr,
    SOURCE: tl.constexpr,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    n = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    in_rows = row < of.value_dim
    in_columns = column < of.key_dim
    inside = in_rows[:, None] & in_columns[None, :]
    kh = head // of.k_group

    sequence = tl.minimum(n, of.sequences - 1)
    origin, first, length = span_of(offsets, sequence, of)
    if SINGLE:
        length = 1
    if offsets is not None:
        # One program more than sequences: tokens of no sequence have output 0.
        if n == of.sequences:
            before = tl.load(offsets).to(tl.int32)
            zero_tokens(out, out_by, origin, 0, before, head, row, in_rows)
            zero_tokens(out, out_by, origin, (first + length).to(tl.int32), of.tokens, head, row, in_rows)
            length = 0
    is_sequence = n < of.sequences

    slot = slot_of(read, accepted, sequence, read_by, of)
    live = is_sequence & (slot > of.null)

    if live:
        s = tl.zeros([ROWS, KEYS], tl.float32)
        if source is not None:
            home = slot * source_by.slot + head * source_by.head
            home += state_offsets(row, column, source_by.row, source_by.column, LAYOUT)
            s = load_state(source + home, inside, SOURCE, CAPABILITY)
        rate = 0.0
        if a_log is not None:
            rate = tl.exp(tl.load(a_log + head // of.rate_group).to(tl.float32))
        shift = 0.0
        if bias is not None:
            if CHANNELS:
                shift = tl.load(bias + head // of.bias_group * of.key_dim + column, in_columns, other=0).to(tl.float32)
            else:
                shift = tl.load(bias + head // of.bias_group).to(tl.float32)
        last = slot
        if FINAL:
            if write is not None:
                last = tl.load(write + n).to(tl.int64)
        goal = last * state_by.slot + head * state_by.head
        goal += state_offsets(row, column, state_by.row, state_by.column, LAYOUT)
        stored = length
        if stop is not None:
            stored = tl.load(stop + n).to(tl.int32)
        for t in range(length):
            token = first + t
            at = origin * k_by.row + token * k_by.token + kh * k_by.head
            raw_key = tl.load(k + at + column, in_columns, other=0)
            key = raw_key.to(tl.float32)
            at = origin * v_by.row + token * v_by.token + head // of.v_group * v_by.head
            raw_value = tl.load(v + at + row, in_rows, other=0)
            at = origin * q_by.row + token * q_by.token + head // of.q_group * q_by.head
            query = tl.load(q + at + column, in_columns, other=0).to(tl.float32)
            if NORMALIZE:
                key = unit_length(key)
                query = unit_length(query)
            log = 0.0
            raw_gate = 0.0
            if gate is not None:
                at = gate + origin * gate_by.row + token * gate_by.token + head // of.gate_group * gate_by.head
                if CHANNELS:
                    raw_gate = tl.load(at + column, in_columns, other=0)
                else:
                    raw_gate = tl.load(at)
                if GATE == "linear":
                    decay = raw_gate.to(tl.float32)
                    if KEEP == "replay":
                        log = tl.log(decay)
                else:
                    log = log_decay(raw_gate.to(tl.float32) + shift, rate, numbers, GATE)
                    decay = tl.exp(log)
                if CHANNELS:
                    s *= decay[None, :]
                else:
                    s *= decay
            rate_of_change = 1.0
            if beta is not None:
                at = origin * beta_by.row + token * beta_by.token + head // of.beta_group * beta_by.head
                rate_of_change = tl.load(beta + at).to(tl.float32)
                if BETA == "logit":
                    rate_of_change = sigmoid(rate_of_change)
            correction = rate_of_change * (raw_value.to(tl.float32) - tl.sum(s * key[None, :], 1))
            s += correction[:, None] * key[None, :]
            o = tl.sum(s * query[None, :], 1) * numbers.scale
            if norm_gate is not None:
                o *= tl.rsqrt(tl.sum(o * o, 0) / of.value_dim + numbers.eps)
                o *= tl.load(norm_weight + row, in_rows, other=0).to(tl.float32)
                at = origin * norm_by.row + token * norm_by.token + head * norm_by.head
                o *= sigmoid(tl.load(norm_gate + at + row, in_rows, other=0).to(tl.float32))
            at = origin * out_by.row + token * out_by.token + head * out_by.head
            tl.store(out + at + row, o.to(out.dtype.element_ty), in_rows)
            if EACH == "buffer":
                at = n.to(tl.int64) * each_by.row + t * each_by.token + head * each_by.head
                at += row[:, None].to(tl.int64) * of.key_dim + column[None, :]
                store_state(each + at, s, inside & (t < stored), STATE, CAPABILITY)
            if EACH == "pool":
                to = tl.load(rows + n.to(tl.int64) * rows_by.sequence + t * rows_by.column).to(tl.int64)
                at = to * state_by.slot + head * state_by.head
                at += state_offsets(row, column, state_by.row, state_by.column, LAYOUT)
                store_state(state + at, s, inside & (to > of.null) & (t < stored), STATE, CAPABILITY)
            if FINAL and stop is not None:
                store_state(state + goal, s, inside & (last > of.null) & (t + 1 == stored), STATE, CAPABILITY)
            if KEEP != "":
                keep_token(
                    kept_v, kept_k, kept_gate, kept_beta, kept_by, slot, t, head, kh, block, row, column, in_rows,
                    in_columns, raw_value, raw_key, raw_gate, log, rate_of_change, correction, of, KEEP,
                )  # fmt: skip
        if FINAL and stop is None:
            store_state(state + goal, s, inside & (last > of.null), STATE, CAPABILITY)
    else:
        zero_tokens(out, out_by, origin, first.to(tl.int32), first.to(tl.int32) + length, head, row, in_rows)


@triton.jit
def commit_kernel(
    state,
    window_v,
    window_k,
    window_gate,
    window_beta,
    slots,
    lengths,
    path,
    track_slots,
    track_steps,
    state_by,
    v_by,
    k_by,
    gate_by,
    beta_by,
    of,
    NORMALIZE: tl.constexpr,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    n = tl.program_id(0)
    head = tl.program_id(1) // of.blocks
    row = tl.program_id(1) % of.blocks * ROWS + tl.arange(0, ROWS)
    layer = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, KEYS)
    in_rows = row < of.value_dim
    in_columns = column < of.key_dim
    inside = in_rows[:, None] & in_columns[None, :]
    kh = head // of.k_group
    slot = tl.load(slots + n).to(tl.int64)
    length = tl.load(lengths + n).to(tl.int32)
    if (slot > of.null) & (length > 0):
        here = state_offsets(row, column, state_by.row, 1, "k") + head * state_by.head + layer * state_by.layer
        s = load_state(state + here + slot * state_by.slot, inside, STATE, CAPABILITY)
        track = tl.full([], -1, tl.int64)
        step = tl.full([], -1, tl.int32)
        if track_slots is not None:
            track = tl.load(track_slots + n).to(tl.int64)
            step = tl.load(track_steps + n).to(tl.int32)
        values = window_v + layer * v_by.layer + slot * v_by.slot
        keys = window_k + layer * k_by.layer + slot * k_by.slot
        gates = window_gate + layer * gate_by.layer + slot * gate_by.slot + head * of.tokens
        betas = window_beta + layer * beta_by.layer + slot * beta_by.slot + head * of.tokens
        for i in range(length):
            t = i
            if path is not None:
                t = tl.load(path + n * of.tokens + i).to(tl.int32)
            key = tl.load(keys + (kh * of.tokens + t) * of.key_dim + column, in_columns, other=0).to(tl.float32)
            value = tl.load(values + (head * of.tokens + t) * of.value_dim + row, in_rows, other=0).to(tl.float32)
            if NORMALIZE:
                key = unit_length(key)
            s *= tl.exp(tl.load(gates + t))
            correction = tl.load(betas + t) * (value - tl.sum(s * key[None, :], 1))
            s += correction[:, None] * key[None, :]
            if track_slots is not None:
                to_track = inside & (i == step) & (track > of.null)
                store_state(state + here + track * state_by.slot, s, to_track, STATE, CAPABILITY)
        store_state(state + here + slot * state_by.slot, s, inside, STATE, CAPABILITY)


_STEP_PLACES = {
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
_STEP_SIZES = (
    ("sequences", "tokens", "key_dim", "value_dim", "columns", "kept", "null")
    + ("q_group", "k_group", "v_group", "gate_group", "beta_group", "rate_group", "bias_group")
)  # fmt: skip


def _build_step(problem, config):
    raw = problem.gate in ("softplus", "bounded")
    wide = problem.gate_dtype if problem.channels else ""
    kinds = {
        "q": problem.dtype,
        "k": problem.dtype,
        "v": problem.dtype,
        "gate": problem.gate_dtype,
        "beta": problem.beta_dtype,
        "a_log": "fp32" if raw else "",
        "bias": problem.bias_dtype,
        "source": problem.source_dtype,
        "state": problem.state_dtype if problem.final or problem.each == "pool" else "",
        "each": problem.state_dtype if problem.each == "buffer" else "",
        "out": problem.out_dtype,
        "read": problem.index if problem.read else "",
        "write": problem.index if problem.write else "",
        "stop": problem.index if problem.stop else "",
        "rows": problem.index if problem.each == "pool" else "",
        "accepted": problem.index if problem.accepted else "",
        "offsets": problem.index if problem.packed else "",
        "kept_v": ("fp32" if problem.keep == "corrections" else problem.kept_dtype) if problem.keep else "",
        "kept_k": problem.kept_dtype if problem.keep else "",
        "kept_gate": "fp32" if problem.keep == "replay" else "",
        "kept_beta": "fp32" if problem.keep == "replay" else "",
        "norm_gate": problem.dtype if problem.norm else "",
        "norm_weight": "fp32" if problem.norm else "",
    }
    rows = {"q", "k", "v", "source", "state", "each", "out", "norm_gate"} | ({"gate"} if wide else set())
    types = pointers(kinds, rows if problem.aligned else ())
    types |= place_types(_STEP_PLACES, _units(kinds, rows) if problem.aligned else {}, _UNITS_OF[problem.layout])
    types |= {f"of.{size}": "i32" for size in _STEP_SIZES}
    types |= {f"numbers.{name}": "fp32" for name in ("scale", "eps", "lower", "sharp", "threshold")}
    constants = {name: None for name, kind in kinds.items() if not kind} | {
        "GATE": problem.gate,
        "CHANNELS": problem.channels,
        "BETA": problem.beta,
        "NORMALIZE": problem.normalize,
        "LAYOUT": problem.layout,
        "SINGLE": problem.single,
        "EACH": problem.each,
        "FINAL": problem.final,
        "KEEP": problem.keep,
        "SOURCE": problem.source_dtype,
        "STATE": problem.state_dtype,
        "ROWS": config.rows,
        "KEYS": power_of_two(problem.key_dim),
        "CAPABILITY": config.capability,
    }
    return Build(step_kernel, types, constants, num_warps=config.num_warps)


def _units(kinds: dict, names) -> dict:
    short = {"norm_gate": "norm_by"}
    return {short.get(name, f"{name}_by"): kinds[name] for name in names if kinds[name]}


_UNITS_OF = {
    "k": dict.fromkeys(("source_by", "state_by"), ("slot", "head", "row")),
    "v": dict.fromkeys(("source_by", "state_by"), ("slot", "head", "column")),
    "": dict.fromkeys(("source_by", "state_by"), ()),
}
_WINDOWS = ("v", "k", "gate", "beta")


def _build_commit(problem, config):
    window = {"v": problem.dtype, "k": problem.dtype, "gate": "fp32", "beta": "fp32"}
    kinds = {"state": problem.state_dtype} | {f"window_{name}": kind for name, kind in window.items()}
    kinds |= {"slots": "i32", "lengths": "i32", "path": "i32" if problem.path else ""}
    kinds |= dict.fromkeys(("track_slots", "track_steps"), "i32" if problem.track else "")
    whole = {"state": problem.state_dtype, "window_v": problem.dtype, "window_k": problem.dtype}
    types = pointers(kinds, whole)
    places = {"state_by": ("layer", "slot", "head", "row")} | {f"{name}_by": ("layer", "slot") for name in _WINDOWS}
    types |= place_types(places, {"state_by": problem.state_dtype, "v_by": problem.dtype, "k_by": problem.dtype})
    types |= {f"of.{name}": "i32" for name in ("blocks", "tokens", "key_dim", "value_dim", "k_group", "null")}
    constants = {name: None for name, kind in kinds.items() if not kind} | {
        "NORMALIZE": problem.normalize,
        "STATE": problem.state_dtype,
        "ROWS": config.rows,
        "KEYS": power_of_two(problem.key_dim),
        "CAPABILITY": config.capability,
    }
    return Build(commit_kernel, types, constants, num_warps=config.num_warps)


launch_step = Launcher("delta_step", _build_step)
launch_commit = Launcher("delta_commit", _build_commit)
# Bytes of stack a thread may use, for trees of 64 tokens; nothing else uses any.
STACK_BUDGET = 384


def kernels(problem, config):
    if isinstance(problem, Commit):
        yield launch_commit, problem, config
    else:
        yield launch_tree if problem.tokens else launch_step, problem, config


def run(problem, config, *args):
    _RUN[type(problem)](problem, config, *args)


def step(problem, config, tokens, gates, pool, out, scale, kept=None, norm=None, parents=None):
    """Every sequence's tokens one after another from its state; see operands.py for what is read and written."""
    if problem.tokens:
        tree(problem, config, tokens, gates, pool, out, scale, kept, parents)
        return
    n, heads, (values, keys) = tokens.sequences, tokens.heads, (tokens.v.shape[3], tokens.k.shape[3])
    group = [1 if x is None else heads // x.shape[2] for x in (tokens.q, tokens.k, tokens.v, tokens.gate, tokens.beta)]
    group += [1 if x is None else heads // x.shape[0] for x in (gates.a_log, gates.bias)]
    columns = 1 if pool.read is None or pool.read.dim() == 1 else pool.read.shape[1]
    sizes = (n, tokens.k.shape[1], keys, values, columns, 0 if kept is None else kept.v.shape[2], pool.null, *group)
    present = [x for x in (tokens.q, tokens.k, tokens.v, tokens.gate, tokens.beta) if x is not None]
    present += [x for x in (gates.a_log, gates.bias, pool.source) if x is not None]
    if problem.final or problem.each == "pool":
        present.append(pool.state)
    present += [
        x for x in (pool.each, out, pool.read, pool.write, pool.stop, pool.rows, pool.accepted) if x is not None
    ]
    present += [
        x for x in (tokens.offsets, *(kept or ()), *((norm.gate, norm.weight) if norm else ())) if x is not None
    ]
    places = [strides(x, (0, 1, 2)) for x in (tokens.q, tokens.k, tokens.v, tokens.gate, tokens.beta, out)]
    places += [strides(x, (0, 1, 2, 3)) for x in (pool.source, pool.state)]
    places += [strides(pool.each, (0, 1, 2))]
    places += [table_strides(x) for x in (pool.read, pool.rows)]
    places += [strides(None if norm is None else norm.gate, (0, 1, 2))]
    places += [tuple(0 if x is None else x.stride(0) for x in (kept or (None,) * 4))]
    numbers = scale, 0.0 if norm is None else norm.eps, gates.lower, gates.sharp, gates.threshold
    grid = (n + problem.packed, heads, triton.cdiv(values, config.rows))
    flat = [x for place in places for x in place]
    launch_step(problem, config, grid, *map(raw, present), *flat, *sizes, *numbers)


def commit(problem, config, state, window, accepted):
    """Fold accepted tokens into the states [layers, slots, heads, V, K]."""
    layers, _, heads, values, keys = state.shape
    blocks = triton.cdiv(values, config.rows)
    present = [state, *window, accepted.slots, accepted.lengths]
    present += [x for x in (accepted.path, accepted.track_slots, accepted.track_steps) if x is not None]
    places = [*state.stride()[:4], *(s for x in window for s in x.stride()[:2])]
    sizes = blocks, window.v.shape[3], keys, values, heads // window.k.shape[2], accepted.null
    grid = (accepted.slots.shape[0], heads * blocks, layers)
    launch_commit(problem, config, grid, *map(raw, present), *places, *sizes)


_RUN = {Step: step, Commit: commit}

IMPLEMENTATION = Implementation(
    run,
    (launch_step, launch_tree, launch_commit),
    kernels=kernels,
    stack_budget=STACK_BUDGET,
)

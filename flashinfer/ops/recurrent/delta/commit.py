"""Applies the accepted tokens of replay windows to the states of all layers, in Triton.

Grid: `states_grid` of the sequences of all layers. A program has ROWS values of one head's state, [ROWS, K] float32, in
registers: each state is read once and written once, however many tokens were accepted.
Warps: all share a program's state. Shared memory: sums.
Inputs: raw keys and values, decays and beta of `Window`, slots and counts of `Accepted`. Outputs: states
[slots, heads, V, K], in place.
Method: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024.
"""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent._device.gates import unit_length
from flashinfer.ops.recurrent._device.sequences import program_of, states_grid
from flashinfer.ops.recurrent._device.states import load_state, state_offsets, store_state
from flashinfer.ops.recurrent.launching import place_types, pointers, raw, size_types, strides


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
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    place, head, block = program_of(BLOCKS)
    n = place % of.sequences
    layer = (place // of.sequences).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    in_rows = row < of.value_dim
    in_columns = column < of.key_dim
    inside = in_rows[:, None] & in_columns[None, :]
    kh = head // of.k_group
    slot = tl.load(slots + n).to(tl.int64)
    length = tl.load(lengths + n).to(tl.int32)
    if (layer < of.layers) & (slot > of.null) & (length > 0):
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


_WINDOWS = ("v", "k", "gate", "beta")


def _build(problem, config):
    window = {"v": problem.dtype, "k": problem.dtype, "gate": "fp32", "beta": "fp32"}
    kinds = {"state": problem.state_dtype} | {f"window_{name}": kind for name, kind in window.items()}
    kinds |= {"slots": "i32", "lengths": "i32", "path": "i32" if problem.path else ""}
    kinds |= dict.fromkeys(("track_slots", "track_steps"), "i32" if problem.track else "")
    whole = ("state", "window_v", "window_k") if problem.aligned else ()
    types = pointers(kinds, whole)
    places = {"state_by": ("layer", "slot", "head", "row")} | {f"{name}_by": ("layer", "slot") for name in _WINDOWS}
    units = {"state_by": problem.state_dtype, "v_by": problem.dtype, "k_by": problem.dtype}
    types |= place_types(places, units if problem.aligned else {})
    sizes = ("layers", "sequences", "tokens", "key_dim", "value_dim", "k_group", "null")
    types |= size_types(sizes, key_dim=problem.key_dim, value_dim=problem.value_dim)
    constants = {
        "NORMALIZE": problem.normalize,
        "STATE": problem.state_dtype,
        "BLOCKS": triton.cdiv(problem.value_dim, config.rows),
        "ROWS": config.rows,
        "KEYS": power_of_two(problem.key_dim, 16),
        "CAPABILITY": config.capability,
    }
    return Build(commit_kernel, types, constants, num_warps=config.num_warps)


launch_commit = Launcher("delta_commit", _build)


def commit(problem, config, state, window, accepted):
    """Apply accepted tokens to the states [layers, slots, heads, V, K]."""
    layers, _, heads, values, keys = state.shape
    sequences = accepted.slots.shape[0]
    present = [state, *window, accepted.slots, accepted.lengths]
    present += [x for x in (accepted.path, accepted.track_slots, accepted.track_steps) if x is not None]
    places = [*strides(state, (0, 1, 2, 3)), *(s for x in window for s in strides(x, (0, 1)))]
    sizes = layers, sequences, window.v.shape[3], keys, values, heads // window.k.shape[2], accepted.null
    grid = states_grid(layers * sequences, heads, triton.cdiv(values, config.rows))
    launch_commit(problem, config, grid, *map(raw, present), *places, *sizes)

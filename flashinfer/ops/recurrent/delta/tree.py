"""Verification of draft tokens in a tree, in Triton: the state is read once for all branches.

The state of a node is the root's state, decayed, plus one outer product of correction and key for each token on its
path. Corrections stay in registers, and a token reads those of its ancestors:

    u_i = S_0 (decay of the path to i) k_i + sum over ancestors j of c_j (k_j decayed from j to i . k_i)
    c_i = beta_i (v_i - u_i)

Grid: `states_grid`, with one more sequence for packed tokens outside of all sequences.
Warps: all share a program's tiles; in registers are 16 values of the state [ROWS, K], and keys, sums of logarithms and
a mask of ancestors [TOKENS, ..]. Shared memory: sums.
Inputs: as in step.py, and parents [sequences, TOKENS]. Outputs: like v, states, and `Kept`.
Method: the recurrence of step.py, along each path of the tree.
"""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent._device.gates import at_least, log_decay, sigmoid, unit_length
from flashinfer.ops.recurrent._device.sequences import program_of, slot_of, states_grid, tokens_of, zero_tokens
from flashinfer.ops.recurrent._device.states import load_state, state_offsets, store_state
from flashinfer.ops.recurrent.delta.keep import keep_token
from flashinfer.ops.recurrent.delta.step import input_kinds, kept_kinds, shares
from flashinfer.ops.recurrent.launching import arguments, place_types, pointers, size_types, strides, table_strides

# A decay below exp(-64) is replaced by exp(-64), so that sums of logarithms along a path keep their precision.
LEAST = tl.constexpr(-64.0)


@triton.jit
def row_of(tile, i, index):
    """Row `index` of a tile; zeros for an index outside, as that of a root's parent."""
    return tl.sum(tl.where((i == index)[:, None], tile, 0), 0)


@triton.jit
def tree_kernel(
    tokens, gates, pool, out, slots, offsets, parents, kept,
    q_by, k_by, v_by, gate_by, beta_by, out_by, source_by, state_by, each_by, read_by, rows_by, kept_by, of, numbers,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    n, head, block = program_of(pool.BLOCKS)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, KEYS)
    i = tl.arange(0, TOKENS)
    in_rows = row < of.value_dim
    in_columns = column < of.key_dim
    inside = in_rows[:, None] & in_columns[None, :]
    kh = head // of.k_group
    sequence, origin, first, length = tokens_of(offsets, n, out, out_by, head, row, 1, in_rows, of)
    sequence = sequence.to(tl.int64)
    slot = slot_of(slots.read, slots.accepted, sequence, read_by, of)
    if (n < of.sequences) & (slot > of.null):
        s = tl.zeros([ROWS, KEYS], tl.float32)
        if pool.source is not None:
            read_at = slot * source_by.slot + head * source_by.head
            read_at += state_offsets(row, column, source_by.row, source_by.column, pool.LAYOUT)
            s = load_state(pool.source + read_at, inside, pool.SOURCE, CAPABILITY)
        rate = 0.0
        if gates.a_log is not None:
            rate = tl.exp(tl.load(gates.a_log + head // of.rate_group).to(tl.float32))
        shift = 0.0
        if gates.bias is not None:
            if gates.CHANNELS:
                shifts = gates.bias + head // of.bias_group * of.key_dim
                shift = tl.load(shifts + column, in_columns, other=0).to(tl.float32)
            else:
                shift = tl.load(gates.bias + head // of.bias_group).to(tl.float32)
        keys = tl.zeros([TOKENS, KEYS], tl.float32)
        changes = tl.zeros([TOKENS, ROWS], tl.float32)
        paths = tl.zeros([TOKENS, TOKENS], tl.int32)
        # Sums of logarithms along the path. With one decay a head all columns are equal.
        sums = tl.zeros([TOKENS, KEYS], tl.float32)
        for t in range(tl.minimum(length, of.most)):
            parent = tl.load(parents + sequence * of.most + t)
            token = first + t
            at = origin * k_by.row + token * k_by.token + kh * k_by.head
            raw_key = tl.load(tokens.k + at + column, in_columns, other=0)
            key = raw_key.to(tl.float32)
            at = origin * q_by.row + token * q_by.token + head // of.q_group * q_by.head
            query = tl.load(tokens.q + at + column, in_columns, other=0).to(tl.float32)
            at = origin * v_by.row + token * v_by.token + head // of.v_group * v_by.head
            raw_value = tl.load(tokens.v + at + row, in_rows, other=0)
            if NORMALIZE:
                key = unit_length(key)
                query = unit_length(query)
            log = tl.zeros([KEYS], tl.float32)
            raw_gate = 0.0
            if tokens.gate is not None:
                at = origin * gate_by.row + token * gate_by.token + head // of.gate_group * gate_by.head
                if gates.CHANNELS:
                    raw_gate = tl.load(tokens.gate + at + column, in_columns, other=0).to(tl.float32)
                else:
                    raw_gate = tl.load(tokens.gate + at).to(tl.float32)
                if gates.KIND == "linear":
                    log += at_least(tl.log(raw_gate), LEAST)
                else:
                    log += at_least(log_decay(raw_gate + shift, rate, numbers, gates.KIND), LEAST)
            share = 1.0
            if tokens.beta is not None:
                at = origin * beta_by.row + token * beta_by.token + head // of.beta_group * beta_by.head
                share = tl.load(tokens.beta + at).to(tl.float32)
                if gates.BETA == "logit":
                    share = sigmoid(share)
            above = row_of(paths, i, parent)
            total = row_of(sums, i, parent) + log
            since = tl.exp(tl.where((above > 0)[:, None], total[None, :] - sums, 0))
            decayed = tl.where((above > 0)[:, None], keys * since, 0)
            from_root = s * tl.exp(total)[None, :]
            read_back = tl.sum(from_root * key[None, :], 1)
            read_back += tl.sum(changes * tl.sum(decayed * key[None, :], 1)[:, None], 0)
            change = share * (raw_value.to(tl.float32) - read_back)
            mine = (i == t)[:, None]
            keys = tl.where(mine, key[None, :], keys)
            sums = tl.where(mine, total[None, :], sums)
            changes = tl.where(mine, change[None, :], changes)
            path = tl.where(i == t, 1, above)
            paths = tl.where(mine, path[None, :], paths)
            decayed = tl.where(mine, key[None, :], decayed)
            o = tl.sum(from_root * query[None, :], 1)
            o += tl.sum(changes * tl.sum(decayed * query[None, :], 1)[:, None], 0)
            at = origin * out_by.row + token * out_by.token + head * out_by.head
            tl.store(out + at + row, (o * numbers.scale).to(out.dtype.element_ty), in_rows)
            if pool.EACH != "":
                now = tl.dot(tl.trans(changes), decayed, from_root, input_precision="ieee")
                if pool.EACH == "buffer":
                    at = sequence * each_by.row + t * each_by.token + head * each_by.head
                    write_at = at + row[:, None].to(tl.int64) * of.key_dim + column[None, :]
                    store_state(pool.each + write_at, now, inside, pool.STATE, CAPABILITY)
                else:
                    to = tl.load(slots.rows + sequence * rows_by.sequence + t * rows_by.column).to(tl.int64)
                    at = to * state_by.slot + head * state_by.head
                    write_at = at + state_offsets(row, column, state_by.row, state_by.column, pool.LAYOUT)
                    store_state(pool.state + write_at, now, inside & (to > of.null), pool.STATE, CAPABILITY)
            if kept.KIND != "":
                # With one decay a head all columns are equal: column 0 is taken.
                head_log = tl.max(tl.where(column == 0, log, LEAST), 0)
                keep_token(
                    kept, kept_by, slot, t, head, kh, block, row, column, in_rows, in_columns, raw_value, raw_key,
                    raw_gate, head_log, share, change, of,
                )  # fmt: skip
        first += of.most
        length -= of.most
    if n < of.sequences:
        # Zeros for padding, and for tokens past the table of parents.
        zero_tokens(out, out_by, origin, first.to(tl.int32), first.to(tl.int32) + length, head, row, 1, in_rows)


_INPUT, _STATE = ("row", "token", "head"), ("slot", "head", "row", "column")
_PLACES = dict.fromkeys(("q_by", "k_by", "v_by", "gate_by", "beta_by", "out_by"), _INPUT)
_PLACES |= {"source_by": _STATE, "state_by": _STATE, "each_by": _INPUT, "read_by": ("sequence", "column")}
_PLACES |= {"rows_by": ("sequence", "column"), "kept_by": ("v", "k", "gate", "beta")}
_SIZES = ("sequences", "tokens", "most", "columns", "key_dim", "value_dim", "kept", "null")
_SIZES += ("q_group", "k_group", "v_group", "gate_group", "beta_group", "rate_group", "bias_group")


def _build(problem, config):
    written = problem.state_dtype
    kinds = input_kinds(problem)
    kinds |= {"pool.source": problem.source_dtype, "pool.state": written if problem.each == "pool" else ""}
    kinds |= {"pool.each": written if problem.each == "buffer" else "", "out": problem.out_dtype}
    kinds |= {"slots.read": problem.index if problem.read else ""}
    kinds |= {"slots.rows": problem.index if problem.each == "pool" else ""}
    kinds |= {"slots.accepted": problem.index if problem.accepted else ""}
    kinds |= {"offsets": problem.index if problem.packed else "", "parents": "i32"}
    kinds |= kept_kinds(problem)
    rows = ("tokens.q", "tokens.k", "tokens.v", "pool.source", "pool.state", "pool.each", "out")
    types = pointers(kinds, rows if problem.aligned else ()) | place_types(_PLACES, {})
    types |= size_types(_SIZES, key_dim=problem.key_dim, value_dim=problem.value_dim)
    types |= {f"numbers.{name}": "fp32" for name in ("scale", "lower", "sharp", "threshold")}
    constants = {"gates.KIND": problem.gate, "gates.CHANNELS": problem.channels, "gates.BETA": problem.beta}
    constants |= {"pool.LAYOUT": problem.layout, "pool.EACH": problem.each, "pool.SOURCE": problem.source_dtype}
    constants |= {"pool.STATE": written, "kept.KIND": problem.keep, "NORMALIZE": problem.normalize}
    constants |= {"ROWS": config.rows, "KEYS": power_of_two(problem.key_dim, 16), "TOKENS": problem.tokens}
    constants |= {"CAPABILITY": config.capability, "pool.BLOCKS": triton.cdiv(problem.value_dim, config.rows)}
    return Build(tree_kernel, types, constants, num_warps=config.num_warps)


launch_tree = Launcher("delta_tree", _build)


def tree(problem, config, tokens, gates, pool, out, scale, kept, parents):
    """Process every sequence's tree of tokens from its state, which is not changed."""
    n, heads, (values, keys) = tokens.sequences, tokens.heads, (tokens.v.shape[3], tokens.k.shape[3])
    columns = 1 if pool.read is None or pool.read.dim() == 1 else pool.read.shape[1]
    longest = 0 if kept is None else kept.v.shape[2]
    sizes = n, tokens.k.shape[1], parents.shape[1], columns, keys, values, longest, pool.null, *shares(tokens, gates)
    state = pool.state if problem.each == "pool" else None
    given = [*tokens[:5], gates.a_log, gates.bias, pool.source, state, pool.each, out, pool.read, pool.rows]
    given += [pool.accepted, tokens.offsets, parents, *(kept or ())]
    places = [strides(x, (0, 1, 2)) for x in (*tokens[:5], out)]
    places += [strides(x, (0, 1, 2, 3)) for x in (pool.source, state)] + [strides(pool.each, (0, 1, 2))]
    places += [table_strides(pool.read), strides(pool.rows, (0, 1))]
    places += [tuple(0 if x is None else x.stride(0) for x in (kept or (None,) * 4))]
    numbers = scale, gates.lower, gates.sharp, gates.threshold
    grid = states_grid(n + problem.packed, heads, triton.cdiv(values, config.rows))
    launch_tree(problem, config, grid, *arguments(given, places), *sizes, *numbers)

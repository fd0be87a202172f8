"""The gated delta rule by chunks of 64 tokens in Triton; docs/rooms/recurrent.md derives the form.

Two kernels. The first runs over all chunks at once and inverts their triangular systems; the second follows each
sequence from chunk to chunk, some columns of the state in registers. Nothing depends on what else is in the batch.
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.gates import log_decay, sigmoid
from flashinfer.ops.recurrent._device.sequences import place_of, span_of
from flashinfer.ops.recurrent._device.states import load_state, store_state
from flashinfer.ops.recurrent.delta import CHUNK
from flashinfer.ops.recurrent.delta.config import power_of_two
from flashinfer.ops.recurrent.launching import place_types, pointers, raw, strides

# A decay below exp(-64) is taken for exp(-64), so that sums of logarithms over a chunk keep their digits.
LEAST = tl.constexpr(-64.0)
BLOCK = tl.constexpr(16)


@triton.jit
def inverse_norms(x):
    """1 / L2 norm of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def logs_of(at_gate, by_gate, token, inside, wide, rate, shift, numbers, GATE: tl.constexpr, CHANNELS: tl.constexpr):
    """Logarithms of decays, [tokens] or [tokens, K]; 0 outside."""
    if CHANNELS:
        column = tl.arange(0, wide.shape[1])[None, :]
        log = tl.load(at_gate + token[:, None] * by_gate + column, wide, other=0).to(tl.float32)
        inside_gate = wide
    else:
        log = tl.load(at_gate + token * by_gate, inside, other=1).to(tl.float32)
        inside_gate = inside
    if GATE == "linear":
        log = tl.log(log)
    else:
        log = log_decay(log + shift, rate, numbers, GATE)
    return tl.where(inside_gate, tl.maximum(log, LEAST), 0)


@triton.jit
def betas_of(at_beta, by_beta, token, inside, BETA: tl.constexpr):
    beta = tl.where(inside, 1.0, 0.0)
    if BETA != "" and BETA != "channels":
        beta = tl.load(at_beta + token * by_beta, inside, other=0).to(tl.float32)
        if BETA == "logit":
            beta = tl.where(inside, sigmoid(beta), 0)
    return beta


@triton.jit
def block_of_channels(
    at_q, at_k, at_gate, by_q, by_k, by_gate, token, left, rate, shift, numbers, of,
    GATE: tl.constexpr, NORMALIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """16 tokens: k and q in float32, running sums of the logarithms of the decay of each channel, and their total."""
    column = tl.arange(0, KEYS)[None, :]
    wide = (token < left)[:, None] & (column < of.key_dim)
    k = tl.load(at_k + token[:, None] * by_k + column, wide, other=0).to(tl.float32)
    q = tl.load(at_q + token[:, None] * by_q + column, wide, other=0).to(tl.float32)
    if NORMALIZE:
        k *= inverse_norms(k)[:, None]
        q *= inverse_norms(q)[:, None]
    log = logs_of(at_gate, by_gate, token, token < left, wide, rate, shift, numbers, GATE, True)
    return k, q, tl.cumsum(log, 0), tl.sum(log, 0)


@triton.jit
def products_within(k, erase, q, c, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr):
    """erase_i . k_j and q_i . k_j of a block, i no earlier than j, each channel with its decay from j to i."""
    i = tl.arange(0, BLOCK)
    if BOUNDED:
        # From the middle of a block, decays of at least exp(-5) a token stay within exp(+-45).
        middle = tl.sum(tl.where((i == BLOCK // 2)[:, None], c, 0), 0)[None, :]
        right = tl.trans((k * tl.exp(middle - c)).to(OPERAND))
        left = tl.exp(c - middle)
        kk = tl.dot((erase * left).to(OPERAND), right, input_precision=PRECISION)
        qk = tl.dot((q * left).to(OPERAND), right, input_precision=PRECISION)
    else:
        # The quotient of two decays has no bound on either side of a reference, so each is taken by itself.
        kk = tl.zeros([BLOCK, BLOCK], tl.float32)
        qk = tl.zeros([BLOCK, BLOCK], tl.float32)
        for j in range(BLOCK):
            mine = (i == j)[:, None]
            key = tl.sum(tl.where(mine, k, 0), 0)[None, :]
            key *= tl.exp(tl.where((i >= j)[:, None], c - tl.sum(tl.where(mine, c, 0), 0)[None, :], 0))
            kk = tl.where((i == j)[None, :], tl.sum(erase * key, 1)[:, None], kk)
            qk = tl.where((i == j)[None, :], tl.sum(q * key, 1)[:, None], qk)
    return kk, qk


@triton.jit
def inverse(lower):
    """(1 + L)^-1 of a strictly lower triangular L [16, 16], by forward substitution."""
    i = tl.arange(0, BLOCK)
    x = -lower
    for row in range(2, BLOCK):
        mine = (i == row)[:, None]
        values = tl.sum(tl.where(mine, -lower, 0), 0)
        values += tl.sum(values[:, None] * x, 0)
        x = tl.where(mine, values[None, :], x)
    return x + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def block_at(row, column, TOKENS: tl.constexpr):
    """Offsets of block (row, column) of 16 x 16 in a square of TOKENS."""
    i = tl.arange(0, BLOCK)
    return (row * 16 + i)[:, None] * TOKENS + column * 16 + i[None, :]


@triton.jit
def invert(scratch, solved, at_beta, by_beta, left, BETA: tl.constexpr, TOKENS: tl.constexpr):
    """(1 + L)^-1 diag(beta), by blocks of 16. L is in the lower half of `scratch`, which is overwritten.

    X_ij = -X_ii (L_ij X_jj + ... + L_i,i-1 X_i-1,j) below the diagonal; X_ij is put at block (j, i).
    """
    t = tl.arange(0, BLOCK)
    for i in range(TOKENS // BLOCK):
        x = inverse(tl.load(scratch + block_at(i, i, TOKENS)))
        beta = betas_of(at_beta, by_beta, i * 16 + t, i * 16 + t < left, BETA)
        tl.debug_barrier()
        tl.store(scratch + block_at(i, i, TOKENS), x)
        tl.store(solved + block_at(i, i, TOKENS), (x * beta[None, :]).to(solved.dtype.element_ty))
        for j in range(i):
            sum = tl.zeros([BLOCK, BLOCK], tl.float32)
            for m in range(j, i):
                lower = tl.load(scratch + block_at(i, m, TOKENS))
                sum = tl.dot(lower, tl.load(scratch + block_at(j, m, TOKENS)), sum, input_precision="ieee")
            below = -tl.dot(x, sum, input_precision="ieee")
            beta = betas_of(at_beta, by_beta, j * 16 + t, j * 16 + t < left, BETA)
            tl.store(scratch + block_at(j, i, TOKENS), below)
            tl.store(solved + block_at(i, j, TOKENS), (below * beta[None, :]).to(solved.dtype.element_ty))
        tl.debug_barrier()


@triton.jit
def systems_of_channels(
    at_q, at_k, at_gate, by_q, by_k, by_gate, at_beta, by_beta, left, rate, shift, numbers, of, scratch, scores, sums,
    rows_k, rows_q, rows_last,
    GATE: tl.constexpr, BOUNDED: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """L and the scores of a chunk, block by block; and its rows of k and q with their decays."""
    t = tl.arange(0, BLOCK)
    column = tl.arange(0, KEYS)
    below = t[:, None] > t[None, :]
    upto = t[:, None] >= t[None, :]
    total = tl.zeros([KEYS], tl.float32)
    for i in range(TOKENS // BLOCK):
        token = i * 16 + t
        wide = (token < left)[:, None] & (column < of.key_dim)[None, :]
        total += tl.sum(logs_of(at_gate, by_gate, token, token < left, wide, rate, shift, numbers, GATE, True), 0)
    tl.store(sums + column, total)
    before = tl.zeros([KEYS], tl.float32)
    for i in range(TOKENS // BLOCK):
        token = i * 16 + t
        k, q, c, sum = block_of_channels(
            at_q, at_k, at_gate, by_q, by_k, by_gate, token, left, rate, shift, numbers, of, GATE, NORMALIZE, KEYS
        )
        beta = betas_of(at_beta, by_beta, token, token < left, BETA)[:, None]
        erase = k
        if BETA == "channels":
            wide = (token < left)[:, None] & (column < of.key_dim)[None, :]
            erase *= tl.load(at_beta + token[:, None] * by_beta + column[None, :], wide, other=0).to(tl.float32)
        kk, qk = products_within(k, erase, q, c, BOUNDED, PRECISION, OPERAND)
        tl.store(scratch + block_at(i, i, TOKENS), tl.where(below, kk * beta, 0))
        tl.store(scores + block_at(i, i, TOKENS), tl.where(upto, qk * numbers.scale, 0).to(OPERAND))
        place = token[:, None] * KEYS + column[None, :]
        since = tl.exp(before[None, :] + c)
        tl.store(rows_k + place, (erase * since).to(OPERAND))
        tl.store(rows_q + place, (q * (since * numbers.scale)).to(OPERAND))
        tl.store(rows_last + place, (k * tl.exp((total - before)[None, :] - c)).to(OPERAND))
        since = tl.exp(c)
        erase = (erase * since).to(OPERAND)
        q = (q * since).to(OPERAND)
        gap = tl.zeros([KEYS], tl.float32)
        for back in range(i):
            j = i - 1 - back
            kj, _, cj, earlier = block_of_channels(
                at_q, at_k, at_gate, by_q, by_k, by_gate, j * 16 + t, left, rate, shift, numbers, of,
                GATE, NORMALIZE, KEYS,
            )  # fmt: skip
            gap += earlier
            kj = tl.trans((kj * tl.exp(gap[None, :] - cj)).to(OPERAND))
            kk = tl.dot(erase, kj, input_precision=PRECISION) * beta
            tl.store(scratch + block_at(i, j, TOKENS), kk)
            qk = tl.dot(q, kj, input_precision=PRECISION) * numbers.scale
            tl.store(scores + block_at(i, j, TOKENS), qk.to(OPERAND))
        before += sum


@triton.jit
def systems_of_heads(
    at_q, at_k, at_gate, by_q, by_k, by_gate, at_beta, by_beta, left, rate, shift, numbers, of, scratch, scores, sums,
    GATE: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """L and the scores of a chunk with one decay a head; and its sums of logarithms and inverse norms."""
    token = tl.arange(0, TOKENS)
    inside = token < left
    column = tl.arange(0, KEYS)[None, :]
    wide = inside[:, None] & (column < of.key_dim)
    k = tl.load(at_k + token[:, None] * by_k + column, wide, other=0)
    q = tl.load(at_q + token[:, None] * by_q + column, wide, other=0)
    if GATE == "":
        c = tl.zeros([TOKENS], tl.float32)
    else:
        c = tl.cumsum(logs_of(at_gate, by_gate, token, inside, wide, rate, shift, numbers, GATE, False), 0)
    tl.store(sums + token, c)
    upto = token[:, None] >= token[None, :]
    decay = tl.exp(tl.where(upto, c[:, None] - c[None, :], 0))
    kk = tl.dot(k.to(OPERAND), tl.trans(k.to(OPERAND)), input_precision=PRECISION) * decay
    qk = tl.dot(q.to(OPERAND), tl.trans(k.to(OPERAND)), input_precision=PRECISION) * (decay * numbers.scale)
    if NORMALIZE:
        k_norms = inverse_norms(k)
        q_norms = inverse_norms(q)
        kk *= k_norms[:, None] * k_norms[None, :]
        qk *= q_norms[:, None] * k_norms[None, :]
        tl.store(sums + TOKENS + token, k_norms)
        tl.store(sums + 2 * TOKENS + token, q_norms)
    kk *= betas_of(at_beta, by_beta, token, inside, BETA)[:, None]
    square = token[:, None] * TOKENS + token[None, :]
    tl.store(scratch + square, tl.where(token[:, None] > token[None, :], kk, 0))
    tl.store(scores + square, tl.where(upto, qk, 0).to(OPERAND))


@triton.jit
def prepare_kernel(
    q,
    k,
    gate,
    beta,
    a_log,
    bias,
    offsets,
    scratch,
    solved,
    scores,
    sums,
    rows_k,
    rows_q,
    rows_last,
    q_by,
    k_by,
    gate_by,
    beta_by,
    of,
    numbers,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BOUNDED: tl.constexpr,
    BETA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    scratch += tl.program_id(0).to(tl.int64) * (TOKENS * TOKENS)
    for tile in range(tl.program_id(0), of.tiles, tl.num_programs(0)):
        p = tile // of.heads
        head = tile % of.heads
        if offsets is None:
            n = p // of.chunks
            chunk = p % of.chunks
        else:
            n, chunk = place_of(p, offsets, of, STRIDE)
        origin, first, length = span_of(offsets, n, of)
        if (chunk >= 0) & (chunk * STRIDE < length):
            first += chunk * STRIDE
            left = tl.minimum(length - chunk * STRIDE, STRIDE)
            rate = 0.0
            if a_log is not None:
                rate = tl.exp(tl.load(a_log + head // of.rate_group).to(tl.float32))
            shift = 0.0
            if bias is not None:
                if CHANNELS:
                    column = tl.arange(0, KEYS)
                    at_bias = bias + head // of.bias_group * of.key_dim + column
                    shift = tl.load(at_bias, column < of.key_dim, other=0).to(tl.float32)[None, :]
                else:
                    shift = tl.load(bias + head // of.bias_group).to(tl.float32)
            at_k = k + origin * k_by.row + first * k_by.token + head // of.k_group * k_by.head
            at_q = q + origin * q_by.row + first * q_by.token + head // of.q_group * q_by.head
            at_gate = at_k
            if gate is not None:
                at_gate = gate + origin * gate_by.row + first * gate_by.token + head // of.gate_group * gate_by.head
            at_beta = at_k
            if beta is not None:
                at_beta = beta + origin * beta_by.row + first * beta_by.token + head // of.beta_group * beta_by.head
            place = tl.full([], 0, tl.int64) + tile
            square = place * (TOKENS * TOKENS)
            if CHANNELS:
                rows = place * (TOKENS * KEYS)
                systems_of_channels(
                    at_q, at_k, at_gate, q_by.token, k_by.token, gate_by.token, at_beta, beta_by.token,
                    left, rate, shift, numbers, of,
                    scratch, scores + square, sums + place * KEYS, rows_k + rows, rows_q + rows, rows_last + rows,
                    GATE, BOUNDED, BETA, NORMALIZE, PRECISION, TOKENS, KEYS, OPERAND,
                )  # fmt: skip
            else:
                systems_of_heads(
                    at_q, at_k, at_gate, q_by.token, k_by.token, gate_by.token, at_beta, beta_by.token,
                    left, rate, shift, numbers, of,
                    scratch, scores + square, sums + place * (3 * TOKENS),
                    GATE, BETA, NORMALIZE, PRECISION, TOKENS, KEYS, OPERAND,
                )  # fmt: skip
            tl.debug_barrier()
            invert(scratch, solved + square, at_beta, beta_by.token, left, BETA, TOKENS)


@triton.jit
def scan_kernel(
    q,
    k,
    v,
    w,
    offsets,
    read,
    source,
    state,
    marks,
    mark_starts,
    mark_slots,
    solved,
    scores,
    sums,
    rows_k,
    rows_q,
    rows_last,
    out,
    q_by,
    k_by,
    v_by,
    w_by,
    out_by,
    source_by,
    state_by,
    marks_by,
    of,
    numbers,
    CHANNELS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    FIRST_MARK: tl.constexpr,
    SOURCE: tl.constexpr,
    STATE: tl.constexpr,
    MARKS: tl.constexpr,
    STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    CAPABILITY: tl.constexpr,
):
    n = tl.program_id(2)
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
    origin, first, length = span_of(offsets, sequence, of)
    if offsets is None:
        place = sequence * of.chunks
    else:
        place = first.to(tl.int32) // STRIDE + sequence
        if n == of.sequences:
            # One program more than sequences: tokens of no sequence have output 0.
            begin = tl.load(offsets).to(tl.int32)
            zero_rows(at_out, out_by, 0, begin, value, in_values, TOKENS)
            zero_rows(at_out, out_by, (first + length).to(tl.int32), of.tokens, value, in_values, TOKENS)
            length = 0
    at_out += origin * out_by.row + first * out_by.token
    slot = n.to(tl.int64)
    if read is not None:
        slot = tl.load(read + sequence).to(tl.int64)
    live = (n < of.sequences) & (slot > of.null)

    if live:
        s = tl.zeros([KEYS, ROWS], tl.float32)
        if source is not None:
            home = slot * source_by.slot + head * source_by.head
            home += value[None, :].to(tl.int64) * source_by.row + column[:, None].to(tl.int64) * source_by.column
            s = load_state(source + home, inside, SOURCE, CAPABILITY)
        mark = tl.full([], 0, tl.int64)
        if marks is not None:
            mark = tl.load(mark_starts + sequence).to(tl.int64)
            at_marks = marks + head * marks_by.head
            at_marks += value[None, :].to(tl.int64) * marks_by.row + column[:, None].to(tl.int64) * marks_by.column
            if FIRST_MARK:
                if length > 0:
                    store_mark(at_marks, marks_by, mark_slots, mark, s, inside, MARKS, CAPABILITY)
                    mark += 1
        at_k = k + origin * k_by.row + first * k_by.token + head // of.k_group * k_by.head
        at_q = q + origin * q_by.row + first * q_by.token + head // of.q_group * q_by.head
        at_v = v + origin * v_by.row + first * v_by.token + head // of.v_group * v_by.head
        for chunk in range(tl.cdiv(length, STRIDE)):
            begin = chunk * STRIDE
            token = begin + i.to(tl.int64)
            inside_chunk = i < tl.minimum(length - begin, STRIDE)
            tile = (place + chunk).to(tl.int64) * of.heads + head
            block = i[:, None] * TOKENS + i[None, :]
            lower = i[:, None] // 16 >= i[None, :] // 16
            a = tl.load(solved + tile * (TOKENS * TOKENS) + block, lower, other=0)
            p = tl.load(scores + tile * (TOKENS * TOKENS) + block, lower, other=0)
            v_mask = inside_chunk[:, None] & in_values[None, :]
            values = tl.load(at_v + token[:, None] * v_by.token + value[None, :], v_mask, other=0).to(tl.float32)
            if w is not None:
                at_w = w + origin * w_by.row + (first + token)[:, None] * w_by.token + head * w_by.head
                values *= tl.load(at_w + value[None, :], v_mask, other=0).to(tl.float32)
            narrow = s.to(OPERAND)
            if CHANNELS:
                rows = tile * (TOKENS * KEYS) + i[:, None] * KEYS + column[None, :]
                keys = tl.load(rows_k + rows)
                queries = tl.load(rows_q + rows)
                lasts = tl.load(rows_last + rows)
                decay = tl.exp(tl.load(sums + tile * KEYS + column))
                values -= tl.dot(keys, narrow, input_precision=PRECISION)
                o = tl.dot(queries, narrow, input_precision=PRECISION)
                change = tl.dot(a, values.to(OPERAND), input_precision=PRECISION)
                o = tl.dot(p, change.to(OPERAND), o, input_precision=PRECISION)
                s = tl.dot(tl.trans(lasts), change.to(OPERAND), s * decay[:, None], input_precision=PRECISION)
            else:
                wide = inside_chunk[:, None] & in_columns[None, :]
                keys = tl.load(at_k + token[:, None] * k_by.token + column[None, :], wide, other=0)
                queries = tl.load(at_q + token[:, None] * q_by.token + column[None, :], wide, other=0)
                keys = keys.to(OPERAND)
                at_sums = sums + tile * (3 * TOKENS)
                total = tl.load(at_sums + TOKENS - 1)
                since = tl.load(at_sums + i)
                k_factor = tl.exp(since)
                q_factor = k_factor * numbers.scale
                last_factor = tl.exp(total - since)
                if NORMALIZE:
                    k_norms = tl.load(at_sums + TOKENS + i)
                    k_factor *= k_norms
                    q_factor *= tl.load(at_sums + 2 * TOKENS + i)
                    last_factor *= k_norms
                values -= tl.dot(keys, narrow, input_precision=PRECISION) * k_factor[:, None]
                o = tl.dot(queries.to(OPERAND), narrow, input_precision=PRECISION) * q_factor[:, None]
                change = tl.dot(a, values.to(OPERAND), input_precision=PRECISION)
                o = tl.dot(p, change.to(OPERAND), o, input_precision=PRECISION)
                change *= last_factor[:, None]
                s = tl.dot(tl.trans(keys), change.to(OPERAND), s * tl.exp(total), input_precision=PRECISION)
            tl.store(at_out + token[:, None] * out_by.token + value[None, :], o.to(out.dtype.element_ty), v_mask)
            if marks is not None:
                done = begin + STRIDE
                if (done % of.every == 0) & (done < length + (not FIRST_MARK)):
                    store_mark(at_marks, marks_by, mark_slots, mark, s, inside, MARKS, CAPABILITY)
                    mark += 1
        if state is not None:
            goal = slot * state_by.slot + head * state_by.head
            goal += value[None, :].to(tl.int64) * state_by.row + column[:, None].to(tl.int64) * state_by.column
            store_state(state + goal, s, inside, STATE, CAPABILITY)
    else:
        zero_rows(at_out, out_by, 0, length, value, in_values, TOKENS)


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


_TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
_INPUT = ("row", "token", "head")
_STATE = ("slot", "head", "row", "column")


def _common(problem, config) -> dict:
    precision = "tf32x3" if problem.dtype == "fp32" else "tf32"
    constants = {"CHANNELS": problem.channels, "NORMALIZE": problem.normalize, "PRECISION": precision}
    constants |= {"STRIDE": problem.stride, "TOKENS": CHUNK, "KEYS": power_of_two(problem.key_dim)}
    return constants | {"OPERAND": _TYPES[config.operand]}


def _workspace(problem, narrow: str) -> dict:
    rows = narrow if problem.channels else ""
    kinds = {"solved": narrow, "scores": narrow, "sums": "fp32"}
    return kinds | {"rows_k": rows, "rows_q": rows, "rows_last": rows}


def _build_prepare(problem, config):
    constants, narrow = _common(problem, config), config.operand
    kinds = {"q": problem.dtype, "k": problem.dtype, "gate": problem.gate_dtype, "beta": problem.beta_dtype}
    kinds |= {"a_log": "fp32" if problem.gate in ("softplus", "bounded") else "", "bias": problem.bias_dtype}
    kinds |= {"offsets": problem.index if problem.packed else "", "scratch": "fp32", **_workspace(problem, narrow)}
    rows = {"q", "k"} | ({"gate"} if problem.channels and problem.gate else set())
    whole = (rows if problem.aligned else set()) | {"scratch", *_workspace(problem, narrow)}
    types = pointers(kinds, whole)
    units = {f"{name}_by": kinds[name] for name in rows} if problem.aligned else {}
    types |= place_types(dict.fromkeys(("q_by", "k_by", "gate_by", "beta_by"), _INPUT), units)
    sizes = ("sequences", "tokens", "chunks", "heads", "key_dim", "tiles")
    groups = ("q_group", "k_group", "gate_group", "beta_group", "rate_group", "bias_group")
    types |= {f"of.{name}": "i32" for name in (*sizes, *groups)}
    types |= {f"numbers.{name}": "fp32" for name in ("scale", "lower", "sharp", "threshold")}
    constants |= {name: None for name, kind in kinds.items() if not kind}
    constants |= {"GATE": problem.gate, "BOUNDED": problem.bounded, "BETA": problem.beta}
    return Build(prepare_kernel, types, constants, num_warps=config.prepare_warps)


def _build_scan(problem, config):
    constants, narrow = _common(problem, config), config.operand
    mark, table = problem.marks_dtype, problem.index
    kinds = {"q": problem.dtype, "k": problem.dtype, "v": problem.dtype, "w": problem.write_dtype}
    kinds |= {"offsets": table if problem.packed else ""}
    kinds |= {"read": table if problem.read else "", "source": problem.source_dtype, "state": problem.state_dtype}
    kinds |= {"marks": mark, "mark_starts": table if mark else "", "mark_slots": table if problem.mark_slots else ""}
    kinds |= _workspace(problem, narrow) | {"out": problem.out_dtype}
    rows = {"q", "k", "v", "out"} if problem.aligned else set()
    types = pointers(kinds, rows | set(_workspace(problem, narrow)))
    places = dict.fromkeys(("q_by", "k_by", "v_by", "w_by", "out_by"), _INPUT)
    places |= dict.fromkeys(("source_by", "state_by", "marks_by"), _STATE)
    types |= place_types(places, {f"{name}_by": kinds[name] for name in rows})
    sizes = ("sequences", "tokens", "chunks", "heads", "key_dim", "value_dim", "null", "every")
    types |= {f"of.{name}": "i32" for name in (*sizes, "q_group", "k_group", "v_group")} | {"numbers.scale": "fp32"}
    constants |= {name: None for name, kind in kinds.items() if not kind}
    constants |= {"FIRST_MARK": problem.first_mark, "SOURCE": problem.source_dtype, "STATE": problem.state_dtype}
    constants |= {"MARKS": mark, "ROWS": config.rows, "CAPABILITY": config.capability}
    return Build(scan_kernel, types, constants, num_warps=config.scan_warps, num_stages=config.stages)


launch_prepare = Launcher("delta_prepare", _build_prepare)
launch_scan = Launcher("delta_scan", _build_scan)
# Bytes of stack a thread may use: up to 16 on Hopper, more where products are mma of older chips.
STACK_BUDGET = 320


def run(problem, config, tokens, gates, pool, out, scale, marks=None, write=None):
    """Every sequence from its state to its last token; see operands.py for what is read and written."""
    device, n, heads = out.device, tokens.sequences, tokens.heads
    rows, length, keys, values = tokens.k.shape[0], tokens.k.shape[1], tokens.k.shape[3], tokens.v.shape[3]
    chunks = triton.cdiv(length, problem.stride)
    places = rows * chunks if tokens.offsets is None else length // problem.stride + n
    narrow = torch_dtype(config.operand)

    def empty(*shape, dtype=narrow):
        return torch.empty(places, heads, *shape, dtype=dtype, device=device)

    wide = power_of_two(keys)
    workspace = [empty(CHUNK, CHUNK), empty(CHUNK, CHUNK)]
    workspace.append(empty(wide if problem.channels else 3 * CHUNK, dtype=torch.float32))
    workspace += [empty(CHUNK, wide) for _ in range(3 * problem.channels)]
    group = {name: 1 if x is None else heads // x.shape[2] for name, x in zip("qkvgb", tokens[:5], strict=True)}
    rate = [1 if x is None else heads // x.shape[0] for x in (gates.a_log, gates.bias)]
    sizes = (n, length, chunks, heads, keys)
    tiles = places * heads
    programs = min(tiles, config.programs)
    scratch = torch.empty(programs, CHUNK, CHUNK, dtype=torch.float32, device=device)
    given = [x for x in (*tokens[:2], *tokens[3:5], gates.a_log, gates.bias, tokens.offsets) if x is not None]
    flat = [s for x in (tokens.q, tokens.k, tokens.gate, tokens.beta) for s in strides(x, (0, 1, 2))]
    grouped = (group["q"], group["k"], group["g"], group["b"], *rate)
    numbers = scale, gates.lower, gates.sharp, gates.threshold
    grid = (programs, 1, 1)
    launch_prepare(problem, config, grid, *given, scratch, *workspace, *flat, *sizes, tiles, *grouped, *numbers)

    tables = (None,) * 3 if marks is None else (marks.out, marks.starts, marks.slots)
    given = [*tokens[:3], write, tokens.offsets, pool.read, pool.source, pool.state, *tables]
    given = [x for x in given if x is not None]
    flat = [s for x in (*tokens[:3], write, out) for s in strides(x, (0, 1, 2))]
    flat += [s for x in (pool.source, pool.state, tables[0]) for s in strides(x, (0, 1, 2, 3))]
    more = (values, pool.null, 1 if marks is None else marks.every, group["q"], group["k"], group["v"])
    grid = (triton.cdiv(values, config.rows), heads, n + problem.packed)
    launch_scan(problem, config, grid, *map(raw, given), *workspace, out, *flat, *sizes, *more, scale)


IMPLEMENTATION = Implementation(run, (launch_prepare, launch_scan), compile_together=True, stack_budget=STACK_BUDGET)

"""The triangular systems of chunks of 64 tokens, in Triton; docs/rooms/recurrent.md derives them.

With D the decay from token j to token i, L_ij = beta_i D k_i . k_j for i > j, and P_ij = scale D q_i . k_j for i >= j.

Grid: (programs). All chunks of all sequences are independent: a program computes (1 + L)^-1 diag(beta) and P of one
chunk and head after another.
Warps: all share a program's tile. Shared memory: operands of the products; L is in the program's global scratch of
16 KiB, which stays in L2.
Inputs: q, k [rows, tokens, heads, K], gate, beta. Outputs: the workspace of workspace.py.
Method: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024; Kimi Team, Kimi Linear, 2025 (decays of channels by
blocks).
"""

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.gates import at_least, log_decay, sigmoid
from flashinfer.ops.recurrent._device.products import operand
from flashinfer.ops.recurrent._device.sequences import chunk_of, span_of
from flashinfer.ops.recurrent.delta.workspace import INPUT, common, workspace
from flashinfer.ops.recurrent.launching import place_types, pointers, size_types

# A decay below exp(-64) is replaced by exp(-64), so that sums of logarithms over a chunk keep their precision.
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
    return tl.where(inside_gate, at_least(log, LEAST), 0)


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
        # Relative to the middle of a block, decays of at least exp(-5) a token are within exp(+-45).
        middle = tl.sum(tl.where((i == BLOCK // 2)[:, None], c, 0), 0)[None, :]
        right = tl.trans(operand(k * tl.exp(middle - c), OPERAND, PRECISION))
        left = tl.exp(c - middle)
        kk = tl.dot(operand(erase * left, OPERAND, PRECISION), right, input_precision=PRECISION)
        qk = tl.dot(operand(q * left, OPERAND, PRECISION), right, input_precision=PRECISION)
    else:
        # Without a bound, factors relative to a common reference may overflow: the decay from j is computed for each j.
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
def invert(
    scratch, solved, at_beta, by_beta, left,
    BETA: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """(1 + L)^-1 diag(beta), by blocks of 16. L is in the lower half of `scratch`, which is overwritten.

    X_ij = -X_ii (L_ij X_jj + ... + L_i,i-1 X_i-1,j) below the diagonal; X_ij is stored in block (j, i) of `scratch`.
    """
    t = tl.arange(0, BLOCK)
    for i in range(TOKENS // BLOCK):
        x = inverse(tl.load(scratch + block_at(i, i, TOKENS)))
        beta = betas_of(at_beta, by_beta, i * 16 + t, i * 16 + t < left, BETA)
        tl.debug_barrier()
        tl.store(scratch + block_at(i, i, TOKENS), x)
        tl.store(solved + block_at(i, i, TOKENS), operand(x * beta[None, :], OPERAND, PRECISION))
        for j in range(i):
            sum = tl.zeros([BLOCK, BLOCK], tl.float32)
            for m in range(j, i):
                lower = tl.load(scratch + block_at(i, m, TOKENS))
                sum = tl.dot(lower, tl.load(scratch + block_at(j, m, TOKENS)), sum, input_precision="ieee")
            below = -tl.dot(x, sum, input_precision="ieee")
            beta = betas_of(at_beta, by_beta, j * 16 + t, j * 16 + t < left, BETA)
            tl.store(scratch + block_at(j, i, TOKENS), below)
            tl.store(solved + block_at(i, j, TOKENS), operand(below * beta[None, :], OPERAND, PRECISION))
            tl.store(solved + block_at(j, i, TOKENS), tl.zeros([BLOCK, BLOCK], OPERAND))
        tl.debug_barrier()


@triton.jit
def systems_of_channels(
    at_q, at_k, at_gate, by_q, by_k, by_gate, at_beta, by_beta, left, rate, shift, numbers, of, scratch, scores, decay,
    rows_k, rows_q, rows_last,
    GATE: tl.constexpr, BOUNDED: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """L and the scores P of a chunk with a decay for each channel, by blocks; and its decayed rows of k and q."""
    t = tl.arange(0, BLOCK)
    column = tl.arange(0, KEYS)
    below = t[:, None] > t[None, :]
    upto = t[:, None] >= t[None, :]
    total = tl.zeros([KEYS], tl.float32)
    for i in range(TOKENS // BLOCK):
        token = i * 16 + t
        wide = (token < left)[:, None] & (column < of.key_dim)[None, :]
        total += tl.sum(logs_of(at_gate, by_gate, token, token < left, wide, rate, shift, numbers, GATE, True), 0)
    tl.store(decay + column, tl.exp(total))
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
        tl.store(scores + block_at(i, i, TOKENS), operand(tl.where(upto, qk * numbers.scale, 0), OPERAND, PRECISION))
        place = token[:, None] * KEYS + column[None, :]
        since = tl.exp(before[None, :] + c)
        tl.store(rows_k + place, operand(erase * since, OPERAND, PRECISION))
        tl.store(rows_q + place, operand(q * (since * numbers.scale), OPERAND, PRECISION))
        tl.store(rows_last + place, operand(k * tl.exp((total - before)[None, :] - c), OPERAND, PRECISION))
        since = tl.exp(c)
        erase = operand(erase * since, OPERAND, PRECISION)
        q = operand(q * since, OPERAND, PRECISION)
        gap = tl.zeros([KEYS], tl.float32)
        for back in range(i):
            j = i - 1 - back
            kj, _, cj, earlier = block_of_channels(
                at_q, at_k, at_gate, by_q, by_k, by_gate, j * 16 + t, left, rate, shift, numbers, of,
                GATE, NORMALIZE, KEYS,
            )  # fmt: skip
            gap += earlier
            kj = tl.trans(operand(kj * tl.exp(gap[None, :] - cj), OPERAND, PRECISION))
            kk = tl.dot(erase, kj, input_precision=PRECISION) * beta
            tl.store(scratch + block_at(i, j, TOKENS), kk)
            qk = tl.dot(q, kj, input_precision=PRECISION) * numbers.scale
            tl.store(scores + block_at(i, j, TOKENS), operand(qk, OPERAND, PRECISION))
            tl.store(scores + block_at(j, i, TOKENS), tl.zeros([BLOCK, BLOCK], OPERAND))
        before += sum


@triton.jit
def systems_of_heads(
    at_q, at_k, at_gate, by_q, by_k, by_gate, at_beta, by_beta, left, rate, shift, numbers, of, scratch, scores,
    factors, GATE: tl.constexpr, BETA: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """L, the scores P and the factors of a chunk with one decay a head."""
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
    total = tl.sum(tl.where(token == TOKENS - 1, c, 0), 0)
    k_factor = tl.exp(c)
    q_factor = k_factor * numbers.scale
    last_factor = tl.exp(total - c)
    upto = token[:, None] >= token[None, :]
    decay = tl.exp(tl.where(upto, c[:, None] - c[None, :], 0))
    kk = tl.dot(k.to(OPERAND), tl.trans(k.to(OPERAND)), input_precision=PRECISION) * decay
    qk = tl.dot(q.to(OPERAND), tl.trans(k.to(OPERAND)), input_precision=PRECISION) * (decay * numbers.scale)
    if NORMALIZE:
        k_norms = inverse_norms(k)
        q_norms = inverse_norms(q)
        kk *= k_norms[:, None] * k_norms[None, :]
        qk *= q_norms[:, None] * k_norms[None, :]
        k_factor *= k_norms
        q_factor *= q_norms
        last_factor *= k_norms
    tl.store(factors + token, k_factor)
    tl.store(factors + TOKENS + token, q_factor)
    tl.store(factors + 2 * TOKENS + token, last_factor)
    tl.store(factors + 3 * TOKENS + token, tl.exp(total + tl.zeros_like(c)))
    kk *= betas_of(at_beta, by_beta, token, inside, BETA)[:, None]
    square = token[:, None] * TOKENS + token[None, :]
    tl.store(scratch + square, tl.where(token[:, None] > token[None, :], kk, 0))
    tl.store(scores + square, operand(tl.where(upto, qk, 0), OPERAND, PRECISION))


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
    factors,
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
        n, chunk = chunk_of(p, offsets, of, STRIDE)
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
                    scratch, scores + square, factors + place * KEYS, rows_k + rows, rows_q + rows, rows_last + rows,
                    GATE, BOUNDED, BETA, NORMALIZE, PRECISION, TOKENS, KEYS, OPERAND,
                )  # fmt: skip
            else:
                systems_of_heads(
                    at_q, at_k, at_gate, q_by.token, k_by.token, gate_by.token, at_beta, beta_by.token,
                    left, rate, shift, numbers, of,
                    scratch, scores + square, factors + place * (4 * TOKENS),
                    GATE, BETA, NORMALIZE, PRECISION, TOKENS, KEYS, OPERAND,
                )  # fmt: skip
            tl.debug_barrier()
            invert(scratch, solved + square, at_beta, beta_by.token, left, BETA, PRECISION, TOKENS, OPERAND)


def types_of(problem, made: dict, sizes: tuple[str, ...]) -> tuple[dict, dict]:
    """Argument types and constants of a kernel that makes the systems of chunks; `made` are the dtypes of what it
    writes, and `sizes` what it has in `of` beside groups."""
    kinds = {"q": problem.dtype, "k": problem.dtype, "gate": problem.gate_dtype, "beta": problem.beta_dtype}
    kinds |= {"a_log": "fp32" if problem.gate in ("softplus", "bounded") else "", "bias": problem.bias_dtype}
    kinds |= {"offsets": problem.index if problem.packed else "", **made}
    rows = ({"q", "k"} | ({"gate"} if problem.channels and problem.gate else set())) if problem.aligned else set()
    types = pointers(kinds, rows | made.keys())
    units = {f"{name}_by": kinds[name] for name in rows}
    types |= place_types(dict.fromkeys(("q_by", "k_by", "gate_by", "beta_by"), INPUT), units)
    groups = ("q_group", "k_group", "gate_group", "beta_group", "rate_group", "bias_group")
    types |= size_types((*sizes, *groups), key_dim=problem.key_dim)
    types |= {f"numbers.{name}": "fp32" for name in ("scale", "lower", "sharp", "threshold")}
    return types, {"GATE": problem.gate, "BETA": problem.beta, "NORMALIZE": problem.normalize}


# Those of all such kernels.
SIZES = ("sequences", "tokens", "chunks", "heads", "key_dim")


def _build_prepare(problem, config):
    made = {"scratch": "fp32", **workspace(problem, config.operand)}
    types, constants = types_of(problem, made, (*SIZES, "tiles"))
    constants |= common(problem, config) | {"BOUNDED": problem.bounded}
    return Build(prepare_kernel, types, constants, num_warps=config.prepare_warps)


launch_prepare = Launcher("delta_prepare", _build_prepare)

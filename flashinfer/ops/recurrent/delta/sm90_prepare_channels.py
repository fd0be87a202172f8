"""The triangular systems of chunks of 64 tokens on Hopper, a decay a channel, of at least exp(-5) a token.

For each block J of 16 tokens, all tokens are multiplied with the keys of block J. The keys are decayed to the end of
block J, and the rows of later blocks from there on. In block J itself the rows' factor is a growth of at most e^75.

The reference points are the ends of blocks, rounded to whole powers of two. So keys and rows are rounded to bfloat16
once, and the four scalings by powers of two are exact. The only exponentials for each token and channel are e^{c} and
e^{T - c}, with c the running sum of logarithms in a block and T the block's total. The inverse is that of
sm90_prepare.py. docs/rooms/recurrent.md derives it.

Grid: (chunks * heads). A program has a chunk and a head. Warps: each of the four has a block of 16 of the tokens.
Shared memory: keys; rows of keys and of queries; the inverse's slots; each block's T.
Inputs: q, k and gate [rows, tokens, heads, K], beta [rows, tokens, heads]. Outputs: the workspace of workspace.py.
Method: Kimi Team, Kimi Linear, 2025.
"""

from flashinfer._core.gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.gates import at_least, log_decay
from flashinfer.ops.recurrent._device.sequences import chunk_of, span_of
from flashinfer.ops.recurrent.delta.sm90_prepare import (
    BLOCK,
    FLAT_2D,
    LEAST,
    LOG2E,
    QUARTER,
    TOKENS,
    VALUES,
    add,
    betas_of,
    join_16,
    join_32,
    make_slots,
    shared_types,
    store_inverse,
    store_lower,
    substitute,
)

@gluon.constexpr_function
def _wide(keys: int):
    """[block, token, channel]: a warp has a block, a thread some channels of all of its tokens."""
    return gl.BlockedLayout([1, 16, keys // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _load(at, by_token, token, column, left):
    """Rows [block, token, channel] in float32, 0 outside."""
    return gl.load(at + token * by_token + column, token < left, other=0.0).to(gl.float32)


@gluon.jit
def _exp2(x):
    """2^x in one instruction; a result below the normal numbers is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """1 / x in one instruction, to an ulp."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _logs(gate, rate, numbers, GATE: gl.constexpr):
    """Base-2 logarithms of decays of a float32 gate with its bias."""
    if GATE == "bounded":
        # No decay is below e^-5, so none is below e^LEAST. The constants are of a head: three instructions an element.
        return (numbers.lower * LOG2E) * _reciprocal(1.0 + _exp2(gate * (rate * -LOG2E)))
    log = gl.log(gate) if GATE == "linear" else log_decay(gate, rate, numbers, GATE)
    return at_least(log, LEAST) * LOG2E


@gluon.jit
def _unit(x):
    return x * gl.rsqrt(gl.sum(x * x, 2) + 1e-6)[:, :, None]


@gluon.jit
def _column(
    J: gl.constexpr, erase, query, from_here, reference, b, keys, of_keys, of_queries, i, j, strength, to
):
    """The columns of block J, [64, 16]: returns those of L, with whole diagonal blocks, and stores those of P.

    erase, query : rows decayed from `from_here` on, the base-2 exponent of a reference point near the start of their
    own block. reference : the exponent of the reference point near the end of block J, to which the keys are decayed.
    """
    more = _exp2(gl.where(b < J, 0.0, from_here - reference)).to(gl.bfloat16)[:, None, :]
    of_keys.store((erase * more).reshape(of_keys.shape))
    of_queries.store((query * more).reshape(of_queries.shape))
    fence_async_shared()
    block_keys = keys.slice(J * BLOCK, BLOCK).permute([1, 0])
    zeros = gl.zeros([TOKENS, BLOCK], gl.float32, QUARTER)
    kk = warpgroup_mma(of_keys, block_keys, zeros, use_acc=False, is_async=True)
    qk = warpgroup_mma(of_queries, block_keys, zeros, use_acc=False, is_async=True)
    kk, qk = warpgroup_mma_wait(0, [kk, qk])
    j += J * BLOCK
    gl.store(to + J * BLOCK, gl.where(i >= j, qk, 0.0).to(gl.bfloat16))
    return gl.where(i > j, kk * strength, 0.0)


@gluon.jit
def prepare_channels_kernel(
    q,
    k,
    gate,
    beta,
    a_log,
    bias,
    offsets,
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
    GATE: gl.constexpr,
    BETA: gl.constexpr,
    NORMALIZE: gl.constexpr,
    STRIDE: gl.constexpr,
    KEYS: gl.constexpr,
):
    WIDE: gl.constexpr = _wide(KEYS)
    BLOCKS: gl.constexpr = gl.SliceLayout(1, WIDE)
    p = gl.program_id(0) // of.heads
    head = gl.program_id(0) % of.heads
    n, chunk = chunk_of(p, offsets, of, STRIDE)
    origin, first, length = span_of(offsets, n, of)
    if (chunk >= 0) & (chunk * STRIDE < length):
        first += chunk * STRIDE
        left = gl.minimum(length - chunk * STRIDE, STRIDE)
        place = p.to(gl.int64) * of.heads + head
        block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))[:, None, None]
        token = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, WIDE)))[None, :, None]
        column = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))[None, None, :]

        at_gate = gate + origin * gate_by.row + first * gate_by.token + head // of.gate_group * gate_by.head
        log = _load(at_gate, gate_by.token, token, column, left)
        at_k = k + origin * k_by.row + first * k_by.token + head // of.k_group * k_by.head
        key = _load(at_k, k_by.token, token, column, left)
        at_q = q + origin * q_by.row + first * q_by.token + head // of.q_group * q_by.head
        query = _load(at_q, q_by.token, token, column, left)
        at_beta = beta
        if BETA != "":
            at_beta = beta + origin * beta_by.row + first * beta_by.token
        betas = gl.allocate_shared_memory(gl.float32, [1, TOKENS], FLAT_2D)
        heads = head + gl.arange(0, 1, gl.SliceLayout(1, VALUES))
        at = gl.arange(0, TOKENS, gl.SliceLayout(0, VALUES))
        inside = (at < left)[None, :] & (heads >= 0)[:, None]
        KIND: gl.constexpr = "" if BETA == "channels" else BETA
        betas.store(betas_of(at_beta, beta_by, heads, at, inside, of, KIND))

        if NORMALIZE:
            key = _unit(key)
            query = _unit(query)
        query *= numbers.scale
        erase = key
        if BETA == "channels":
            at_beta += head // of.beta_group * beta_by.head
            erase = key * _load(at_beta, beta_by.token, token, column, left)
        rate = 0.0
        if a_log is not None:
            rate = gl.exp(gl.load(a_log + head // of.rate_group).to(gl.float32))
        if bias is not None:
            log += gl.load(bias + head // of.bias_group * KEYS + column).to(gl.float32)
        log = gl.where(token < left, _logs(log, rate, numbers, GATE), 0.0)
        sums = gl.associative_scan(log, 1, add)
        whole = gl.sum(log, 1)

        # The total decay of each block, and reference points: the starts and ends of blocks as whole exponents.
        shared = gl.allocate_shared_memory(gl.float32, [4, KEYS], FLAT_2D)
        shared.store(whole)
        b = gl.arange(0, 4, gl.SliceLayout(1, BLOCKS))[:, None]
        t0 = shared.slice(0, 1).load(BLOCKS)
        end_1 = t0 + shared.slice(1, 1).load(BLOCKS)
        end_2 = end_1 + shared.slice(2, 1).load(BLOCKS)
        total = end_2 + shared.slice(3, 1).load(BLOCKS)
        begin = gl.where(b == 0, 0.0, gl.where(b == 1, t0, gl.where(b == 2, end_1, end_2)))
        end = gl.where(b == 0, t0, gl.where(b == 1, end_1, gl.where(b == 2, end_2, total)))
        from_here = gl.floor(begin)
        to_here = gl.floor(end)

        OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, KEYS], gl.bfloat16)
        keys = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, KEYS], OPERAND)
        to_end = key * _exp2((to_here - begin)[:, None, :] - sums)
        keys.store(to_end.to(gl.bfloat16).reshape([TOKENS, KEYS]))
        since = _exp2(sums + (begin - from_here)[:, None, :])
        erase = (erase * since).to(gl.bfloat16)
        query = (query * since).to(gl.bfloat16)

        gl.store(factors + place * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, BLOCKS))[None, :], _exp2(total))
        row = place * (TOKENS * KEYS) + token * KEYS + column
        before = _exp2(from_here).to(gl.bfloat16)[:, None, :]
        gl.store(rows_k + row, erase * before)
        gl.store(rows_q + row, query * before)
        gl.store(rows_last + row, (to_end * _exp2(total - to_here)[:, None, :]).to(gl.bfloat16))

        of_keys = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, KEYS], OPERAND)
        of_queries = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, KEYS], OPERAND)
        i = gl.arange(0, TOKENS, gl.SliceLayout(1, QUARTER))[:, None]
        j = gl.arange(0, BLOCK, gl.SliceLayout(0, QUARTER))[None, :]
        to = scores + place * (TOKENS * TOKENS) + i * TOKENS + j
        strength = betas.reshape([TOKENS]).load(gl.SliceLayout(1, QUARTER))[:, None]
        a = _column(0, erase, query, from_here, gl.floor(t0), b, keys, of_keys, of_queries, i, j, strength, to)
        c = _column(1, erase, query, from_here, gl.floor(end_1), b, keys, of_keys, of_queries, i, j, strength, to)
        d = _column(2, erase, query, from_here, gl.floor(end_2), b, keys, of_keys, of_queries, i, j, strength, to)
        e = _column(3, erase, query, from_here, gl.floor(total), b, keys, of_keys, of_queries, i, j, strength, to)
        slots = make_slots(1)
        lower = gl.allocate_shared_memory(gl.float32, [TOKENS, BLOCK], FLAT_2D)
        store_lower(a, c, d, e, lower, slots, 0)

        x = substitute(lower.reshape([4, BLOCK, BLOCK]))
        slots.diagonal.reshape([4, BLOCK, BLOCK]).permute([0, 2, 1]).store(x)
        join_16(slots, 1)
        join_32(slots, 1)
        store_inverse(slots, betas.reshape([TOKENS]), solved + place * (TOKENS * TOKENS), 1)


# One kernel, without a choice.
CONFIGS = (None,)


def launch(problem, places: int, given, made, strides, sizes, groups, numbers) -> None:
    """Compute all chunks' systems, a decay a channel, into the workspace `made`; arguments as in the kernel."""
    grid = (places * sizes[3], 1, 1)
    LAUNCHER(problem, None, grid, *given, *made, *strides, *sizes, *groups, *numbers)


def _build(problem, config: None):
    types, constants = shared_types(problem)
    return Build(prepare_channels_kernel, types, constants, num_warps=4, maxnreg=255)


LAUNCHER = Launcher("delta_prepare_channels", _build)

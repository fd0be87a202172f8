"""The triangular systems of chunks of 64 tokens on Hopper, one decay a head; docs/rooms/recurrent.md derives them.

Grid: (chunks * heads / GROUP). A program has one chunk and GROUP heads that share a key head and a query head. It
computes the products of keys and queries once, by wgmma, and keeps both in registers. For HEADS heads at a time it
computes L and P, inverts 1 + L by blocks, and stores (1 + L)^-1 diag(beta) and P.

The inverse X: the diagonal blocks of 16 are inverted by forward substitution, one column a thread. Two inverted blocks
join to one of twice the size by X21 = -(X22 L21) X11, from 16 to 32 and from 32 to 64, by mma.

Warps: all four share a program's work. Shared memory: keys and queries; L, which X overwrites (`Slots`); a staging
buffer for P; sums of logarithms, betas and norms.
Inputs: q, k [rows, tokens, heads, K], gate and beta [rows, tokens, heads]. Outputs: the workspace of workspace.py.
Method: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024.
"""

import math
from dataclasses import dataclass

from flashinfer._core.gluon_compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mma_v2,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.recurrent._device.gates import at_least, log_decay, sigmoid
from flashinfer.ops.recurrent._device.sequences import chunk_of, span_of
from flashinfer.ops.recurrent.delta.prepare import SIZES, types_of
from flashinfer.ops.recurrent.delta.workspace import workspace

TOKENS = gl.constexpr(64)
BLOCK = gl.constexpr(16)
LOG2E = gl.constexpr(1.4426950408889634)
# A decay below exp(-64) is replaced by exp(-64), as in the portable kernel.
LEAST = gl.constexpr(-64.0)
# Above the diagonal a quotient of decays may overflow. It is clamped to 2^120, since it is multiplied by zero.
MOST_EXPONENT = gl.constexpr(120.0)
# A [64, 64] product of a warpgroup, and a column of its blocks of 16.
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUARTER = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
# One value for each head and token. A warp has whole heads, so that scans along tokens stay within the warp.
VALUES = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
# Blocks as [block, column, row]: a thread has a column.
COLUMNS = gl.constexpr(gl.BlockedLayout([1, 1, 16], [2, 16, 1], [4, 1, 1], [2, 1, 0]))
# Rows for global stores, 16 bytes of bfloat16 a thread.
OUT = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
OUT_SQUARE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_2D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@aggregate
class Slots:
    """L of some heads, which X overwrites: the blocks of 16 x 16 on and below the diagonal, in four slots of
    [heads * 64, 16] float32. The blocks (row, column) of a head, from the top of each slot:

        diagonal  (0, 0)  (1, 1)  (2, 2)  (3, 3)
        beside      -     (1, 0)    -     (3, 2)
        left        -       -     (2, 0)  (3, 0)
        right       -       -     (2, 1)  (3, 1)
    """

    diagonal: gl.shared_memory_descriptor
    # Joins two inverses of 16 to one of 32.
    beside: gl.shared_memory_descriptor
    # Join two inverses of 32: the first 16 columns, and the last.
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor


@gluon.constexpr_function
def _banks(rows: int):
    """A shared memory layout for rows of 16 float32 without bank conflicts. mma operands read the even rows of 8
    together, so these have to be in different banks; two rows fill the 32 banks.

    Bit 4 of an element's address, which selects the half of the banks, is the exclusive or of row bits 0 and 1. Bit 3,
    which selects half a row, is the exclusive or of column bit 3 and row bit 2. Rows 0, 2, 4, 6 at column 0 are in
    banks 0, 16, 8, 24.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [3, 0], [4, 8]]
    while len(bases) < 4 + rows.bit_length() - 1:
        bases.append([2 * bases[-1][0], 0])
    return gl.SharedLinearLayout(bases)


@gluon.jit
def make_slots(HEADS: gl.constexpr):
    SHAPE: gl.constexpr = [HEADS * TOKENS, BLOCK]
    LAYOUT: gl.constexpr = _banks(HEADS * TOKENS)
    diagonal = gl.allocate_shared_memory(gl.float32, SHAPE, LAYOUT)
    beside = gl.allocate_shared_memory(gl.float32, SHAPE, LAYOUT)
    left = gl.allocate_shared_memory(gl.float32, SHAPE, LAYOUT)
    right = gl.allocate_shared_memory(gl.float32, SHAPE, LAYOUT)
    return Slots(diagonal, beside, left, right)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def _rows(at, by_token, left, KEYS: gl.constexpr):
    """The rows [64, KEYS] of a chunk, 0 past its `left` tokens."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // KEYS, KEYS // 8], [4, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    return gl.load(at + token[:, None] * by_token + column[None, :], (token < left)[:, None], other=0.0)


@gluon.jit
def _inverse_norms(x):
    wide = x.to(gl.float32)
    return gl.rsqrt(gl.sum(wide * wide, 1) + 1e-6)


@gluon.jit
def _logs(at_gate, by_gate, a_log, bias, head, token, inside, of, numbers, GATE: gl.constexpr):
    """Logarithms of decays to base 2 [heads, tokens]; 0 outside."""
    at = at_gate + (head // of.gate_group)[:, None] * by_gate.head + token[None, :] * by_gate.token
    log = gl.load(at, inside, other=1.0).to(gl.float32)
    if GATE == "linear":
        log = gl.log(log)
    else:
        rate = 0.0
        if a_log is not None:
            rate = gl.exp(gl.load(a_log + head // of.rate_group).to(gl.float32))[:, None]
        if bias is not None:
            log += gl.load(bias + head // of.bias_group).to(gl.float32)[:, None]
        log = log_decay(log, rate, numbers, GATE)
    return gl.where(inside, at_least(log, LEAST), 0.0) * LOG2E


@gluon.jit
def betas_of(at_beta, by_beta, head, token, inside, of, BETA: gl.constexpr):
    """Betas [heads, tokens]; 0 outside."""
    beta = gl.where(inside, 1.0, 0.0)
    if BETA != "":
        at = at_beta + (head // of.beta_group)[:, None] * by_beta.head + token[None, :] * by_beta.token
        beta = gl.load(at, inside, other=0.0).to(gl.float32)
        if BETA == "logit":
            beta = gl.where(inside, sigmoid(beta), 0.0)
    return beta


@gluon.jit
def _quarters(x):
    """The four columns of blocks [64, 16] of a product [64, 64]. Each thread has its part of them: no data moves."""
    x = x.reshape([TOKENS, 2, 2, BLOCK]).permute([0, 3, 1, 2])
    even, odd = x.split()
    a, c = even.split()
    b, d = odd.split()
    a = gl.convert_layout(a, QUARTER, assert_trivial=True)
    b = gl.convert_layout(b, QUARTER, assert_trivial=True)
    c = gl.convert_layout(c, QUARTER, assert_trivial=True)
    d = gl.convert_layout(d, QUARTER, assert_trivial=True)
    return a, b, c, d


@gluon.jit
def store_lower(a, b, c, d, lower, slots: Slots, HEAD: gl.constexpr):
    """Store L of a head, given as four columns of blocks: diagonal blocks in `lower`, the others in `slots`."""
    block = gl.arange(0, TOKENS, gl.SliceLayout(1, QUARTER))[:, None] // BLOCK
    diagonal = gl.where(block == 0, a, gl.where(block == 1, b, gl.where(block == 2, c, d)))
    lower.slice(HEAD * TOKENS, TOKENS).store(diagonal)
    slots.beside.slice(HEAD * TOKENS, TOKENS).store(gl.where(block == 1, a, c))
    slots.left.slice(HEAD * TOKENS, TOKENS).store(a)
    slots.right.slice(HEAD * TOKENS, TOKENS).store(b)


@gluon.jit
def _parts(x):
    """x as a sum of two bfloat16. The first is rounded by integer operations, which have four times the rate of a cvt
    to one bfloat16. For NaN the second is NaN."""
    bits = (x.to(gl.int32, bitcast=True) + 0x8000) & -0x10000
    high = bits.to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def _add_product(a_high, a_low, b, acc):
    """acc + a b by three mma of bfloat16 parts; the relative error of each product is 2**-16."""
    b_high, b_low = _parts(b)
    acc = mma_v2(a_low, b_high, acc)
    acc = mma_v2(a_high, b_low, acc)
    return mma_v2(a_high, b_high, acc)


@gluon.jit
def substitute(blocks):
    """(1 + L)^-1 of blocks [blocks, 16, 16] of L, as [blocks, column, row]."""
    BLOCKS: gl.constexpr = blocks.shape[0]
    row = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :]
    x = gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, COLUMNS)
    for i in gl.static_range(BLOCK):
        lower = blocks.slice(i, 1, dim=1).load(COLUMNS)
        # Adding -0.0 is the identity, so the compiler drops the terms above the diagonal.
        known = gl.sum(gl.where(row < i, lower * x, -0.0), 2)
        x = gl.where(row == i, (gl.where(column == i, 1.0, 0.0) - known)[:, :, None], x)
    return x


@gluon.jit
def join_16(slots: Slots, HEADS: gl.constexpr):
    """Join inverses of 16 in `diagonal` to inverses of 32: computes the blocks of `beside`."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    diagonal = slots.diagonal.reshape([HEADS * 2, 32, BLOCK])
    below = slots.beside.reshape([HEADS * 2, 32, BLOCK]).slice(BLOCK, BLOCK, dim=1)
    none = gl.zeros([HEADS * 2, BLOCK, BLOCK], gl.float32, MMA)
    high, low = _parts(diagonal.slice(BLOCK, BLOCK, dim=1).load(A))
    x = _add_product(high, low, below.load(B), none)
    high, low = _parts(gl.convert_layout(x, A))
    x = _add_product(high, low, diagonal.slice(0, BLOCK, dim=1).load(B), none)
    below.store(-x)


@gluon.jit
def join_32(slots: Slots, HEADS: gl.constexpr):
    """Join inverses of 32 in `diagonal` and `beside` to the inverse of 64: computes the blocks of `left` and
    `right`."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HEADS, 4 // HEADS, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    diagonal = slots.diagonal.reshape([HEADS, TOKENS, BLOCK])
    beside = slots.beside.reshape([HEADS, TOKENS, BLOCK])
    left = slots.left.reshape([HEADS, TOKENS, BLOCK])
    right = slots.right.reshape([HEADS, TOKENS, BLOCK])
    none = gl.zeros([HEADS, 32, BLOCK], gl.float32, MMA)
    # X22 by columns of blocks.
    upper = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None] < BLOCK
    on = diagonal.slice(32, 32, dim=1).load(A)
    a_high, a_low = _parts(gl.where(upper, on, beside.slice(32, 32, dim=1).load(A)))
    b_high, b_low = _parts(gl.where(upper, 0.0, on))
    x = _add_product(a_high, a_low, left.slice(32, BLOCK, dim=1).load(B), none)
    x = _add_product(b_high, b_low, left.slice(48, BLOCK, dim=1).load(B), x)
    y = _add_product(a_high, a_low, right.slice(32, BLOCK, dim=1).load(B), none)
    y = _add_product(b_high, b_low, right.slice(48, BLOCK, dim=1).load(B), y)
    # Times X11.
    a_high, a_low = _parts(gl.convert_layout(x, A))
    b_high, b_low = _parts(gl.convert_layout(y, A))
    x = _add_product(a_high, a_low, diagonal.slice(0, BLOCK, dim=1).load(B), none)
    x = _add_product(b_high, b_low, beside.slice(BLOCK, BLOCK, dim=1).load(B), x)
    y = _add_product(b_high, b_low, diagonal.slice(BLOCK, BLOCK, dim=1).load(B), none)
    left.slice(32, 32, dim=1).store(-x)
    right.slice(32, 32, dim=1).store(-y)


@gluon.jit
def _store_slot(slot, betas, solved, HEADS: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr):
    """Store a slot's blocks of X diag(beta), and zeros above the diagonal.

    In each ROWS rows of a slot, the last half are blocks of X with columns from FIRST on. The first half are stored as
    the zeros of the mirrored blocks above the diagonal. With 16 rows all are blocks of X.
    """
    COUNT: gl.constexpr = HEADS * TOKENS // ROWS
    HALF: gl.constexpr = ROWS // 2 if ROWS > BLOCK else 0
    x = slot.reshape([COUNT, ROWS, BLOCK]).load(OUT)
    beta = betas.reshape([COUNT, ROWS]).slice(FIRST, BLOCK, dim=1).load(gl.SliceLayout(1, OUT))
    part = gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
    x = gl.where(row >= HALF, x * beta[:, None, :], 0.0)
    column += part % (TOKENS // ROWS) * ROWS + (row < HALF).to(gl.int32) * HALF + FIRST
    gl.store(solved + (part * ROWS + row) * TOKENS + column, x.to(solved.dtype.element_ty))


@gluon.jit
def store_inverse(slots: Slots, betas, solved, HEADS: gl.constexpr):
    """X diag(beta) of some heads; betas [heads * 64]."""
    _store_slot(slots.diagonal, betas, solved, HEADS, 16, 0)
    _store_slot(slots.beside, betas, solved, HEADS, 32, 0)
    _store_slot(slots.left, betas, solved, HEADS, 64, 0)
    _store_slot(slots.right, betas, solved, HEADS, 64, 16)


@gluon.jit
def prepare_heads_kernel(
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
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
):
    groups = of.heads // GROUP
    p = gl.program_id(0) // groups
    first_head = gl.program_id(0) % groups * GROUP
    n, chunk = chunk_of(p, offsets, of, STRIDE)
    origin, first, length = span_of(offsets, n, of)
    if (chunk >= 0) & (chunk * STRIDE < length):
        first += chunk * STRIDE
        left = gl.minimum(length - chunk * STRIDE, STRIDE)
        at_k = k + origin * k_by.row + first * k_by.token + first_head // of.k_group * k_by.head
        at_q = q + origin * q_by.row + first * q_by.token + first_head // of.q_group * q_by.head
        place = (p.to(gl.int64) * of.heads + first_head) * TOKENS

        OPERAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, KEYS], gl.bfloat16)
        k_tile = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, KEYS], OPERAND)
        q_tile = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, KEYS], OPERAND)
        k_norms = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT)
        q_norms = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT)
        logs = gl.allocate_shared_memory(gl.float32, [GROUP // HEADS, HEADS * TOKENS], FLAT)
        betas = gl.allocate_shared_memory(gl.float32, [GROUP // HEADS, HEADS * TOKENS], FLAT)

        k_rows = _rows(at_k, k_by.token, left, KEYS)
        q_rows = _rows(at_q, q_by.token, left, KEYS)
        head = first_head + gl.arange(0, GROUP, gl.SliceLayout(1, VALUES))
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, VALUES))
        inside = (token < left)[None, :] & (head >= 0)[:, None]
        log = gl.zeros([GROUP, TOKENS], gl.float32, VALUES)
        if GATE != "":
            at_gate = gate + origin * gate_by.row + first * gate_by.token
            log = _logs(at_gate, gate_by, a_log, bias, head, token, inside, of, numbers, GATE)
            log = gl.associative_scan(log, 1, add)
        at_beta = beta
        if BETA != "":
            at_beta = beta + origin * beta_by.row + first * beta_by.token
        reinterpret(logs, gl.float32, [GROUP, TOKENS], FLAT_2D).store(log)
        strength = betas_of(at_beta, beta_by, head, token, inside, of, BETA)
        reinterpret(betas, gl.float32, [GROUP, TOKENS], FLAT_2D).store(strength)
        k_tile.store(k_rows)
        q_tile.store(q_rows)
        if NORMALIZE:
            k_norms.store(_inverse_norms(k_rows))
            q_norms.store(_inverse_norms(q_rows))
        fence_async_shared()
        none = gl.zeros([TOKENS, TOKENS], gl.float32, SQUARE)
        kk = warpgroup_mma(k_tile, k_tile.permute([1, 0]), none, use_acc=False, is_async=True)
        qk = warpgroup_mma(q_tile, k_tile.permute([1, 0]), none, use_acc=False, is_async=True)

        total = gl.sum(gl.where((token == TOKENS - 1)[None, :], log, 0.0), 1)[:, None]
        k_factor = gl.exp2(log)
        q_factor = k_factor * numbers.scale
        last_factor = gl.exp2(total - log)
        if NORMALIZE:
            norms = k_norms.load(gl.SliceLayout(0, VALUES))[None, :]
            k_factor *= norms
            last_factor *= norms
            q_factor *= q_norms.load(gl.SliceLayout(0, VALUES))[None, :]
        at = factors + place * 4 + (head - first_head)[:, None] * (4 * TOKENS) + token[None, :]
        gl.store(at, k_factor)
        gl.store(at + TOKENS, q_factor)
        gl.store(at + 2 * TOKENS, last_factor)
        gl.store(at + 3 * TOKENS, gl.exp2(total + gl.zeros_like(log)))

        kk, qk = warpgroup_mma_wait(0, [kk, qk])
        i = gl.arange(0, TOKENS, gl.SliceLayout(1, SQUARE))[:, None]
        j = gl.arange(0, TOKENS, gl.SliceLayout(0, SQUARE))[None, :]
        if NORMALIZE:
            columns = k_norms.load(gl.SliceLayout(0, SQUARE))[None, :]
            kk *= k_norms.load(gl.SliceLayout(1, SQUARE))[:, None] * columns
            qk *= q_norms.load(gl.SliceLayout(1, SQUARE))[:, None] * columns
        kk = gl.where(i > j, kk, 0.0)
        qk = gl.where(i >= j, qk * numbers.scale, 0.0)

        lower = gl.allocate_shared_memory(gl.float32, [HEADS * TOKENS, BLOCK], FLAT_2D)
        slots = make_slots(HEADS)
        SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, TOKENS], gl.bfloat16)
        stage = gl.allocate_shared_memory(gl.bfloat16, [HEADS, TOKENS, TOKENS], SCORES)
        out_row = gl.arange(0, TOKENS, gl.SliceLayout(1, OUT_SQUARE))[:, None]
        out_place = out_row * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, OUT_SQUARE))[None, :]
        for turn in range(GROUP // HEADS):
            for h in gl.static_range(HEADS):
                sums = logs.index(turn).slice(h * TOKENS, TOKENS)
                exponent = sums.load(gl.SliceLayout(1, SQUARE))[:, None] - sums.load(gl.SliceLayout(0, SQUARE))[None, :]
                decay = gl.exp2(gl.minimum(exponent, MOST_EXPONENT))
                beta_i = betas.index(turn).slice(h * TOKENS, TOKENS).load(gl.SliceLayout(1, SQUARE))
                a, b, c, d = _quarters(kk * decay * beta_i[:, None])
                store_lower(a, b, c, d, lower, slots, h)
                stage.index(h).store((qk * decay).to(gl.bfloat16))
            to = (place + turn * (HEADS * TOKENS)) * TOKENS
            x = substitute(lower.reshape([HEADS * 4, BLOCK, BLOCK]))
            for h in gl.static_range(HEADS):
                gl.store(scores + to + h * (TOKENS * TOKENS) + out_place, stage.index(h).load(OUT_SQUARE))
            slots.diagonal.reshape([HEADS * 4, BLOCK, BLOCK]).permute([0, 2, 1]).store(x)
            join_16(slots, HEADS)
            join_32(slots, HEADS)
            store_inverse(slots, betas.index(turn), solved + to, HEADS)


@dataclass(frozen=True)
class HeadsConfig:
    """heads : heads of a program, which share a key head and a query head."""

    heads: int


CONFIGS = tuple(HeadsConfig(heads) for heads in (1, 2, 4))


def launch(problem, places: int, given, made, strides, sizes, groups, numbers) -> None:
    """Compute all chunks' systems, one decay a head, into the workspace `made`; arguments as in
    prepare_heads_kernel."""
    heads = math.gcd(groups[0], groups[1], 4)
    grid = (places * (sizes[3] // heads), 1, 1)
    LAUNCHER(problem, HeadsConfig(heads), grid, *given, *made, *strides, *sizes, *groups, *numbers)


def shared_types(problem) -> tuple[dict, dict]:
    """Argument types and constants of both kernels that make the systems on Hopper."""
    made = {name: kind for name, kind in workspace(problem, "bf16").items() if kind}
    types, constants = types_of(problem, made, SIZES)
    return types, constants | {"STRIDE": problem.stride, "KEYS": problem.key_dim}


def _build(problem, config):
    types, constants = shared_types(problem)
    constants |= {"GROUP": config.heads, "HEADS": min(config.heads, 2)}
    return Build(prepare_heads_kernel, types, constants, num_warps=4, maxnreg=168)


LAUNCHER = Launcher("delta_prepare_heads", _build)

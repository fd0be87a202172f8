"""The scan over chunks of 64 tokens on Hopper, in Gluon: outputs and states; docs/rooms/recurrent.md derives them.

A consumer warpgroup processes 64 values of one head of one sequence. Its state, [64, 128] float32 in two halves of
keys, is the accumulator of its own update, and stays in registers. A program has PARTS of them, which read the same
tiles. Values are the rows of every product, so the result of a product is the next one's left operand in registers. The
products of a chunk, in the order of issue:

    T = S K^T       O = S Q^T (first half of the keys)
    C = (V^T - T k_factor) A^T       O += S Q^T (second half)
    S = S decay + (C last_factor) K
    O = O q_factor + C P^T

Grid: (blocks of PARTS * 64 values, heads, sequences), with one more sequence for packed tokens outside of all
sequences. Warps: PARTS consumer warpgroups, and a producer warp that copies chunks by TMA and factors by cp.async.
Shared memory: STAGES chunks of tiles of 64 x 64 (K and Q two each, V one a part, A, P; with a decay for each channel, K
and Q are rows of the workspace, and there are two more tiles), and a staging buffer for each part's outputs.

Inputs: q, k [rows, heads, tokens, K] by their maps, v, the workspace of workspace.py, states [slots, heads, V, K].
Outputs: like v (whole chunks by TMA, the last one of a sequence by threads), final states, checkpoints (marks): states
at multiples of some tokens.
Method: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024; Kimi Team, Kimi Linear, 2025.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async,
    cp_async_arrive,
    fence_async_shared,
    gl,
    gluon,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashinfer.ops._device.sm90.mma import halves
from flashinfer.ops._device.sm90.ring import Channel, make_barriers, make_channel
from flashinfer.ops.recurrent._device.states import load_state, store_state

# Registers of a thread of a second consumer warpgroup; the first has what it and the producer leave, 240 as well.
SECOND_REGISTERS = gl.constexpr(240)
# Tokens of a chunk, values of a consumer, and half of the keys: the sides of every tile.
SIDE = gl.constexpr(64)
KEYS = gl.constexpr(2 * SIDE)
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
STATE_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
# Rows of 64 16-bit values, 16 bytes a thread.
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class Ring:
    """The ring: tiles k, last [stages, 64, K], q [2 stages, 64, 64] in halves of K, v [PARTS stages, 64, 64], a and p
    [stages, 64, 64], and factors [stages, 4 * 64 or K] float32.

    `channel` is for all but a and p. `systems` is the channel of a and p, which the consumer needs later. `last` is the
    operand of the state's update: keys, or with CHANNELS keys times their decay to the chunk's end.
    """

    k: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    last: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    a: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    channel: Channel
    systems: Channel
    CHANNELS: gl.constexpr
    PARTS: gl.constexpr

    @gluon.jit
    def factor(self, stage, PART: gl.constexpr):
        """64 factors, a column of a tile each."""
        return self.factors.index(stage).slice(PART * SIDE, SIDE).load(gl.SliceLayout(0, ACC))[None, :]

    @gluon.jit
    def decay(self, stage):
        """The state's decay over a whole chunk: one number, or with CHANNELS one for each column."""
        FIRST: gl.constexpr = 0 if self.CHANNELS else 3 * SIDE
        COUNT: gl.constexpr = KEYS if self.CHANNELS else 1
        return self.factors.index(stage).slice(FIRST, COUNT).load(gl.SliceLayout(0, STATE_ACC))[None, :]


@gluon.jit
def _tiles(COUNT: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, SIDE, COLUMNS], LAYOUT)


@gluon.jit
def make_ring(STAGES: gl.constexpr, DTYPE: gl.constexpr, CHANNELS: gl.constexpr, PARTS: gl.constexpr):
    FACTORS: gl.constexpr = KEYS if CHANNELS else 4 * SIDE
    k = _tiles(STAGES, KEYS, DTYPE)
    q = _tiles(2 * STAGES, SIDE, DTYPE)
    last = k
    if CHANNELS:
        last = _tiles(STAGES, KEYS, DTYPE)
    v = _tiles(PARTS * STAGES, SIDE, DTYPE)
    a = _tiles(STAGES, SIDE, DTYPE)
    p = _tiles(STAGES, SIDE, DTYPE)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # 33 arrivals: one for the TMA copies, and one of each lane for the factors.
    channel = make_channel(STAGES, 33, PARTS)
    systems = Channel(make_barriers(STAGES), channel.empty)
    return Ring(k, q, last, v, a, p, factors, channel, systems, CHANNELS, PARTS)


@gluon.jit
def _produce(maps, factors, where, chunks, heads, ring: Ring):
    """Producer warp: copies the operands of one chunk after another."""
    k_map, q_map, last_map, v_map, a_map, p_map = maps
    row, first, k_head, q_head, v_head, v_column, tile = where
    TILES: gl.constexpr = (6 if ring.CHANNELS else 4) + ring.PARTS
    FACTORS: gl.constexpr = ring.factors.shape[1]
    VECTOR: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    factors += gl.arange(0, FACTORS, VECTOR)
    for chunk in range(chunks):
        token = first + chunk * SIDE
        stage, full = ring.channel.expect(chunk, TILES * SIDE * SIDE * 2)
        if ring.CHANNELS:
            tma_load(k_map, [tile, 0, 0], full, ring.k.index(stage))
            tma_load(last_map, [tile, 0, 0], full, ring.last.index(stage))
        else:
            tma_load(k_map, [row, k_head, token, 0], full, ring.k.index(stage))
        for half in gl.static_range(2):
            if ring.CHANNELS:
                tma_load(q_map, [tile, 0, half * SIDE], full, ring.q.index(stage * 2 + half))
            else:
                tma_load(q_map, [row, q_head, token, half * SIDE], full, ring.q.index(stage * 2 + half))
        for part in gl.static_range(ring.PARTS):
            tma_load(v_map, [row, v_head, token, v_column + part * SIDE], full, ring.v.index(stage * ring.PARTS + part))
        cp_async(ring.factors.index(stage), factors + tile.to(gl.int64) * FACTORS)
        cp_async_arrive(full, increment_count=False)
        stage, full = ring.systems.expect(chunk, 2 * SIDE * SIDE * 2)
        tma_load(a_map, [tile, 0, 0], full, ring.a.index(stage))
        tma_load(p_map, [tile, 0, 0], full, ring.p.index(stage))
        tile += heads


@gluon.jit
def _clear_tail(tile, left):
    """Zero the rows of a tile past the sequence's end. They hold another sequence's tokens, and a NaN there would
    spread even when multiplied by 0."""
    row = gl.arange(0, SIDE, gl.SliceLayout(1, WIDE))
    x = tile.load(WIDE)
    tile.store(gl.where((row < left)[:, None], x, 0.0).to(x.dtype))


@gluon.jit
def _issue(a, b, acc):
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def _issue_from_zero(a, b):
    zeros = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def _operand(x):
    """A rounded accumulator in the layout of a product's left operand; no value moves between threads."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=x.type.layout, k_width=2)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _operands(s):
    """A state in bfloat16 as left operands: all keys, the left half, the right half. They share registers."""
    # Inline assembly keeps the rounding here. The compiler would move it behind the next wait, where the tensor cores
    # would idle.
    s = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [s], dtype=gl.bfloat16, is_pure=False, pack=2
    )  # fmt: skip
    left, right = halves(s)
    return _operand(s), _operand(left), _operand(right)


@gluon.jit
def _store_outputs(o, staging, at_out, by, left):
    """Store O^T [values, tokens] as rows of tokens; only the first `left` tokens."""
    staging.permute([1, 0]).store(o)
    rows = staging.load(WIDE)
    token = gl.arange(0, SIDE, gl.SliceLayout(1, WIDE))
    value = gl.arange(0, SIDE, gl.SliceLayout(0, WIDE))
    at = at_out + token[:, None].to(gl.int64) * by + value[None, :]
    gl.store(at, rows, mask=(token < left)[:, None] & (value >= 0)[None, :])


@gluon.jit
def zero_rows(at, by, first, end):
    token = gl.arange(0, SIDE, gl.SliceLayout(1, WIDE))
    value = gl.arange(0, SIDE, gl.SliceLayout(0, WIDE))
    zeros = gl.zeros([SIDE, SIDE], at.dtype.element_ty, WIDE)
    for begin in range(first, end, SIDE):
        inside = (begin + token < end)[:, None] & (value >= 0)[None, :]
        gl.store(at + (begin + token)[:, None].to(gl.int64) * by + value[None, :], zeros, mask=inside)


@gluon.jit
def _state_addresses(at, by):
    """Addresses of a program's part of a state, and their mask, which is all true but keeps the accesses predicated."""
    value = gl.arange(0, SIDE, gl.SliceLayout(1, STATE_ACC)).to(gl.int64)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, STATE_ACC)).to(gl.int64)
    return at + value[:, None] * by.row + key[None, :] * by.column, (value >= 0)[:, None] & (key >= 0)[None, :]


@gluon.jit
def _load_state(at, by, DTYPE: gl.constexpr, CAPABILITY: gl.constexpr):
    places, inside = _state_addresses(at, by)
    return load_state(places, inside, DTYPE, CAPABILITY)


@gluon.jit
def _store_state(at, by, s, pred, DTYPE: gl.constexpr, CAPABILITY: gl.constexpr):
    places, inside = _state_addresses(at, by)
    store_state(places, s, inside & pred, DTYPE, CAPABILITY)


@gluon.jit
def _store_mark(
    at, by, slots, mark, s, SLOTS: gl.constexpr, DTYPE: gl.constexpr, CAPABILITY: gl.constexpr
):  # fmt: skip
    place = mark
    if SLOTS:
        place = gl.load(slots + mark).to(gl.int64)
    _store_state(at + place * by.slot, by, s, place >= 0, DTYPE, CAPABILITY)


@gluon.jit
def _wait_for_chunk(chunk, length, fresh, ring: Ring, PART: gl.constexpr):
    """Wait for a chunk's tiles. If the chunk is `fresh`, seen for the first time, tokens past the sequence's end are
    zeroed."""
    stage = ring.channel.wait(chunk)
    tokens = length - chunk * SIDE
    if fresh & (tokens < SIDE):
        _clear_tail(ring.v.index(stage * ring.PARTS + PART), tokens)
        if not ring.CHANNELS:
            _clear_tail(ring.k.index(stage), tokens)
            # wgmma reads the keys through the async proxy; the values are read by threads.
            fence_async_shared()
        # Explicit, because the compiler would otherwise insert a barrier before the load of values, in every chunk.
        block_barrier()
    return stage


@gluon.jit
def _consume(
    s, chunks, length, out_map, out_at, at_out, out_by, at_marks, marks_by, mark_slots, mark, every, staging,
    ring: Ring, PART: gl.constexpr, FIRST_MARK: gl.constexpr, SLOTS: gl.constexpr, MARKS: gl.constexpr,
    CAPABILITY: gl.constexpr,
):  # fmt: skip
    """Consumer: processes all chunks of a sequence from the state `s`. Returns the state after them."""
    DTYPE: gl.constexpr = ring.k.dtype
    row, head, first, value = out_at
    whole, left, right = _operands(s)
    # The outputs of a chunk are stored during the next chunk's first product.
    o = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    stage = 0
    if chunks > 0:
        stage = _wait_for_chunk(0, length, True, ring, PART)
    # Without loop-invariant code motion, which would keep the addresses of checkpoints in registers.
    chunk = 0
    while tl.condition(chunk < chunks, disable_licm=True):
        t = _issue_from_zero(whole, ring.k.index(stage).permute([1, 0]))
        x = ring.v.index(stage * ring.PARTS + PART).permute([1, 0]).load(ACC).to(gl.float32)
        o = warpgroup_mma_wait(1, [o])
        # The previous chunk's outputs are complete. The store before them, issued one chunk ago, has to have read the
        # staging buffer. After the barrier all warps know that, and have read the previous chunk's values and factors.
        tma_store_wait(0)
        block_barrier()
        ring.channel.release(chunk + ring.channel.full.shape[0] - 1, pred=chunk > 0)
        staging.permute([1, 0]).store(o.to(staging.dtype))
        fence_async_shared()
        o = _issue_from_zero(left, ring.q.index(stage * 2).permute([1, 0]))
        block_barrier()
        if chunk > 0:
            tma_store(out_map, [row, head, first + (chunk - 1) * SIDE, value], staging)
        # The mbarrier wait for A and P, which have arrived by now, is a branch. ptxas does not move code across it. It
        # would otherwise move code that follows the wait for T, and wait for O at that earlier place too.
        if ring.CHANNELS:
            ring.systems.wait(chunk)
            t = warpgroup_mma_wait(1, [t])
            x -= t
        else:
            k_factor = ring.factor(stage, 0)
            ring.systems.wait(chunk)
            t = warpgroup_mma_wait(1, [t])
            x -= t * k_factor
        if not ring.CHANNELS:
            # Factors are loaded one product ahead of their use.
            last_factor = ring.factor(stage, 2)
        c = _issue_from_zero(_operand(x.to(DTYPE)), ring.a.index(stage).permute([1, 0]))
        # Issuing a product on an accumulator that is still in flight would make ptxas wait for all products.
        o, s = warpgroup_mma_wait(1, [o, s])
        o = _issue(right, ring.q.index(stage * 2 + 1).permute([1, 0]), o)
        s *= ring.decay(stage)
        if not ring.CHANNELS:
            q_factor = ring.factor(stage, 1)
        c = warpgroup_mma_wait(1, [c])
        change = _operand(c.to(DTYPE))
        update = change
        if not ring.CHANNELS:
            update = _operand((c * last_factor).to(DTYPE))
        s = _issue(update, ring.last.index(stage), s)
        o = warpgroup_mma_wait(1, [o])
        if not ring.CHANNELS:
            o *= q_factor
        o = _issue(change, ring.p.index(stage).permute([1, 0]), o)
        s = warpgroup_mma_wait(1, [s])
        whole, left, right = _operands(s)
        # The wait in _take is a branch again: ptxas does not move the rounding behind it.
        following = gl.minimum(chunk + 1, chunks - 1)
        stage = _wait_for_chunk(following, length, following > chunk, ring, PART)
        o = warpgroup_mma_wait(0, [o])
        if MARKS != "":
            done = chunk * SIDE + SIDE
            if (done % every == 0) & (done < length + (1 - FIRST_MARK)):
                _store_mark(at_marks, marks_by, mark_slots, mark, s, SLOTS, MARKS, CAPABILITY)
                mark += 1
        chunk += 1
    # The last chunk may be shorter than a TMA box.
    if chunks > 0:
        tma_store_wait(0)
        block_barrier()
        done = (chunks - 1) * SIDE
        _store_outputs(
            o.to(staging.dtype), staging, at_out + done.to(gl.int64) * out_by.token, out_by.token, length - done
        )
    return s


@gluon.jit
def _run(
    states, outs, marks, chunks, length, live, staging, ring: Ring, PART: gl.constexpr, FIRST_MARK: gl.constexpr,
    SLOTS: gl.constexpr, SOURCE: gl.constexpr, STATE: gl.constexpr, MARKS: gl.constexpr, CAPABILITY: gl.constexpr,
):  # fmt: skip
    """One part of a program: 64 values."""
    at_source, at_state, source_by, state_by = states
    out_map, out_at, at_out, out_by = outs
    at_marks, marks_by, mark_slots, mark, every = marks
    row, head, first, value = out_at
    out_at = (row, head, first, value + PART * SIDE)
    at_source += PART * SIDE * source_by.row
    at_state += PART * SIDE * state_by.row
    at_marks += PART * SIDE * marks_by.row
    at_out += PART * SIDE
    staging = staging.index(PART)
    if live:
        s = gl.zeros([SIDE, KEYS], gl.float32, STATE_ACC)
        if SOURCE != "":
            s = _load_state(at_source, source_by, SOURCE, CAPABILITY)
        if MARKS != "":
            if FIRST_MARK:
                if length > 0:
                    _store_mark(at_marks, marks_by, mark_slots, mark, s, SLOTS, MARKS, CAPABILITY)
                mark += 1
        s = _consume(
            s, chunks, length, out_map, out_at, at_out, out_by, at_marks, marks_by, mark_slots, mark, every, staging,
            ring, PART, FIRST_MARK, SLOTS, MARKS, CAPABILITY,
        )  # fmt: skip
        if STATE != "":
            _store_state(at_state, state_by, s, True, STATE, CAPABILITY)
    else:
        zero_rows(at_out, out_by.token, 0, length)


@gluon.jit
def scan_sm90_kernel(
    k_map, q_map, last_map, v_map, a_map, p_map, out_map, factors, offsets, read, source, state, marks, mark_starts,
    mark_slots, out, out_by, source_by, state_by, marks_by, of,
    CHANNELS: gl.constexpr, FIRST_MARK: gl.constexpr, SOURCE: gl.constexpr, STATE: gl.constexpr, MARKS: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, CAPABILITY: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """With CHANNELS the first three maps are of the workspace's rows; else of k, q and k."""
    ring = make_ring(STAGES, v_map.dtype, CHANNELS, PARTS)
    staging = _tiles(PARTS, SIDE, out.dtype.element_ty)
    value = gl.program_id(0) * (PARTS * SIDE)
    head = gl.program_id(1)
    n = gl.program_id(2)
    sequence = gl.minimum(n, of.sequences - 1)
    at_out = out + head * out_by.head + value
    row = sequence
    first = sequence * 0
    length = first + of.tokens
    place = sequence * of.chunks
    if offsets is not None:
        row = sequence * 0
        first = gl.load(offsets + sequence).to(gl.int32)
        length = gl.load(offsets + sequence + 1).to(gl.int32) - first
        place = first // SIDE + sequence
        if n == of.sequences:
            # The extra program: tokens outside of all sequences have output 0.
            for part in gl.static_range(PARTS):
                zero_rows(at_out + part * SIDE, out_by.token, 0, gl.load(offsets).to(gl.int32))
                zero_rows(at_out + part * SIDE, out_by.token, first + length, of.tokens)
            length = length * 0
    at_out += row.to(gl.int64) * out_by.row + first.to(gl.int64) * out_by.token
    slot = n.to(gl.int64)
    if read is not None:
        slot = gl.load(read + sequence).to(gl.int64)
    live = (n < of.sequences) & (slot > of.null)
    chunks = gl.where(live, (length + SIDE - 1) // SIDE, 0)
    # Roles of warp_specialize take no None, so absent tensors are replaced by `out`, which is not accessed for them.
    at_source = out
    if source is not None:
        at_source = source + slot * source_by.slot + head * source_by.head + value * source_by.row
    at_state = out
    if state is not None:
        at_state = state + slot * state_by.slot + head * state_by.head + value * state_by.row
    at_marks = out
    slots = out
    mark = slot
    if MARKS != "":
        at_marks = marks + head * marks_by.head + value * marks_by.row
        mark = gl.load(mark_starts + sequence).to(gl.int64)
    SLOTS: gl.constexpr = mark_slots is not None
    if SLOTS:
        slots = mark_slots
    maps = (k_map, q_map, last_map, v_map, a_map, p_map)
    out_at = (row, head, first, value)
    where = (row, first, head // of.k_group, head // of.q_group, head // of.v_group, value, place * of.heads + head)
    states = (at_source, at_state, source_by, state_by)
    outs = (out_map, out_at, at_out, out_by)
    marked = (at_marks, marks_by, slots, mark, of.every)
    copies = (maps, factors, where, chunks, of.heads, ring)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_run, (
                    states, outs, marked, chunks, length, live, staging, ring, 0, FIRST_MARK, SLOTS, SOURCE, STATE,
                    MARKS, CAPABILITY,
                )),
                (_produce, copies),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_run, (
                    states, outs, marked, chunks, length, live, staging, ring, 0, FIRST_MARK, SLOTS, SOURCE, STATE,
                    MARKS, CAPABILITY,
                )),
                (_run, (
                    states, outs, marked, chunks, length, live, staging, ring, 1, FIRST_MARK, SLOTS, SOURCE, STATE,
                    MARKS, CAPABILITY,
                )),
                (_produce, copies),
            ],
            [4, 1],
            [SECOND_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip

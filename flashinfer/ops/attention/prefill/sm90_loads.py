"""How tiles reach shared memory on Hopper, and the work that they are of.

The copy engine brings keys and values box by box, or four warps gather them row by row; each warpgroup that computes
brings its own queries.
"""

import triton.language as tl

from flashinfer._core.gluon_compat import (
    aggregate,
    block_barrier,
    cp_async,
    cp_async_arrive,
    cp_async_commit,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)
from flashinfer.ops.attention._device.fixed_shift_sm90 import one_word, read_word
from flashinfer.ops.attention._device.schedule import (
    ITEM_KV_BASE,
    ITEM_KV_BEGIN,
    ITEM_KV_END,
    ITEM_KV_LEN,
    ITEM_Q_LEN,
    ITEM_Q_ROW,
    ITEM_TAKEN,
    ITEM_TILE_ROW,
    ITEM_WIDTH,
)

# Rows of a warpgroup's tile: what one wgmma takes.
ROWS = gl.constexpr(64)


@aggregate
class Form:
    """What the kernel is compiled for."""

    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    CUSTOM: gl.constexpr
    SOFT_CAP: gl.constexpr
    ALIBI: gl.constexpr
    SINKS: gl.constexpr
    HEAD_SCALES: gl.constexpr
    LSE: gl.constexpr
    # Whether logits are more than products times a positive scale, which is folded into the exponent.
    TRANSFORM: gl.constexpr
    # Whether tiles are gathered row by row, and not copied in boxes.
    GATHER: gl.constexpr
    GROUP: gl.constexpr
    PAGE_SIZE: gl.constexpr
    D_VO: gl.constexpr
    D_VO_PAD: gl.constexpr
    BLOCK_M: gl.constexpr
    STAGES: gl.constexpr
    # Whether keys have two parts, see Ring; whether outputs are staged in shared memory.
    TWO: gl.constexpr
    STAGED: gl.constexpr
    # Whether queries, keys, weights and values are e4m3; the depth of a product; the warps that turn values.
    FP8: gl.constexpr
    MMA_K: gl.constexpr
    TURN_WARPS: gl.constexpr
    # The functions of a user's variant, or None; whether there is a variant; whether its logits are weights.
    LOGITS: gl.constexpr
    MASK: gl.constexpr
    VARIED: gl.constexpr
    SOFTMAX: gl.constexpr
    # Whether weights of what needs no mask are those of a fixed shift, see attend_sm90._steps.
    FIXED: gl.constexpr



@aggregate
class Ring:
    """Stages of K or V tiles, and the barriers that say full and empty.

    A head_dim that is no power of two comes in two parts, `tiles` and `rest`; else they are the same.
    """

    tiles: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor



@aggregate
class Queue:
    """The next pieces of a block's work: one of its warps takes them, and tells all others by shared memory.

    Work is taken as blocks come to it: dealt out before, requests of one length leave some blocks with the longest
    tiles of each.

    With form.FIXED, the warpgroups say of each piece whether they failed at it (`judge`), and it is told once more.
    """

    works: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    # For each of two pieces and two warpgroups: the piece if the warpgroup failed at it, else -1; and who says so.
    failed: gl.shared_memory_descriptor
    judged: gl.shared_memory_descriptor



# What is the same for all pieces of work, the compiler finds before the first one and keeps: on the stack, since the
# loop over keys needs the registers. These functions hide that it is the same.


@gluon.jit
def numbered(first, index, STEP: gl.constexpr):
    """first + index. `index` is an arange whose numbers in a thread differ by what is no less than STEP, or by 1.

    A thread's place, which is below STEP, is added first, out of the compiler's sight, and then constants: else there
    are the sums of place and constants to keep, one for each number. `first` is not the same for all pieces.
    """
    place = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [first + (index & (STEP - 1))], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip
    return place + (index & -STEP)


@gluon.jit
def again(number):
    """The same number: nothing that is made of it (its 64 bits, say) is made once and kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def programs():
    """gl.num_programs(0), read where it stands."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def program():
    """gl.program_id(0), read where it stands."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# Pieces are told by their numbers, and from this bit on, by the warpgroups that failed at them: a piece that is told
# again. There are fewer pieces: each has a record of its own in memory.
AGAIN = gl.constexpr(29)


@gluon.jit
def queue_of(READERS: gl.constexpr, FIXED: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    works = gl.allocate_shared_memory(gl.int32, [2, 1], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    failed = works
    judged = full
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    if FIXED:
        failed = gl.allocate_shared_memory(gl.int32, [4, 1], LAYOUT)
        judged = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(4):
            failed.index(i).store(one_word(-1))
            mbarrier.init(judged.index(i), count=1)
    return Queue(works, full, empty, failed, judged)


@gluon.jit
def judge(queue: Queue, WG, wave, work, failed):
    """A warpgroup's word on the block's wave-th piece, before it asks for the next one."""
    at = wave % 2 * 2 + WG
    queue.failed.index(at).store(one_word(gl.where(failed, work, -1)))
    mbarrier.arrive(queue.judged.index(at), count=1)


@gluon.jit
def _failed(queue: Queue, wave, at_end):
    """A piece to be told again, with who failed at it, or -1: the one before the block's wave-th or, when there is no
    other `at_end`, this one."""
    word = -1
    for back in gl.static_range(1, -1, -1):
        if (word < 0) & ((back == 1) | at_end):
            at = (wave + back) % 2 * 2
            # The phase before the first counts as over, as the piece before the first is.
            phase = ((wave - back + 2) // 2 & 1) ^ 1
            mbarrier.wait(queue.judged.index(at), phase)
            mbarrier.wait(queue.judged.index(at + 1), phase)
            first = read_word(queue.failed.index(at))
            second = read_word(queue.failed.index(at + 1))
            if gl.maximum(first, second) >= 0:
                who = (first >= 0).to(gl.int32) + 2 * (second >= 0).to(gl.int32)
                word = gl.maximum(first, second) | who << AGAIN
                queue.failed.index(at).store(one_word(-1))
                queue.failed.index(at + 1).store(one_word(-1))
    return word


@gluon.jit
def take(queue: Queue, wave, held, items, works, form: Form):
    """The piece of work after the block's wave-th, for those who ask `told`, too; past the last one, no less than
    `works`. And the piece that is held back while another is told again, or -1.

    Every block that begins with a piece asks once for each that it has, so all together ask `works` times: who does
    so last puts the count back.
    """
    work = held
    if held < 0:
        taken = gl.atomic_add(items + ITEM_TAKEN, 1, sem="relaxed")
        if taken == works - 1:
            gl.store(items + ITEM_TAKEN, 0)
        work = programs() + taken
    at = wave % 2
    mbarrier.wait(queue.empty.index(at), ((wave // 2) & 1) ^ 1)
    held = -1
    if form.FIXED:
        word = _failed(queue, wave, work >= works)
        if word >= 0:
            held = work
            work = word
    queue.works.index(at).store(one_word(work))
    mbarrier.arrive(queue.full.index(at), count=1)
    return work & ((1 << AGAIN) - 1), held


@gluon.jit
def told(queue: Queue, wave):
    """The piece of work after the block's wave-th, as `take` has it; and, if it is told again, who failed at it: 1 the
    first warpgroup, 2 the second, 3 both."""
    at = wave % 2
    mbarrier.wait(queue.full.index(at), (wave // 2) & 1)
    word = read_word(queue.works.index(at))
    mbarrier.arrive(queue.empty.index(at), count=1)
    return word & ((1 << AGAIN) - 1), word >> AGAIN


@gluon.jit
def span(record, window_left, BLOCK_N: gl.constexpr, form: Form):
    """First key, and blocks of keys in all; blocks [plain_from, plain_to) are seen whole by every row of the tile."""
    q_len = gl.load(record + ITEM_Q_LEN)
    kv_len = gl.load(record + ITEM_KV_LEN)
    tile_row = gl.load(record + ITEM_TILE_ROW)
    begin = gl.load(record + ITEM_KV_BEGIN)
    end = gl.load(record + ITEM_KV_END)
    first_pos = tile_row // form.GROUP + kv_len - q_len
    last_pos = gl.minimum((tile_row + form.BLOCK_M - 1) // form.GROUP, q_len - 1) + kv_len - q_len
    if form.WINDOW:
        begin += gl.maximum(first_pos - window_left - begin, 0) // BLOCK_N * BLOCK_N
    plain_end = end
    if form.CAUSAL:
        end = gl.minimum(end, last_pos + 1)
        plain_end = gl.minimum(plain_end, first_pos + 1)
    blocks = (gl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    plain_to = gl.maximum(plain_end - begin, 0) // BLOCK_N
    plain_from = 0
    if form.WINDOW:
        plain_from = (gl.maximum(last_pos - window_left - begin, 0) + BLOCK_N - 1) // BLOCK_N
    if form.CUSTOM or form.MASK is not None:
        plain_to = 0
    plain_to = gl.minimum(plain_to, blocks)
    return begin, blocks, gl.minimum(plain_from, plain_to), plain_to


@gluon.jit
def _pages(kv_indices, kv_base, start, kv_len, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The page ids of one block of keys; none for ragged keys. Past the end, any page of the request: what is read
    there is masked."""
    pages = ()
    if PAGE_SIZE > 0:
        BOXES: gl.constexpr = (BLOCK_N + PAGE_SIZE - 1) // PAGE_SIZE
        for box in gl.static_range(BOXES):
            page = gl.minimum(start + box * PAGE_SIZE, kv_len - 1) // PAGE_SIZE
            pages += (gl.load(kv_indices + kv_base + page),)
    return pages


@gluon.jit
def produce(
    tiles_map, rest_map, ring: Ring, queue: Queue, items, counts, kv_indices, num_kv_heads, window_left, page_rows,
    head_rows, head_cols, TWO: gl.constexpr, TAKES: gl.constexpr, form: Form,
):  # fmt: skip
    """One warp: copies the keys, or the values, of each piece of work, block by block, as stages come free.

    The one that TAKES work asks for the next piece when all copies of this one are on their way: the trip to memory
    is over before a stage comes free.
    """
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    SPLIT_AT: gl.constexpr = ring.tiles.shape[2]
    COLUMNS: gl.constexpr = SPLIT_AT + (ring.rest.shape[2] if TWO else 0)
    works = gl.load(counts) * num_kv_heads
    step = 0
    work = program()
    held = -1
    wave = 0
    while work < works:
        record = items + work // num_kv_heads * ITEM_WIDTH
        kv_head = work % num_kv_heads
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, form)
        kv_base = gl.load(record + ITEM_KV_BASE)
        kv_len = gl.load(record + ITEM_KV_LEN)
        start = begin + (blocks - 1) * BLOCK_N
        for i in range(blocks):
            # Asked for before the wait, which hides the trip to memory.
            pages = _pages(kv_indices, kv_base, start, kv_len, form.PAGE_SIZE, BLOCK_N)
            stage = step % form.STAGES
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), ((step // form.STAGES) & 1) ^ 1)
            mbarrier.expect(full, ring.tiles.dtype.primitive_bitwidth // 8 * BLOCK_N * COLUMNS)
            row = kv_head * head_rows
            col = kv_head * head_cols
            if form.PAGE_SIZE == 0:
                row += kv_base + start
            elif form.PAGE_SIZE >= BLOCK_N:
                row += pages[0] * page_rows + start % form.PAGE_SIZE
            if form.PAGE_SIZE == 0 or form.PAGE_SIZE >= BLOCK_N:
                tma_load(tiles_map, [row, col], full, ring.tiles.index(stage))
                if TWO:
                    tma_load(rest_map, [row, col + SPLIT_AT], full, ring.rest.index(stage))
            else:
                for box in gl.static_range(BLOCK_N // form.PAGE_SIZE):
                    at = row + pages[box] * page_rows
                    to = ring.tiles.index(stage).slice(box * form.PAGE_SIZE, form.PAGE_SIZE, dim=0)
                    tma_load(tiles_map, [at, col], full, to)
                    if TWO:
                        to = ring.rest.index(stage).slice(box * form.PAGE_SIZE, form.PAGE_SIZE, dim=0)
                        tma_load(rest_map, [at, col + SPLIT_AT], full, to)
            start -= BLOCK_N
            step += 1
        if TAKES:
            work, held = take(queue, wave, held, items, works, form)
        else:
            work, retry = told(queue, wave)
        wave += 1


@gluon.jit
def _found(start, kv_base, kv_len, kv_indices, COUNT: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """What finds the rows of COUNT keys: their pages, or their rows in a ragged tensor. Past the end, the last key's.

    Laid out for tiles of D columns, see _gather_tile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    position = gl.minimum(numbered(start, gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT)), 1024 // D), kv_len - 1)
    if PAGE_SIZE == 0:
        return kv_base + position
    return gl.load(kv_indices + kv_base + position // PAGE_SIZE)


@gluon.jit
def _times(number, step):
    """Their product in 64 bits; neither is negative. Told so, the assembler multiplies and adds at once."""
    if step.dtype.primitive_bitwidth == 32:
        step = step.to(gl.uint32)
    return number.to(gl.uint32).to(gl.int64) * step.to(gl.int64)


@gluon.jit
def _gather_tile(to, source, found, start, kv_len, page, step, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Start copying the rows of one tile from wherever they lie; `found` has _found of them.

    In one go: slices of a tile are one place to the compiler, which has all warps meet between them. Steps are bytes,
    so that an address is one instruction.
    """
    D: gl.constexpr = to.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    found = gl.convert_layout(found, gl.SliceLayout(1, LAYOUT))
    if PAGE_SIZE == 0:
        at = _times(found, step)
    else:
        at = _times(found, page)
        if PAGE_SIZE > 1:
            # Again for each tile: numbers of keys and values together are too many to keep.
            number = numbered(again(start), gl.arange(0, to.shape[0], gl.SliceLayout(1, LAYOUT)), 1024 // D)
            position = gl.minimum(number, kv_len - 1)
            at += _times(position % PAGE_SIZE, step)
    columns = (source + d[None, :]).to(gl.pointer_type(gl.int8))
    pointers = (columns + at[:, None]).to(gl.pointer_type(to.dtype))
    # A cast of pointers does not tell what it knew: 16 bytes each, aligned.
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])
    if COLUMNS < D:
        cp_async(to, pointers, mask=(d < COLUMNS)[None, :])
    else:
        cp_async(to, pointers)


@gluon.jit
def _gather_keys(k: Ring, source, count, found, start, kv_len, page, step, form: Form):
    """Start copying the count-th block of keys as its stage comes free."""
    stage = count % form.STAGES
    mbarrier.wait(k.empty.index(stage), ((count // form.STAGES) & 1) ^ 1)
    D: gl.constexpr = k.tiles.shape[2]
    _gather_tile(k.tiles.index(stage), source, found, start, kv_len, page, step, D, form.PAGE_SIZE)
    if form.TWO:
        REST: gl.constexpr = k.rest.shape[2]
        _gather_tile(k.rest.index(stage), source + D, found, start, kv_len, page, step, REST, form.PAGE_SIZE)
    cp_async_arrive(k.full.index(stage), increment_count=False)


@gluon.jit
def _gather_values(v: Ring, source, count, found, start, kv_len, page, step, form: Form):
    """The same of values."""
    stage = count % form.STAGES
    mbarrier.wait(v.empty.index(stage), ((count // form.STAGES) & 1) ^ 1)
    _gather_tile(v.tiles.index(stage), source, found, start, kv_len, page, step, form.D_VO, form.PAGE_SIZE)
    cp_async_arrive(v.full.index(stage), increment_count=False)


@gluon.jit
def gather(
    k_source, v_source, k: Ring, v: Ring, queue: Queue, items, counts, kv_indices, num_kv_heads, window_left, k_page,
    k_head, k_step, v_page, v_head, v_step, form: Form,
):  # fmt: skip
    """Four warps: copy keys and values that no box takes, pages of a few tokens say, row by row with cp.async."""
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    D: gl.constexpr = k.tiles.shape[2]
    PAGE_SIZE: gl.constexpr = form.PAGE_SIZE
    works = gl.load(counts) * num_kv_heads
    step = 0
    work = program()
    held = -1
    wave = 0
    while tl.condition(work < works, disable_licm=True):
        record = items + work // num_kv_heads * ITEM_WIDTH
        kv_head = (work % num_kv_heads).to(gl.int64)
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, form)
        kv_base = gl.load(record + ITEM_KV_BASE)
        kv_len = gl.load(record + ITEM_KV_LEN)
        start = begin + (blocks - 1) * BLOCK_N
        if blocks > 0:
            keys = k_source + kv_head * k_head
            values = v_source + kv_head * v_head
            found = _found(start, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
            _gather_keys(k, keys, step, found, start, kv_len, k_page, k_step, form)
            # A stage of keys comes free before one of values does, whose turn is a block later: so keys go ahead. What
            # finds rows is loaded again for values: kept, it takes registers of the warps that compute (Triton 3.9).
            for i in range(1, blocks):
                start -= BLOCK_N
                found = _found(start, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
                _gather_keys(k, keys, step + 1, found, start, kv_len, k_page, k_step, form)
                found = _found(start + BLOCK_N, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
                _gather_values(v, values, step, found, start + BLOCK_N, kv_len, v_page, v_step, form)
                step += 1
            found = _found(start, kv_base, kv_len, kv_indices, BLOCK_N, D, PAGE_SIZE)
            _gather_values(v, values, step, found, start, kv_len, v_page, v_step, form)
            step += 1
        work, held = take(queue, wave, held, items, works, form)
        wave += 1


@gluon.constexpr_function
def _pairs_layout(KEYS, PAIRS, WARPS):
    registers = [[1, 0], [8, 0]] + [[1 << i, 0] for i in range(4, KEYS.bit_length() - 1)]
    columns = [[0, 1 << i] for i in range(3, PAIRS.bit_length() - 1)]
    warps = columns[len(columns) - (WARPS.bit_length() - 1) :] if WARPS > 1 else []
    registers += columns[: len(columns) - len(warps)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [KEYS, PAIRS])


@gluon.jit
def _turn_tile(values, turned, start, kv_len, CLEAR: gl.constexpr, WARPS: gl.constexpr):
    """See turn_values. With CLEAR, values of keys past the end become zeros: their weight is 0, and 0 times what lies
    there may be NaN."""
    BLOCK_N: gl.constexpr = values.shape[0]
    PAIRS: gl.constexpr = values.shape[1] // 2
    # Of 32 keys, Triton 3.9 puts four of a thread's places on the stack.
    SLICE: gl.constexpr = 16
    # What ldmatrix gives a thread when it turns pairs: those of two neighbouring keys in a register; the register that
    # is to be mixed with it, 8 keys on, comes next.
    LAYOUT: gl.constexpr = _pairs_layout(SLICE, PAIRS, WARPS)
    IN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, PAIRS], gl.int16)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * PAIRS, BLOCK_N // 2], gl.int16)
    pairs = reinterpret(values, gl.int16, [BLOCK_N, PAIRS], IN)
    to = reinterpret(turned, gl.int16, [2 * PAIRS, BLOCK_N // 2], OUT)
    for i in gl.static_range(BLOCK_N // SLICE):
        x = pairs.slice(i * SLICE, SLICE, dim=0).load(LAYOUT)
        if CLEAR:
            key = numbered(start + i * SLICE, gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT)), 8)
            x = gl.where((key < kv_len)[:, None], x, 0).to(gl.int16)
        # Bytes 0, 2, 4, 6 and 1, 3, 5, 7 of two registers: a column of four keys each.
        x = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [x], dtype=gl.int16,
            is_pure=True, pack=4,
        )  # fmt: skip
        # Keys are 16 a + 8 e + 2 c + j, where e is now a column's parity and j one of two pairs of keys; pairs of
        # columns are 8 h + g. Rows become 16 h + 8 e + g, so that matrices of 8 rows are stored without conflicts.
        x = x.reshape([SLICE // 16, 2, 4, 2, PAIRS // 8, 8]).permute([4, 1, 5, 0, 2, 3])
        to.slice(i * SLICE // 2, SLICE // 2, dim=1).store(x.reshape([2 * PAIRS, SLICE // 2]))


@gluon.jit
def turn_values(raw: Ring, v: Ring, queue: Queue, items, counts, num_kv_heads, window_left, form: Form):
    """Turns tiles of 8-bit values [keys, columns] so that their keys are contiguous, as wgmma wants them.

    Instructions that turn do so with 16-bit elements, here pairs of columns; two permutations of bytes make columns of
    keys of these. What lies at 4 c + 2 j + b of 16 keys is key 8 j + 2 c + b, which is the order that weights are in
    when their fragments of accumulators are taken for operands.
    """
    BLOCK_N: gl.constexpr = raw.tiles.shape[1]
    works = gl.load(counts) * num_kv_heads
    step = 0
    work = program()
    wave = 0
    while work < works:
        record = items + work // num_kv_heads * ITEM_WIDTH
        begin, blocks, plain_from, plain_to = span(record, window_left, BLOCK_N, form)
        kv_len = gl.load(record + ITEM_KV_LEN)
        start = begin + (blocks - 1) * BLOCK_N
        i = 0
        # Places in tiles are made for each: eight that are kept, and eight made of them, take more than there is.
        while tl.condition(i < blocks, disable_licm=True):
            stage = again(step % form.STAGES)
            phase = (step // form.STAGES) & 1
            mbarrier.wait(raw.full.index(stage), phase)
            mbarrier.wait(v.empty.index(stage), phase ^ 1)
            if start + BLOCK_N > kv_len:
                _turn_tile(raw.tiles.index(stage), v.tiles.index(stage), start, kv_len, True, form.TURN_WARPS)
            else:
                _turn_tile(raw.tiles.index(stage), v.tiles.index(stage), start, kv_len, False, form.TURN_WARPS)
            # What threads wrote, the tensor cores see behind this fence.
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(raw.empty.index(stage), count=1)
            mbarrier.arrive(v.full.index(stage), count=1)
            start -= BLOCK_N
            step += 1
            i += 1
        work, retry = told(queue, wave)
        wave += 1


@gluon.jit
def _fetch_part(
    WG, tile, q, record, kv_head, q_stride_n, q_stride_h, GROUP: gl.constexpr
):  # fmt: skip
    D: gl.constexpr = tile.shape[1]
    VEC: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // D, D // VEC], [4, 1], [1, 0])
    # Slice by slice, each behind a branch: the addresses of all rows at once would take too many registers.
    STEP: gl.constexpr = min(128 * VEC // D, ROWS)
    SLICE: gl.constexpr = min(4 * STEP, ROWS)
    first = gl.load(record + ITEM_TILE_ROW) + WG * ROWS
    q_row = gl.load(record + ITEM_Q_ROW)
    q_len = gl.load(record + ITEM_Q_LEN)
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    # Made once, in front of the branches: what of it hangs on the thread alone would else be kept for all pieces.
    number = numbered(first, gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT)), STEP)
    for i in gl.static_range(ROWS // SLICE):
        if first + i * SLICE < q_len * GROUP:
            packed = number + i * SLICE
            token = packed // GROUP
            at = (q_row + token).to(gl.int64) * q_stride_n
            at += (kv_head * GROUP + packed % GROUP) * q_stride_h
            there = (token < q_len)[:, None]
            cp_async(tile.slice(i * SLICE, SLICE, dim=0), q + at[:, None] + d[None, :], mask=there)


@gluon.jit
def fetch_queries(
    WG, tiles, rests, q, items, work, works, num_kv_heads, q_stride_n, q_stride_h, form: Form
):  # fmt: skip
    """Start copying a warpgroup's query rows of a piece of work, if there is one."""
    if work < works:
        record = items + work // num_kv_heads * ITEM_WIDTH
        kv_head = work % num_kv_heads
        _fetch_part(WG, tiles.index(WG), q, record, kv_head, q_stride_n, q_stride_h, form.GROUP)
        if form.TWO:
            _fetch_part(WG, rests.index(WG), q + tiles.shape[2], record, kv_head, q_stride_n, q_stride_h, form.GROUP)
    cp_async_commit()


@gluon.jit
def ring_of(tiles, rest, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Ring(tiles, rest, full, empty)

"""Exchanges between ranks through peer memory: flags in each other's buffers, and waits with a deadline.

Each rank has a buffer that its peers write (`flashinfer/ops/comm/symmetric.py`). Program n of a kernel is channel n: it
exchanges only with program n of the other ranks, in slots of its own, so there is no barrier over the grid. An exchange
is: write to the peers' slots, `arrive`, `wait`, read the own slot. Epochs number the exchanges of a channel. The kernel
keeps the epoch in device memory, so a replayed CUDA graph continues the numbers.

A channel has two slots, which alternate. This makes a barrier after the reads unnecessary: a rank that writes exchange
e has seen all peers arrive at e - 1, and a peer arrives at e - 1 after it has read exchange e - 2, which used the same
slot. For example, exchange 5 writes slot 1; all peers have arrived at 4, so they have read exchange 3 from slot 1.

A flag is stored with st.release.sys and read with ld.acquire.sys; no atomic operation crosses a link. Its low 32 bits
are the epoch, and its high 32 bits a checksum of the call's sizes, on which ranks must agree. In Triton's interpreter
(CAPABILITY 0) ranks run one after another, loads and stores are plain, and a flag that is missing is late at once.

A value that decides a branch around a barrier must be the same in all threads, although memory changes between their
loads. Such a value is loaded by all LANES threads of the program, one element each, and reduced over them.
"""

import triton
import triton.language as tl

from flashinfer.ops.comm import symmetric

LINE = tl.constexpr(symmetric.LINE)
CHANNELS = tl.constexpr(symmetric.CHANNELS)
SLOTTED = tl.constexpr(symmetric.SLOTTED)


@triton.jit
def epoch_of(state, channel):
    """The number of the last exchange that `channel` completed."""
    return tl.load(state + channel)


@triton.jit
def keep_epoch(state, channel, epoch):
    """Store the number of the last exchange that `channel` completed."""
    tl.store(state + channel, epoch)


@triton.jit
def is_lost(state, LANES: tl.constexpr):
    """Whether a wait on this rank has failed since the last reset. Nothing may be sent then."""
    return tl.max(tl.load(state + CHANNELS + tl.arange(0, LANES)), 0) != 0


@triton.jit
def pointer_at(address, dtype: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """An integer address, which UNIT_BYTES divides, as a pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), UNIT_BYTES)


@triton.jit
def int64(i):
    """i as 64 bits; in the interpreter a loop counts in Python's integers."""
    return tl.zeros([], tl.int64) + i


@triton.jit
def slot_of(epoch, channel, source, area, WORLD: tl.constexpr):
    """Offset in a buffer of the `area` bytes that rank `source` sends to `channel` in exchange `epoch`."""
    slot = (epoch & 1) * SLOTTED + channel
    return LINE * CHANNELS + (slot * WORLD + source).to(tl.int64) * area


@triton.jit
def arrive(peers, rank, channel, epoch, sizes, WORLD: tl.constexpr, LANES: tl.constexpr, CAPABILITY: tl.constexpr):
    """Signal to all ranks that this program has written exchange `epoch`, and read the exchanges before it."""
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    flag = tl.load(peers + lane, lane < WORLD, other=0) + channel * LINE + rank * 8
    value = (sizes.to(tl.int64) << 32) | (epoch.to(tl.int64) & 0xFFFFFFFF)
    if CAPABILITY == 0:
        tl.store(flag.to(tl.pointer_type(tl.int64)), value, lane < WORLD)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred on; setp.ne.s32 on, $3, 0; @on st.release.sys.global.s64 [$1], $2; mov.s32 $0, 0; }",
            "=r,l,l,r", [flag, value, (lane < WORLD).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait(
    peers, rank, channel, epoch, sizes, limit, WORLD: tl.constexpr, LANES: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """Wait until all ranks have arrived at `epoch`, or for `limit` nanoseconds.

    Returns -1 if all have arrived, r if rank r has not, WORLD + r if rank r has arrived with other sizes.
    """
    source = tl.arange(0, LANES) % WORLD
    flag = tl.load(peers + rank) + channel * LINE + source * 8
    start = _clock(source, CAPABILITY)
    # 0 for a rank that has arrived, 1 for one that is awaited, 2 and more for a failure.
    worst = tl.max(_arrived(flag, source, epoch, sizes, start, limit, WORLD, CAPABILITY), 0)
    while worst == 1:
        worst = tl.max(_arrived(flag, source, epoch, sizes, start, limit, WORLD, CAPABILITY), 0)
    return tl.maximum(worst, 1) - 2


@triton.jit
def _arrived(flag, source, epoch, sizes, start, limit, WORLD: tl.constexpr, CAPABILITY: tl.constexpr):
    """The state of rank `source` in `wait`: 0, 1, 2 + source when late, 2 + WORLD + source with other sizes."""
    if CAPABILITY == 0:
        seen = tl.load(flag.to(tl.pointer_type(tl.int64)))
        # Ranks run one after another: a missing flag will not come.
        over = source >= 0
    else:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s64 $0, [$1];", "=l,l", [flag], dtype=tl.int64, is_pure=False, pack=1
        )
        over = _clock(source, CAPABILITY) - start >= limit
    # A difference is right when the epoch wraps, too. A rank that is one exchange ahead has that exchange's sizes.
    ahead = seen.to(tl.int32) - epoch
    mismatch = tl.where((ahead == 0) & ((seen >> 32).to(tl.int32) != sizes), 2 + WORLD + source, 0)
    return tl.where(ahead >= 0, mismatch, tl.where(over, 2 + source, 1))


@triton.jit
def _clock(lane, CAPABILITY: tl.constexpr):
    """%globaltimer in nanoseconds, per lane; constant in the interpreter."""
    if CAPABILITY == 0:
        return lane.to(tl.int64)
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def give_up(state, lost, late, operation, epoch, LANES: tl.constexpr):
    """Record a failed wait: its result for the host in `lost`, where the first failure stays, and a mark in `state`
    that stops later kernels."""
    tl.store(state + CHANNELS + tl.arange(0, LANES), 1)
    if tl.load(lost) == 0:
        word = tl.arange(0, 4)
        tl.store(lost + word, tl.where(word == 0, late + 1, tl.where(word == 1, operation, epoch)))

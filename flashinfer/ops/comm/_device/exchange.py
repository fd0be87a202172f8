"""Exchanges between ranks: flags that peers store, and waits that end.

Every rank has a buffer that its peers write (`flashinfer/ops/comm/symmetric.py`). A program of a kernel is a channel:
it exchanges with the programs of the same number on the other ranks and with no other, in slots of its own, so that
calls with different grids need no common barrier. An exchange is: write to the peers' slots, `arrive`, `wait`, read the
own slot. Exchanges of a channel are numbered by an epoch, which the kernel keeps in device memory, and so are right in
a replayed CUDA graph too.

Slots alternate, and that makes an end barrier unnecessary: who writes exchange e has seen every peer arrive at e - 1,
and a peer arrives there after it has read exchange e - 2, which had the same slot. (A program arrives after its reads
of what came before; kernels of one stream run one after another.)

A flag is stored with st.release.sys and read with ld.acquire.sys: no atomic operation crosses a link. Its low half is
the epoch and its high half a number that ranks must agree on, made of the sizes of the call. In Triton's interpreter
(CAPABILITY 0) loads and stores are plain, and nothing waits: what has not arrived is late at once.

Whatever decides a branch around a barrier must be the same in all threads, though memory changes between their reads.
So it is read by LANES = threads of the program, one element a thread, and reduced over them.
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
    tl.store(state + channel, epoch)


@triton.jit
def is_lost(state, LANES: tl.constexpr):
    """Whether a wait on this rank has failed, and nothing may be sent until the reset."""
    return tl.max(tl.load(state + CHANNELS + tl.arange(0, LANES)), 0) != 0


@triton.jit
def pointer_at(address, dtype: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """An integer address, which UNIT_BYTES divides, as a pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), UNIT_BYTES)


@triton.jit
def slot_of(epoch, channel, source, area, WORLD: tl.constexpr):
    """Offset in a buffer of the `area` bytes that rank `source` sends to `channel` in exchange `epoch`."""
    slot = (epoch & 1) * SLOTTED + channel
    return LINE * CHANNELS + (slot * WORLD + source).to(tl.int64) * area


@triton.jit
def arrive(peers, rank, channel, epoch, sizes, WORLD: tl.constexpr, LANES: tl.constexpr, CAPABILITY: tl.constexpr):
    """Tell every rank that this program has written its part of exchange `epoch`, and read all before it."""
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
    """Wait until every rank has arrived at `epoch`, or `limit` nanoseconds.

    -1 if all have; r if rank r has not; WORLD + r if it has come with other sizes.
    """
    source = tl.arange(0, LANES) % WORLD
    flag = tl.load(peers + rank) + channel * LINE + source * 8
    start = _clock(source, CAPABILITY)
    # 0 where the rank has arrived, 1 where it may yet, 2 and more where it will not.
    worst = tl.max(_arrived(flag, source, epoch, sizes, start, limit, WORLD, CAPABILITY), 0)
    while worst == 1:
        worst = tl.max(_arrived(flag, source, epoch, sizes, start, limit, WORLD, CAPABILITY), 0)
    return tl.maximum(worst, 1) - 2


@triton.jit
def _arrived(flag, source, epoch, sizes, start, limit, WORLD: tl.constexpr, CAPABILITY: tl.constexpr):
    if CAPABILITY == 0:
        seen = tl.load(flag.to(tl.pointer_type(tl.int64)))
        # Ranks run one after another: what is not there does not come.
        over = source >= 0
    else:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s64 $0, [$1];", "=l,l", [flag], dtype=tl.int64, is_pure=False, pack=1
        )
        over = _clock(source, CAPABILITY) - start >= limit
    # A difference, so that it holds when the epoch wraps. A rank may be one exchange ahead, and its sizes with it.
    ahead = seen.to(tl.int32) - epoch
    here = tl.where((ahead == 0) & ((seen >> 32).to(tl.int32) != sizes), 2 + WORLD + source, 0)
    return tl.where(ahead >= 0, here, tl.where(over, 2 + source, 1))


@triton.jit
def _clock(lane, CAPABILITY: tl.constexpr):
    """Nanoseconds, per lane. In the interpreter time stands still."""
    if CAPABILITY == 0:
        return lane.to(tl.int64)
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def give_up(state, lost, late, operation, epoch, LANES: tl.constexpr):
    """Record for the host what `wait` returned, and for later kernels that it failed. The first failure is kept."""
    tl.store(state + CHANNELS + tl.arange(0, LANES), 1)
    if tl.load(lost) == 0:
        word = tl.arange(0, 4)
        tl.store(lost + word, tl.where(word == 0, late + 1, tl.where(word == 1, operation, epoch)))

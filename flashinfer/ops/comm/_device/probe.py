"""Tests whether ranks reach each other's memory: each writes a word to each, signals, and reads both directions back.

Grid: one program. Warps: one. Shared memory: none.
Inputs: peers int64 [WORLD], the addresses of the ranks' buffers; state and lost of exchange.py.
Outputs: seen int32 [WORLD], 1 for each rank that was reached both ways.
Method: `flashinfer/ops/comm/_device/exchange.py`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.comm._device.exchange import arrive, epoch_of, give_up, keep_epoch, pointer_at, slot_of, wait


@dataclass(frozen=True)
class Problem:
    """world : ranks. capability : the compute capability times ten."""

    world: int
    capability: int


@triton.jit
def probe_kernel(
    seen, peers, state, lost, rank, area, limit, WORLD: tl.constexpr, LANES: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """seen [WORLD] becomes 1 for each rank whose word is in this rank's memory and which has this rank's word."""
    channel = tl.program_id(0)
    epoch = epoch_of(state, channel) + 1
    own = tl.load(peers + rank)
    for other in tl.static_range(WORLD):
        at = pointer_at(tl.load(peers + other) + slot_of(epoch, channel, rank, area, WORLD), tl.int32, 4)
        tl.store(at, _word(rank, other))
    arrive(peers, rank, channel, epoch, channel, WORLD, LANES, CAPABILITY)
    late = wait(peers, rank, channel, epoch, channel, limit, WORLD, LANES, CAPABILITY)
    if late >= 0:
        give_up(state, lost, late, 4, epoch, LANES)
    for other in tl.static_range(WORLD):
        received = pointer_at(own + slot_of(epoch, channel, other, area, WORLD), tl.int32, 4)
        written = pointer_at(tl.load(peers + other) + slot_of(epoch, channel, rank, area, WORLD), tl.int32, 4)
        good = (tl.load(received) == _word(other, rank)) & (tl.load(written) == _word(rank, other))
        tl.store(seen + other, good.to(tl.int32))
    keep_epoch(state, channel, epoch)


@triton.jit
def _word(source, to):
    """The word that rank `source` writes to rank `to`."""
    return 0x5A000000 + source * 256 + to


def build(problem: Problem, config: None) -> Build:
    types = {"seen": "*i32", "peers": "*i64", "state": "*i32", "lost": "*i32", "rank": "i32"}
    types |= {"area": "i64:16", "limit": "i64"}
    constants = {"WORLD": problem.world, "LANES": 32, "CAPABILITY": problem.capability}
    return Build(probe_kernel, types, constants, num_warps=1)


launch = Launcher("comm_probe", build)

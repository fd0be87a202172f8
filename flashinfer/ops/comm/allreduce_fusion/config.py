"""Programs, warps and the choice between one shot and two of the all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.comm.symmetric import SLOTTED

# Elements that a program of the plain all-reduce takes at a time: of bf16, one to four 16-byte accesses in each of 128
# threads.
CHUNKS = 1024, 2048, 4096


@dataclass(frozen=True)
class Config:
    """num_warps : warps per program. capability : of the chip, ten times; 0 in the interpreter.

    first, last : the phases of a launch: 0 sends, 1 receives (and of two shots sends the sums), 2 receives the sums.
        All of them on a GPU; in the interpreter, where ranks run one after another, each is a launch.
    """

    num_warps: int
    capability: int
    first: int
    last: int


def portable(problem, target) -> Config:
    # 16 elements a thread; never more than 512 threads, so that a row of 16384 has 32 in each. Not measured.
    num_warps = min(max(problem.block // 512, 4), 16)
    return Config(num_warps, target.capability, 0, 2 if problem.two_shot else 1)


def one_shot_bytes(world: int) -> int:
    """Rows of up to so many bytes are sent to every rank. One shot moves world / 2 as much as two, in half the trips.

    On H200s with NVLink, in us: two ranks, 8 MiB 33 in one shot and 34 in two, 64 MiB 254 and 246; four ranks, 128 KiB
    6.3 and 8.0, 1 MiB 15.0 and 13.3.
    """
    return 16 << 20 if world <= 2 else (2 << 20) // world


def chunk(elements: int) -> int:
    """Elements of a row of the plain all-reduce: as few as all programs together need."""
    return next((size for size in CHUNKS if elements <= size * SLOTTED), CHUNKS[-1])


def programs(tokens: int) -> int:
    """Programs of a call. It is the same on every rank whatever its chip, for they exchange one with one."""
    return min(tokens, SLOTTED)


def needed_area(nbytes: int, row: int, world: int, one_shot: bool) -> int:
    """Bytes of an area that takes rows of `row` bytes, `nbytes` in all."""
    each = -(-nbytes // row // SLOTTED) if nbytes % row == 0 else -(-(nbytes // row + 1) // SLOTTED)
    if not one_shot:
        each = -(-each // world)
    return -(-max(each, 1) * row // 16) * 16


def area(nbytes: int, row: int, world: int, one_shot: bool) -> int:
    """Bytes of an area that takes `nbytes` in rows of up to `row` bytes, or 32 KiB, whatever their number."""
    return -(-(nbytes // SLOTTED // (1 if one_shot else world) + max(row, 32 << 10)) // 16) * 16

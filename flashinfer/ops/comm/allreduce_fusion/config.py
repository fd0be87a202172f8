"""Configs of the all-reduce, and the choice between one-shot and two-shot."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.comm.symmetric import SLOTTED

# Elements that a program of the plain all-reduce takes at once: one to four 16-byte accesses of bf16 in each of 128
# threads.
CHUNKS = 1024, 2048, 4096


@dataclass(frozen=True)
class Config:
    """num_warps : warps of a program. capability : the compute capability times ten; 0 in the interpreter.

    first, last : the first and the last phase of a launch. 0 sends rows; 1 receives them, and with two-shot sends the
        sums; 2 receives the sums. A GPU launch has all phases. In the interpreter ranks run one after another, so each
        phase is a launch.
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
    """The most bytes for which one-shot is used. One-shot moves world / 2 times as many bytes as two-shot, in half the
    number of exchanges.

    On H200s with NVLink, one-shot and two-shot in us: two ranks, 8 MiB 33 and 34, 64 MiB 254 and 246; four ranks,
    128 KiB 6.3 and 8.0, 1 MiB 15.0 and 13.3.
    """
    return 16 << 20 if world <= 2 else (2 << 20) // world


def chunk(elements: int) -> int:
    """Elements of a row of the plain all-reduce: the smallest of CHUNKS for which one row a program is enough."""
    return next((size for size in CHUNKS if elements <= size * SLOTTED), CHUNKS[-1])


def programs(tokens: int) -> int:
    """Programs of a call. The number does not depend on the chip, because program n of a rank exchanges with program n
    of the others."""
    return min(tokens, SLOTTED)


def needed_area(nbytes: int, row: int, world: int, one_shot: bool) -> int:
    """Bytes of an area that holds a channel's rows, with rows of `row` bytes and `nbytes` in all."""
    each = -(-nbytes // row // SLOTTED) if nbytes % row == 0 else -(-(nbytes // row + 1) // SLOTTED)
    if not one_shot:
        each = -(-each // world)
    return -(-max(each, 1) * row // 16) * 16


def area(nbytes: int, row: int, world: int, one_shot: bool) -> int:
    """Bytes of an area that is large enough for `nbytes` in rows of any size up to `row` bytes or 32 KiB."""
    return -(-(nbytes // SLOTTED // (1 if one_shot else world) + max(row, 32 << 10)) // 16) * 16
